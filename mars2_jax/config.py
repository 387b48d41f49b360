"""The configuration tree: every key there is, with its default.

A config file under `configs/` starts from `default_config()`, changes values, and fills `config.agents`. A key that
is not in this file is an error (`mars2_jax.validation`), as is a combination that the program cannot run
(`mars2_jax.combinations`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.files import write_atomically

__all__ = ["agent_config", "as_json", "default_config", "write_config"]


def agent_config() -> ConfigDict:
    """The defaults of one agent: a language model with its own weights, optimizer, role and buffer; or a role that
    plays with another agent's weights; or a model that is served elsewhere."""
    return ConfigDict(
        dict(
            model=dict(
                # A folder in Hugging Face layout, a .gguf file, package:<distribution>/<path of a file in it>, or
                # hub:<owner>/<name>[@revision].
                path="",
                # Hexadecimal SHA-256 of a model file; "" does not check.
                sha256="",
                # Arithmetic and storage of the policy: "auto" is float32 on CPU, bfloat16 elsewhere.
                dtype="auto",
                # Attention over whole sequences (updates, scores, prompts): "xla" everywhere, "cudnn" on NVIDIA GPUs in
                # bfloat16, "splash" on TPUs; "auto" is the fastest that runs on the mesh.
                attention="auto",
                lora=dict(
                    # Rank of the adapters that the agent learns, over the checkpoint's weights, which stay as they are
                    # and are held once for all agents that name the checkpoint; 0 learns all weights.
                    rank=0,
                    # An adapter's product counts alpha / rank times.
                    alpha=32.0,
                    # Weights with adapters: "attention" (query-key-value and output), "mlp" (gate, up and down).
                    targets=("attention", "mlp"),
                ),
            ),
            # Another agent, whose weights and optimizer it has: one set of weights, two roles. Nodes that it writes are
            # learned from by the other; in trees, metrics and groups of advantages it is an agent of its own. It has
            # its own role and enable_thinking; model, trainable and optimizer stay as they are here. "" shares none.
            share_weights_with="",
            # A server that speaks the OpenAI chat API, in place of weights: for evaluation only, not trainable.
            # Searches with it are not reproducible.
            endpoint=dict(
                # Such as "http://localhost:8000/v1", without "/chat/completions"; "" is none.
                base_url="",
                # The server's name for the model.
                model="",
                # Environment variable that holds the key; "" sends none.
                api_key_env="",
                # The server's word for the budget of a response: "max_tokens", or "max_completion_tokens" (OpenAI's
                # reasoning models).
                token_limit="max_tokens",
                # Seconds to wait for an answer.
                timeout=600.0,
                # How often a request is sent again that found no connection, got no answer in time, or was answered
                # with status 408, 409, 429 or 5xx; the pauses grow, or are what the server asks for.
                max_retries=5,
                # Requests under way at a time.
                concurrency=16,
            ),
            # System prompt; "" uses none.
            role="",
            # Whether the model reasons before it answers, where its chat template lets one choose (Qwen3's does): "on",
            # "off", or "default" (the template's own choice).
            enable_thinking="default",
            # False: the agent plays but never learns.
            trainable=True,
            optimizer=dict(
                # "adamw"; "adafactor", next to no optimizer memory; "muon" for the layers' matrices, with AdamW for the
                # rest. Steps of all three have about the size of the learning rate.
                name="adamw",
                learning_rate=1e-6,
                # Updates in which the rate grows linearly to learning_rate.
                warmup_updates=0,
                # After them: "constant", or "cosine" or "linear" to final_learning_rate within decay_updates.
                schedule="constant",
                decay_updates=0,
                final_learning_rate=0.0,
                # Of AdamW, and of muon's AdamW.
                b1=0.9,
                b2=0.999,
                eps=1e-8,
                # Of muon's matrices.
                momentum=0.95,
                # Of matrices, times the learning rate.
                weight_decay=0.0,
                max_grad_norm=1.0,
                # What lies in host memory while the agent does not learn: "none"; "state", the moments, which are on
                # the devices from when an update has its gradient to its end; or "all", the master weights too, which
                # are there for scores and updates. The bits of the result are the same.
                offload="none",
            ),
        )
    )


def default_config() -> ConfigDict:
    """Every key with its default: the paper's MARS2 where the paper gives one. `agents` is empty."""
    return ConfigDict(
        dict(
            seed=0,
            # name -> agent_config()
            agents=ConfigDict(),
            # Devices on each mesh axis; one of them may be -1 (all that are left).
            mesh=dict(data=1, fsdp=-1, tensor=1),
            data=dict(
                # "starter", "human_eval", "leetcode", a .jsonl file in this project's layout, "<layout>:<path>" of
                # files in another one, or a folder that `python -m mars2_jax.problems --build` wrote
                # (mars2_jax/tasks/sources.py).
                source="starter",
                # "all" is all of the source.
                split="train",
                # Keep only problems of these difficulties, comma-separated; "" keeps all.
                difficulty="",
                # Keep only the first so many problems; 0 keeps all.
                limit=0,
                # Keep only problems published from this day on, and up to that day, such as "2025-01-31"; "" keeps all.
                date_from="",
                date_to="",
                # Public tests, which may be shown to a model, where the source does not say which: the first so many,
                # but one is hidden always.
                public_tests=2,
                # Problems (= trees) a training step, of all hosts together.
                problems_per_step=4,
                # Dynamic filtering (DAPO): an agent learns from no tree in which all its nodes have the advantage 0.
                # They are neither scored nor put into its buffer, so its KL and entropy terms leave them out, too.
                dynamic_filtering=False,
                # Further rounds of a step, at most, in which other problems are drawn in the place of those whose trees
                # taught no agent anything, as many as are missing; 0 goes on with fewer trees.
                max_resamples=0,
                # "pass_rate" passes over problems that are too easy or too hard, by the running share of their nodes
                # that pass; "none" takes all, once an epoch.
                curriculum="none",
                # The band of pass rates to learn from, its ends within. What was never tried comes as if in the band.
                curriculum_low=0.1,
                curriculum_high=0.9,
                # Share of the epochs in which a problem outside the band comes still. Where all are outside, so many
                # epochs are passed over in search of the next one: no less than 0.0001.
                curriculum_floor=0.1,
                # rate <- decay * rate + (1 - decay) * (the share of a new tree's nodes that pass).
                curriculum_decay=0.5,
            ),
            search=dict(
                # Thompson sampling: "mars2" (the paper's), "rs2" (one agent). Flat, every node a child of the root:
                # "flat_multi", "grpo" (one agent). Plain baselines, agents in turn: "best_first" fills the best node,
                # "round_robin" the earliest.
                strategy="mars2",
                # Of Thompson sampling: "agent_first" (the paper's) or "node_first" (the released code's).
                order="agent_first",
                # "beta" or "gaussian".
                posterior="beta",
                # Nodes a tree, the root not counted.
                nodes=8,
                # Deepest level of a node (children of the root are at 1), and most children a node has; 0 is no limit.
                max_depth=0,
                max_children=0,
                # Depth guidance of Thompson sampling (MARS2-T+): a GEN draw at depth d is multiplied by
                # (guidance * guidance_decay^d)^(nodes made so far at that depth). 1 and 1 are off; the paper's is 0.98.
                guidance=1.0,
                guidance_decay=1.0,
                # Nodes of one tree that may be open at a time. Above 1 it is another search: a node is chosen before
                # the verdicts on its open siblings are in.
                in_tree_parallelism=1,
                # End a tree once a node passes all the tests that pay.
                stop_when_solved=False,
                # Engine steps between the end of a program and the use of its verdict. Fixed, so that results do not
                # depend on how fast the grader is.
                verdict_lag=1,
            ),
            rollout=dict(
                slots=16,
                # Tokens decoded in one call of the compiled program.
                chunk=16,
                # Tokens of prompts that are kept prefilled, should they come again, padding included; each device has
                # all of them but for the heads of other parts of the tensor axis. 0 keeps as many as the cache has.
                prompt_memory=0,
                max_prompt_tokens=1024,
                max_new_tokens=256,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                # Strings that end a response, the end-of-turn tokens apart.
                stop=(),
                # Attention of a new token to its past: "xla" everywhere, "paged" (reads no more than each slot's own
                # length) on TPUs in bfloat16; "auto" is the fastest that runs on the mesh.
                attention="auto",
                # Weights that engines decode with: "model" (in the model's dtype), or "int8" (those of the layers'
                # matmuls in eight bits, a scale for each output channel): half of bfloat16's memory and reads (CPUs
                # gain memory only), and log-probs that differ from the trainer's (agent/<name>/logprob_gap), which
                # learning.tis can correct.
                weights="model",
                # The same devices as another mesh for engines: weights are handed over from device to device. Over
                # fsdp, decoding reads its piece of a weight alone, but sums over devices in every layer and gathers
                # embedding and head for every token; without it a device reads all of its tensor part. `plan` tells
                # what either takes. All zeros is config.mesh itself; one size may be -1.
                mesh=dict(data=0, fsdp=0, tensor=0),
            ),
            prompts=dict(
                # What a refinement prompt tells about the failure: "summary" or "detailed".
                feedback="detailed",
            ),
            grading=dict(
                # "bubblewrap", or "none" to run model-written programs unprotected (never do this with data you love).
                isolation="bubblewrap",
                # Worker processes; 0 is one a CPU core.
                workers=0,
                # "all" (1 if every test passes, else 0) or "fraction".
                reward="all",
                # Tests that pay while training: "all" or "public".
                reward_tests="all",
                # Functions that problems may name as their `compare`, each "name=module:function" of a module that can
                # be imported: (test input, expected, actual) -> bool. They are trusted: they run outside the sandbox.
                checkers=(),
                # Grades kept, so that the same program with the same tests is run once; 0 keeps none.
                cache=1024,
                # CPU limit of a problem: so many times what the slowest test of its reference takes (measured at the
                # start), from time_floor seconds up to the problem's own limit. 0 leaves all limits alone.
                time_factor=0.0,
                time_floor=1.0,
            ),
            learning=dict(
                # Advantages: "mars2" (shaped rewards over the tree), "grpo" (raw ones), "rloo" (against the mean of the
                # others), "treerl" and "treepo" (by subtrees), "tree_grpo" (over the tree and over all trees of the
                # problem), "sibling" (over the children of one parent).
                estimator="mars2",
                # Tree-consistent shaping, of mars2.
                gamma=0.5,
                lam=0.5,
                # Of mars2, grpo and rloo: the group is the nodes of a "tree", or of an agent in it ("tree_agent").
                group="tree",
                # Of mars2 and grpo: "std" or "none".
                scale="std",
                # Of mars2 and grpo: "mean" or "leave_one_out".
                baseline="mean",
                # "clip" (PPO's clipped surrogate) or "cispo" (REINFORCE with a clipped importance weight).
                objective="clip",
                # "ppo" (token ratio) or "gspo" (sequence ratio).
                ratio="ppo",
                clip_low=0.2,
                clip_high=0.28,
                # Upper bound of the ratio where the advantage is negative; 0 is off.
                dual_clip=0.0,
                # Rollout correction: "off", "token", "sequence" or "geometric".
                tis="off",
                tis_cap=2.0,
                # "truncate" (TIS) or "mask" (MIS).
                tis_mode="truncate",
                # Drop a sequence that holds a token with a correction weight below this; 0 is off.
                tis_veto=0.0,
                # KL to the reference: estimator "k1", "k2", "k3"; coefficient 0 keeps no reference.
                kl="k3",
                kl_coef=1e-3,
                # Updates of an agent after which its current weights become its reference: a copy, in the type that
                # the model computes in, of all that it learns. 0 keeps the checkpoint's, which all agents share.
                reference_every=0,
                # Added to the "loss" of each token, or taken off the "reward" of a response, summed over its tokens.
                kl_in="loss",
                entropy_coef=0.0,
                # "token_mean", "seq_mean" or "seq_mean_token_sum_norm".
                aggregation="token_mean",
                # Penalty on the last `overlong_buffer` tokens of the budget, times `overlong_factor`; factor 0 is off.
                overlong_buffer=0,
                overlong_factor=0.0,
                # Learn nothing from responses that the budget cut off; in their trees they count as they do without.
                overlong_mask=False,
                # Nodes that are taken from an agent's buffer at a time; one whose buffer holds fewer waits.
                train_batch_size=16,
                # Passes over what was taken, and updates a pass, each from as many of the nodes, which are shuffled for
                # every pass. Ratios stay relative to the weights that wrote the nodes.
                epochs=1,
                minibatches=1,
                # Nodes that were written more than so many updates of the agent ago are dropped when nodes are taken;
                # 0 keeps all.
                max_staleness=0,
                # Rows of one micro-batch.
                micro_batch_size=4,
                # Tokens of a row into which several samples are packed, none seeing another, in updates and scores; 0
                # gives each a row as long as the longest.
                pack_tokens=0,
                # Recompute activations in the backward pass: "none", "dots" (all but the outputs of matmuls with
                # weights) or "layer" (all of a layer).
                remat="none",
                # Layers a step of a scan over the layers, in updates and scores: compiles one step for all. 0 compiles
                # each layer for itself, which on CPU runs faster.
                scan_unroll=0,
            ),
            training=dict(
                steps=2,
                # Steps between checkpoints; the last step always has one.
                checkpoint_every=1,
                # Newest checkpoints kept.
                keep=2,
                # Checkpoints kept for being the best so far, by a metric of their step (any in metrics.jsonl, the
                # higher the better), such as "eval/starter/pass@n"; "" and 0 keep none.
                best_metric="",
                keep_best=0,
                # Evaluate before the first and after the last step, and every so many steps in between (0: not).
                evaluate=True,
                evaluate_every=0,
                # Keys, such as "agents.coder.optimizer" or "rollout.slots", in which a run that goes on may differ from
                # its checkpoint.
                may_change=(),
            ),
            # Supervised fine-tuning (`python -m mars2_jax.sft`), which training does not read. Of the rest it reads
            # seed, agents, mesh, data, prompts, grading, rollout.max_prompt_tokens and max_new_tokens (longer pairs
            # are left out), and micro_batch_size, pack_tokens, remat and scan_unroll of `learning`.
            sft=dict(
                # What is learned: "references", the reference solutions of the problems of `data`; "pairs:<file or
                # folder>" of records (mars2_jax/tasks/pairs.py); "trees:<workdir>", the programs that passed in a run
                # on the problems of `data`, refinements among them. Several are joined.
                sources=("references",),
                # Of trees: programs that "anyone" in the team wrote, or that the agent "itself" wrote.
                authors="anyone",
                # Share of the problems whose pairs are not learned from, but measured by; 0 measures nothing.
                held_out=0.1,
                # How often each pair is learned from.
                epochs=2,
                # Pairs an update.
                batch_size=16,
                # In place of those of agents.<name>.optimizer: the rate; the updates in which it grows linearly to it;
                # and the rest of the run: "constant", or "cosine" or "linear" to final_learning_rate at the end.
                learning_rate=1e-5,
                warmup_updates=0,
                schedule="constant",
                final_learning_rate=0.0,
                # Updates between held-out losses, beside the first and the last; 0: none.
                evaluate_every=0,
                # Updates between checkpoints; the last update always has one.
                checkpoint_every=50,
            ),
            eval=dict(
                # As in `data`.
                source="starter",
                split="test",
                difficulty="",
                limit=0,
                date_from="",
                date_to="",
                public_tests=2,
                # Of the single answers behind Pass@1: temperature (0 is greedy), longest prompt and budget (0: those of
                # `rollout`). The search samples as `rollout` says.
                temperature=0.0,
                max_prompt_tokens=0,
                max_new_tokens=0,
                # Nodes of the test-time search behind Pass@1(MCTS); 0 leaves it out.
                search_nodes=8,
            ),
        )
    )


def as_json(config: ConfigDict | FrozenConfigDict) -> dict[str, Any]:
    """A config as it comes back from a file of JSON, which knows no tuples."""
    return json.loads(json.dumps(config.to_dict()))


def write_config(config: ConfigDict, workdir: str | os.PathLike[str]) -> Path:
    """Writes the resolved config to `<workdir>/config.json`."""
    path = Path(workdir) / "config.json"
    write_atomically(path, json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n")
    return path

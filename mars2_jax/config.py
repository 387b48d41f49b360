"""The configuration tree: every key there is, with its default, and the check that a run's config is one we honour.

A config file under `configs/` starts from `default_config()`, changes values, and fills `config.agents`. A key that
is not in this file is an error, as is a combination that the program cannot run.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.errors import ConfigError
from mars2_jax.files import write_atomically
from mars2_jax.grading.checkers import parse_checkers
from mars2_jax.roster import check_roster

__all__ = ["agent_config", "as_json", "check_key", "default_config", "describe_type", "validate", "write_config"]


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
                # KL to the frozen reference: estimator "k1", "k2", "k3"; coefficient 0 keeps no reference.
                kl="k3",
                kl_coef=1e-3,
                # Added to the "loss" of each token, or taken off the "reward" of a response, summed over its tokens.
                kl_in="loss",
                entropy_coef=0.0,
                # "token_mean", "seq_mean" or "seq_mean_token_sum_norm".
                aggregation="token_mean",
                # Penalty on the last `overlong_buffer` tokens of the budget, times `overlong_factor`; factor 0 is off.
                overlong_buffer=0,
                overlong_factor=0.0,
                # Nodes an update; an agent whose buffer holds fewer waits.
                train_batch_size=16,
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


_CHOICES = {
    "search.strategy": ("mars2", "rs2", "flat_multi", "grpo", "best_first", "round_robin"),
    "search.order": ("agent_first", "node_first"),
    "search.posterior": ("beta", "gaussian"),
    "rollout.attention": ("auto", "xla", "paged"),
    "rollout.weights": ("model", "int8"),
    "prompts.feedback": ("summary", "detailed"),
    "grading.isolation": ("bubblewrap", "none"),
    "grading.reward": ("all", "fraction"),
    "grading.reward_tests": ("all", "public"),
    "learning.estimator": ("mars2", "grpo", "rloo", "treerl", "treepo", "tree_grpo", "sibling"),
    "learning.group": ("tree", "tree_agent"),
    "learning.scale": ("std", "none"),
    "learning.baseline": ("mean", "leave_one_out"),
    "learning.objective": ("clip", "cispo"),
    "learning.ratio": ("ppo", "gspo"),
    "learning.tis": ("off", "token", "sequence", "geometric"),
    "learning.tis_mode": ("truncate", "mask"),
    "learning.kl": ("k1", "k2", "k3"),
    "learning.kl_in": ("loss", "reward"),
    "learning.aggregation": ("token_mean", "seq_mean", "seq_mean_token_sum_norm"),
    "learning.remat": ("none", "dots", "layer"),
    "agents.*.enable_thinking": ("default", "on", "off"),
    "agents.*.model.dtype": ("auto", "float32", "bfloat16"),
    "agents.*.model.attention": ("auto", "xla", "cudnn", "splash"),
    "agents.*.model.lora.targets": ("attention", "mlp"),
    "agents.*.optimizer.name": ("adamw", "adafactor", "muon"),
    "agents.*.optimizer.schedule": ("constant", "cosine", "linear"),
    "agents.*.endpoint.token_limit": ("max_tokens", "max_completion_tokens"),
}

# What a number must be, as an interval; None is no bound, a round bracket leaves the bound itself out.
_RANGES: dict[str, tuple[str, float | None, float | None, str]] = {
    "seed": ("[", 0, 2**32 - 1, "]"),
    "data.limit": ("[", 0, None, ")"),
    "data.public_tests": ("[", 0, None, ")"),
    "data.problems_per_step": ("[", 1, None, ")"),
    "search.nodes": ("[", 1, None, ")"),
    "search.max_depth": ("[", 0, None, ")"),
    "search.max_children": ("[", 0, None, ")"),
    "search.guidance": ("(", 0, 1, "]"),
    "search.guidance_decay": ("(", 0, 1, "]"),
    "search.in_tree_parallelism": ("[", 1, None, ")"),
    "search.verdict_lag": ("[", 0, None, ")"),
    "rollout.slots": ("[", 1, None, ")"),
    "rollout.chunk": ("[", 1, None, ")"),
    "rollout.prompt_memory": ("[", 0, None, ")"),
    "rollout.max_prompt_tokens": ("[", 1, None, ")"),
    "rollout.max_new_tokens": ("[", 1, None, ")"),
    "rollout.temperature": ("[", 0, 1000, "]"),
    "rollout.top_k": ("[", 0, 2**31 - 1, "]"),
    "rollout.top_p": ("(", 0, 1, "]"),
    "rollout.min_p": ("[", 0, 1, ")"),
    "grading.workers": ("[", 0, None, ")"),
    "grading.cache": ("[", 0, None, ")"),
    "grading.time_factor": ("[", 0, None, ")"),
    "grading.time_floor": ("(", 0, None, ")"),
    "learning.gamma": ("[", 0, None, ")"),
    "learning.lam": ("[", 0, 1, "]"),
    "learning.clip_low": ("[", 0, 1, "]"),
    "learning.clip_high": ("[", 0, None, ")"),
    "learning.tis_cap": ("(", 0, None, ")"),
    "learning.tis_veto": ("[", 0, 1, ")"),
    "learning.kl_coef": ("[", 0, None, ")"),
    "learning.entropy_coef": ("[", 0, None, ")"),
    "learning.overlong_buffer": ("[", 0, None, ")"),
    "learning.overlong_factor": ("[", 0, None, ")"),
    "learning.train_batch_size": ("[", 1, None, ")"),
    "learning.micro_batch_size": ("[", 1, None, ")"),
    "learning.pack_tokens": ("[", 0, None, ")"),
    "learning.scan_unroll": ("[", 0, None, ")"),
    "training.steps": ("[", 1, None, ")"),
    "training.checkpoint_every": ("[", 1, None, ")"),
    "training.keep": ("[", 1, None, ")"),
    "training.keep_best": ("[", 0, None, ")"),
    "training.evaluate_every": ("[", 0, None, ")"),
    "eval.limit": ("[", 0, None, ")"),
    "eval.public_tests": ("[", 0, None, ")"),
    "eval.temperature": ("[", 0, None, ")"),
    "eval.max_prompt_tokens": ("[", 0, None, ")"),
    "eval.max_new_tokens": ("[", 0, None, ")"),
    "eval.search_nodes": ("[", 0, None, ")"),
    "agents.*.model.lora.rank": ("[", 0, None, ")"),
    "agents.*.model.lora.alpha": ("(", 0, None, ")"),
    "agents.*.endpoint.timeout": ("(", 0, None, ")"),
    "agents.*.endpoint.max_retries": ("[", 0, None, ")"),
    "agents.*.endpoint.concurrency": ("[", 1, None, ")"),
    "agents.*.optimizer.learning_rate": ("[", 0, None, ")"),
    "agents.*.optimizer.warmup_updates": ("[", 0, None, ")"),
    "agents.*.optimizer.decay_updates": ("[", 0, None, ")"),
    "agents.*.optimizer.final_learning_rate": ("[", 0, None, ")"),
    "agents.*.optimizer.momentum": ("[", 0, 1, ")"),
    "agents.*.optimizer.b1": ("[", 0, 1, ")"),
    "agents.*.optimizer.b2": ("[", 0, 1, ")"),
    "agents.*.optimizer.eps": ("[", 1e-30, None, ")"),
    "agents.*.optimizer.weight_decay": ("[", 0, None, ")"),
    "agents.*.optimizer.max_grad_norm": ("(", 0, None, ")"),
}

_TYPES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a tuple of strings",
}


def validate(config: ConfigDict) -> None:
    """Checks that a run's config holds only keys that exist, with values and combinations that can be honoured.

    Raises:
      ConfigError: names the first key that is wrong, its value, and what is allowed.
    """
    _check_group(config, default_config(), "")
    _check_combinations(config)


def check_key(key: str) -> Any:
    """The default value of a key such as "search.nodes" or "agents.coder.role" (a ConfigDict for a group of keys).

    Raises:
      ConfigError: there is no such key; names the nearest one there is.
    """
    node: Any = default_config()
    parts = key.split(".")
    for i, part in enumerate(parts):
        here = ".".join(parts[:i])
        if here == "agents":
            node = agent_config()
        elif not isinstance(node, ConfigDict):
            raise ConfigError(f"config.{key} does not exist: config.{here} is {describe_type(node)}")
        elif part not in node:
            raise _unknown(part, node.keys(), here)
        else:
            node = node[part]
    return node


def describe_type(default: Any) -> str:
    """What a value of the same type as `default` is called in a message."""
    return "a group of keys" if isinstance(default, Mapping | ConfigDict) else _TYPES[type(default)]


def as_json(config: ConfigDict | FrozenConfigDict) -> dict[str, Any]:
    """A config as it comes back from a file of JSON, which knows no tuples."""
    return json.loads(json.dumps(config.to_dict()))


def write_config(config: ConfigDict, workdir: str | os.PathLike[str]) -> Path:
    """Writes the resolved config to `<workdir>/config.json`."""
    path = Path(workdir) / "config.json"
    write_atomically(path, json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n")
    return path


def _check_group(config: Any, default: ConfigDict, path: str) -> None:
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config.{path} must be a group of keys, is {config!r}")
    for key in config:
        if key not in default:
            raise _unknown(key, default.keys(), path)
    for key in default:
        name = f"{path}.{key}" if path else key
        if key not in config:
            raise ConfigError(f"config.{name} is missing; start from mars2_jax.config.default_config()")
        value = config[key]
        if name == "agents":
            _check_agents(value)
        elif isinstance(default[key], ConfigDict):
            _check_group(value, default[key], name)
        else:
            _check_value(name, value, default[key])


def _check_agents(agents: Any) -> None:
    if not isinstance(agents, ConfigDict) or not agents:
        raise ConfigError("config.agents is empty: give at least one, config.agents.<name> = agent_config()")
    for name in agents:
        # Names appear in metric names and paths, and in overrides (--config.agents.<name>.role=...).
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"config.agents.{name}: a name is made of letters, digits and _, no digit first")
        _check_group(agents[name], agent_config(), f"agents.{name}")


def _check_value(name: str, value: Any, default: Any) -> None:
    wanted = type(default)
    # A config that was read from JSON has lists for tuples.
    kinds = {float: (int, float), tuple: (tuple, list)}.get(wanted, (wanted,))
    right = isinstance(value, kinds)
    if not right or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"config.{name} must be {describe_type(default)}, is {value!r}")
    if wanted is tuple and not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"config.{name} must be a tuple of strings that are not empty, is {value!r}")
    if wanted is float and not abs(value) <= sys.float_info.max:
        raise ConfigError(f"config.{name} must be finite, is {value}")
    pattern = re.sub(r"^agents\.[^.]+", "agents.*", name)
    choices = _CHOICES.get(pattern)
    for choice in value if wanted is tuple else [value]:
        if choices is not None and choice not in choices:
            raise ConfigError(f"config.{name} is {value!r}; it may be {_list(choices)}{_nearest(choice, choices)}")
    if pattern in _RANGES:
        open_, low, high, close = _RANGES[pattern]
        above = low is None or value > low or (value == low and open_ == "[")
        below = high is None or value < high or (value == high and close == "]")
        if not (above and below):
            raise ConfigError(f"config.{name} is {value}; it must be {_interval(pattern)}")


def _check_combinations(config: ConfigDict) -> None:
    _check_mesh("mesh", config.mesh.to_dict())
    if any(config.rollout.mesh.values()):
        _check_mesh("rollout.mesh", config.rollout.mesh.to_dict(), ", or all three 0 for config.mesh")
    check_roster(config, agent_config())
    _check_search(config)
    _check_grading(config.grading)
    _check_learning(config)
    _check_training(config.training)
    for name, agent in config.agents.items():
        _check_optimizer(f"agents.{name}.optimizer", agent.optimizer)


# Options that some estimators, or some optimizers, do not read: which ones do.
_READ_BY_ESTIMATORS = {
    "gamma": ("mars2",),
    "lam": ("mars2",),
    "group": ("mars2", "grpo", "rloo"),
    "scale": ("mars2", "grpo"),
    "baseline": ("mars2", "grpo"),
}
_READ_BY_OPTIMIZERS = {
    "b1": ("adamw", "muon"),
    "b2": ("adamw", "muon"),
    "eps": ("adamw", "muon"),
    "momentum": ("muon",),
}


def _check_learning(config: ConfigDict) -> None:
    learning = config.learning
    defaults = default_config().learning
    for key, readers in _READ_BY_ESTIMATORS.items():
        if learning.estimator not in readers:
            _check_unread("learning", learning, defaults, key, f"estimator {learning.estimator!r} does not use it")
    if learning.objective == "cispo":
        _check_unread("learning", learning, defaults, "dual_clip", "objective 'cispo' does not use it")
        if learning.ratio != "ppo":
            raise ConfigError(
                f"config.learning.ratio is {learning.ratio!r}, but objective 'cispo' weighs every token by its own "
                "ratio: use 'ppo'"
            )
    if not learning.kl_coef:
        for key in ("kl", "kl_in"):
            _check_unread("learning", learning, defaults, key, "kl_coef is 0")
    if learning.train_batch_size % learning.micro_batch_size:
        raise ConfigError(
            f"config.learning.train_batch_size is {learning.train_batch_size}; it must be a multiple of "
            f"config.learning.micro_batch_size, which is {learning.micro_batch_size}"
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if learning.pack_tokens and learning.pack_tokens < longest:
        raise ConfigError(
            f"config.learning.pack_tokens is {learning.pack_tokens}; it must hold the longest sample, "
            f"max_prompt_tokens + max_new_tokens of config.rollout, which is {longest}, or be 0 for off"
        )
    if learning.dual_clip != 0 and learning.dual_clip <= 1 + learning.clip_high:
        raise ConfigError(
            f"config.learning.dual_clip is {learning.dual_clip}; it must be above 1 + config.learning.clip_high, which "
            f"is {1 + learning.clip_high}, or 0 for off"
        )
    if learning.overlong_factor > 0 and not 0 < learning.overlong_buffer <= config.rollout.max_new_tokens:
        raise ConfigError(
            f"config.learning.overlong_buffer is {learning.overlong_buffer}; with overlong_factor above 0 it must be "
            f"between 1 and config.rollout.max_new_tokens, which is {config.rollout.max_new_tokens}"
        )
    if learning.tis == "off" and learning.tis_veto > 0:
        raise ConfigError(
            f"config.learning.tis_veto is {learning.tis_veto}, but config.learning.tis is 'off'; set tis to use it"
        )


def _check_grading(grading: ConfigDict) -> None:
    parse_checkers(grading.checkers)
    factor, floor = grading.time_factor, grading.time_floor
    if 0 < factor <= 1:
        raise ConfigError(
            f"config.grading.time_factor is {factor}; it must be above 1, or references would fail, or 0 for off"
        )
    if not factor and floor != default_config().grading.time_floor:
        raise ConfigError(
            f"config.grading.time_floor is {floor}, but config.grading.time_factor is 0, which sets no limits: set it"
        )


def _check_optimizer(key: str, optimizer: ConfigDict) -> None:
    defaults = agent_config().optimizer
    for option, readers in _READ_BY_OPTIMIZERS.items():
        if optimizer.name not in readers:
            _check_unread(key, optimizer, defaults, option, f"optimizer {optimizer.name!r} does not use it")
    if optimizer.schedule == "constant":
        for option in ("decay_updates", "final_learning_rate"):
            _check_unread(key, optimizer, defaults, option, "schedule 'constant' does not use it")
    elif not optimizer.decay_updates:
        raise ConfigError(
            f"config.{key}.decay_updates is 0, but schedule {optimizer.schedule!r} decays within that many updates: "
            "set it"
        )


def _check_unread(path: str, group: ConfigDict, defaults: ConfigDict, key: str, why: str) -> None:
    if group[key] != defaults[key]:
        raise ConfigError(f"config.{path}.{key} is {group[key]!r}, but {why}: leave it at {defaults[key]!r}")


def _check_mesh(key: str, sizes: dict[str, int], otherwise: str = "") -> None:
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise ConfigError(
                f"config.{key}.{axis} is {size}; it must be at least 1, or -1 for all devices left{otherwise}"
            )
    if sum(size == -1 for size in sizes.values()) > 1:
        raise ConfigError(f"config.{key} has more than one -1: {sizes}; only one axis can take all devices left")


def _check_training(training: ConfigDict) -> None:
    best = training.best_metric
    if bool(best) != bool(training.keep_best):
        raise ConfigError(
            f"config.training.best_metric is {best!r} and keep_best is {training.keep_best}: set both, or neither"
        )
    if training.evaluate_every and not training.evaluate:
        raise ConfigError(
            f"config.training.evaluate_every is {training.evaluate_every}, but evaluate is False: set it to True"
        )
    if best.startswith("eval/") and not training.evaluate_every:
        raise ConfigError(
            f"config.training.best_metric is {best!r}, but evaluate_every is 0: set it, or no checkpoint but the last "
            "has a score"
        )
    for key in training.may_change:
        check_key(key)


def _check_search(config: ConfigDict) -> None:
    search, agents = config.search, len(config.agents)
    strategy = search.strategy
    if strategy in ("grpo", "rs2") and agents != 1:
        several = {"grpo": "flat_multi", "rs2": "mars2"}[strategy]
        raise ConfigError(
            f"config.search.strategy is {strategy!r}, which has one agent, but config.agents has {agents}: "
            f"use {several!r} or leave one agent"
        )
    flat, blind = strategy in ("grpo", "flat_multi"), strategy in ("best_first", "round_robin")
    defaults = default_config().search
    unused = ["guidance", "guidance_decay"] if flat or blind else []
    unused += ["max_depth", "max_children", "in_tree_parallelism", "stop_when_solved"] if flat else []
    for key in unused:
        if search[key] != defaults[key]:
            raise ConfigError(
                f"config.search.{key} is {search[key]}, but strategy {strategy!r} does not use it: leave it at "
                f"{defaults[key]}"
            )
    if blind and not search.max_children:
        raise ConfigError(f"config.search.max_children is 0; strategy {strategy!r} fills node after node: set it")
    depth, children = search.max_depth, search.max_children
    if depth and children:
        for key, nodes in (("search.nodes", search.nodes), ("eval.search_nodes", config.eval.search_nodes)):
            # More levels than nodes hold them in any case.
            room = sum(children**level for level in range(1, min(depth, nodes) + 1))
            if room < nodes:
                raise ConfigError(
                    f"config.{key} is {nodes}, but with max_depth={depth} and max_children={children} of config.search "
                    f"a tree holds {room}: raise the limits or lower it"
                )


def _unknown(key: str, known: Iterable[str], path: str) -> ConfigError:
    name = f"{path}.{key}" if path else key
    known = list(known)
    group = f"config.{path}" if path else "config"
    remedy = _nearest(key, known, group + ".") or f"; {group} has {_list(known)}"
    return ConfigError(f"config.{name} does not exist{remedy}")


def _nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _list(words: Iterable[str]) -> str:
    return ", ".join(str(word) for word in words)


def _interval(pattern: str) -> str:
    open_, low, high, close = _RANGES[pattern]
    lower = "" if low is None else f"{'at least' if open_ == '[' else 'above'} {low}"
    upper = "" if high is None else f"{'at most' if close == ']' else 'below'} {high}"
    return " and ".join(part for part in (lower, upper) if part)

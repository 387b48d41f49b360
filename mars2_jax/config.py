"""The configuration tree: every key there is, with its default, and the check that a run's config is one we honour.

A config file under `configs/` starts from `default_config()`, changes values, and fills `config.agents`. A key that
is not in this file is an error, as is a combination that the program cannot run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from mars2_jax.errors import ConfigError

__all__ = ["agent_config", "default_config", "validate"]


def agent_config() -> ConfigDict:
    """The defaults of one agent: one language model with its own weights, optimizer, role and buffer."""
    return ConfigDict(
        dict(
            model=dict(
                # A folder in Hugging Face layout, a .gguf file, or package:<distribution>/<path of a file in it>.
                path="",
                # Hexadecimal SHA-256 of a model file; "" does not check.
                sha256="",
                # Arithmetic and storage of the policy: "auto" is float32 on CPU, bfloat16 elsewhere.
                dtype="auto",
            ),
            # System prompt; "" uses none.
            role="",
            # False: the agent plays but never learns.
            trainable=True,
            optimizer=dict(
                learning_rate=1e-6,
                warmup_updates=0,
                b1=0.9,
                b2=0.999,
                eps=1e-8,
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
                # "starter", "human_eval", or a .jsonl file in this project's schema.
                source="starter",
                split="train",
                # Keep only problems of these difficulties, comma-separated; "" keeps all.
                difficulty="",
                # Keep only the first so many problems; 0 keeps all.
                limit=0,
                # Problems (= trees) a training step.
                problems_per_step=4,
            ),
            search=dict(
                # "mars2": several agents in one tree. "grpo": every node a child of the root.
                strategy="mars2",
                # "agent_first" (the paper's) or "node_first" (the released code's).
                order="agent_first",
                # "beta" or "gaussian".
                posterior="beta",
                # Nodes a tree, the root not counted.
                nodes=8,
                # Engine steps between the end of a program and the use of its verdict. Fixed, so that results do not
                # depend on how fast the grader is.
                verdict_lag=1,
            ),
            rollout=dict(
                slots=16,
                # Tokens decoded in one call of the compiled program.
                chunk=16,
                max_prompt_tokens=1024,
                max_new_tokens=256,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
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
            ),
            learning=dict(
                # "mars2" or "grpo".
                estimator="mars2",
                # Tree-consistent shaping.
                gamma=0.5,
                lam=0.5,
                # Advantages are normalised within "tree" or within "tree_agent".
                group="tree",
                # "std" or "none".
                scale="std",
                # "mean" or "leave_one_out".
                baseline="mean",
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
                # Recompute activations in the backward pass: "none" or "layer".
                remat="none",
            ),
            training=dict(
                steps=2,
                # Steps between checkpoints; the last step always has one.
                checkpoint_every=1,
                # Checkpoints kept.
                keep=2,
                # Evaluate before the first and after the last step.
                evaluate=True,
            ),
            eval=dict(
                source="starter",
                split="test",
                difficulty="",
                limit=0,
                # 0 is greedy.
                temperature=0.0,
                # Nodes of the test-time search behind Pass@1(MCTS); 0 leaves it out.
                search_nodes=8,
            ),
        )
    )


_CHOICES = {
    "search.strategy": ("mars2", "grpo"),
    "search.order": ("agent_first", "node_first"),
    "search.posterior": ("beta", "gaussian"),
    "prompts.feedback": ("summary", "detailed"),
    "grading.isolation": ("bubblewrap", "none"),
    "grading.reward": ("all", "fraction"),
    "grading.reward_tests": ("all", "public"),
    "learning.estimator": ("mars2", "grpo"),
    "learning.group": ("tree", "tree_agent"),
    "learning.scale": ("std", "none"),
    "learning.baseline": ("mean", "leave_one_out"),
    "learning.ratio": ("ppo", "gspo"),
    "learning.tis": ("off", "token", "sequence", "geometric"),
    "learning.tis_mode": ("truncate", "mask"),
    "learning.kl": ("k1", "k2", "k3"),
    "learning.aggregation": ("token_mean", "seq_mean", "seq_mean_token_sum_norm"),
    "learning.remat": ("none", "layer"),
}

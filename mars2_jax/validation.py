"""The check that a run's config is one that we honour: its keys, and each value for itself."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from mars2_jax.combinations import check_combinations
from mars2_jax.config import agent_config, default_config
from mars2_jax.errors import ConfigError

__all__ = ["CHOICES", "RANGES", "check_key", "describe_type", "validate"]

CHOICES = {
    "data.curriculum": ("none", "pass_rate"),
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
    "sft.authors": ("anyone", "itself"),
    "sft.schedule": ("constant", "cosine", "linear"),
    "agents.*.enable_thinking": ("default", "on", "off"),
    "agents.*.model.dtype": ("auto", "float32", "bfloat16"),
    "agents.*.model.attention": ("auto", "xla", "cudnn", "splash"),
    "agents.*.model.lora.targets": ("attention", "mlp"),
    "agents.*.optimizer.name": ("adamw", "adafactor", "muon"),
    "agents.*.optimizer.schedule": ("constant", "cosine", "linear"),
    "agents.*.optimizer.offload": ("none", "state", "all"),
    "agents.*.endpoint.token_limit": ("max_tokens", "max_completion_tokens"),
}

# What a number must be, as an interval; None is no bound, a round bracket leaves the bound itself out.
RANGES: dict[str, tuple[str, float | None, float | None, str]] = {
    "seed": ("[", 0, 2**32 - 1, "]"),
    "data.limit": ("[", 0, None, ")"),
    "data.public_tests": ("[", 0, None, ")"),
    "data.problems_per_step": ("[", 1, None, ")"),
    "data.max_resamples": ("[", 0, None, ")"),
    "data.curriculum_low": ("[", 0, 1, "]"),
    "data.curriculum_high": ("[", 0, 1, "]"),
    "data.curriculum_floor": ("[", 1e-4, 1, "]"),
    "data.curriculum_decay": ("[", 0, 1, ")"),
    "search.nodes": ("[", 1, 2**20, "]"),
    "search.max_depth": ("[", 0, 2**31 - 1, "]"),
    "search.max_children": ("[", 0, 2**31 - 1, "]"),
    "search.guidance": ("(", 0, 1, "]"),
    "search.guidance_decay": ("(", 0, 1, "]"),
    "search.in_tree_parallelism": ("[", 1, None, ")"),
    "search.verdict_lag": ("[", 0, None, ")"),
    "rollout.slots": ("[", 1, 2**20, "]"),
    "rollout.chunk": ("[", 1, 2**20, "]"),
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
    "learning.reference_every": ("[", 0, None, ")"),
    "learning.entropy_coef": ("[", 0, None, ")"),
    "learning.overlong_buffer": ("[", 0, None, ")"),
    "learning.overlong_factor": ("[", 0, None, ")"),
    "learning.train_batch_size": ("[", 1, None, ")"),
    "learning.epochs": ("[", 1, None, ")"),
    "learning.minibatches": ("[", 1, None, ")"),
    "learning.max_staleness": ("[", 0, None, ")"),
    "learning.micro_batch_size": ("[", 1, None, ")"),
    "learning.pack_tokens": ("[", 0, None, ")"),
    "learning.scan_unroll": ("[", 0, None, ")"),
    "training.steps": ("[", 1, None, ")"),
    "training.checkpoint_every": ("[", 1, None, ")"),
    "training.keep": ("[", 1, None, ")"),
    "training.keep_best": ("[", 0, None, ")"),
    "training.evaluate_every": ("[", 0, None, ")"),
    "sft.held_out": ("[", 0, 1, ")"),
    "sft.epochs": ("[", 1, None, ")"),
    "sft.batch_size": ("[", 1, None, ")"),
    "sft.learning_rate": ("[", 0, None, ")"),
    "sft.warmup_updates": ("[", 0, None, ")"),
    "sft.final_learning_rate": ("[", 0, None, ")"),
    "sft.evaluate_every": ("[", 0, None, ")"),
    "sft.checkpoint_every": ("[", 1, None, ")"),
    "eval.limit": ("[", 0, None, ")"),
    "eval.public_tests": ("[", 0, None, ")"),
    "eval.temperature": ("[", 0, 1000, "]"),
    "eval.max_prompt_tokens": ("[", 0, None, ")"),
    "eval.max_new_tokens": ("[", 0, None, ")"),
    "eval.search_nodes": ("[", 0, 2**20, "]"),
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
    for key in config.training.may_change:
        check_key(key)
    check_combinations(config)


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
    choices = CHOICES.get(pattern)
    for choice in value if wanted is tuple else [value]:
        if choices is not None and choice not in choices:
            raise ConfigError(f"config.{name} is {value!r}; it may be {_list(choices)}{_nearest(choice, choices)}")
    if pattern in RANGES:
        open_, low, high, close = RANGES[pattern]
        above = low is None or value > low or (value == low and open_ == "[")
        below = high is None or value < high or (value == high and close == "]")
        if not (above and below):
            raise ConfigError(f"config.{name} is {value}; it must be {_interval(pattern)}")


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
    open_, low, high, close = RANGES[pattern]
    lower = "" if low is None else f"{'at least' if open_ == '[' else 'above'} {low}"
    upper = "" if high is None else f"{'at most' if close == ']' else 'below'} {high}"
    return " and ".join(part for part in (lower, upper) if part)

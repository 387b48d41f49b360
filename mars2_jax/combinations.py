"""Values of a config that do not go together, and options that nothing would read."""

from __future__ import annotations

from ml_collections import ConfigDict

from mars2_jax.config import agent_config, default_config
from mars2_jax.errors import ConfigError
from mars2_jax.grading.checkers import parse_checkers
from mars2_jax.roster import check_roster

__all__ = ["check_combinations"]


def check_combinations(config: ConfigDict) -> None:
    """Checks a config whose keys and values are right each for itself.

    Raises:
      ConfigError: names the first option that is wrong, and what to do.
    """
    _check_mesh("mesh", config.mesh.to_dict())
    if any(config.rollout.mesh.values()):
        _check_mesh("rollout.mesh", config.rollout.mesh.to_dict(), ", or all three 0 for config.mesh")
    check_roster(config, agent_config())
    _check_data(config)
    _check_search(config)
    _check_grading(config.grading)
    _check_learning(config)
    _check_training(config.training)
    _check_sft(config.sft)
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


def _check_data(config: ConfigDict) -> None:
    data, learning = config.data, config.learning
    defaults = default_config().data
    if not data.dynamic_filtering:
        _check_unread("data", data, defaults, "max_resamples", "dynamic_filtering is False")
    elif learning.kl_coef and learning.kl_in == "reward":
        raise ConfigError(
            "config.data.dynamic_filtering is True, but with the KL in the reward (config.learning.kl_in is 'reward') "
            "no response is like another, and it takes scores to tell: use kl_in='loss', or kl_coef=0"
        )
    if data.curriculum == "none":
        for key in ("curriculum_low", "curriculum_high", "curriculum_floor", "curriculum_decay"):
            _check_unread("data", data, defaults, key, "curriculum is 'none'")
    elif data.curriculum_low > data.curriculum_high:
        raise ConfigError(
            f"config.data.curriculum_low is {data.curriculum_low}, above config.data.curriculum_high, which is "
            f"{data.curriculum_high}: no pass rate lies between them"
        )


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
        for key in ("kl", "kl_in", "reference_every"):
            _check_unread("learning", learning, defaults, key, "kl_coef is 0")
    if learning.train_batch_size % (learning.minibatches * learning.micro_batch_size):
        several = f"minibatches, which is {learning.minibatches}, times " if learning.minibatches > 1 else ""
        raise ConfigError(
            f"config.learning.train_batch_size is {learning.train_batch_size}; it must be a multiple of "
            f"{several}config.learning.micro_batch_size, which is {learning.micro_batch_size}"
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
    if not learning.overlong_factor:
        _check_unread("learning", learning, defaults, "overlong_buffer", "overlong_factor is 0")
    if learning.tis == "off":
        for key in ("tis_cap", "tis_mode"):
            _check_unread("learning", learning, defaults, key, "tis is 'off'")
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
    if best.startswith("eval/") and training.evaluate_every % training.checkpoint_every:
        raise ConfigError(
            f"config.training.best_metric is {best!r}, measured every {training.evaluate_every} steps "
            f"(evaluate_every), but checkpoint_every is {training.checkpoint_every}: not all that is "
            "measured would have a checkpoint; make evaluate_every a multiple of checkpoint_every"
        )


def _check_sft(sft: ConfigDict) -> None:
    defaults = default_config().sft
    if not sft.sources:
        raise ConfigError("config.sft.sources is empty: name references, pairs:<file> or trees:<workdir>")
    for source in sft.sources:
        kind, _, path = source.partition(":")
        if source != "references" and not (kind in ("pairs", "trees") and path):
            raise ConfigError(
                f"config.sft.sources has {source!r}; it may be references, pairs:<file or folder> or trees:<workdir>"
            )
    if not any(source.startswith("trees:") for source in sft.sources):
        _check_unread("sft", sft, defaults, "authors", "no source is trees:<workdir>")
    if sft.schedule == "constant":
        _check_unread("sft", sft, defaults, "final_learning_rate", "schedule 'constant' does not use it")
    if not sft.held_out:
        _check_unread("sft", sft, defaults, "evaluate_every", "held_out is 0")


def _check_search(config: ConfigDict) -> None:
    search, agents = config.search, len(config.agents)
    strategy = search.strategy
    if strategy in ("grpo", "rs2") and agents != 1:
        several = {"grpo": "flat_multi", "rs2": "mars2"}[strategy]
        raise ConfigError(
            f"config.search.strategy is {strategy!r}, which has one agent, but config.agents has {agents}: "
            f"use {several!r} or leave one agent in config.agents"
        )
    flat, blind = strategy in ("grpo", "flat_multi"), strategy in ("best_first", "round_robin")
    defaults = default_config().search
    unused = ["order", "posterior", "guidance", "guidance_decay"] if flat or blind else []
    unused += ["max_depth", "max_children", "in_tree_parallelism", "stop_when_solved"] if flat else []
    for key in unused:
        if search[key] != defaults[key]:
            raise ConfigError(
                f"config.search.{key} is {search[key]!r}, but strategy {strategy!r} does not use it: leave it at "
                f"{defaults[key]!r}"
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

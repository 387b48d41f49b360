"""The paper's run (MARS2, arXiv 2604.14564) and its ablations, each one change of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from mars2_jax.config import agent_config, default_config

__all__ = ["VARIANTS", "ablate", "paper_config"]


def paper_config(paths: Mapping[str, str]) -> ConfigDict:
    """The paper's settings for a team of models, by name of the agent: those of `default_config()`, and these.

    A rollout batch is 512 nodes, 64 problems with a tree of 8 nodes each; an update takes 256 of an agent's nodes.
    """
    config = default_config()
    for name, path in paths.items():
        agent = agent_config()
        agent.model.path = path
        config.agents[name] = agent
    config.data.problems_per_step = 64
    config.search.nodes = 8
    config.rollout.update(
        slots=64,
        chunk=64,
        # Thirty-two of the longest prompts; most are a tenth as long.
        prompt_memory=131_072,
        max_prompt_tokens=4096,
        max_new_tokens=32_768,
    )
    config.prompts.feedback = "summary"
    config.learning.train_batch_size = 256
    config.training.update(steps=200, checkpoint_every=10)
    config.eval.update(temperature=1.0, search_nodes=60)
    return config


def _plus(config: ConfigDict) -> None:
    config.learning.update(ratio="gspo", tis="token", tis_cap=2.0, overlong_factor=1.0)
    # The paper's 2,048 of 32,768 tokens.
    config.learning.overlong_buffer = max(config.rollout.max_new_tokens // 16, 1)


def _first_agent_alone(config: ConfigDict) -> None:
    for name in list(config.agents)[1:]:
        del config.agents[name]


def _rs2(config: ConfigDict) -> None:
    config.search.strategy = "rs2"
    _first_agent_alone(config)


def _flat_multi(config: ConfigDict) -> None:
    # Shaping changes nothing among the children of the root: it widens the distance to their mean for all alike.
    config.search.strategy = "flat_multi"
    config.learning.estimator = "grpo"


def _grpo(config: ConfigDict) -> None:
    config.search.strategy = config.learning.estimator = "grpo"
    _first_agent_alone(config)


VARIANTS: dict[str, tuple[str, Callable[[ConfigDict], None]]] = {
    "mars2": ("the paper's MARS2", lambda c: None),
    "plus": ("MARS2+: sequence ratio, rollout correction, overlong penalty", _plus),
    "no_shaping": ("raw rewards in the group advantage", lambda c: c.learning.update(gamma=0.0)),
    "beta": ("Thompson sampling with beta posteriors", lambda c: c.search.update(posterior="beta")),
    "gaussian": ("Thompson sampling with gaussian posteriors", lambda c: c.search.update(posterior="gaussian")),
    "node_first": ("the node is drawn before the agent", lambda c: c.search.update(order="node_first")),
    "agent_group": ("advantages within an agent's nodes of a tree", lambda c: c.learning.update(group="tree_agent")),
    "flat_multi": ("no tree: independent answers of all agents", _flat_multi),
    "rs2": ("the tree with one agent", _rs2),
    "grpo": ("one agent, independent answers", _grpo),
}
"""name -> what it is, and the change that makes it of the paper's config."""


def ablate(config: ConfigDict, variant: str) -> ConfigDict:
    """Makes a variant of a config, in place, and returns it.

    Raises:
      ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"there is no variant {variant!r}; there are {', '.join(VARIANTS)}")
    VARIANTS[variant][1](config)
    return config

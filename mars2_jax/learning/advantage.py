"""From the rewards of search trees to the advantage of every node: the estimators, by name.

All functions are pure and work on arrays `[*trees, nodes]`: any number of leading axes, the nodes of one tree on the
last. Slot 0 is the root, which is the problem itself and has no reward. Only slots that are `graded` enter a mean or a
standard deviation; whatever the other slots hold (NaN included) changes nothing, and their results are 0. Rewards are
plain numbers, usually in [0, 1]; every reward on the right of a formula is the raw one. Memory is of trees · nodes²
numbers at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from mars2_jax.errors import ConfigError
from mars2_jax.learning.groups import group_advantages, problem_advantages
from mars2_jax.learning.rewards import overlong_penalty, shaped_rewards
from mars2_jax.learning.subtrees import treepo_advantages, treerl_advantages

__all__ = ["ESTIMATORS", "TreeAdvantages", "response_advantages", "tree_advantages"]


class TreeAdvantages(NamedTuple):
    """What an estimator makes of a forest.

    Attributes:
      shaped: the rewards that the advantages were taken from; the raw ones if the estimator shapes nothing.
      advantage: the advantage of each node, shared by all tokens of its response.
    """

    shaped: Float[Array, "*trees nodes"]
    advantage: Float[Array, "*trees nodes"]


class _Forest(NamedTuple):
    """The arguments of `tree_advantages`; rewards that are not graded are 0."""

    reward: Float[Array, "*trees nodes"]
    parent: Int[Array, "*trees nodes"]
    agent: Int[Array, "*trees nodes"]
    graded: Bool[Array, "*trees nodes"]
    problem: Int[Array, "*trees"]


def _group(forest: _Forest, config: ConfigDict) -> Int[Array, "*trees nodes"] | None:
    if config.group not in ("tree", "tree_agent"):
        raise ConfigError(f"learning.group={config.group!r} is unknown; use 'tree' or 'tree_agent'")
    return forest.agent if config.group == "tree_agent" else None


def _grpo(forest: _Forest, config: ConfigDict) -> TreeAdvantages:
    advantage = group_advantages(
        forest.reward,
        forest.graded,
        group=_group(forest, config),
        scale=config.scale,
        baseline=config.baseline,
    )
    return TreeAdvantages(forest.reward, advantage)


def _mars2(forest: _Forest, config: ConfigDict) -> TreeAdvantages:
    shaped = shaped_rewards(forest.reward, forest.parent, forest.graded, gamma=config.gamma, lam=config.lam)
    return _grpo(forest._replace(reward=shaped), config)


def _rloo(forest: _Forest, config: ConfigDict) -> TreeAdvantages:
    group = _group(forest, config)
    advantage = group_advantages(forest.reward, forest.graded, group=group, scale="none", baseline="leave_one_out")
    return TreeAdvantages(forest.reward, advantage)


def _treerl(forest: _Forest, config: ConfigDict) -> TreeAdvantages:
    del config
    return TreeAdvantages(forest.reward, treerl_advantages(forest.reward, forest.parent, forest.graded))


def _treepo(forest: _Forest, config: ConfigDict) -> TreeAdvantages:
    del config
    return TreeAdvantages(forest.reward, treepo_advantages(forest.reward, forest.parent, forest.graded))


def _tree_grpo(forest: _Forest, config: ConfigDict) -> TreeAdvantages:
    del config
    within = group_advantages(forest.reward, forest.graded)
    across = problem_advantages(forest.reward, forest.graded, forest.problem)
    return TreeAdvantages(forest.reward, within + across)


def _sibling(forest: _Forest, config: ConfigDict) -> TreeAdvantages:
    del config
    return TreeAdvantages(forest.reward, group_advantages(forest.reward, forest.graded, group=forest.parent))


ESTIMATORS: dict[str, Callable[[_Forest, ConfigDict], TreeAdvantages]] = {
    "mars2": _mars2,
    "grpo": _grpo,
    "rloo": _rloo,
    "treerl": _treerl,
    "treepo": _treepo,
    "tree_grpo": _tree_grpo,
    "sibling": _sibling,
}
"""Estimators by their name in `learning.estimator`."""


def tree_advantages(
    reward: Float[Array, "*trees nodes"],
    parent: Int[Array, "*trees nodes"],
    agent: Int[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
    config: ConfigDict,
    *,
    problem: Int[Array, "*trees"] | None = None,
) -> TreeAdvantages:
    """The advantages of a forest by the estimator that the config names.

    - `mars2` (arXiv 2604.14564): shaped rewards, normalised over the tree (path-level group advantage).
    - `grpo` (arXiv 2402.03300, eq. 3): raw rewards, normalised over the tree.
    - `rloo` (arXiv 2402.14740): the reward minus the mean of the others of its group.
    - `treerl` (arXiv 2506.11902): see `learning.subtrees`.
    - `treepo` (arXiv 2508.17445): see `learning.subtrees`.
    - `tree_grpo` (arXiv 2509.21240): the z-score within the tree plus the z-score among the nodes of all trees
      of the same problem.
    - `sibling` (TreeRPO, arXiv 2506.05183): the z-score among the children of one parent, the node itself among
      them; 0 for an only child. The paper, whose inner nodes have no reward, compares the means of what is below
      them; here each node's own reward is compared.

    Standard deviations are unbiased; a group of equal rewards gives exact zeros, and so does a group of one.

    Args:
      reward: raw rewards.
      parent: slot of the parent; 0 for children of the root, -1 for the root and for empty slots.
      agent: which agent wrote the node; -1 for the root and for empty slots.
      graded: slots that have a reward.
      config: the `learning` section; its estimator is read, and what that one uses of gamma, lam, group, scale and
        baseline (`config.validate` refuses the others where they are set).
      problem: trees with equal numbers are of one problem, for `tree_grpo`; None: each tree is of its own.

    Returns:
      The rewards used and the advantages, both 0 where not graded.

    Raises:
      ConfigError: an unknown estimator or option.
    """
    if config.estimator not in ESTIMATORS:
        raise ConfigError(f"learning.estimator={config.estimator!r} is unknown; use one of {', '.join(ESTIMATORS)}")
    graded = graded & (parent >= 0)
    if problem is None:
        trees = parent.shape[:-1]
        problem = jnp.arange(parent[..., 0].size).reshape(trees)
    forest = _Forest(jnp.where(graded, reward, 0.0), parent, agent, graded, problem)
    return ESTIMATORS[config.estimator](forest, config)


def response_advantages(
    reward: Float[Array, "*trees nodes"],
    parent: Int[Array, "*trees nodes"],
    agent: Int[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
    length: Int[Array, "*trees nodes"],
    config: ConfigDict,
    *,
    budget: int,
    problem: Int[Array, "*trees"] | None = None,
    kl: Float[Array, "*trees nodes"] | None = None,
) -> TreeAdvantages:
    """What an update learns from: the advantages of rewards as they were earned, less the penalty on long responses
    and, where the config takes it off the reward, the KL to the reference.

    Args:
      reward: as the grader's verdicts earned it. This, the next three, `config` and `problem` as in `tree_advantages`.
      parent: see there.
      agent: see there.
      graded: see there.
      length: tokens of each response.
      config: the `learning` section.
      budget: most tokens a response may have.
      problem: see there.
      kl: of each response to the reference, summed over its tokens.

    Raises:
      ValueError: the KL is to be taken off the reward, and is not there.
    """
    penalty = overlong_penalty(length, budget=budget, buffer=config.overlong_buffer, factor=config.overlong_factor)
    reward = reward + penalty
    if config.kl_in == "reward" and config.kl_coef:
        if kl is None:
            raise ValueError("learning.kl_in is 'reward', but the trees have no KL of their responses")
        reward -= config.kl_coef * kl
    return tree_advantages(reward, parent, agent, graded, config, problem=problem)

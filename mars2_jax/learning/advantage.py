"""From the rewards of search trees to the advantage of every node.

All functions are pure and work on arrays `[*trees, nodes]`: any number of leading axes, the nodes of one tree on the
last. Slot 0 is the root, which is the problem itself and has no reward. Only slots that are `graded` enter a mean or a
standard deviation; whatever the other slots hold (NaN included) changes nothing, and their results are 0. Rewards are
plain numbers, usually in [0, 1]; every reward on the right of a formula is the raw one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from mars2_jax.errors import ConfigError

__all__ = [
    "ESTIMATORS",
    "TreeAdvantages",
    "group_advantages",
    "overlong_penalty",
    "shaped_rewards",
    "tree_advantages",
]

# Rewards of a group that lie closer together than this are the same reward: rewards differ by 1/tests or by
# factor/overlong_buffer, float32 rounding by about 1e-7. Without it, a group of equal rewards would have
# advantages of rounding noise over eps.
_SAME_REWARD = 1e-6


def overlong_penalty(
    length: Int[Array, "*trees nodes"], *, budget: int, buffer: int, factor: float
) -> Float[Array, "*trees nodes"]:
    """Soft penalty on responses that use the last `buffer` tokens of their budget (DAPO, arXiv 2503.14476, eq. 13).

        penalty = -factor · min(max(length - (budget - buffer), 0), buffer) / buffer

    Args:
      length: tokens of each node's response.
      budget: most tokens a response may have.
      buffer: tokens at the end of the budget over which the penalty grows from 0 to `factor`.
      factor: the penalty of a response that fills the budget; 0 is none.

    Returns:
      What to add to the reward, in [-factor, 0].

    Raises:
      ConfigError: the penalty is on and the buffer is not in 1..budget.
    """
    if factor == 0:
        return jnp.zeros(jnp.shape(length), jnp.float32)
    if not 0 < buffer <= budget:
        raise ConfigError(
            f"learning.overlong_buffer={buffer} must be between 1 and the response budget ({budget} tokens) "
            f"when learning.overlong_factor is not 0"
        )
    excess = jnp.clip(length - (budget - buffer), 0, buffer)
    return -factor * excess.astype(jnp.float32) / buffer


def shaped_rewards(
    reward: Float[Array, "*trees nodes"],
    parent: Int[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
    *,
    gamma: float,
    lam: float,
) -> Float[Array, "*trees nodes"]:
    """Tree-consistent reward shaping (MARS2, arXiv 2604.14564): what a node adds to its parent and its siblings.

        b(v) = (1 - λ) r_parent + λ mean(r of siblings)        r̂_v = r_v + γ (r_v - b(v))

    A child of the root has no parent reward: b is the mean of its siblings. Without a graded sibling b is the reward
    of the parent. With neither, r̂_v = r_v. A parent that is not graded counts as one without a reward.

    Args:
      reward: raw rewards.
      parent: slot of the parent; 0 for children of the root, -1 for the root and for empty slots.
      graded: slots that have a reward.
      gamma: γ, weight of the shaping; 0 returns the raw rewards.
      lam: λ, share of the siblings in the baseline.

    Returns:
      r̂; 0 where not graded.
    """
    graded = graded & (parent >= 0)
    reward = jnp.where(graded, reward, 0.0)

    above = jnp.maximum(parent, 0)
    parent_reward = jnp.take_along_axis(reward, above, axis=-1)
    has_parent = jnp.take_along_axis(graded, above, axis=-1)

    # [*trees, v, u]: u is a graded sibling of v. Trees have tens of nodes, so all pairs are cheaper than a scatter.
    sibling = (parent[..., :, None] == parent[..., None, :]) & graded[..., :, None] & graded[..., None, :]
    sibling &= ~jnp.eye(reward.shape[-1], dtype=bool)
    siblings = sibling.sum(-1)
    sibling_mean = jnp.where(sibling, reward[..., None, :], 0.0).sum(-1) / jnp.maximum(siblings, 1)

    both = (1 - lam) * parent_reward + lam * sibling_mean
    baseline = jnp.where(siblings > 0, jnp.where(has_parent, both, sibling_mean), parent_reward)
    delta = jnp.where(has_parent | (siblings > 0), reward - baseline, 0.0)
    return jnp.where(graded, reward + gamma * delta, 0.0)


def group_advantages(
    reward: Float[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
    *,
    group: Int[Array, "*trees nodes"] | None = None,
    scale: str = "std",
    baseline: str = "mean",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "*trees nodes"]:
    """Advantage of every node over its group (GRPO, arXiv 2402.03300, eq. 3, with the nodes of a tree as the group).

        A_v = (r_v - baseline) / (std + eps)

    The mean and the standard deviation run over the graded nodes of the same tree and the same `group`. A group whose
    rewards are all equal (a group of one, too) gives exact zeros.

    Args:
      reward: rewards, shaped or raw.
      graded: slots that have a reward.
      group: nodes of a tree with equal numbers form a group, e.g. the agent of each node (Dr. MAS, arXiv 2602.08847);
        None: the whole tree.
      scale: "std" divides by the standard deviation, "none" does not (Dr. GRPO, arXiv 2503.20783).
      baseline: "mean" of the group, or "leave_one_out": the mean of the others (RLOO, arXiv 2402.14740).
      ddof: the standard deviation divides by n - ddof; 1 is the unbiased one.
      eps: added to the standard deviation.

    Returns:
      Advantages; 0 where not graded.

    Raises:
      ConfigError: unknown `scale` or `baseline`.
    """
    if scale not in ("std", "none"):
        raise ConfigError(f"learning.scale={scale!r} is unknown; use 'std' or 'none'")
    if baseline not in ("mean", "leave_one_out"):
        raise ConfigError(f"learning.baseline={baseline!r} is unknown; use 'mean' or 'leave_one_out'")
    reward = jnp.where(graded, reward, 0.0)
    member = graded[..., :, None] & graded[..., None, :]
    if group is not None:
        member &= group[..., :, None] == group[..., None, :]

    # [*trees, v, u]: the reward of u as a member of v's group.
    others = jnp.broadcast_to(reward[..., None, :], member.shape)
    count = member.sum(-1)
    mean = jnp.where(member, others, 0.0).sum(-1) / jnp.maximum(count, 1)
    centred = reward - mean
    if baseline == "leave_one_out":
        # r - (n mean - r)/(n - 1) = n/(n - 1) (r - mean)
        advantage = centred * count / jnp.maximum(count - 1, 1)
    else:
        advantage = centred
    if scale == "std":
        square = jnp.where(member, (others - mean[..., None]) ** 2, 0.0).sum(-1)
        advantage = advantage / (jnp.sqrt(square / jnp.maximum(count - ddof, 1)) + eps)

    spread = jnp.where(member, others, -jnp.inf).max(-1) - jnp.where(member, others, jnp.inf).min(-1)
    return jnp.where(graded & (spread > _SAME_REWARD), advantage, 0.0)


class TreeAdvantages(NamedTuple):
    """What an estimator makes of a forest.

    Attributes:
      shaped: the rewards that the advantages were taken from; the raw ones if the estimator shapes nothing.
      advantage: the advantage of each node, shared by all tokens of its response.
    """

    shaped: Float[Array, "*trees nodes"]
    advantage: Float[Array, "*trees nodes"]


def _normalised(
    reward: Float[Array, "*trees nodes"],
    agent: Int[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
    config: ConfigDict,
) -> TreeAdvantages:
    if config.group not in ("tree", "tree_agent"):
        raise ConfigError(f"learning.group={config.group!r} is unknown; use 'tree' or 'tree_agent'")
    advantage = group_advantages(
        reward,
        graded,
        group=agent if config.group == "tree_agent" else None,
        scale=config.scale,
        baseline=config.baseline,
    )
    return TreeAdvantages(reward, advantage)


def _mars2(reward, parent, agent, graded, config) -> TreeAdvantages:
    shaped = shaped_rewards(reward, parent, graded, gamma=config.gamma, lam=config.lam)
    return _normalised(shaped, agent, graded, config)


def _grpo(reward, parent, agent, graded, config) -> TreeAdvantages:
    del parent
    return _normalised(reward, agent, graded, config)


# Estimators by their name in `learning.estimator`; each takes the arguments of `tree_advantages`, with the slots that
# are not graded already zeroed.
ESTIMATORS: dict[str, Callable[..., TreeAdvantages]] = {"mars2": _mars2, "grpo": _grpo}


def tree_advantages(
    reward: Float[Array, "*trees nodes"],
    parent: Int[Array, "*trees nodes"],
    agent: Int[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
    config: ConfigDict,
) -> TreeAdvantages:
    """The advantages of a forest by the estimator that the config names.

    `mars2`: shaped rewards, normalised over the tree (the paper's path-level group advantage). `grpo`: raw rewards,
    normalised over the tree.

    Args:
      reward: raw rewards.
      parent: slot of the parent; 0 for children of the root, -1 for the root and for empty slots.
      agent: which agent wrote the node; -1 for the root and for empty slots.
      graded: slots that have a reward.
      config: the `learning` section; its estimator, gamma, lam, group, scale and baseline are read.

    Returns:
      The rewards used and the advantages, both 0 where not graded.

    Raises:
      ConfigError: an unknown estimator or option.
    """
    if config.estimator not in ESTIMATORS:
        raise ConfigError(f"learning.estimator={config.estimator!r} is unknown; use one of {', '.join(ESTIMATORS)}")
    graded = graded & (parent >= 0)
    return ESTIMATORS[config.estimator](jnp.where(graded, reward, 0.0), parent, agent, graded, config)

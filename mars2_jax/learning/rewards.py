"""What becomes of a reward before it is compared: a penalty on long responses, and the shaping along the tree.

Shapes and the meaning of `graded` are those of `learning.advantage`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mars2_jax.errors import ConfigError

__all__ = ["overlong_penalty", "shaped_rewards"]


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

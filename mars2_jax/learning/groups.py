"""The advantage of a node over a group of nodes: of its tree, of its agent in its tree, of its problem.

Shapes and the meaning of `graded` are those of `learning.advantage`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mars2_jax.errors import ConfigError

__all__ = ["SAME_REWARD", "group_advantages", "problem_advantages"]

SAME_REWARD = 1e-6
"""Rewards of a group that lie closer together than this are the same reward: rewards differ by 1/tests or by
factor/overlong_buffer, float32 rounding by about 1e-7. Without it, a group of equal rewards would have advantages of
rounding noise over eps."""


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
    return jnp.where(graded & (spread > SAME_REWARD), advantage, 0.0)


def problem_advantages(
    reward: Float[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
    problem: Int[Array, "*trees"],
    *,
    eps: float = 1e-6,
) -> Float[Array, "*trees nodes"]:
    """Advantage of every node over all nodes of all trees of its problem: (r_v - mean) / (std + eps), std unbiased.

    Of every tree only a few sums are compared with those of the others: memory grows with trees², not with nodes².

    Args:
      reward: rewards.
      graded: slots that have a reward.
      problem: trees with equal numbers are of one problem; all axes of trees are one list.
      eps: added to the standard deviation.

    Returns:
      Advantages; 0 where not graded, and on a whole problem whose rewards are all equal.
    """
    shape, nodes = reward.shape, reward.shape[-1]
    graded = graded.reshape(-1, nodes)
    reward = jnp.where(graded, reward.reshape(-1, nodes), 0.0)
    problem = problem.reshape(-1)
    same = problem[:, None] == problem[None, :]  # [tree, other tree]

    def over_problem(of_tree: Float[Array, "tree other"]) -> Float[Array, " tree"]:
        return jnp.where(same, of_tree, 0.0).sum(-1)

    count = over_problem(graded.sum(-1)[None, :].astype(reward.dtype))
    mean = over_problem(reward.sum(-1)[None, :]) / jnp.maximum(count, 1)
    # About the mean of the problem, which is the same for all trees of it.
    centred = reward - mean[:, None]
    square = over_problem(jnp.where(graded, centred**2, 0.0).sum(-1)[None, :])
    advantage = centred / (jnp.sqrt(square / jnp.maximum(count - 1, 1)) + eps)[:, None]

    highest = jnp.where(same, jnp.where(graded, reward, -jnp.inf).max(-1)[None, :], -jnp.inf).max(-1)
    lowest = jnp.where(same, jnp.where(graded, reward, jnp.inf).min(-1)[None, :], jnp.inf).min(-1)
    return jnp.where(graded & (highest - lowest > SAME_REWARD)[:, None], advantage, 0.0).reshape(shape)

"""Estimators that value a node by what grew out of it, and compare it with what grew beside it.

The papers behind them branch inside one response: an inner node is a beginning of a response, and only a leaf is a
whole response, with a reward. Here every node is a whole attempt with a reward of its own, and its children are
refinements of it. An attempt is therefore taken as a leaf that hangs under its own node, beside the subtrees of its
children: *the leaves under a node* are all graded nodes of its subtree, itself included. So a node is credited for the
refinements that it led to as a beginning is for its endings, and for its own attempt as much as for one of those.

Shapes and the meaning of `graded` are those of `learning.advantage`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mars2_jax.learning.groups import SAME_REWARD

__all__ = ["treepo_advantages", "treerl_advantages", "under"]


def under(parent: Int[Array, "*trees nodes"]) -> Bool[Array, "*trees nodes ancestors"]:
    """Whether slot v is slot a or lies below it, as [..., v, a].

    Args:
      parent: slot of the parent; 0 for children of the root, -1 for the root and for empty slots.
    """
    nodes = parent.shape[-1]
    slots = jnp.arange(nodes)
    above = jnp.where(parent < 0, slots, parent)
    known = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (*parent.shape, nodes))
    # After k rounds `known` has the ancestors of 2^k - 1 levels, and `above` is the 2^k-th: chains of any length in
    # log2(nodes) rounds, and nothing is added in an order that may change, as a scatter does on some devices.
    for _ in range(max(nodes - 1, 1).bit_length()):
        known = known | jnp.take_along_axis(known, above[..., :, None], axis=-2)
        above = jnp.take_along_axis(above, above, axis=-1)
    return known


def _values(
    reward: Float[Array, "*trees nodes"], graded: Bool[Array, "*trees nodes"], below: Bool[Array, "*trees nodes nodes"]
) -> tuple[Float[Array, "*trees nodes"], Int[Array, "*trees nodes"]]:
    """V, the mean reward of the leaves under each slot (0 where there are none), and their number."""
    leaf = below & graded[..., :, None]
    count = leaf.sum(-2)
    total = jnp.where(leaf, reward[..., :, None], 0.0).sum(-2)
    return total / jnp.maximum(count, 1), count


def _told_apart(
    advantage: Float[Array, "*trees nodes"], reward: Float[Array, "*trees nodes"], graded: Bool[Array, "*trees nodes"]
) -> Float[Array, "*trees nodes"]:
    """Exact zeros where not graded, and on a tree whose rewards are all equal."""
    highest = jnp.where(graded, reward, -jnp.inf).max(-1, keepdims=True)
    lowest = jnp.where(graded, reward, jnp.inf).min(-1, keepdims=True)
    return jnp.where(graded & (highest - lowest > SAME_REWARD), advantage, 0.0)


def treerl_advantages(
    reward: Float[Array, "*trees nodes"],
    parent: Int[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
) -> Float[Array, "*trees nodes"]:
    """Global and local advantage of a node's subtree (TreeRL, arXiv 2506.11902).

        A(n) = [(V(n) - V(root)) + (V(n) - V(parent of n))] / √|L(n)|       V(n) = mean of r over L(n)

    L(n), the leaves under n, are the graded nodes of n's subtree with n itself (see the head of this file); L(root) is
    the whole tree. This is the formula of the paper: its code divides V(parent) by the parent's own root.

    Args:
      reward: raw rewards.
      parent: slot of the parent; 0 for children of the root, -1 for the root and for empty slots.
      graded: slots that have a reward.

    Returns:
      Advantages; 0 where not graded.
    """
    value, leaves = _values(reward, graded, under(parent))
    before = jnp.take_along_axis(value, jnp.maximum(parent, 0), axis=-1)
    advantage = (2 * value - value[..., :1] - before) / jnp.sqrt(jnp.maximum(leaves, 1))
    return _told_apart(advantage, reward, graded)


def treepo_advantages(
    reward: Float[Array, "*trees nodes"],
    parent: Int[Array, "*trees nodes"],
    graded: Bool[Array, "*trees nodes"],
) -> Float[Array, "*trees nodes"]:
    """Mean advantage of a node over the groups that it belongs to (TreePO, arXiv 2508.17445, with the plain average).

        A(i) = mean over the groups g of i of (r_i - mean of r over g)

    The groups of i are the whole tree and, for every node above i, the leaves under that node (see the head of this
    file), if there are two or more. The refinements of i itself are no group of it: they share all of its tokens, so
    what sets them apart from i is nothing that i did. The paper whitens the result over the batch's tokens; here it is
    left as it is.

    Args:
      reward: raw rewards.
      parent: slot of the parent; 0 for children of the root, -1 for the root and for empty slots.
      graded: slots that have a reward.

    Returns:
      Advantages; 0 where not graded.
    """
    below = under(parent)
    value, leaves = _values(reward, graded, below)
    slots = jnp.arange(parent.shape[-1])
    group = below & (slots[:, None] != slots[None, :]) & ((leaves >= 2) | (slots == 0))[..., None, :]
    baseline = jnp.where(group, value[..., None, :], 0.0).sum(-1) / jnp.maximum(group.sum(-1), 1)
    return _told_apart(reward - baseline, reward, graded)

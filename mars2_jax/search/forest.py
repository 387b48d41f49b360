"""Many search trees as arrays, and the four pure functions that grow them.

All trees of a batch live in one frozen pytree of `[trees, nodes]` arrays, so that a search is a handful of compiled
calls whatever the number of trees. Node slots are handed out in order; slot 0 is the root, which is the problem
itself and carries no reward.
"""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int8

__all__ = ["Expansion", "Forest", "Stats", "Status", "empty", "observe", "reserve", "void"]


class Status(enum.IntEnum):
    """What is in a slot. Only GRADED nodes enter a statistic, a mean, or a choice of where to go on."""

    EMPTY = 0
    """No node. The root is not a node: it stays EMPTY."""
    PENDING = 1
    """Being written or graded."""
    GRADED = 2
    """Has its reward."""
    VOID = 3
    """The grader failed on it: it counts nowhere, and nothing is built on it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Sufficient statistics (n, Σr, Σr²) of every posterior that a selection draws from.

    The three moments are an axis of their own before the nodes, so that the node axis is the contiguous one and a
    whole level of a tree is drawn by one vector operation.

    Posteriors that follow from these by addition are not stored, because every observation is of exactly one agent:
    GEN and CONT shared by the agents (`node_first`) are sums over the agent axis, and the posterior of an agent at a
    node (`agent_first`) is `gen + cont` there.

    Attributes:
      gen: of node x and agent a: the rewards of the children of x that a wrote.
      cont: of node x and agent a: the rewards of all nodes two or more levels below x, through a child that a wrote.
      child: of node x: its own reward and those of all nodes below it.
      agent: of agent a: the rewards of all nodes that it wrote in the tree.
    """

    gen: Float[Array, "trees 3 agents slots"]
    cont: Float[Array, "trees 3 agents slots"]
    child: Float[Array, "trees 3 slots"]
    agent: Float[Array, "trees 3 agents"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forest:
    """`trees` search trees with room for `slots - 1` nodes each; slot 0 is the root.

    Attributes:
      parent: slot of the parent; 0 for the children of the root; -1 for the root and for empty slots.
      agent: index of the agent that wrote the node; -1 for the root and for empty slots.
      depth: 0 for the root and for empty slots.
      reward: in [0, 1]; 0 where the status is not GRADED.
      status: a `Status`.
      stats: statistics of the posteriors, kept up to date by `observe`.
    """

    parent: Int[Array, "trees slots"]
    agent: Int[Array, "trees slots"]
    depth: Int[Array, "trees slots"]
    reward: Float[Array, "trees slots"]
    status: Int8[Array, "trees slots"]
    stats: Stats

    @property
    def trees(self) -> int:
        return self.parent.shape[0]

    @property
    def nodes(self) -> int:
        """Nodes that a tree has room for, the root not counted."""
        return self.parent.shape[1] - 1

    @property
    def agents(self) -> int:
        return self.stats.agent.shape[-1]

    @property
    def size(self) -> Int[Array, "trees"]:
        """Slots in use, the root not counted; PENDING and VOID ones count. The next node takes slot `size + 1`."""
        return jnp.sum(self.status != Status.EMPTY, axis=1, dtype=jnp.int32)

    @property
    def graded(self) -> Bool[Array, "trees slots"]:
        """Nodes that have a reward."""
        return self.status == Status.GRADED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Expansion:
    """Where each tree grows next: `agent` writes a new child of slot `parent`."""

    parent: Int[Array, "trees"]
    agent: Int[Array, "trees"]


def empty(trees: int, nodes: int, agents: int) -> Forest:
    """A forest of `trees` bare roots with room for `nodes` nodes each, written by `agents` agents."""
    if min(trees, nodes, agents) < 1:
        raise ValueError(f"a forest needs trees, nodes and agents, got {trees}, {nodes} and {agents}")
    slots = nodes + 1
    absent = jnp.full((trees, slots), -1, jnp.int32)
    return Forest(
        parent=absent,
        agent=absent.copy(),  # a buffer of its own: a caller may donate the forest, and no buffer is donated twice
        depth=jnp.zeros((trees, slots), jnp.int32),
        reward=jnp.zeros((trees, slots), jnp.float32),
        status=jnp.full((trees, slots), Status.EMPTY, jnp.int8),
        stats=Stats(
            gen=jnp.zeros((trees, 3, agents, slots), jnp.float32),
            cont=jnp.zeros((trees, 3, agents, slots), jnp.float32),
            child=jnp.zeros((trees, 3, slots), jnp.float32),
            agent=jnp.zeros((trees, 3, agents), jnp.float32),
        ),
    )


@jax.jit
def reserve(
    forest: Forest, expansion: Expansion, mask: Bool[Array, "trees"] | None = None
) -> tuple[Forest, Int[Array, "trees"]]:
    """Gives each tree one PENDING node, as `expansion` says.

    Args:
      forest: the trees.
      expansion: parent and agent of the new nodes. A parent is the root or a GRADED node; -1: the tree stays.
      mask: trees that grow; None is all.

    Returns:
      The forest and the slot of each new node; -1 where the tree is masked out, full, or not to grow.
    """
    size = forest.size
    grows = (size < forest.nodes) & (expansion.parent >= 0)
    if mask is not None:
        grows &= mask
    slot = jnp.where(grows, size + 1, -1)
    row = jnp.arange(forest.trees)
    # An index past the end is dropped (-1 would wrap around to the last slot).
    at = (row, jnp.where(grows, slot, forest.nodes + 1))
    grown = dataclasses.replace(
        forest,
        parent=forest.parent.at[at].set(expansion.parent, mode="drop"),
        agent=forest.agent.at[at].set(expansion.agent, mode="drop"),
        depth=forest.depth.at[at].set(forest.depth[row, expansion.parent] + 1, mode="drop"),
        status=forest.status.at[at].set(Status.PENDING, mode="drop"),
    )
    return grown, slot


@jax.jit
def observe(
    forest: Forest,
    tree: Int[ArrayLike, "*batch"],
    slot: Int[ArrayLike, "*batch"],
    reward: Float[ArrayLike, "*batch"],
) -> Forest:
    """Gives PENDING nodes their rewards and backs these up to the roots.

    For a node x with parent p and agent a: GEN of (p, a), the child posterior of x, and agent a observe r. Then for
    y = p up to the root, with q the parent of y: the child posterior of y and CONT of (q, agent of y) observe r. So
    GEN sees direct children only, CONT only what is deeper (arXiv 2503.04412, and TreeQuest 0.3.3's code).

    Works on a list of nodes, not on all trees, and takes O(depth) steps; several nodes of one tree may be in one
    call, one node only once.

    Args:
      forest: the trees.
      tree: which trees.
      slot: which of their nodes. A slot that is not PENDING (or -1, padding) is left as it is.
      reward: in [0, 1].
    """
    tree, slot, reward = (jnp.atleast_1d(jnp.asarray(x)) for x in (tree, slot, reward))
    reward = reward.astype(jnp.float32)
    live = (slot > 0) & (forest.status[tree, slot] == Status.PENDING)
    # Rows past the end are dropped: an index of `trees` switches a lane off.
    row = jnp.where(live, tree, forest.trees)
    parent, agent = forest.parent[tree, slot], forest.agent[tree, slot]
    moments = jnp.stack([jnp.ones_like(reward), reward, reward * reward], axis=-1)

    def add(table: Array, row: Array, *at: Array) -> Array:
        return table.at[(row, slice(None), *at)].add(moments, mode="drop")

    gen = add(forest.stats.gen, row, agent, parent)
    by_agent = add(forest.stats.agent, row, agent)
    child = add(forest.stats.child, row, slot)

    def is_below_root(carry: tuple[Array, Array, Array]) -> Array:
        return jnp.any(carry[0] > 0)

    def up(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        node, child, cont = carry
        here = jnp.where(node > 0, row, forest.trees)
        above = forest.parent[tree, node]
        child = add(child, here, node)
        cont = add(cont, here, forest.agent[tree, node], above)
        return jnp.maximum(above, 0), child, cont

    start = jnp.where(live, parent, 0)
    _, child, cont = jax.lax.while_loop(is_below_root, up, (start, child, forest.stats.cont))
    return dataclasses.replace(
        forest,
        reward=forest.reward.at[row, slot].set(reward, mode="drop"),
        status=forest.status.at[row, slot].set(Status.GRADED, mode="drop"),
        stats=Stats(gen=gen, cont=cont, child=child, agent=by_agent),
    )


@jax.jit
def void(forest: Forest, tree: Int[ArrayLike, "*batch"], slot: Int[ArrayLike, "*batch"]) -> Forest:
    """Marks PENDING nodes VOID: the grader failed on them. Their slots stay used; nothing else changes.

    Args:
      forest: the trees.
      tree: which trees.
      slot: which of their nodes. A slot that is not PENDING (or -1, padding) is left as it is.
    """
    tree, slot = (jnp.atleast_1d(jnp.asarray(x)) for x in (tree, slot))
    live = (slot > 0) & (forest.status[tree, slot] == Status.PENDING)
    row = jnp.where(live, tree, forest.trees)
    return dataclasses.replace(forest, status=forest.status.at[row, slot].set(Status.VOID, mode="drop"))

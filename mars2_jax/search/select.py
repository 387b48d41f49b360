"""Where each tree grows next: Thompson selection of a node and an agent (arXiv 2503.04412; MARS2, arXiv 2604.14564)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from mars2_jax.search.forest import Expansion, Forest, Stats, Status
from mars2_jax.search.posterior import POSTERIORS, Draw

__all__ = ["FLAT", "ORDERS", "STRATEGIES", "Shape", "Tree", "agent_first", "node_first", "select"]

STRATEGIES = ("mars2", "rs2", "flat_multi", "grpo", "best_first", "round_robin")
FLAT = ("flat_multi", "grpo")
"""Strategies whose nodes are all children of the root. They look at no reward: nothing makes a chain of a tree."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a selection does to the shape of a tree. Hashable: a static argument of jitted code.

    Attributes:
      max_depth: no node lies deeper; 0 is no limit.
      max_children: no node (the root included) has more children, VOID and PENDING ones counted; 0 is no limit.
      guidance: γ(0) of depth guidance, in (0, 1]. The GEN draw at a node of depth d is multiplied by γ(d)^c, where c is
        the number of children made so far at that depth in the tree, and γ(d) = γ(0) · decay^d: the more a depth has,
        the sooner the search goes on below, and sooner still further down (MARS2-T+, arXiv 2604.14564). 1 with a decay
        of 1 is off. A negative draw, which the gaussian posterior can give, moves towards 0 as the others do.
      guidance_decay: `decay` in the line above, in (0, 1].
    """

    max_depth: int = 0
    max_children: int = 0
    guidance: float = 1.0
    guidance_decay: float = 1.0

    @property
    def limited(self) -> bool:
        """Whether there are nodes that may not get another child."""
        return self.max_depth > 0 or self.max_children > 0

    @property
    def guided(self) -> bool:
        return self.guidance < 1 or self.guidance_decay < 1


class Tree(NamedTuple):
    """What a descent looks at: one tree of a `Forest`, and where it may grow.

    Attributes:
      parent, agent, stats: as in `Forest`.
      enter: nodes that a descent may enter: GRADED, and with a node below or at them that may get another child.
      grow: nodes that may get another child: the root or GRADED, and within the limits.
      made: of depth d, children made so far of the nodes of that depth.
    """

    parent: Int[Array, "slots"]
    agent: Int[Array, "slots"]
    stats: Stats
    enter: Bool[Array, "slots"]
    grow: Bool[Array, "slots"]
    made: Int[Array, "slots"]


@functools.partial(jax.jit, static_argnames=("order", "posterior", "strategy", "shape"))
def select(
    forest: Forest,
    key: PRNGKeyArray,
    *,
    order: str,
    posterior: str,
    strategy: str = "mars2",
    shape: Shape = Shape(),
    tree_ids: Int[Array, "trees"] | None = None,
) -> Expansion:
    """Chooses, for every tree, the node to expand and the agent that writes the new child.

    Tree t with n slots in use draws from `fold_in(fold_in(key, tree_ids[t]), n)`, and from nothing else: its path does
    not depend on the other trees of the batch, on its place among them, or on when it is asked. PENDING and VOID nodes
    are not entered; a node without a GRADED child is a leaf, and a leaf is always expanded.

    Args:
      forest: the trees.
      key: a typed PRNG key.
      order: "agent_first" (the paper's) or "node_first" (the released code's); see the functions of that name.
      posterior: "beta" or "gaussian".
      strategy: "mars2" and "rs2" (the name for one agent alone) search the tree by Thompson sampling. The others draw
        nothing, and the agents take turns: slot s is written by agent (s - 1) mod agents. "flat_multi" and "grpo" (one
        agent) make every node a child of the root. "best_first" fills the root, then the node of the highest reward,
        the earliest on ties. "round_robin" fills the earliest node that has room: breadth first, blind to rewards.
      shape: limits and guidance.
      tree_ids: the trees' names in the key, distinct in a run; None is 0, 1, 2, ...

    Returns:
      An expansion for each tree, also for those without a free slot (which `reserve` leaves alone). Parent -1 (which it
      leaves alone, too): the limits leave no node to expand, for good unless a node is PENDING.

    Raises:
      ValueError: for an order, posterior or strategy that is not known.
    """
    for name, value, known in (
        ("order", order, ORDERS),
        ("posterior", posterior, POSTERIORS),
        ("strategy", strategy, STRATEGIES),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is not known: use one of {', '.join(known)}")
    size = forest.size
    in_turn = size % forest.agents
    if strategy in FLAT:
        return Expansion(parent=jnp.zeros_like(size), agent=in_turn)
    trees = jax.vmap(functools.partial(_view, shape=shape))(forest)
    some = trees.grow.any(-1)
    if strategy == "round_robin":
        return Expansion(parent=jnp.where(some, jnp.argmax(trees.grow, axis=-1).astype(jnp.int32), -1), agent=in_turn)
    if strategy == "best_first":
        worth = forest.reward.at[:, 0].set(jnp.inf)
        best = jnp.argmax(jnp.where(trees.grow, worth, -jnp.inf), axis=-1).astype(jnp.int32)
        return Expansion(parent=jnp.where(some, best, -1), agent=in_turn)
    if tree_ids is None:
        tree_ids = jnp.arange(forest.trees)
    keys = jax.vmap(lambda tree, n: jax.random.fold_in(jax.random.fold_in(key, tree), n))(tree_ids, size)
    descend = functools.partial(ORDERS[order], draw=POSTERIORS[posterior], shape=shape)
    parent, agent = jax.vmap(descend)(keys, trees)
    return Expansion(parent=jnp.where(some, parent, -1), agent=agent)


def _view(forest: Forest, *, shape: Shape) -> Tree:
    """One tree (a `Forest` without its first axis) as a descent sees it."""
    graded = forest.status == Status.GRADED
    root = jnp.arange(graded.shape[0]) == 0
    there = forest.status != Status.EMPTY  # false for the root
    grow = graded | root
    enter = graded
    if shape.limited:
        if shape.max_depth:
            grow &= forest.depth < shape.max_depth
        if shape.max_children:
            grow &= jnp.zeros_like(forest.parent).at[forest.parent].add(there, mode="drop") < shape.max_children
        enter &= _leads_on(forest.parent, there, grow)
    made = jnp.zeros_like(forest.depth).at[jnp.where(there, forest.depth - 1, graded.shape[0])].add(1, mode="drop")
    return Tree(forest.parent, forest.agent, forest.stats, enter, grow, made)


def _leads_on(
    parent: Int[Array, "slots"], there: Bool[Array, "slots"], grow: Bool[Array, "slots"]
) -> Bool[Array, "slots"]:
    """Nodes at or below which a node may get another child. One step of the loop a level."""
    above = jnp.where(there, parent, parent.shape[0])

    def spread(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        _, leads = carry
        return leads, leads.at[above].max(leads, mode="drop")

    _, leads = jax.lax.while_loop(lambda c: jnp.any(c[0] != c[1]), spread, (jnp.zeros_like(grow), grow))
    return leads


def agent_first(key: PRNGKeyArray, tree: Tree, *, draw: Draw, shape: Shape) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """One tree: at each node draw an agent, then its GEN against its CONT, then one of the children it wrote.

    GEN (also on a tie, and where the agent has no child here): that agent expands this node. This is the paper's
    order and TreeQuest's "stack". The posterior of an agent at a node is that of all it led to from there. Where the
    limits forbid GEN, only agents with a child to enter are drawn.

    Args:
      key: this tree's key at its size.
      tree: the tree; one of its nodes may grow.
      draw: a posterior.
      shape: depth guidance.

    Returns:
      Slot of the node to expand, and the agent.
    """
    child_key, level_key = jax.random.split(key)
    # All child posteriors in one draw: a descent asks each node's at most once, as it passes the node's parent.
    value = draw(child_key, tree.stats.child)
    stats = tree.stats

    def choose(node: Array, level: Array) -> tuple[Array, Array]:
        gen, cont = stats.gen[..., node], stats.cont[..., node]
        moments = jnp.stack([gen + cont, gen, cont], axis=1)
        by_agent, by_gen, by_cont = draw(jax.random.fold_in(level_key, level), moments)
        children = tree.enter & (tree.parent == node)
        if shape.limited:
            enters = (children & (tree.agent == jnp.arange(by_agent.shape[0])[:, None])).any(-1)
            by_agent = jnp.where(tree.grow[node] | enters, by_agent, -jnp.inf)
        who = jnp.argmax(by_agent).astype(jnp.int32)
        go_on = (by_cont[who] > _guided(by_gen[who], tree, level, shape)) | ~tree.grow[node]
        return _best(children & (tree.agent == who), value, go_on, node), who

    return _descend(choose)


def node_first(key: PRNGKeyArray, tree: Tree, *, draw: Draw, shape: Shape) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """One tree: at each node draw GEN against CONT, then one of all its children; the agent last, tree-globally.

    GEN (also on a tie) expands this node. This is TreeQuest's "multiarm_bandit_thompson", which the released code of
    MARS2 runs: which agent writes does not depend on where in the tree. Arguments and results as `agent_first`.
    """
    child_key, level_key, agent_key = jax.random.split(key, 3)
    value = draw(child_key, tree.stats.child)
    stats = tree.stats

    def choose(node: Array, level: Array) -> tuple[Array, Array]:
        moments = jnp.stack([stats.gen[..., node].sum(1), stats.cont[..., node].sum(1)], axis=1)
        by_gen, by_cont = draw(jax.random.fold_in(level_key, level), moments)
        go_on = (by_cont > _guided(by_gen, tree, level, shape)) | ~tree.grow[node]
        return _best(tree.enter & (tree.parent == node), value, go_on, node), jnp.int32(0)

    node, _ = _descend(choose)
    return node, jnp.argmax(draw(agent_key, stats.agent)).astype(jnp.int32)


def _guided(by_gen: Float[Array, ""], tree: Tree, depth: Int[Array, ""], shape: Shape) -> Float[Array, ""]:
    """The GEN draw at a node of this depth under depth guidance."""
    if not shape.guided:
        return by_gen
    return by_gen * (shape.guidance * shape.guidance_decay**depth) ** tree.made[depth]


def _descend(choose: Callable[[Array, Array], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Follows `choose(node, level) -> (next node, agent)` from the root until it stays where it is."""

    def moving(carry: tuple[Array, Array, Array, Array]) -> Array:
        return carry[3]

    def go(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        node, _, level, _ = carry
        following, who = choose(node, level)
        return following, who, level + 1, following != node

    node, who, _, _ = jax.lax.while_loop(moving, go, (jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.bool_(True)))
    return node, who


def _best(
    candidates: Bool[Array, "slots"], value: Float[Array, "slots"], go_on: Bool[Array, ""], node: Int[Array, ""]
) -> Int[Array, ""]:
    """The candidate of the highest value, the first on a tie; `node` itself where the descent ends here."""
    best = jnp.argmax(jnp.where(candidates, value, -jnp.inf)).astype(jnp.int32)
    return jnp.where(go_on & jnp.any(candidates), best, node)


ORDERS = {"agent_first": agent_first, "node_first": node_first}

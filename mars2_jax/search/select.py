"""Where each tree grows next: Thompson selection of a node and an agent (arXiv 2503.04412; MARS2, arXiv 2604.14564)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from mars2_jax.search.forest import Expansion, Forest, Stats
from mars2_jax.search.posterior import POSTERIORS, Draw

__all__ = ["ORDERS", "STRATEGIES", "agent_first", "node_first", "select"]

STRATEGIES = ("mars2", "grpo")


@functools.partial(jax.jit, static_argnames=("order", "posterior", "strategy"))
def select(
    forest: Forest,
    key: PRNGKeyArray,
    *,
    order: str,
    posterior: str,
    strategy: str = "mars2",
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
      strategy: "mars2" searches the tree. "grpo" makes every node a child of the root, by the agents in turn (slot s
        is written by agent (s - 1) mod agents), and draws nothing.
      tree_ids: the trees' names in the key, distinct in a run; None is 0, 1, 2, ...

    Returns:
      An expansion for each tree, also for the full ones (which `reserve` leaves alone).

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
    if strategy == "grpo":
        return Expansion(parent=jnp.zeros_like(size), agent=size % forest.agents)
    if tree_ids is None:
        tree_ids = jnp.arange(forest.trees)
    keys = jax.vmap(lambda tree, n: jax.random.fold_in(jax.random.fold_in(key, tree), n))(tree_ids, size)
    descend = functools.partial(ORDERS[order], draw=POSTERIORS[posterior])
    parent, agent = jax.vmap(descend)(keys, forest.parent, forest.agent, forest.graded, forest.stats)
    return Expansion(parent=parent, agent=agent)


def agent_first(
    key: PRNGKeyArray,
    parent: Int[Array, "slots"],
    agent: Int[Array, "slots"],
    graded: Bool[Array, "slots"],
    stats: Stats,
    *,
    draw: Draw,
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """One tree: at each node draw an agent, then its GEN against its CONT, then one of the children it wrote.

    GEN (also on a tie, and where the agent has no child here): that agent expands this node. This is the paper's
    order and TreeQuest's "stack". The posterior of an agent at a node is that of all it led to from there.

    Args:
      key: this tree's key at its size.
      parent, agent, graded, stats: one tree of a `Forest`.
      draw: a posterior.

    Returns:
      Slot of the node to expand, and the agent.
    """
    child_key, level_key = jax.random.split(key)
    # All child posteriors in one draw: a descent asks each node's at most once, as it passes the node's parent.
    value = draw(child_key, stats.child)

    def choose(node: Array, level: Array) -> tuple[Array, Array]:
        gen, cont = stats.gen[..., node], stats.cont[..., node]
        moments = jnp.stack([gen + cont, gen, cont], axis=1)
        by_agent, by_gen, by_cont = draw(jax.random.fold_in(level_key, level), moments)
        who = jnp.argmax(by_agent).astype(jnp.int32)
        candidates = graded & (parent == node) & (agent == who)
        return _best(candidates, value, by_cont[who] > by_gen[who], node), who

    return _descend(choose)


def node_first(
    key: PRNGKeyArray,
    parent: Int[Array, "slots"],
    agent: Int[Array, "slots"],
    graded: Bool[Array, "slots"],
    stats: Stats,
    *,
    draw: Draw,
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """One tree: at each node draw GEN against CONT, then one of all its children; the agent last, tree-globally.

    GEN (also on a tie) expands this node. This is TreeQuest's "multiarm_bandit_thompson", which the released code of
    MARS2 runs: which agent writes does not depend on where in the tree. Arguments and results as `agent_first`.
    """
    del agent
    child_key, level_key, agent_key = jax.random.split(key, 3)
    value = draw(child_key, stats.child)

    def choose(node: Array, level: Array) -> tuple[Array, Array]:
        moments = jnp.stack([stats.gen[..., node].sum(1), stats.cont[..., node].sum(1)], axis=1)
        by_gen, by_cont = draw(jax.random.fold_in(level_key, level), moments)
        return _best(graded & (parent == node), value, by_cont > by_gen, node), jnp.int32(0)

    node, _ = _descend(choose)
    return node, jnp.argmax(draw(agent_key, stats.agent)).astype(jnp.int32)


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

"""Limits of depth and width, depth guidance, and the strategies that draw nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats as sps

from mars2_jax.search.forest import Forest, Status, empty, observe, reserve, void
from mars2_jax.search.select import Shape, select
from tests.search.peer import Tell, forest_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

TREES, NODES, AGENTS = 32, 12, 2
THOMPSON = [(order, posterior) for order in ("agent_first", "node_first") for posterior in ("beta", "gaussian")]


def grow(how: dict, *, seed: int = 0, pending: float = 0.0, voids: float = 0.0):
    """Grows random trees; yields (forest, expansion) before each step. Some nodes stay open for good, some are void."""
    rng = np.random.default_rng(seed)
    forest = empty(TREES, NODES, AGENTS)
    for _ in range(NODES):
        expansion = select(forest, jax.random.key(seed), **how)
        yield jax.device_get((forest, expansion))
        forest, slot = reserve(forest, expansion)
        fate = rng.random(TREES)
        slot = np.asarray(slot)
        forest = void(forest, jnp.arange(TREES), jnp.where(fate < voids, slot, -1))
        settled = jnp.where((fate >= voids) & (fate < 1 - pending), slot, -1)
        forest = observe(forest, jnp.arange(TREES), settled, rng.integers(0, 5, TREES) / 4)


def plain(forest: Forest, tree: int) -> tuple[list[int], list[int], list[int], list[float]]:
    return tuple(x[tree].tolist() for x in (forest.parent, forest.depth, forest.status, forest.reward))  # type: ignore[return-value]


def growable(forest: Forest, tree: int, shape: Shape) -> list[int]:
    """Nodes that may get a child, told in plain Python."""
    parent, depth, status, _ = plain(forest, tree)
    used = [s for s in range(1, NODES + 1) if status[s] != Status.EMPTY]
    return [
        node
        for node in [0, *(s for s in used if status[s] == Status.GRADED)]
        if (not shape.max_depth or depth[node] < shape.max_depth)
        and (not shape.max_children or sum(parent[s] == node for s in used) < shape.max_children)
    ]


@pytest.mark.parametrize("shape", [Shape(max_depth=2), Shape(max_children=2), Shape(max_depth=2, max_children=2)])
@pytest.mark.parametrize(("order", "posterior"), THOMPSON)
def test_limits_hold_and_a_tree_ends_only_where_nothing_can_grow(order, posterior, shape):
    refused = deepest = widest = 0
    for forest, chosen in grow(dict(order=order, posterior=posterior, shape=shape), pending=0.1, voids=0.1):
        for tree in range(TREES):
            may = growable(forest, tree, shape)
            refused += not may
            assert (chosen.parent[tree] in may) if may else chosen.parent[tree] == -1
            assert 0 <= chosen.agent[tree] < AGENTS
        deepest = max(deepest, int(forest.depth.max()))
        widest = max(widest, *(np.bincount(row[row >= 0]).max(initial=0) for row in forest.parent))
    # The limits were reached, so that they were tried.
    assert deepest == (shape.max_depth or deepest) and widest == (shape.max_children or widest)
    if shape.max_depth and shape.max_children:
        assert refused


@pytest.mark.parametrize(("order", "posterior"), THOMPSON)
def test_limits_that_are_not_reached_change_nothing(order, posterior):
    free = dict(order=order, posterior=posterior)
    wide = free | dict(shape=Shape(max_depth=NODES + 1, max_children=NODES + 1))
    for (_, a), (_, b) in zip(grow(free, voids=0.1), grow(wide, voids=0.1), strict=True):
        np.testing.assert_array_equal(a.parent, b.parent)
        np.testing.assert_array_equal(a.agent, b.agent)


@pytest.mark.parametrize("strategy", ["best_first", "round_robin"])
def test_plain_baselines_as_told_in_plain_python(strategy):
    shape = Shape(max_depth=3, max_children=2)
    how = dict(order="agent_first", posterior="beta", strategy=strategy, shape=shape)
    for forest, chosen in grow(how, seed=3, pending=0.1, voids=0.1):
        for tree in range(TREES):
            *_, status, reward = plain(forest, tree)
            may = growable(forest, tree, shape)
            if strategy == "round_robin":
                expected = min(may, default=-1)
            elif 0 in may:
                expected = 0
            else:
                expected = max(may, key=lambda node: (reward[node], -node), default=-1)
            assert chosen.parent[tree] == expected
            assert chosen.agent[tree] == sum(s != Status.EMPTY for s in status) % AGENTS


@pytest.mark.parametrize("guidance", [1.0, 0.8])
def test_guidance_weakens_gen_by_what_the_depth_has(guidance):
    """node_first at a root with three children, one of them with a child: GEN wins against CONT as often as SciPy's
    draws say, the GEN draw times (γ(0))³."""
    tells = [Tell(0, 0, 1.0), Tell(0, 1, 0.5), Tell(0, 0, 0.5), Tell(1, 1, 0.5)]
    copies = 20_000
    one = forest_of(tells, AGENTS, NODES)
    forest = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (copies, *x.shape[1:])), one)
    shape = Shape(guidance=guidance, guidance_decay=0.5 if guidance < 1 else 1.0)
    chosen = select(forest, jax.random.key(1), order="node_first", posterior="beta", shape=shape)
    stayed = int((chosen.parent == 0).sum())
    rng = np.random.default_rng(0)
    # GEN saw 1, ½, ½ and CONT ½.
    gen, cont = rng.beta(0.5 + 2, 0.5 + 1, 10**6), rng.beta(0.5 + 0.5, 0.5 + 0.5, 10**6)
    expected = (cont <= gen * guidance**3).mean()
    assert sps.binomtest(stayed, copies, expected).pvalue > 1e-3


def test_guidance_falls_with_depth():
    """At depth 1, γ(1) = γ(0) · decay: with a decay of 0.01 a refined child is all but never refined again."""
    tells = [Tell(0, 0, 1.0), Tell(1, 0, 1.0), Tell(2, 0, 1.0)]
    forest = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (2_000, *x.shape[1:])), forest_of(tells, AGENTS, NODES))
    at_one = {}
    for decay in (1.0, 0.01):
        shape = Shape(guidance=0.98, guidance_decay=decay)
        chosen = select(forest, jax.random.key(1), order="node_first", posterior="beta", shape=shape)
        at_one[decay] = float((chosen.parent == 1).mean())
    assert at_one[1.0] > 0.05 > 0.02 > at_one[0.01]

"""Which (node, agent) is chosen: frequencies against TreeQuest, and the rules that hold in every draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats as sps

from mars2_jax.search.forest import Expansion, Forest, empty, observe, reserve, void
from mars2_jax.search.select import select
from tests.search.peer import Tell, forest_of, treequest_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

AGENTS, NODES = 2, 8
COPIES = 20_000  # one number, so that each case compiles once
CASES = [(order, posterior) for order in ("agent_first", "node_first") for posterior in ("beta", "gaussian")]
TREES = {
    "root": [],
    "binary": [Tell(0, 0, 0.0), Tell(0, 1, 1.0), Tell(2, 0, 1.0), Tell(2, 1, 0.0), Tell(3, 1, 1.0), Tell(0, 0, 1.0)],
    "graded": [Tell(0, 0, 0.2), Tell(1, 0, 0.6), Tell(1, 1, 0.4), Tell(2, 1, 0.9), Tell(4, 0, 0.95), Tell(0, 0, 0.3)],
}


def many(forest: Forest) -> Forest:
    """The first tree, `COPIES` times: each copy draws by itself."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (COPIES, *x.shape[1:])), forest)


def counts(nodes, agents) -> np.ndarray:
    return np.bincount(np.asarray(nodes) * AGENTS + np.asarray(agents), minlength=(NODES + 1) * AGENTS)


def same_distribution(a: np.ndarray, b: np.ndarray) -> float:
    """The p-value of a χ² test that two tables of counts have one distribution; rare cells are put together."""
    rare = a + b < 20
    table = np.stack([np.append(x[~rare], x[rare].sum()) for x in (a, b)])
    table = table[:, table.sum(0) > 0]
    return 1.0 if table.shape[1] == 1 else sps.chi2_contingency(table).pvalue


def check_frequencies(order, posterior, name, asks):
    tells = TREES[name]
    np.random.seed(5)
    algorithm, state = treequest_of(tells, AGENTS, order, posterior)
    _, trials = algorithm.ask_batch(state, asks, [str(a) for a in range(AGENTS)])
    theirs = counts([t.node_to_expand + 1 for t in trials], [int(t.action) for t in trials])
    chosen = select(many(forest_of(tells, AGENTS, NODES)), jax.random.key(2), order=order, posterior=posterior)
    ours = counts(chosen.parent, chosen.agent)
    assert same_distribution(ours, theirs) > 1e-3, (ours / ours.sum(), theirs / theirs.sum())


@pytest.mark.parity
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("order", "posterior"), CASES)
def test_frequencies_equal_treequests(order, posterior, name):
    check_frequencies(order, posterior, name, 2_500)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("order", "posterior"), CASES)
def test_frequencies_equal_treequests_over_20000_asks(order, posterior, name):
    check_frequencies(order, posterior, name, 20_000)


def test_the_test_of_frequencies_can_fail():
    """The orders differ on the same tree, and the test sees it."""
    forest = many(forest_of(TREES["graded"], AGENTS, NODES))
    tables = []
    for order in ("agent_first", "node_first"):
        chosen = select(forest, jax.random.key(2), order=order, posterior="beta")
        tables.append(counts(chosen.parent, chosen.agent))
    assert same_distribution(*tables) < 1e-6


def grow(trees, key, tree_ids=None, steps=NODES, **how):
    """Searches with rewards that follow from tree, slot and parent; returns the forest."""
    forest = empty(trees, NODES, AGENTS)
    ids = jnp.arange(trees) if tree_ids is None else jnp.array(tree_ids)
    for _ in range(steps):
        expansion = select(forest, key, tree_ids=ids, **how)
        forest, slot = reserve(forest, expansion)
        forest = observe(forest, jnp.arange(trees), slot, (ids * 7 + slot * 3 + expansion.parent) % 5 / 4.0)
    return forest


@pytest.mark.parametrize(("order", "posterior"), CASES)
def test_a_trees_path_does_not_depend_on_the_others(order, posterior):
    key = jax.random.key(0)
    together = grow(6, key, [3, 1, 4, 15, 9, 2], order=order, posterior=posterior)
    moved = grow(6, key, [8, 9, 10, 11, 12, 4], order=order, posterior=posterior)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(a[2], b[5])  # tree id 4
        np.testing.assert_array_equal(a[4], b[1])  # tree id 9
    # And trees do differ, from each other and between keys.
    parents = np.asarray(together.parent)
    assert len({tuple(row) for row in parents}) > 1
    other = grow(6, jax.random.key(1), [3, 1, 4, 15, 9, 2], order=order, posterior=posterior)
    assert (np.asarray(other.parent) != parents).any()


@pytest.mark.parametrize(("order", "posterior"), CASES)
def test_pending_and_void_nodes_count_nowhere_and_are_not_entered(order, posterior):
    """Three good children, one pending and one void beside them: choices as if the two were not there."""
    tells = [Tell(0, 0, 1.0), Tell(0, 1, 1.0), Tell(1, 0, 1.0)]
    forest = plain = forest_of(tells, AGENTS, NODES)
    for agent in (0, 1):
        forest, slot = reserve(forest, Expansion(jnp.array([0]), jnp.array([agent])))
    forest = void(forest, 0, slot[0])
    # The keys follow the size, which is 5 here and 3 there; ids are no remedy, so distributions are compared.
    tables = []
    for f in (forest, plain):
        chosen = select(many(f), jax.random.key(0), order=order, posterior=posterior)
        assert set(np.unique(chosen.parent)) <= {0, 1, 2, 3}
        tables.append(counts(chosen.parent, chosen.agent))
    assert same_distribution(*tables) > 1e-3


@pytest.mark.parametrize(("order", "posterior"), CASES)
def test_a_node_with_only_pending_children_is_a_leaf(order, posterior):
    forest = empty(1, NODES, AGENTS)
    forest, _ = reserve(forest, Expansion(jnp.array([0]), jnp.array([1])))
    chosen = select(many(forest), jax.random.key(0), order=order, posterior=posterior)
    assert (chosen.parent == 0).all()
    assert set(np.unique(chosen.agent)) == {0, 1}


def test_agent_first_enters_only_children_of_the_agent():
    """Agent 0 wrote a good chain, agent 1 nothing: whoever is drawn as agent 1 expands the root."""
    tells = [Tell(0, 0, 1.0)] + [Tell(i, 0, 1.0) for i in range(1, 6)]
    chosen = select(many(forest_of(tells, AGENTS, NODES)), jax.random.key(0), order="agent_first", posterior="beta")
    parents = np.asarray(chosen.parent)
    assert (parents > 1).any()
    # Deeper than the root, agent 1 may well refine; at the root, it has no child to go on with.
    one = parents[np.asarray(chosen.agent) == 1]
    assert (one == 0).any() and (one > 0).any()


@pytest.mark.parametrize("strategy", ["flat_multi", "grpo"])
def test_flat_strategies_are_flat_and_take_turns(strategy):
    forest = grow(6, jax.random.key(0), order="agent_first", posterior="beta", strategy=strategy)
    assert (forest.parent[:, 1:] == 0).all() and (forest.depth[:, 1:] == 1).all()
    assert (forest.agent[:, 1:] == jnp.arange(NODES) % AGENTS).all()


@pytest.mark.parametrize("wrong", [dict(order="x"), dict(posterior="x"), dict(strategy="x")])
def test_unknown_names(wrong):
    how = dict(order="agent_first", posterior="beta", strategy="mars2") | wrong
    with pytest.raises(ValueError, match="'x' is not known"):
        select(empty(1, 1, 1), jax.random.key(0), **how)

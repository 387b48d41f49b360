"""Statistics of the forest against TreeQuest and against their definition; the pure functions' promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.search.forest import Expansion, Status, empty, observe, reserve, void
from tests.search.peer import Tell, forest_of, moments, treequest_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

AGENTS, NODES = 3, 12


@st.composite
def tell_sequences(draw):
    count = draw(st.integers(0, NODES))
    rewards = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32))
    return [Tell(draw(st.integers(0, i)), draw(st.integers(0, AGENTS - 1)), draw(rewards)) for i in range(count)]


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parity
@settings(max_examples=40, deadline=None)
@given(tell_sequences())
def test_statistics_equal_treequests(tells):
    stats = jax.device_get(forest_of(tells, AGENTS, NODES).stats)
    for order in ("node_first", "agent_first"):
        _, state = treequest_of(tells, AGENTS, order, "gaussian")
        for agent in range(AGENTS):
            close(stats.agent[0, :, agent], moments(state.all_rewards_store[str(agent)]))
        for slot in range(len(tells) + 1):
            gen, cont = stats.gen[0, :, :, slot], stats.cont[0, :, :, slot]
            node = state.tree.get_node(slot - 1)
            theirs = state.thompson_states.get(node)
            if theirs is None:  # never told anything below this node
                assert not gen.any() and not cont.any()
                continue
            for agent in range(AGENTS):
                close((gen + cont)[:, agent], moments(theirs.action_probas[str(agent)].all_obs))
                if order == "agent_first":
                    pair = theirs.gen_vs_cont_probas[str(agent)]
                    close(gen[:, agent], moments(pair["GEN"].all_obs))
                    close(cont[:, agent], moments(pair["CONT"].all_obs))
            if order == "node_first":
                pair = theirs.gen_vs_cont_probas["shared"]
                close(gen.sum(-1), moments(pair["GEN"].all_obs))
                close(cont.sum(-1), moments(pair["CONT"].all_obs))
            for index, child in enumerate(node.children):
                agent = str(tells[child.expand_idx].agent)
                told = theirs.node_probas[agent if order == "agent_first" else "shared"][index]
                close(stats.child[0, :, child.expand_idx + 1], moments(told.all_obs))


@settings(max_examples=40, deadline=None)
@given(tell_sequences(), st.randoms(use_true_random=False))
def test_statistics_follow_their_definition_in_any_order_of_observation(tells, random):
    """Nodes written side by side, observed in any order, some void: rewards of what is below, nothing else."""
    forest = empty(1, NODES, AGENTS)
    for tell in tells:
        forest, _ = reserve(forest, Expansion(jnp.array([tell.parent]), jnp.array([tell.agent])))
    slots = list(range(1, len(tells) + 1))
    random.shuffle(slots)
    voids = {s for s in slots if random.random() < 0.2}
    for slot in slots:
        if slot in voids:
            forest = void(forest, 0, slot)
        else:
            forest = observe(forest, 0, slot, jnp.float32(tells[slot - 1].reward))
    stats = jax.device_get(forest.stats)
    parent = [None] + [t.parent for t in tells]
    gen = {(p, a): [] for p in range(NODES + 1) for a in range(AGENTS)}
    cont, child, by_agent = {k: [] for k in gen}, {s: [] for s in range(NODES + 1)}, {a: [] for a in range(AGENTS)}
    for slot in set(slots) - voids:
        r = tells[slot - 1].reward
        gen[parent[slot], tells[slot - 1].agent].append(r)
        by_agent[tells[slot - 1].agent].append(r)
        child[slot].append(r)
        y = parent[slot]
        while y != 0:
            child[y].append(r)
            cont[parent[y], tells[y - 1].agent].append(r)
            y = parent[y]
    for (node, agent), rewards in gen.items():
        close(stats.gen[0, :, agent, node], moments(rewards))
        close(stats.cont[0, :, agent, node], moments(cont[node, agent]))
    for slot, rewards in child.items():
        close(stats.child[0, :, slot], moments(rewards))
    for agent, rewards in by_agent.items():
        close(stats.agent[0, :, agent], moments(rewards))


def grown(trees=3, nodes=3, count=2):
    forest = empty(trees, nodes, 2)
    for i in range(count):
        forest, slot = reserve(forest, Expansion(jnp.full(trees, i), jnp.full(trees, i % 2)))
        forest = observe(forest, jnp.arange(trees), slot, jnp.linspace(0, 1, trees))
    return forest


def test_an_empty_forest():
    forest = empty(2, 3, 4)
    assert (forest.trees, forest.nodes, forest.agents) == (2, 3, 4)
    assert forest.size.tolist() == [0, 0] and not forest.graded.any()
    assert (forest.parent == -1).all() and (forest.agent == -1).all()
    with pytest.raises(ValueError):
        empty(1, 0, 1)


def test_reserve_fills_slots_in_order_and_marks_them_pending():
    forest = grown()
    assert forest.size.tolist() == [2, 2, 2]
    assert forest.parent[0].tolist() == [-1, 0, 1, -1]
    assert forest.agent[0].tolist() == [-1, 0, 1, -1]
    assert forest.depth[0].tolist() == [0, 1, 2, 0]
    assert forest.status[0].tolist() == [Status.EMPTY, Status.GRADED, Status.GRADED, Status.EMPTY]
    forest, slot = reserve(
        forest, Expansion(jnp.array([2, 0, 1]), jnp.array([1, 1, 0])), jnp.array([True, False, True])
    )
    assert slot.tolist() == [3, -1, 3]
    assert forest.depth[:, 3].tolist() == [3, 0, 2]
    assert forest.status[:, 3].tolist() == [Status.PENDING, Status.EMPTY, Status.PENDING]


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_a_full_tree_is_left_alone():
    forest = grown(nodes=2, count=2)
    after, slot = reserve(forest, Expansion(jnp.zeros(3, int), jnp.zeros(3, int)))
    assert slot.tolist() == [-1, -1, -1] and same(forest, after)


@pytest.mark.parametrize("slot", [-1, 0, 1, 3])
def test_only_pending_nodes_are_observed_or_voided(slot):
    """Padding, the root, a node observed before, an empty slot."""
    forest = grown()
    assert same(observe(forest, 0, slot, 1.0), forest)
    assert same(void(forest, 0, slot), forest)


def test_observing_many_trees_at_once_equals_one_by_one():
    rng = np.random.default_rng(0)
    together = apart = empty(3, 20, 2)
    for n in range(20):
        expansion = Expansion(jnp.array(rng.integers(0, n + 1, 3)), jnp.array(rng.integers(0, 2, 3)))
        rewards = jnp.array(rng.random(3), jnp.float32)
        together, slot = reserve(together, expansion)
        apart, _ = reserve(apart, expansion)
        together = observe(together, jnp.arange(3), slot, rewards)
        for tree in range(3):
            apart = observe(apart, tree, slot[tree], rewards[tree])
    assert same(together, apart)


def test_two_nodes_of_a_tree_in_one_call():
    forest = grown(trees=1, nodes=4)
    for parent in (2, 1):
        forest, _ = reserve(forest, Expansion(jnp.array([parent]), jnp.array([0])))
    both = observe(forest, jnp.zeros(2, int), jnp.array([3, 4]), jnp.array([1.0, 0.5]))
    one = observe(observe(forest, 0, 3, 1.0), 0, 4, 0.5)
    assert same(both, one)


def test_the_functions_are_pure_and_donate_nothing():
    forest = grown()
    before = jax.device_get(forest)
    after, slot = reserve(forest, Expansion(jnp.zeros(3, int), jnp.zeros(3, int)))
    observe(after, jnp.arange(3), slot, jnp.ones(3))
    assert same(forest, before)

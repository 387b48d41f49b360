import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.errors import ConfigError
from mars2_jax.learning.advantage import ESTIMATORS, tree_advantages
from mars2_jax.learning.subtrees import under
from tests.learning import reference
from tests.learning.forests import (
    GOLDEN,
    GOLDEN_AGENT,
    GOLDEN_GRADED,
    GOLDEN_PARENT,
    GOLDEN_REWARD,
    SLOTS,
    forests,
    learning,
    trees,
)

# Compiled once for all examples; the learner calls these functions inside jit, too.
_jitted = jax.jit(tree_advantages, static_argnums=4)
EVERY = pytest.mark.parametrize("estimator", ESTIMATORS)


def _advantages(forest, config, problem=None):
    return _jitted(*forest, config, problem=problem)


@pytest.mark.parametrize(
    "estimator, group", [*((e, "tree") for e in ESTIMATORS), *((e, "tree_agent") for e in ("mars2", "grpo", "rloo"))]
)
@given(forest=forests, problem=st.lists(st.integers(0, 2), min_size=3, max_size=3))
@settings(max_examples=40, deadline=None)
def test_tree_advantages_equal_the_loops(forest, estimator, group, problem):
    reward, parent, agent, graded = forest
    got = _advantages(forest, learning(estimator=estimator, group=group), np.asarray(problem, np.int32))
    raw = np.where(graded, np.nan_to_num(reward), 0)
    shaped, want = reference.tree_advantages(raw, parent, agent, graded, problem, estimator, group)
    np.testing.assert_allclose(got.shaped, shaped, atol=1e-6)
    np.testing.assert_allclose(got.advantage, want, atol=3e-5)


@given(tree=trees())
@settings(max_examples=60, deadline=None)
def test_under_is_the_walk_to_the_root(tree):
    _, parent, _, _ = tree
    want = np.zeros((SLOTS, SLOTS), bool)
    for v in range(SLOTS):
        a = v
        while a >= 0:
            want[v, a] = True
            a = parent[a]
    np.testing.assert_array_equal(_under(parent), want)


_under = jax.jit(under)


def test_under_follows_the_longest_chain():
    chain = np.arange(-1, 40, dtype=np.int32)
    np.testing.assert_array_equal(_under(chain), np.tri(41, dtype=bool))


# --- By hand, on the tree of `forests` ---------------------------------------------------------------------------

# γ = λ = ½. b: 1 <- sibling 2 (3 is void) = 0;  2 <- 1;  4 <- (1 + 1)/2 = 1;  5 <- (1 + 0)/2 = ½;  6 <- parent 2 = 0;
#    7 <- parent 4 = 0;  8 <- parent 7 = 0
GOLDEN_SHAPED = [0, 1.5, -0.5, 0, -0.5, 1.25, 1.5, 0, 1.5]
# Raw rewards 1, 0, 0, 1, 1, 0, 1: mean 4/7, std √((4 · 9/49 + 3 · 16/49)/6) = √(2/7) = 0.534522.
HIGH, LOW = 0.801784, -1.069045  # (3/7) / std, (-4/7) / std
GOLDEN_ADVANTAGES = {
    # Sum of shaped 4.75, mean 19/28 = 0.678571; Σ (r̂ - mean)² = 8.8125 - 4.75²/7 = 5.589286; std √(5.589286/6) =
    # 0.965168.
    "mars2": [0, 0.851073, -1.221105, 0, -1.221105, 0.592051, 0.851073, -0.703061, 0.851073],
    "grpo": [0, HIGH, LOW, 0, LOW, HIGH, HIGH, LOW, HIGH],
    # 1: the others have 3 of 6;  0: the others have 4 of 6.
    "rloo": [0, 1 / 2, -2 / 3, 0, -2 / 3, 1 / 2, 1 / 2, -2 / 3, 1 / 2],
    # Leaves under a node, itself among them, and V: root all seven 4/7;  1: {1 4 5 7 8} 3/5;  2: {2 6} 1/2;
    # 4: {4 7 8} 1/3;  5: {5} 1;  6: {6} 1;  7: {7 8} 1/2;  8: {8} 1. A = (2 V - V(root) - V(parent)) / √leaves:
    "treerl": [
        0,
        (6 / 5 - 8 / 7) / 5**0.5,
        (1 - 8 / 7) / 2**0.5,
        0,
        (2 / 3 - 4 / 7 - 3 / 5) / 3**0.5,
        2 - 4 / 7 - 3 / 5,
        2 - 4 / 7 - 1 / 2,
        (1 - 4 / 7 - 1 / 3) / 2**0.5,
        2 - 4 / 7 - 1 / 2,
    ],
    # r minus the mean V of what is above: 1, 2: root 4/7;  4, 5: root, 1: (4/7 + 3/5)/2 = 0.585714;
    # 6: root, 2: (4/7 + 1/2)/2 = 0.535714;  7: root, 1, 4: (4/7 + 3/5 + 1/3)/3 = 0.501587;
    # 8: root, 1, 4, 7: (4/7 + 3/5 + 1/3 + 1/2)/4 = 0.501190.
    "treepo": [0, 3 / 7, -4 / 7, 0, -0.585714, 0.414286, 0.464286, -0.501587, 0.498810],
    # Alone of its problem: twice the z-score.
    "tree_grpo": [0, 2 * HIGH, 2 * LOW, 0, 2 * LOW, 2 * HIGH, 2 * HIGH, 2 * LOW, 2 * HIGH],
    # {1 2} and {4 5} are pairs of 1 and 0: ±½ / √½. 6, 7 and 8 are only children.
    "sibling": [0, 0.707107, -0.707107, 0, -0.707107, 0.707107, 0, 0, 0],
}


@EVERY
def test_golden_tree(estimator):
    got = _advantages(GOLDEN, learning(estimator=estimator))
    np.testing.assert_allclose(got.shaped, GOLDEN_SHAPED if estimator == "mars2" else GOLDEN_REWARD, atol=1e-7)
    np.testing.assert_allclose(got.advantage, GOLDEN_ADVANTAGES[estimator], atol=5e-6)


def test_golden_tree_by_agent():
    # Agent 0 wrote slots 1, 5, 7: r̂ = 1.5, 1.25, 0, mean 2.75/3, Σ squares 3.8125 - 2.75²/3 = 1.291667, std 0.803638;
    # 0.583333/std, 0.333333/std, -0.916667/std. Raw: 1, 1, 0; the others have 1/2, 1/2 and 1.
    own = jnp.array([1, 5, 7])
    got = _advantages(GOLDEN, learning(group="tree_agent")).advantage
    np.testing.assert_allclose(got[own], [0.725865, 0.414780, -1.140645], atol=2e-6)
    got = _advantages(GOLDEN, learning(group="tree_agent", estimator="rloo")).advantage
    np.testing.assert_allclose(got[own], [0.5, 0.5, -1], atol=2e-6)


def test_golden_trees_of_one_problem():
    # A second tree of the problem with two nodes that fail: nothing to tell within it; in the problem, nine nodes of
    # mean 4/9 and std √((4 · 25/81 + 5 · 16/81)/8) = 0.527046: 1 -> 1.054093, 0 -> -0.843274.
    places = np.r_[-1, 0, 0, [-1] * 6].astype(np.int32)
    second = np.zeros(9, np.float32), places, places, places == 0
    both = [np.stack(pair) for pair in zip(GOLDEN, second)]
    config = learning(estimator="tree_grpo")
    got = _advantages(both, config, np.array([7, 7], np.int32)).advantage
    across = np.where(GOLDEN_GRADED, np.where(GOLDEN_REWARD > 0, 1.054093, -0.843274), 0)
    np.testing.assert_allclose(got[0], np.array(GOLDEN_ADVANTAGES["grpo"]) + across, atol=5e-6)
    np.testing.assert_allclose(got[1], np.where(second[3], -0.843274, 0), atol=3e-6)
    apart = _advantages(both, config, np.array([7, 3], np.int32)).advantage
    np.testing.assert_allclose(apart[0], GOLDEN_ADVANTAGES["tree_grpo"], atol=5e-6)
    assert not np.any(apart[1])


def test_shaping_changes_the_advantages():
    mars2, grpo = (_advantages(GOLDEN, learning(estimator=e)).advantage for e in ("mars2", "grpo"))
    assert np.abs(mars2 - grpo).max() > 0.1


def test_no_two_estimators_are_the_same():
    every = [np.asarray(_advantages(GOLDEN, learning(estimator=e)).advantage) for e in ESTIMATORS]
    assert all(np.abs(a - b).max() > 0.1 for i, a in enumerate(every) for b in every[:i])


# --- What changes nothing ----------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("group", ["tree", "tree_agent"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exact_zeros(estimator, group, baseline):
    # The mean of five equal siblings is off by a rounding for some of these values, and so are the shaped rewards.
    config = learning(estimator=estimator, group=group, baseline=baseline)
    reward = np.repeat(np.linspace(0, 1, 50, dtype=np.float32)[:, None], 9, axis=1)
    parent = np.tile(np.array([-1, 0, 0, 1, 1, 1, 1, 1, 1], np.int32), (50, 1))
    got = _advantages((reward, parent, np.tile(GOLDEN_AGENT, (50, 1)), parent >= 0), config)
    if estimator == "mars2":
        assert np.ptp(np.asarray(got.shaped)[:, 1:], axis=1).any(), "nothing was rounded: the test shows nothing"
    assert not np.any(got.advantage)


@EVERY
@given(tree=trees(), shift=st.sampled_from([-1.0, 0.5, 3.0]))
@settings(max_examples=25, deadline=None)
def test_shifting_all_rewards_changes_no_advantage(estimator, tree, shift):
    reward, *rest = tree
    config = learning(estimator=estimator)
    before = _advantages(tree, config).advantage
    after = _advantages((reward + np.float32(shift), *rest), config).advantage
    np.testing.assert_allclose(after, before, atol=1e-4)


@EVERY
@given(tree=trees(), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_order_of_slots_does_not_matter(estimator, tree, seed):
    reward, parent, agent, graded = tree
    # New slot of each old slot; the root stays where it is.
    new = np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(SLOTS - 1)])
    old = np.argsort(new)
    moved = np.where(parent >= 0, new[np.maximum(parent, 0)], -1)[old].astype(np.int32)
    config = learning(estimator=estimator)
    before = _advantages(tree, config)
    after = _advantages((reward[old], moved, agent[old], graded[old]), config)
    np.testing.assert_allclose(after.shaped, before.shaped[old], atol=1e-6)
    np.testing.assert_allclose(after.advantage, before.advantage[old], atol=2e-5)


@EVERY
@given(tree=trees())
@settings(max_examples=25, deadline=None)
def test_a_void_leaf_is_as_good_as_absent(estimator, tree):
    reward, parent, agent, graded = tree
    void = ~graded & (parent >= 0) & ~np.isin(np.arange(SLOTS), parent)
    removed = np.where(void, -1, parent).astype(np.int32)
    config = learning(estimator=estimator)
    with_void = _advantages(tree, config)
    without = _advantages((reward, removed, np.where(void, -1, agent), graded), config)
    np.testing.assert_array_equal(with_void.shaped, without.shaped)
    np.testing.assert_array_equal(with_void.advantage, without.advantage)


@EVERY
def test_trees_of_a_batch_do_not_mix(estimator):
    """Unless they are of one problem, and an estimator compares these."""
    other = np.random.default_rng(1).random(9).astype(np.float32)
    config = learning(estimator=estimator)
    alone = _advantages(GOLDEN, config)
    stacked = [np.stack(pair) for pair in [(GOLDEN_REWARD, other), *zip(GOLDEN[1:], GOLDEN[1:])]]
    batched = _advantages(stacked, config)
    mapped = jax.jit(jax.vmap(lambda *x: tree_advantages(*x, config)))(*stacked)
    np.testing.assert_allclose(batched.advantage[0], alone.advantage, atol=1e-6)
    np.testing.assert_allclose(mapped.advantage, batched.advantage, atol=1e-6)
    of_one = _advantages(stacked, config, np.zeros(2, np.int32)).advantage
    assert np.allclose(of_one, batched.advantage, atol=1e-6) == (estimator != "tree_grpo")


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"estimator": "rlo"}, "learning.estimator"),
        ({"group": "agent"}, "learning.group"),
        ({"scale": "mad"}, "learning.scale"),
        ({"baseline": "median"}, "learning.baseline"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_it(changes, name):
    with pytest.raises(ConfigError, match=name):
        _advantages((GOLDEN_REWARD, GOLDEN_PARENT, GOLDEN_AGENT, GOLDEN_GRADED), learning(**changes))

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import FrozenConfigDict

from mars2_jax.config import default_config
from mars2_jax.errors import ConfigError
from mars2_jax.learning.advantage import group_advantages, overlong_penalty, shaped_rewards, tree_advantages
from tests.learning import reference

SLOTS = 9
REWARDS = [0.0, 1.0, 0.25, 1 / 3, 2 / 3, 0.1]


@st.composite
def trees(draw):
    """One ragged tree in SLOTS slots: parents before children, voids with NaN rewards, empty slots at the end."""
    nodes = draw(st.integers(0, SLOTS - 1))
    levels = draw(st.sampled_from([[0.5], [0.0, 1.0], REWARDS]))
    parent = np.full(SLOTS, -1, np.int32)
    agent = np.full(SLOTS, -1, np.int32)
    reward = np.full(SLOTS, np.nan, np.float32)
    graded = np.zeros(SLOTS, bool)
    for v in range(1, nodes + 1):
        parent[v] = draw(st.integers(0, v - 1))
        agent[v] = draw(st.integers(0, 2))
        if draw(st.integers(0, 4)):
            graded[v] = True
            reward[v] = draw(st.sampled_from(levels))
    return reward, parent, agent, graded


forests = st.lists(trees(), min_size=3, max_size=3).map(lambda ts: tuple(np.stack(x) for x in zip(*ts)))
# Compiled once for all examples; the learner calls these functions inside jit, too.
_shaped = jax.jit(shaped_rewards, static_argnames=("gamma", "lam"))
_group = jax.jit(group_advantages, static_argnames=("scale", "baseline", "ddof"))
_advantages = jax.jit(tree_advantages, static_argnums=4)


def _config(**changes):
    config = default_config().learning
    config.update(changes)
    return FrozenConfigDict(config)


@pytest.mark.parametrize("gamma, lam", [(0.5, 0.5), (0.3, 1.0), (1.0, 0.0), (0.0, 0.5)])
@given(forest=forests)
@settings(max_examples=40, deadline=None)
def test_shaped_rewards_equal_the_loops(forest, gamma, lam):
    reward, parent, _, graded = forest
    got = _shaped(reward, parent, graded, gamma=gamma, lam=lam)
    want = [reference.shaped(r, p, g, gamma, lam) for r, p, g in zip(reward, parent, graded)]
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("by_agent", [False, True])
@given(forest=forests)
@settings(max_examples=40, deadline=None)
def test_group_advantages_equal_the_loops(forest, scale, baseline, by_agent):
    reward, _, agent, graded = forest
    group = agent if by_agent else np.zeros_like(agent)
    got = _group(reward, graded, group=agent if by_agent else None, scale=scale, baseline=baseline)
    want = [reference.group_advantages(r, g, k, scale, baseline) for r, g, k in zip(reward, graded, group)]
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("estimator", ["mars2", "grpo"])
@pytest.mark.parametrize("group", ["tree", "tree_agent"])
@given(forest=forests)
@settings(max_examples=40, deadline=None)
def test_tree_advantages_equal_the_loops(forest, estimator, group):
    reward, parent, agent, graded = forest
    config = _config(estimator=estimator, group=group)
    got = _advantages(reward, parent, agent, graded, config)
    for t in range(len(reward)):
        raw = np.where(graded[t], np.nan_to_num(reward[t]), 0)
        shaped = reference.shaped(raw, parent[t], graded[t], 0.5, 0.5) if estimator == "mars2" else raw
        key = agent[t] if group == "tree_agent" else np.zeros_like(agent[t])
        np.testing.assert_allclose(got.shaped[t], shaped, atol=1e-6)
        want = reference.group_advantages(shaped, graded[t], key, "std", "mean")
        np.testing.assert_allclose(got.advantage[t], want, atol=2e-5)


# A tree worked out by hand, γ = λ = ½ (slot: parent, reward):
#   1: 0, 1    2: 0, 0    3: 0, void    4: 1, 0    5: 1, 1    6: 2, 1    7: 4, 0    8: 7, 1
# b: 1 <- sibling 2 (3 is void) = 0;  2 <- 1;  4 <- (1 + 1)/2 = 1;  5 <- (1 + 0)/2 = ½;  6 <- parent 2 = 0;
#    7 <- parent 4 = 0;  8 <- parent 7 = 0
GOLDEN_REWARD = np.array([0, 1, 0, 0, 0, 1, 1, 0, 1], np.float32)
GOLDEN_PARENT = np.array([-1, 0, 0, 0, 1, 1, 2, 4, 7], np.int32)
GOLDEN_AGENT = np.array([-1, 0, 1, 0, 1, 0, 1, 0, 1], np.int32)
GOLDEN_GRADED = np.array([0, 1, 1, 0, 1, 1, 1, 1, 1], bool)
GOLDEN_SHAPED = np.array([0, 1.5, -0.5, 0, -0.5, 1.25, 1.5, 0, 1.5])
# Sum 4.75, mean 19/28 = 0.678571; Σ (r̂ - mean)² = 8.8125 - 4.75²/7 = 5.589286; std = √(5.589286/6) = 0.965168.
GOLDEN_ADVANTAGE = np.array([0, 0.851073, -1.221105, 0, -1.221105, 0.592051, 0.851073, -0.703061, 0.851073])


def test_golden_tree():
    got = _advantages(GOLDEN_REWARD, GOLDEN_PARENT, GOLDEN_AGENT, GOLDEN_GRADED, _config())
    np.testing.assert_allclose(got.shaped, GOLDEN_SHAPED, atol=1e-7)
    np.testing.assert_allclose(got.advantage, GOLDEN_ADVANTAGE, atol=2e-6)


def test_golden_tree_by_agent():
    # Agent 0 wrote slots 1, 5, 7: r̂ = 1.5, 1.25, 0, mean 2.75/3, Σ squares 3.8125 - 2.75²/3 = 1.291667, std 0.803638;
    # 0.583333/std, 0.333333/std, -0.916667/std.
    got = _advantages(GOLDEN_REWARD, GOLDEN_PARENT, GOLDEN_AGENT, GOLDEN_GRADED, _config(group="tree_agent")).advantage
    np.testing.assert_allclose(got[jnp.array([1, 5, 7])], [0.725865, 0.414780, -1.140645], atol=2e-6)


def test_golden_grpo():
    # Raw rewards 1, 0, 0, 1, 1, 0, 1: mean 4/7, std √((4 · 9/49 + 3 · 16/49)/6) = √(2/7) = 0.534522.
    got = _advantages(GOLDEN_REWARD, GOLDEN_PARENT, GOLDEN_AGENT, GOLDEN_GRADED, _config(estimator="grpo")).advantage
    want = np.where(GOLDEN_GRADED, (GOLDEN_REWARD - 4 / 7) / np.sqrt(2 / 7), 0)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_shaping_changes_the_advantages():
    mars2, grpo = (
        _advantages(GOLDEN_REWARD, GOLDEN_PARENT, GOLDEN_AGENT, GOLDEN_GRADED, _config(estimator=e)).advantage
        for e in ("mars2", "grpo")
    )
    assert np.abs(mars2 - grpo).max() > 0.1


@pytest.mark.parametrize("group", ["tree", "tree_agent"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exact_zeros(group, baseline):
    # The mean of five equal siblings is off by a rounding for some of these values, and so are the shaped rewards.
    config = _config(group=group, baseline=baseline)
    reward = np.repeat(np.linspace(0, 1, 50, dtype=np.float32)[:, None], 9, axis=1)
    parent = np.tile(np.array([-1, 0, 0, 1, 1, 1, 1, 1, 1], np.int32), (50, 1))
    got = _advantages(reward, parent, np.tile(GOLDEN_AGENT, (50, 1)), parent >= 0, config)
    assert np.ptp(np.asarray(got.shaped)[:, 1:], axis=1).any(), "nothing was rounded: the test shows nothing"
    assert not np.any(got.advantage)


@given(tree=trees(), shift=st.sampled_from([-1.0, 0.5, 3.0]))
@settings(max_examples=40, deadline=None)
def test_shifting_all_rewards_changes_no_advantage(tree, shift):
    reward, parent, agent, graded = tree
    config = _config()
    before = _advantages(reward, parent, agent, graded, config).advantage
    after = _advantages(reward + np.float32(shift), parent, agent, graded, config).advantage
    np.testing.assert_allclose(after, before, atol=1e-4)


@given(tree=trees(), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_the_order_of_slots_does_not_matter(tree, seed):
    reward, parent, agent, graded = tree
    # New slot of each old slot; the root stays where it is.
    new = np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(SLOTS - 1)])
    old = np.argsort(new)
    moved = np.where(parent >= 0, new[np.maximum(parent, 0)], -1)[old].astype(np.int32)
    before = _advantages(reward, parent, agent, graded, _config())
    after = _advantages(reward[old], moved, agent[old], graded[old], _config())
    np.testing.assert_allclose(after.shaped, before.shaped[old], atol=1e-6)
    np.testing.assert_allclose(after.advantage, before.advantage[old], atol=2e-5)


@given(tree=trees())
@settings(max_examples=40, deadline=None)
def test_a_void_leaf_is_as_good_as_absent(tree):
    reward, parent, agent, graded = tree
    void = ~graded & (parent >= 0) & ~np.isin(np.arange(SLOTS), parent)
    removed = np.where(void, -1, parent).astype(np.int32)
    with_void = _advantages(reward, parent, agent, graded, _config())
    without = _advantages(reward, removed, np.where(void, -1, agent), graded, _config())
    np.testing.assert_array_equal(with_void.shaped, without.shaped)
    np.testing.assert_array_equal(with_void.advantage, without.advantage)


def test_trees_of_a_batch_do_not_mix():
    rng = np.random.default_rng(1)
    other = rng.random(9).astype(np.float32)
    alone = _advantages(GOLDEN_REWARD, GOLDEN_PARENT, GOLDEN_AGENT, GOLDEN_GRADED, _config())
    pairs = [(GOLDEN_REWARD, other), (GOLDEN_PARENT,) * 2, (GOLDEN_AGENT,) * 2, (GOLDEN_GRADED,) * 2]
    stacked = [np.stack(pair) for pair in pairs]
    batched = _advantages(*stacked, _config())
    mapped = jax.jit(jax.vmap(lambda *x: tree_advantages(*x, _config())))(*stacked)
    np.testing.assert_allclose(batched.advantage[0], alone.advantage, atol=1e-6)
    np.testing.assert_allclose(mapped.advantage, batched.advantage, atol=1e-6)


@given(st.integers(0, 120), st.integers(1, 50), st.sampled_from([0.0, 0.5, 1.0]))
@settings(deadline=None)
def test_overlong_penalty_equals_the_formula(length, buffer, factor):
    got = overlong_penalty(jnp.array([length]), budget=100, buffer=buffer, factor=factor)
    np.testing.assert_allclose(got, [reference.overlong(length, 100, buffer, factor)], rtol=1e-6)


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
        _advantages(GOLDEN_REWARD, GOLDEN_PARENT, GOLDEN_AGENT, GOLDEN_GRADED, _config(**changes))


@pytest.mark.parametrize("buffer", [0, 101])
def test_an_overlong_penalty_without_a_fitting_buffer_is_an_error(buffer):
    with pytest.raises(ConfigError, match="learning.overlong_buffer"):
        overlong_penalty(jnp.array([5]), budget=100, buffer=buffer, factor=1.0)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.rollout.sampling import SamplerRows, filter_threshold, sample

VOCAB = 48


def params(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> SamplerRows:
    fill = lambda value, dtype: jnp.full((rows,), value, dtype)
    return SamplerRows(
        fill(temperature, jnp.float32), fill(top_k, jnp.int32), fill(top_p, jnp.float32), fill(min_p, jnp.float32)
    )


def filtered(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The exact distribution, by sorting, one filter after the other, each on what the one before left."""
    p = np.exp((logits - logits.max()) / temperature).astype(np.float64)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        mass = np.cumsum(p[order]) / p.sum()
        p[order[1:][mass[:-1] >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


SETTINGS = [
    dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    dict(temperature=0.6, top_k=0, top_p=1.0, min_p=0.0),
    dict(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0),
    dict(temperature=1.3, top_k=0, top_p=0.8, min_p=0.0),
    dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.1),
    dict(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02),
]

draw = jax.jit(sample)


@pytest.mark.parametrize("setting", SETTINGS)
def test_frequencies_follow_the_filtered_distribution(setting):
    logits = np.random.default_rng(1).normal(0, 1.5, VOCAB).astype(np.float32)
    rows = 20_000
    keys = jax.random.key_data(jax.random.split(jax.random.key(2), rows))
    index = jnp.arange(rows, dtype=jnp.int32)
    token, logprob, score = draw(jnp.tile(logits, (rows, 1)), keys, index, params(rows, **setting))
    exact = filtered(logits, **setting)
    counts = np.bincount(np.asarray(token), minlength=VOCAB)
    assert counts[exact == 0].sum() == 0
    kept = exact > 0
    assert scipy.stats.chisquare(counts[kept], exact[kept] * rows).pvalue > 1e-4
    np.testing.assert_allclose(np.exp(logprob), exact[np.asarray(token)], rtol=1e-4)
    plain = filtered(logits, 1.0, 0, 1.0, 0.0)
    np.testing.assert_allclose(np.exp(score), plain[np.asarray(token)], rtol=1e-4)


def test_greedy_takes_the_first_maximum_and_scores_it_at_temperature_one():
    logits = np.random.default_rng(3).normal(size=(6, VOCAB)).astype(np.float32)
    logits[0, [7, 30]] = 9.0
    token, logprob, score = draw(
        jnp.asarray(logits), jnp.zeros((6, 2), jnp.uint32), jnp.zeros(6, jnp.int32), params(6, temperature=0.0)
    )
    np.testing.assert_array_equal(token, logits.argmax(-1))
    expected = [np.log(filtered(row, 1.0, 0, 1.0, 0.0)[t]) for row, t in zip(logits, np.asarray(token), strict=True)]
    np.testing.assert_allclose(score, expected, rtol=1e-4)
    np.testing.assert_array_equal(logprob, score)


@pytest.mark.parametrize("temperature", [1e-37, 1e-30, 1e-6])
@pytest.mark.parametrize("filters", [dict(), dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1)])
def test_a_temperature_near_zero_takes_the_maximum(temperature, filters):
    """Logits over 1e-37 are beyond the largest float32."""
    logits = np.random.default_rng(4).normal(0, 30, (6, VOCAB)).astype(np.float32)
    token, logprob, score = draw(
        jnp.asarray(logits), jnp.ones((6, 2), jnp.uint32), jnp.arange(6), params(6, temperature, **filters)
    )
    np.testing.assert_array_equal(token, logits.argmax(-1))
    np.testing.assert_allclose(logprob, 0, atol=1e-6)
    assert np.isfinite(score).all()


THRESHOLD = jax.jit(filter_threshold)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(0.01, 30),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_threshold_keeps_what_sorting_keeps(seed, scale, top_k, top_p, min_p):
    logits = (np.random.default_rng(seed).normal(size=VOCAB) * scale).astype(np.float32)
    threshold = THRESHOLD(jnp.asarray(logits)[None], params(1, 1.0, top_k, np.float32(top_p), min_p))[0]
    kept = set(np.flatnonzero(logits >= threshold))
    # The nucleus may differ by one token where the mass reaches top_p within rounding.
    loose = [set(np.flatnonzero(filtered(logits, 1.0, top_k, top_p + d, min_p))) for d in (-1e-5, 0.0, 1e-5)]
    assert kept and loose[0] <= kept <= loose[2]


def test_a_row_is_drawn_alike_whatever_the_other_rows_and_their_settings():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(4, VOCAB)), jnp.float32)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 4))
    index = jnp.arange(4, dtype=jnp.int32)
    mixed = SamplerRows(
        jnp.asarray([1.0, 0.7, 0.0, 1.0]), jnp.asarray([0, 3, 0, 0]), jnp.asarray([1.0, 1.0, 1.0, 0.5]), jnp.zeros(4)
    )
    together = draw(logits, keys, index, mixed)
    for row in range(4):
        one = lambda x, row=row: x[row : row + 1]
        alone = draw(one(logits), one(keys), one(index), jax.tree.map(one, mixed))
        assert int(alone[0][0]) == int(together[0][row])
        np.testing.assert_allclose(alone[1][0], together[1][row], rtol=1e-5)


def test_keys_and_indices_make_different_draws():
    logits = jnp.zeros((2, VOCAB))
    keys = jnp.asarray([[0, 1], [0, 1]], jnp.uint32)
    many = [draw(logits, keys, jnp.asarray([i, i + 1]), params(2))[0] for i in range(20)]
    assert len({int(t[0]) for t in many}) > 5
    assert [int(t[1]) for t in many[:-1]] == [int(t[0]) for t in many[1:]]


@pytest.mark.parametrize("vocab", [7, 64, 97, 49152])
def test_any_vocabulary_size(vocab):
    logits = jnp.full((3, vocab), -50.0).at[jnp.arange(3), jnp.asarray([0, vocab // 2, vocab - 1])].set(50.0)
    token, logprob, _ = sample(logits, jnp.zeros((3, 2), jnp.uint32), jnp.zeros(3, jnp.int32), params(3))
    np.testing.assert_array_equal(token, [0, vocab // 2, vocab - 1])
    np.testing.assert_allclose(logprob, 0.0, atol=1e-6)

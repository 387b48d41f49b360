"""Draws against the distributions of scipy, by Kolmogorov-Smirnov tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats as sps

from mars2_jax.search.posterior import POSTERIORS, beta, gaussian
from tests.search.peer import moments

DRAWS = 20_000
REWARDS = [
    [],
    [0.0],
    [1.0],
    [1.0] * 7,
    [0.0, 1.0, 1.0],
    [0.25, 0.5, 0.75, 0.1],
    [0.0] * 300 + [1.0] * 20,
    [1.0] * 1000,
]


def theirs(posterior, rewards):
    """The posterior as a frozen scipy distribution: formulas of Murphy 3.4.3.3, spelled out in float64."""
    r = np.asarray(rewards, np.float64)
    n = len(r)
    if posterior == "beta":
        return sps.beta(0.5 + r.sum(), 0.5 + (1 - r).sum())
    m, kappa, nu, tau2 = 0.0, 1.0, 1.0, 0.1
    mean = r.mean() if n else 0.0
    tau2_n = (nu * tau2 + ((r - mean) ** 2).sum() + n * kappa * (m - mean) ** 2 / (kappa + n)) / (nu + n)
    return sps.t(nu + n, (kappa * m + n * mean) / (kappa + n), np.sqrt(tau2_n / (kappa + n)))


@pytest.fixture(scope="module", params=["beta", "gaussian"])
def drawn(request):
    """All cases in one call, as a search makes it: [cases, draws]."""
    told = jnp.array(np.stack([moments(r) for r in REWARDS], axis=1), jnp.float32)
    told = jnp.broadcast_to(told[:, :, None], (3, len(REWARDS), DRAWS))
    return request.param, np.asarray(jax.jit(POSTERIORS[request.param])(jax.random.key(11), told))


@pytest.mark.parametrize("case", range(len(REWARDS)))
def test_draws_follow_the_posterior(drawn, case):
    posterior, values = drawn
    assert sps.kstest(values[case], theirs(posterior, REWARDS[case]).cdf).pvalue > 1e-3


def test_draws_are_independent_of_each_other(drawn):
    _, values = drawn
    ranks = np.stack([sps.rankdata(v) for v in values])
    off = np.corrcoef(ranks)[np.triu_indices(len(REWARDS), 1)]
    assert np.abs(off).max() < 5 / np.sqrt(DRAWS)
    assert all(abs(np.corrcoef(v[1:], v[:-1])[0, 1]) < 5 / np.sqrt(DRAWS) for v in ranks)


def test_student_draw_equals_the_two_stage_draw():
    """The design draws σ² and then μ; we draw the marginal. The two have one distribution."""
    rewards = [0.2, 0.9, 0.4]
    rng, n = np.random.default_rng(0), 3
    dist = theirs("gaussian", rewards)
    mean, scale = dist.args[1], dist.args[2]
    tau2_n = scale**2 * (1 + n)
    sigma2 = sps.invgamma((1 + n) / 2, scale=(1 + n) * tau2_n / 2).rvs(DRAWS, random_state=rng)
    staged = rng.normal(mean, np.sqrt(sigma2 / (1 + n)))
    ours = gaussian(jax.random.key(0), jnp.broadcast_to(jnp.array(moments(rewards), jnp.float32)[:, None], (3, DRAWS)))
    assert sps.ks_2samp(staged, np.asarray(ours)).pvalue > 1e-3


@pytest.mark.parametrize("draw", [beta, gaussian])
def test_no_statistics_give_a_value_that_is_not_finite(draw):
    """Equal rewards in float32, where Σr² - n r̄² cancels below zero, and a Σr that exceeds n by rounding."""
    n = jnp.arange(1.0, 2000.0)
    for r in (0.0, 0.1, 0.3, 1.0):
        value = jnp.float32(r)
        told = jnp.stack([n, n * value * (1 + 1e-6), n * value * value * (1 - 1e-6)])
        assert jnp.isfinite(draw(jax.random.key(1), told)).all()


def test_what_is_no_reward_hangs_nothing():
    """A rejection loop in a compiled program cannot be interrupted."""
    odd = jnp.asarray([[1.0, 1.0, 3.0], [jnp.nan, -9.0, 1.0], [1.0, 1.0, 1.0]])
    draws = beta(jax.random.key(0), odd)
    assert np.isnan(draws[:2]).all() and 0 < draws[2] < 1

"""Draws from the posteriors of Thompson selection, vectorised over arrays of sufficient statistics.

Both take `moments`, the statistics (n, Σr, Σr²) of rewards r in [0, 1] stacked on the first axis, and return one
independent draw for each posterior. Sources: arXiv 2503.04412 (AB-MCTS) for the choice of posteriors and priors;
Murphy, Probabilistic Machine Learning: Advanced Topics, 3.4.3.3, for the normal-inverse-χ² update.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

__all__ = ["POSTERIORS", "Draw", "beta", "gaussian"]


class Draw(Protocol):
    """Draws from every posterior of an array of them."""

    def __call__(self, key: PRNGKeyArray, moments: Float[Array, "3 *shape"]) -> Float[Array, "*shape"]: ...


def beta(key: PRNGKeyArray, moments: Float[Array, "3 *shape"]) -> Float[Array, "*shape"]:
    """Draws of the mean reward under Beta(½ + Σr, ½ + n - Σr), the posterior of Jeffreys' prior."""
    n, total, _ = moments
    # Rounding of Σr may exceed n by an ulp; a parameter below ½ cannot come from rewards in [0, 1].
    x, y = _gamma(key, 0.5 + jnp.stack([total, jnp.maximum(n - total, 0)]))
    return x / (x + y)


def gaussian(key: PRNGKeyArray, moments: Float[Array, "3 *shape"]) -> Float[Array, "*shape"]:
    """Draws of the mean reward under the normal-inverse-χ² posterior, prior m=0, κ=1, ν=1, τ²=0.1.

    With r̄ = Σr/n and S = Σ(r - r̄)²: κₙ = κ+n, νₙ = ν+n, mₙ = (κm + n r̄)/κₙ, τₙ² = (ντ² + S + nκ(m - r̄)²/κₙ)/νₙ.
    Drawing σ² ~ InvGamma(νₙ/2, νₙτₙ²/2) and then μ ~ N(mₙ, σ²/κₙ) is drawing μ = mₙ + √(τₙ²/κₙ) t with t ~ Student's
    t of νₙ degrees of freedom, which has a closed form (see `_student`) and needs no rejection.
    """
    m, kappa, nu, tau2 = 0.0, 1.0, 1.0, 0.1
    n, total, square = moments
    mean = total / jnp.maximum(n, 1)
    # Not negative but for rounding: Σr² and n r̄² cancel where the rewards are nearly equal.
    scatter = jnp.maximum(square - n * mean * mean, 0)
    kappa_n, nu_n = kappa + n, nu + n
    tau2_n = (nu * tau2 + scatter + n * kappa * (m - mean) ** 2 / kappa_n) / nu_n
    return (kappa * m + total) / kappa_n + jnp.sqrt(tau2_n / kappa_n) * _student(key, nu_n)


def _student(key: PRNGKeyArray, nu: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Student's t with `nu` degrees of freedom: √(ν(U^(-2/ν) - 1)) cos 2πV (Bailey 1994, Math. Comp. 62, 779)."""
    u, v = jax.random.uniform(key, (2, *nu.shape))
    u = 1 - u  # in (0, 1]: log u is finite
    return jnp.sqrt(nu * jnp.expm1(-2 / nu * jnp.log(u))) * jnp.cos(2 * jnp.pi * v)


def _gamma(key: PRNGKeyArray, shape: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Gamma(shape, 1), for shape >= ½; NaN for any other, of which no proposal would ever be accepted.

    Marsaglia and Tsang (2000) for shape + 1, times U^(1/shape). Each round proposes for the whole array; at
    shape + 1 >= 1.5 a proposal is accepted with probability above 0.97, so that a few rounds settle thousands of draws.
    `jax.random.gamma` runs element by element on CPU and is far slower.
    """
    d = shape + (1 - 1 / 3)
    c = 1 / jnp.sqrt(9 * d)

    def unsettled(carry: tuple[Array, Array, Array]) -> Array:
        return ~jnp.all(carry[1])

    def propose(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, settled, value = carry
        # All that a proposal needs, in one call: each call of the generator costs compile time and a pass.
        # From 2^-24 on: neither log u, nor the quantile x, nor u^2 (at shape ½) leaves the range of float32.
        u = jax.random.uniform(jax.random.fold_in(key, i), (3, *shape.shape), minval=2.0**-24)
        x = jnp.sqrt(2.0) * jax.lax.erf_inv(2 * u[0] - 1)
        v = (1 + c * x) ** 3
        positive = v > 0
        v = jnp.where(positive, v, 1)
        accept = positive & (jnp.log(u[1]) < 0.5 * x * x + d - d * v + d * jnp.log(v))
        return i + 1, settled | accept, jnp.where(settled | ~accept, value, d * v * jnp.exp(jnp.log(u[2]) / shape))

    wrong = ~(shape >= 0.5)  # NaN, too
    start = (jnp.int32(0), wrong, jnp.where(wrong, jnp.nan, jnp.zeros_like(shape)))
    return jax.lax.while_loop(unsettled, propose, start)[2]


POSTERIORS: dict[str, Draw] = {"beta": beta, "gaussian": gaussian}

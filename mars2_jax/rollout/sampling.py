"""From logits to a token and its log-probabilities, without a sort and without a random number per vocabulary entry.

A draw needs two uniforms a row: the first picks a block of the vocabulary by the blocks' masses, the second a token
within the block. Filters are thresholds on the logits, found by bisection over the floats' ordered bit patterns.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

__all__ = ["PLAIN", "SamplerRows", "filter_threshold", "sample"]


class SamplerRows(NamedTuple):
    """Sampling parameters of each row of a batch; see `rollout.types.SamplingParams`."""

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]


PLAIN = SamplerRows(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)  # type: ignore[arg-type]
"""Temperature 1 and no filter, for every row."""


def _blocks(vocab: int) -> int:
    """A divisor of the vocabulary near its square root; 1 if there is none worth having."""
    root = int(vocab**0.5)
    candidates = [n for n in range(1, vocab + 1) if vocab % n == 0 and n <= 8 * root]
    return min(candidates, key=lambda n: abs(n - root))


def _ordered_bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """int32 that sort as the floats do (-0 and 0 apart)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unordered(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)


def _largest_threshold(scaled: Float[Array, "rows vocab"], enough) -> Float[Array, " rows"]:
    """The largest value t of a row with `enough(scaled >= t)`; `enough` is true at the row's minimum."""
    low, high = _ordered_bits(scaled.min(-1)), _ordered_bits(scaled.max(-1))

    def halve(_, bounds):
        low, high = bounds
        # Rounds up and cannot overflow: the sum of two int32 would.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        ok = enough(scaled >= _unordered(middle)[:, None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return _unordered(low)


def filter_threshold(scaled: Float[Array, "rows vocab"], params: SamplerRows) -> Float[Array, " rows"]:
    """The smallest scaled logit that survives top-k, then top-p of what is left, then min-p.

    Tokens of equal logit survive or fall together, so that ties at the edge keep a few more than asked for.
    """
    rows, vocab = scaled.shape
    off = jnp.full((rows,), -jnp.inf, scaled.dtype)
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab), vocab)
    by_k = jax.lax.cond(
        jnp.any(params.top_k > 0),
        lambda: jnp.where(params.top_k > 0, _largest_threshold(scaled, lambda keep: keep.sum(-1) >= k), off),
        lambda: off,
    )

    def nucleus():
        mass = jnp.where(scaled >= by_k[:, None], jax.nn.softmax(scaled, axis=-1), 0.0)
        target = params.top_p * mass.sum(-1)
        found = _largest_threshold(scaled, lambda keep: jnp.where(keep, mass, 0.0).sum(-1) >= target)
        return jnp.where(params.top_p < 1, found, off)

    by_p = jax.lax.cond(jnp.any(params.top_p < 1), nucleus, lambda: off)
    by_min = jnp.where(params.min_p > 0, scaled.max(-1) + jnp.log(jnp.maximum(params.min_p, 1e-30)), off)
    return jnp.maximum(jnp.maximum(by_k, by_p), by_min)


def sample(
    logits: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    index: Int[Array, " rows"],
    params: SamplerRows,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]:
    """Draws one token a row.

    Args:
      logits: float32 scores.
      keys: PRNG key data of each row's request.
      index: number of the token within its response; it is drawn with `fold_in(key, index)`.
      params: how to draw.

    Returns:
      token, its log-probability under the distribution it was drawn from (for temperature 0: under temperature 1),
      and its log-probability under temperature 1 without filters.
    """
    rows, vocab = logits.shape
    blocks = _blocks(vocab)
    greedy = params.temperature <= 0
    # From the maximum down: the quotient of a small temperature has no upper end, and inf - inf would be no number.
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(greedy, 1.0, params.temperature)[:, None]
    filtered = jnp.any((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    threshold = jax.lax.cond(
        filtered, lambda: filter_threshold(scaled, params), lambda: jnp.full((rows,), -jnp.inf, logits.dtype)
    )
    mass = jnp.where(scaled >= threshold[:, None], jnp.exp(scaled), 0.0).reshape(rows, blocks, -1)
    block_mass = mass.sum(-1)
    total = block_mass.sum(-1)

    uniform = jax.vmap(lambda k, i: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(k), i), (2,)))
    u = uniform(keys, index)
    block = _pick(block_mass, u[:, 0])
    inside = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
    drawn = block * (vocab // blocks) + _pick(inside, u[:, 1])

    best = _argmax(logits, blocks)
    token = jnp.where(greedy, best, drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    log_total = jnp.log(total)
    plain = jnp.all(params.temperature == 1) & ~filtered
    score = jax.lax.cond(
        plain,
        lambda: chosen - log_total,
        lambda: jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=-1),
    )
    return token, jnp.where(greedy, score, chosen - log_total), score


def _pick(mass: Float[Array, "rows n"], u: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """Inverts the cumulative mass at the fraction u in [0, 1) of the total; never picks an entry without mass."""
    cumulative = jnp.cumsum(mass, axis=-1)
    reached = (cumulative > (u * cumulative[:, -1])[:, None]) & (mass > 0)
    # Rounding can leave no entry reached: then it is the last that has mass.
    last = mass.shape[-1] - 1 - jnp.argmax(mass[:, ::-1] > 0, axis=-1)
    return jnp.where(reached.any(-1), jnp.argmax(reached, axis=-1), last)


def _argmax(x: Float[Array, "rows vocab"], blocks: int) -> Int[Array, " rows"]:
    """First index of the maximum. A plain max a block vectorizes; argmax over the whole row does not on CPU."""
    parts = x.reshape(x.shape[0], blocks, -1)
    block = jnp.argmax(parts.max(-1), axis=-1)
    inside = jnp.take_along_axis(parts, block[:, None, None], axis=1)[:, 0]
    return block * parts.shape[-1] + jnp.argmax(inside, axis=-1)

"""Log-probabilities of sampled tokens under a decoder, at the sampling temperature.

The head (embedding x vocabulary) runs only where a response token was predicted, and on a bounded number of positions
at a time: the logits of a long batch never exist as a whole.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mars2_jax.learning.rows import Rows
from mars2_jax.models.decoder import Decoder

__all__ = ["logprob_and_entropy", "response_logprobs"]

# Logits held at once: 2^27 float32 numbers are 512 MB. Within it they are kept for the backward pass; beyond it they
# are made chunk by chunk, and again in the backward pass (one more head matmul, about 4 % of a small model's update).
_MAX_LOGITS = 2**27


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def logprob_and_entropy(
    logits: Float[Array, "*tokens vocab"], target: Int[Array, "*tokens"], entropy_gradient: bool = False
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]:
    """Log-probability of the target under softmax(logits), and the entropy of softmax(logits).

    One custom derivative instead of those of logsumexp and gather: the backward pass reads the logits once and writes
    their cotangent once, with no scatter and no saved exponentials.

    Args:
      logits: already divided by the temperature.
      target: token ids.
      entropy_gradient: False: the entropy is a constant to differentiation, and costs nothing in the backward pass.

    Returns:
      log p[target] and -Σ p log p, in nats.
    """
    outputs, _ = _forward(logits, target, entropy_gradient)
    return outputs


def _forward(logits, target, entropy_gradient):
    del entropy_gradient
    top = logits.max(-1, keepdims=True)
    shifted = logits - top
    exponential = jnp.exp(shifted)
    # Σ exp(x) and Σ x exp(x) in one pass over the vocabulary: as two sums, XLA takes every exponential twice.
    zero = jnp.zeros((), logits.dtype)
    total, weighted = jax.lax.reduce(
        (exponential, exponential * shifted), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (logits.ndim - 1,)
    )
    log_total = jnp.log(total)
    entropy = log_total - weighted / total
    logprob = jnp.take_along_axis(shifted, target[..., None], axis=-1)[..., 0] - log_total
    return (logprob, entropy), (logits, target, top[..., 0] + log_total, entropy)


def _backward(entropy_gradient, saved, cotangents):
    logits, target, normaliser, entropy = saved
    to_logprob, to_entropy = (c[..., None] for c in cotangents)
    logp = logits - normaliser[..., None]
    p = jnp.exp(logp)
    hit = jax.lax.broadcasted_iota(target.dtype, logits.shape, logits.ndim - 1) == target[..., None]
    gradient = to_logprob * (hit - p)
    if entropy_gradient:
        gradient -= to_entropy * p * (logp + entropy[..., None])
    return gradient.astype(logits.dtype), None


logprob_and_entropy.defvjp(_forward, _backward)


def _chunks(rows: int, width: int, vocab: int) -> int:
    """The smallest divisor of `width` into which it must be cut so that the logits of a piece stay within bounds."""
    fits = (k for k in range(1, width) if width % k == 0 and rows * (width // k) * vocab <= _MAX_LOGITS)
    return next(fits, width)


def response_logprobs(
    model: Decoder,
    rows: Rows,
    *,
    temperature: float,
    remat: str = "none",
    scan_unroll: int = 0,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "rows response"], Float[Array, "rows response"]]:
    """Log-probability and entropy at each response token of some rows.

    The results are those of a row each, however samples are packed. Where they share a prompt, it is computed once, and
    its gradient is the sum over the samples.

    Args:
      model: the decoder.
      rows: token rows, without an axis of micro-batches. Masked places give numbers without a meaning (finite).
      temperature: that of the sampler; logits are divided by it.
      remat: what to recompute in the backward pass, see `Decoder.__call__`.
      scan_unroll: how the layers are run, see there.
      entropy_gradient: whether the entropy is differentiated.

    Returns:
      log p of the response tokens and the entropies of the distributions they come from.
    """
    hidden = model(
        rows.tokens,
        positions=rows.position,
        segment_ids=rows.segment,
        prefix_ids=rows.prefix,
        remat=remat,
        scan_unroll=scan_unroll,
    )
    # The state at the token before predicts a token.
    before = rows.index - 1 if rows.before is None else rows.before
    target = jnp.take_along_axis(rows.tokens, rows.index, axis=1)
    hidden = jnp.take_along_axis(hidden, before[..., None], axis=1)

    def head(hidden: Float[Array, "rows piece embed"], target: Int[Array, "rows piece"]):
        return logprob_and_entropy(model.logits(hidden) / temperature, target, entropy_gradient)

    count, width = target.shape
    pieces = _chunks(count, width, model.config.vocab_size)
    if pieces == 1:
        return head(hidden, target)

    # Cut along the response, so that an array sharded over its rows stays so.
    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(count, pieces, width // pieces, *x.shape[2:]), 1, 0)

    outputs = jax.lax.map(lambda piece: jax.checkpoint(head)(*piece), (cut(hidden), cut(target)))
    logprob, entropy = (jnp.moveaxis(x, 0, 1).reshape(count, width) for x in outputs)
    return logprob, entropy

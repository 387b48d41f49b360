"""Log-probabilities of sampled tokens under a decoder, at the sampling temperature.

The head (embedding x vocabulary) runs only where a response token was predicted, and on a bounded number of positions
at a time: the logits of a long batch never exist as a whole.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
    tokens: Int[Array, "rows length"],
    prompt_length: Int[Array, " rows"],
    width: int,
    *,
    temperature: float,
    remat: str = "none",
    scan_unroll: int = 0,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "rows {width}"], Float[Array, "rows {width}"]]:
    """Log-probability and entropy at each response position of right-padded rows.

    Args:
      model: the decoder.
      tokens: prompt, response, padding.
      prompt_length: tokens of the prompt, at least 1; the response starts there.
      width: response positions to look at. Positions past the end of a row give numbers without a meaning (finite).
      temperature: that of the sampler; logits are divided by it.
      remat: what to recompute in the backward pass, see `Decoder.__call__`.
      scan_unroll: how the layers are run, see there.
      entropy_gradient: whether the entropy is differentiated.

    Returns:
      log p of the response tokens and the entropies of the distributions they come from.
    """
    hidden = model(tokens, remat=remat, scan_unroll=scan_unroll)
    # The state before token i predicts token i.
    position = jnp.minimum(prompt_length[:, None] + jnp.arange(width), tokens.shape[1] - 1)
    target = jnp.take_along_axis(tokens, position, axis=1)
    hidden = jnp.take_along_axis(hidden, (position - 1)[..., None], axis=1)

    def head(hidden: Float[Array, "rows piece embed"], target: Int[Array, "rows piece"]):
        return logprob_and_entropy(model.logits(hidden) / temperature, target, entropy_gradient)

    rows = tokens.shape[0]
    pieces = _chunks(rows, width, model.config.vocab_size)
    if pieces == 1:
        return head(hidden, target)

    # Cut along the response, so that an array sharded over its rows stays so.
    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, pieces, width // pieces, *x.shape[2:]), 1, 0)

    outputs = jax.lax.map(lambda piece: jax.checkpoint(head)(*piece), (cut(hidden), cut(target)))
    logprob, entropy = (jnp.moveaxis(x, 0, 1).reshape(rows, width) for x in outputs)
    return logprob, entropy

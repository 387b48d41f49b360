"""Supervised fine-tuning: cross entropy of given responses, in one compiled update with the state of `Learner`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from mars2_jax.learning.accumulate import sum_gradients
from mars2_jax.learning.logprobs import response_logprobs
from mars2_jax.learning.optimizer import learning_rate
from mars2_jax.learning.rows import Rows, make_rows, pack, packed_length
from mars2_jax.learning.update import Learner, Metrics, TrainState, descend, step_program
from mars2_jax.models.buckets import bucket

__all__ = ["PairBatch", "fit", "make_pair_batch", "mean_loss"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairBatch:
    """Prompts and their responses, cut into micro-batches.

    Attributes:
      rows: the token rows, [micro, rows, ...].
      filled: micro-batches that hold a pair; the others come last. None where all do.
    """

    rows: Rows
    filled: Int[Array, ""] | None


def make_pair_batch(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    micro_batch_size: int,
    longest: int | None = None,
    pack_tokens: int = 0,
    share_prompts: bool = False,
    room: int = 0,
) -> PairBatch:
    """The batch of some pairs for one update (NumPy arrays).

    Args:
      prompts: int32[P] each, not empty.
      responses: int32[R] each, not empty, the end-of-turn token included.
      micro_batch_size: rows of a micro-batch; the last one is filled up with padding.
      longest: see `make_rows`.
      pack_tokens: tokens of a row into which several pairs are packed; 0: a row each.
      share_prompts: equal prompts of a packed row stand in it once.
      room: pairs that there is room for, at least: a batch of fewer has the shape of one of so many.

    Raises:
      ValueError: no pairs, an empty prompt or response, or a pair longer than `longest` or than a packed row.
    """
    micro = most = -(-max(len(prompts), room) // micro_batch_size)
    filled: Any = None
    options: dict[str, Any] = dict(longest=longest)
    if pack_tokens:
        length = packed_length(pack_tokens)
        layout = pack(prompts, responses, length, share=share_prompts)
        # Their number differs from batch to batch: arrays are of a few sizes.
        filled = np.int32(-(-len(layout) // micro_batch_size))
        micro = bucket(int(filled), 1, most)
        options = dict(layout=layout, packed=length, share=share_prompts)
    rows = make_rows(prompts, responses, rows=micro * micro_batch_size, **options)
    return PairBatch(jax.tree.map(lambda x: x.reshape(micro, micro_batch_size, *x.shape[1:]), rows), filled)


def fit(
    learner: Learner, state: TrainState, batch: PairBatch, base: nnx.State | None = None
) -> tuple[TrainState, Metrics]:
    """Makes one update towards the responses. The arrays of `state` are donated and must not be used again.

    The loss is -Σ log p / number of tokens, over the tokens of all responses of the batch and none of the prompts: the
    same however the batch is cut or packed.

    Returns:
      The new state; metrics, float32 scalars: `loss` (nats a token) and `entropy` before the update, `grad_norm` before
      clipping, `skipped` (see `descend`), `learning_rate`, `tokens` (of responses).
    """
    return step_program(_fit, learner, state, results=1)(state, batch, base)


def mean_loss(
    learner: Learner,
    params: nnx.State,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    base: nnx.State | None = None,
    *,
    longest: int | None = None,
) -> float:
    """-Σ log p / number of tokens over the tokens of all responses (nats). Nothing is learned.

    Arguments as those of `Learner.score_responses`.
    """
    scores = learner.score_responses(params, prompts, responses, base, longest=longest)
    return -float(np.concatenate(scores).astype(np.float64).mean())


def _fit(learner: Learner, state: TrainState, batch: PairBatch, base: nnx.State | None) -> tuple[TrainState, Metrics]:
    def loss(params: nnx.State, rows: Rows) -> tuple[Float[Array, ""], dict[str, Array]]:
        lp, entropy = response_logprobs(
            learner.decoder(params, base),
            rows,
            temperature=learner.temperature,
            remat=learner.learning.remat,
            scan_unroll=learner.learning.scan_unroll,
        )
        total = -jnp.where(rows.mask, lp, 0.0).sum()
        sums = {"loss": total, "entropy": jnp.where(rows.mask, entropy, 0.0).sum()}
        return total, sums | {"tokens": rows.mask.sum().astype(jnp.float32)}

    gradient, sums = sum_gradients(loss, state.params, (batch.rows,), batch.filled)
    sums = jax.tree.map(lambda x: x.sum(0), sums)
    tokens = sums["tokens"]
    gradient = jax.tree.map(lambda g: g / tokens, gradient)
    norm = optax.tree.norm(gradient)
    params, opt_state, skipped = descend(learner.optimizer, gradient, norm, state.params, state.opt_state)
    metrics = {
        "loss": sums["loss"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "grad_norm": norm,
        "skipped": skipped,
        "learning_rate": jnp.asarray(learning_rate(learner.optimizer, state.step), jnp.float32),
        "tokens": tokens,
    }
    return TrainState(params, opt_state, state.step + 1), metrics

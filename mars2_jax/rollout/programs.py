"""The compiled programs of an engine: prefill, insert, decode, grow. Shared by all engines of one architecture."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from mars2_jax.models import cache as kv
from mars2_jax.models.causal_attention import causal_attention
from mars2_jax.models.decode_attention import decode_attention
from mars2_jax.parallel.mesh import constrain
from mars2_jax.rollout.sampling import PLAIN, SamplerRows, sample

__all__ = ["Emitted", "Slots", "compilations", "decode", "empty_slots", "grow", "insert", "prefill", "take_row"]


class Slots(NamedTuple):
    """What an engine holds for each slot, the cache apart.

    Attributes:
      token: last token of the sequence; its key and value are not in the cache yet.
      length: entries in the cache.
      made: tokens of the response so far.
      budget: tokens the response may have.
      active: whether the slot decodes.
      key: PRNG key data of the request.
      sampler: how its tokens are drawn.
    """

    token: Int[Array, " slots"]
    length: Int[Array, " slots"]
    made: Int[Array, " slots"]
    budget: Int[Array, " slots"]
    active: Bool[Array, " slots"]
    key: UInt32[Array, "slots 2"]
    sampler: SamplerRows


class Emitted(NamedTuple):
    """Tokens of one decode call. Column j of a slot is valid while j < emitted."""

    token: Int[Array, "slots chunk"]
    logprob: Float[Array, "slots chunk"]
    score: Float[Array, "slots chunk"]
    emitted: Int[Array, " slots"]
    stopped: Bool[Array, " slots"]


def empty_slots(count: int) -> Slots:
    """Slots that are all idle."""

    def fill(value: int, dtype: Any, *more: int) -> Any:
        return np.full((count, *more), value, dtype)

    return Slots(
        token=fill(0, np.int32),
        length=fill(0, np.int32),
        made=fill(0, np.int32),
        budget=fill(0, np.int32),
        active=fill(0, bool),
        key=fill(0, np.uint32, 2),
        sampler=SamplerRows(
            temperature=fill(1, np.float32),
            top_k=fill(0, np.int32),
            top_p=fill(1, np.float32),
            min_p=fill(0, np.float32),
        ),
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "layout"))
def prefill(graphdef: Any, params: nnx.State, tokens: Int[Array, "prompts length"], layout: kv.Layout) -> kv.KeyValues:
    """Keys and values of whole prompts, padded at the end. No logits: the last prompt token is the decoder's."""
    decoder = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(_, query, key, value):
        kept = kv.layer_cache(key, value, layout)
        return causal_attention(query, key, value, implementation=decoder.attention), kept

    _, kept = decoder.run(tokens, positions, attend)
    return kv.constrain_cache(tuple(kept))


@functools.partial(jax.jit, donate_argnames="cache")
def insert(cache: kv.KeyValues, prompt: kv.KeyValues, slot: Int[Array, ""]) -> kv.KeyValues:
    """See `models.cache.insert`."""
    return kv.constrain_cache(kv.insert(cache, prompt, slot))


@jax.jit
def take_row(entries: kv.KeyValues, row: Int[Array, ""]) -> kv.KeyValues:
    """See `models.cache.take_row`."""
    return kv.constrain_cache(kv.take_row(entries, row))


@functools.partial(jax.jit, static_argnames="length")
def grow(layer: kv.LayerCache, length: int) -> kv.LayerCache:
    """See `models.cache.grow`. Of one layer: of all at once, the old cache would lie beside the whole new one."""
    return kv.constrain_cache((kv.grow(layer, length),))[0]


@functools.partial(jax.jit, static_argnames=("graphdef", "chunk"), donate_argnames=("cache", "slots"))
def decode(
    graphdef: Any,
    params: nnx.State,
    cache: kv.KeyValues,
    slots: Slots,
    stop_ids: Int[Array, " stops"],
    chunk: int,
) -> tuple[kv.KeyValues, Slots, Emitted]:
    """Up to `chunk` tokens for every active slot; ends early when no slot is active.

    `stop_ids` is padded with -1. A slot stops at a stop token (which is emitted) or at its budget.
    """
    decoder = nnx.merge(graphdef, params)
    rows = slots.token.shape[0]
    blank = Emitted(
        token=jnp.zeros((rows, chunk), jnp.int32),
        logprob=jnp.zeros((rows, chunk), jnp.float32),
        score=jnp.zeros((rows, chunk), jnp.float32),
        emitted=jnp.zeros((rows,), jnp.int32),
        stopped=jnp.zeros((rows,), bool),
    )

    def step(carry: tuple[Array, kv.KeyValues, Slots, Emitted]) -> tuple[Array, kv.KeyValues, Slots, Emitted]:
        j, cache, slots, out = carry

        def attend(layer, query, key, value):
            mixed, longer = decode_attention(query, key, value, cache[layer], slots.length, slots.active)
            # The cache is split over the slots; the little that comes out goes to every device, see `few_tokens`.
            return constrain(mixed, None, None, "kv_heads", None, None), longer

        hidden, longer = decoder.run(slots.token[:, None], slots.length[:, None], attend, few_tokens=True)
        # An idle slot must not hold the others to the filters of a request that has left it.
        sampler = jax.tree.map(lambda x, plain: jnp.where(slots.active, x, plain), slots.sampler, PLAIN)
        token, logprob, score = sample(decoder.logits(hidden[:, 0], few_tokens=True), slots.key, slots.made, sampler)
        stop = (token[:, None] == stop_ids).any(-1)
        write = lambda old, new: jax.lax.dynamic_update_slice(old, new[:, None], (0, j))
        out = Emitted(
            token=write(out.token, token),
            logprob=write(out.logprob, logprob),
            score=write(out.score, score),
            emitted=out.emitted + slots.active,
            stopped=out.stopped | (slots.active & stop),
        )
        made = slots.made + slots.active
        slots = slots._replace(
            token=token,
            length=slots.length + slots.active,
            made=made,
            active=slots.active & ~stop & (made < slots.budget),
        )
        return j + 1, kv.constrain_cache(tuple(longer)), slots, out

    start = (jnp.int32(0), cache, slots, blank)
    _, cache, slots, out = jax.lax.while_loop(lambda c: (c[0] < chunk) & c[2].active.any(), step, start)
    # Where they lay before: another place would be another program in the next call.
    by_rows = lambda x: constrain(x, "rows", *(None,) * (x.ndim - 1))
    return kv.constrain_cache(cache), jax.tree.map(by_rows, slots), jax.tree.map(by_rows, out)


def compilations() -> int:
    """Programs compiled so far in this process, of all engines together."""
    programs: tuple[Any, ...] = (prefill, take_row, insert, grow, decode)
    return sum(program._cache_size() for program in programs)

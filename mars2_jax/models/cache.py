"""Keys and values of the past: a main cache that a decode call only reads, and a small one that it fills.

Slots are at different lengths, so writing each new key at its slot's own place would scatter in every layer of every
step. Instead all slots write their new entries at the same index of a `Recent` cache as long as one decode call (a
chunk), and the chunk is merged into the main cache once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mars2_jax.models.config import ModelConfig

__all__ = ["KeyValues", "cached_attention", "empty", "grow", "insert", "merge"]

KeyValues = tuple[
    tuple[Float[Array, "slots kv_heads length head_dim"], Float[Array, "slots kv_heads length head_dim"]], ...
]
"""Keys and values of every layer. One array a layer: slices of a stacked one would be copied in every step."""


def empty(config: ModelConfig, slots: int, length: int, dtype) -> KeyValues:
    """A cache of zeros."""
    shape = (slots, config.kv_heads, length, config.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.layers))


def grow(cache: KeyValues, length: int) -> KeyValues:
    """The same cache with room for `length` entries a slot."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0))), cache)


def insert(cache: KeyValues, prompt: KeyValues, row: Int[Array, " copies"], slot: Int[Array, " copies"]) -> KeyValues:
    """Writes row `row[i]` of prefilled keys and values at the start of slot `slot[i]`, for every i."""

    def write(whole, part):
        def one(i, whole):
            piece = jax.lax.dynamic_slice_in_dim(part, row[i], 1, axis=0)
            return jax.lax.dynamic_update_slice(whole, piece, (slot[i], 0, 0, 0))

        return jax.lax.fori_loop(0, row.shape[0], one, whole)

    return jax.tree.map(write, cache, prompt)


def merge(cache: KeyValues, recent: KeyValues, start: Int[Array, " slots"]) -> KeyValues:
    """Appends a chunk's entries to every slot at its own length."""

    def write(whole, part):
        def one(i, whole):
            piece = jax.lax.dynamic_slice_in_dim(part, i, 1, axis=0)
            return jax.lax.dynamic_update_slice(whole, piece, (i, 0, start[i], 0))

        return jax.lax.fori_loop(0, part.shape[0], one, whole)

    return jax.tree.map(write, cache, recent)


def cached_attention(
    query: Float[Array, "slots 1 kv_heads group head_dim"],
    past: Sequence[Array],
    recent: Sequence[Array],
    past_mask: Bool[Array, "slots 1 1 length"],
    recent_mask: Bool[Array, "1 1 1 chunk"],
) -> Float[Array, "slots 1 kv_heads group head_dim"]:
    """Attention of one new token a slot over the main cache and the chunk's own entries, softmax in float32."""
    q = query[:, 0]

    def scores(keys, mask):
        s = jnp.einsum("bkgh,bksh->bkgs", q, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        return jnp.where(mask, s, -jnp.inf)

    old, new = scores(past[0], past_mask), scores(recent[0], recent_mask)
    top = jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)
    dtype = past[1].dtype
    mixed = jnp.einsum("bkgs,bksh->bkgh", (old / total).astype(dtype), past[1])
    mixed = mixed + jnp.einsum("bkgs,bksh->bkgh", (new / total).astype(dtype), recent[1])
    return mixed[:, None]

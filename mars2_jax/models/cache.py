"""Keys and values of the past, for decoding: one new token a slot, each slot at its own length."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mars2_jax.models.config import ModelConfig
from mars2_jax.parallel.mesh import constrain

__all__ = [
    "AXES",
    "KeyValues",
    "LayerCache",
    "append",
    "cached_attention",
    "constrain_cache",
    "empty",
    "grow",
    "insert",
    "layer_cache",
    "take_row",
]


class LayerCache(NamedTuple):
    """One layer's keys and values.

    The layouts are those that the two matmuls of attention read in order: keys are contracted over head_dim, values
    over length. With keys stored like values, XLA's CPU backend takes half as long again.
    """

    key: Float[Array, "slots kv_heads head_dim length"]
    value: Float[Array, "slots kv_heads length head_dim"]


AXES = ("rows", "kv_heads", None, None)
"""Logical axes of a layer's keys, and of its values."""

KeyValues = tuple[LayerCache, ...]
"""All layers. One pair of arrays a layer: slices of a stacked array would be copied in every step."""


def empty(config: ModelConfig, slots: int, length: int, dtype) -> KeyValues:
    """A cache of zeros."""
    shape = (slots, config.kv_heads, config.head_dim, length)
    return tuple(
        LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype).swapaxes(2, 3)) for _ in range(config.layers)
    )


def constrain_cache(cache: KeyValues) -> KeyValues:
    """The same cache, split over the mesh in context by its logical axes, see `parallel.mesh.constrain`."""
    return jax.tree.map(lambda x: constrain(x, *AXES), cache)


def layer_cache(
    key: Float[Array, "rows length kv_heads head_dim"], value: Float[Array, "rows length kv_heads head_dim"]
) -> LayerCache:
    """Keys and values as a layer computes them, in the cache's layout."""
    return LayerCache(key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3))


def grow(cache: KeyValues, length: int) -> KeyValues:
    """The same cache with room for `length` entries a slot."""

    def pad(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)])

    return tuple(LayerCache(pad(layer.key, 3), pad(layer.value, 2)) for layer in cache)


def insert(cache: KeyValues, prompt: KeyValues, slot: Int[Array, ""]) -> KeyValues:
    """Writes the keys and values of one prompt (one row) at the start of a slot."""
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice(x, part, (slot, 0, 0, 0)), cache, prompt)


def take_row(entries: KeyValues, row: Int[Array, ""]) -> KeyValues:
    """One row of prefilled keys and values, as a cache of one slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=0), entries)


def append(
    layer: LayerCache,
    key: Float[Array, "slots 1 kv_heads head_dim"],
    value: Float[Array, "slots 1 kv_heads head_dim"],
    length: Int[Array, " slots"],
) -> LayerCache:
    """Writes one new entry a slot at the slot's own length; a slot that is full keeps what it has."""
    slot = jnp.arange(length.shape[0])
    return LayerCache(
        layer.key.at[slot, :, :, length].set(key[:, 0], mode="drop"),
        layer.value.at[slot, :, length].set(value[:, 0], mode="drop"),
    )


def cached_attention(
    query: Float[Array, "slots 1 kv_heads group head_dim"], layer: LayerCache, mask: Bool[Array, "slots 1 1 length"]
) -> Float[Array, "slots 1 kv_heads group head_dim"]:
    """Attention of one new token a slot over the entries that the mask lets through, softmax in float32."""
    q = query[:, 0]
    scores = jnp.einsum("bkgh,bkhs->bkgs", q, layer.key, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(layer.value.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, layer.value)[:, None]

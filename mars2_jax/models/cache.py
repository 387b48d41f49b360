"""Keys and values of the past, for decoding: one new token a slot, each slot at its own length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mars2_jax.models.config import ModelConfig
from mars2_jax.parallel.mesh import constrain

__all__ = [
    "AXES",
    "KeyValues",
    "LayerCache",
    "Layout",
    "append",
    "cache_length",
    "constrain_cache",
    "empty",
    "grow",
    "insert",
    "layer_cache",
    "take_row",
]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a layer's keys and values lie, and what reads them. See `models.decode_attention.choose_layout`.

    Attributes:
      kernel: what computes the attention of a new token, see `models.decode_attention`: "xla" or "paged".
      transposed: whether the keys' head_dim comes before their length: the order in which the matmul of the scores
        contracts them. With keys stored like values XLA's CPU backend takes half as long again; its TPU backend stores
        both alike whatever it is given, and would copy all keys in every call.
      side_by_side: key heads whose entries lie in one row. TPUs store rows of 128 numbers: heads of 64 alone would take
        twice the memory, and a copy of the whole cache in every call.
    """

    kernel: str = "xla"
    transposed: bool = False
    side_by_side: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Attributes:
      key: [slots, kv_heads, length, head_dim], or with transposed keys [slots, kv_heads, head_dim, length]; with n
        heads side by side there are kv_heads / n of n · head_dim.
      value: as keys that are not transposed.
      layout: how they lie. Static.
    """

    key: Float[Array, "slots kv_heads length_or_head_dim head_dim_or_length"]
    value: Float[Array, "slots kv_heads length head_dim"]
    layout: Layout = dataclasses.field(metadata=dict(static=True))

    def map(self, function: Callable[[Array, int], Array]) -> LayerCache:
        """The same with `function(array, axis of its length)` in the place of each array."""
        key = function(self.key, 3 if self.layout.transposed else 2)
        return dataclasses.replace(self, key=key, value=function(self.value, 2))


AXES = ("rows", "kv_heads", None, None)
"""Logical axes of a layer's keys, and of its values."""

KeyValues = tuple[LayerCache, ...]
"""All layers. One pair of arrays a layer: slices of a stacked array would be copied in every step."""


def empty(config: ModelConfig, slots: int, length: int, dtype, layout: Layout) -> KeyValues:
    """A cache of zeros."""
    entries = (slots, length, config.kv_heads, config.head_dim)
    return tuple(
        layer_cache(jnp.zeros(entries, dtype), jnp.zeros(entries, dtype), layout) for _ in range(config.layers)
    )


def cache_length(cache: KeyValues) -> int:
    """Entries that a slot has room for."""
    return cache[0].value.shape[2]


def constrain_cache(cache: KeyValues) -> KeyValues:
    """The same cache, split over the mesh in context by its logical axes, see `parallel.mesh.constrain`."""
    return jax.tree.map(lambda x: constrain(x, *AXES), cache)


def layer_cache(
    key: Float[Array, "rows length kv_heads head_dim"],
    value: Float[Array, "rows length kv_heads head_dim"],
    layout: Layout,
) -> LayerCache:
    """Keys and values as a layer computes them, laid out."""
    key, value = _pack(key, layout), _pack(value, layout)
    return LayerCache(key.transpose((0, 2, 3, 1) if layout.transposed else (0, 2, 1, 3)), value.swapaxes(1, 2), layout)


def _pack(x: Float[Array, "rows length kv_heads head_dim"], layout: Layout) -> Array:
    n = layout.side_by_side
    return x.reshape(*x.shape[:2], x.shape[2] // n, n * x.shape[3])


def grow(layer: LayerCache, length: int) -> LayerCache:
    """The same layer with room for `length` entries a slot."""

    def pad(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)])

    return layer.map(pad)


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
    """Writes one new entry a slot at the slot's own length; a slot that is full keeps what it has.

    Of the slots and heads of one device: across several, see `models.decode_attention.decode_attention`.
    """
    slots, heads = layer.value.shape[:2]
    row, at = jnp.arange(slots * heads), jnp.repeat(length, heads)

    def write(entries: Array, new: Array, index: tuple) -> Array:
        # Slots and heads as one axis: with two, XLA's TPU backend would lay the heads of a position together, to write
        # them at once, and for that copy the cache in every step.
        rows = entries.reshape(slots * heads, *entries.shape[2:])
        return (
            rows.at[index].set(_pack(new, layer.layout).reshape(slots * heads, -1), mode="drop").reshape(entries.shape)
        )

    key_index = (row, slice(None), at) if layer.layout.transposed else (row, at)
    return dataclasses.replace(layer, key=write(layer.key, key, key_index), value=write(layer.value, value, (row, at)))

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
    "append",
    "cache_length",
    "constrain_cache",
    "empty",
    "grow",
    "insert",
    "layer_cache",
    "take_row",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, in the layout that its attention reads in order.

    Attributes:
      key: [slots, kv_heads, length, head_dim]; for "xla_cpu" [slots, kv_heads, head_dim, length].
      value: [slots, kv_heads, length, head_dim].
      attention: how a new token attends to them, see `models.decode_attention.choose_decode_attention`. Static.
    """

    key: Float[Array, "slots kv_heads length_or_head_dim head_dim_or_length"]
    value: Float[Array, "slots kv_heads length head_dim"]
    attention: str = dataclasses.field(metadata=dict(static=True))

    @property
    def transposed(self) -> bool:
        """Whether the keys' head_dim comes before their length: the order in which the scores' matmul contracts them.
        With keys stored like values XLA's CPU backend takes half as long again; its TPU backend stores both alike
        whatever it is given, and copies all keys in every call if they come otherwise."""
        return self.attention == "xla_cpu"

    def map(self, function: Callable[[Array, int], Array]) -> LayerCache:
        """The same with `function(array, axis of its length)` in the place of each array."""
        key = function(self.key, 3 if self.transposed else 2)
        return dataclasses.replace(self, key=key, value=function(self.value, 2))


AXES = ("rows", "kv_heads", None, None)
"""Logical axes of a layer's keys, and of its values."""

KeyValues = tuple[LayerCache, ...]
"""All layers. One pair of arrays a layer: slices of a stacked array would be copied in every step."""


def empty(config: ModelConfig, slots: int, length: int, dtype, attention: str) -> KeyValues:
    """A cache of zeros, for an implementation of `models.decode_attention`."""
    entries = (slots, length, config.kv_heads, config.head_dim)
    return tuple(
        layer_cache(jnp.zeros(entries, dtype), jnp.zeros(entries, dtype), attention) for _ in range(config.layers)
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
    attention: str,
) -> LayerCache:
    """Keys and values as a layer computes them, in the layout for an implementation of `models.decode_attention`."""
    order = (0, 2, 3, 1) if attention == "xla_cpu" else (0, 2, 1, 3)
    return LayerCache(key.transpose(order), value.transpose(0, 2, 1, 3), attention)


def grow(cache: KeyValues, length: int) -> KeyValues:
    """The same cache with room for `length` entries a slot."""

    def pad(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)])

    return tuple(layer.map(pad) for layer in cache)


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
    at = (slot, slice(None), slice(None), length) if layer.transposed else (slot, slice(None), length)
    return dataclasses.replace(
        layer,
        key=layer.key.at[at].set(key[:, 0], mode="drop"),
        value=layer.value.at[slot, :, length].set(value[:, 0], mode="drop"),
    )

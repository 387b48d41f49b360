"""One new token a slot: into the slot's cache, and its attention over it, by one of two implementations.

- "xla": plain matmuls and a softmax over the whole cache, whatever a slot's length.
- "paged": the Pallas kernel for TPU that JAX ships. It reads as much of each slot as the slot is long.

The kernel was made for sequences that are scattered over pages. Here every slot has its own fixed part of one array, so
the table of pages is a constant, a page may be large, and nothing allocates.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Float, Int

from mars2_jax.errors import ConfigError
from mars2_jax.models.cache import LayerCache, Layout, append
from mars2_jax.models.config import ModelConfig
from mars2_jax.parallel.mesh import partition_spec, placed, platform

__all__ = ["choose_layout", "decode_attention", "layout_for"]

_LANES = 128
"""Numbers in a row of a TPU's memory. The kernel moves whole rows."""

_PAGE = 512
"""Longest page, in entries: what the kernel reads of one head at a time. Shorter ones leave it waiting for memory
between pages, longer ones make it read more beyond a slot's end."""


def choose_layout(
    name: str, *, platform: str, dtype: Any, head_dim: int, kv_heads: int, key: str = "rollout.attention"
) -> Layout:
    """How the cache lies and what reads it: by the implementation asked for, or for "auto" the fastest that runs.

    Args:
      name: "auto", "xla" or "paged".
      platform: "cpu", "cuda", "rocm" or "tpu": of the devices that will run it, see `parallel.mesh.platform`.
      dtype: type of queries, keys and values.
      head_dim: their last axis.
      kv_heads: key heads on each device.
      key: where `name` comes from, for the message.

    Raises:
      ConfigError: the implementation asked for cannot run there; says why.
    """
    fitting = _LANES // head_dim if platform == "tpu" and _LANES % head_dim == 0 else 1
    layout = Layout(transposed=platform == "cpu", side_by_side=fitting if kv_heads % fitting == 0 else 1)
    obstacle = _paged_obstacle(platform, dtype, head_dim, layout)
    if name == "paged" and obstacle is not None:
        raise ConfigError(f"config.{key} is {name!r}, but {obstacle}: set it to 'auto' or 'xla'")
    return dataclasses.replace(layout, kernel="paged") if name != "xla" and obstacle is None else layout


def layout_for(name: str, config: ModelConfig, dtype: Any, where: Mesh | Sharding) -> Layout:
    """`choose_layout` for a model on the devices of a mesh, or where an array lies. Raises as that does."""
    mesh = where if isinstance(where, Mesh) else where.mesh if isinstance(where, NamedSharding) else None
    kv_heads = config.kv_heads
    if mesh is not None:
        kv_heads = placed(mesh, ("kv_heads",), (kv_heads,)).shard_shape((kv_heads,))[0]
    return choose_layout(name, platform=platform(where), dtype=dtype, head_dim=config.head_dim, kv_heads=kv_heads)


def _paged_obstacle(platform: str, dtype: Any, head_dim: int, layout: Layout) -> str | None:
    if platform != "tpu":
        return f"the paged kernel runs on TPUs only, and the mesh is of {platform} devices"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the paged kernel rounds keys and values to bfloat16, and the model's dtype is {jnp.dtype(dtype).name}"
    if head_dim * layout.side_by_side % _LANES:
        return (
            f"the paged kernel reads rows of {_LANES} numbers, and the model's head_dim is {head_dim}, which neither "
            "is a multiple of it nor makes one with the key heads of a device side by side"
        )
    return None


def decode_attention(
    query: Float[Array, "slots 1 kv_heads group head_dim"],
    key: Float[Array, "slots 1 kv_heads head_dim"],
    value: Float[Array, "slots 1 kv_heads head_dim"],
    layer: LayerCache,
    length: Int[Array, " slots"],
    active: Bool[Array, " slots"],
) -> tuple[Float[Array, "slots 1 kv_heads group head_dim"], LayerCache]:
    """Appends one token a slot to the cache, and lets it attend to all of the slot's entries, itself among them.

    Softmax attention, scaled by 1/sqrt(head_dim). On a mesh, each device works on its own slots and key heads.

    Args:
      query: of the new tokens; each key head serves `group` query heads.
      key: their keys.
      value: their values.
      layer: the cache.
      length: entries in it before.
      active: slots that decode. What comes out of an idle one has no meaning (it is finite if the cache is).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return _append_and_attend(query, key, value, layer, length, active)
    # Slots or heads that the mesh does not divide are computed by every device.
    cache = partition_spec(mesh, ("rows", "kv_heads"), layer.value.shape[:2])
    rows, heads = (*cache, None, None)[:2]
    new, slots = PartitionSpec(rows, None, heads), PartitionSpec(rows)
    # The kernel's output does not say over which mesh axes it varies (check_vma).
    mapped = jax.shard_map(
        _append_and_attend,
        in_specs=(new, new, new, cache, slots, slots),
        out_specs=(new, cache),
        check_vma=False,
    )
    return mapped(query, key, value, layer, length, active)


def _append_and_attend(
    query: jax.Array, key: jax.Array, value: jax.Array, layer: LayerCache, length: jax.Array, active: jax.Array
) -> tuple[jax.Array, LayerCache]:
    longer = append(layer, key, value, length)
    # The new token sees itself; of an idle slot nothing need be read.
    seen = jnp.where(active, length + 1, 0)
    return _side_by_side({"xla": _xla, "paged": _paged}[layer.layout.kernel], query, longer, seen), longer


def _side_by_side(attend: Any, query: jax.Array, layer: LayerCache, length: jax.Array) -> jax.Array:
    """`attend` on queries that are as wide as the cache's rows: each is zero but for its own head's part of a row, and
    of what it gets from the row's values that part counts."""
    scale = query.shape[-1] ** -0.5
    if (n := layer.layout.side_by_side) == 1:
        return attend(query[:, 0], layer, length, scale)[:, None]
    slots, _, kv_heads, group, head_dim = query.shape
    own = jnp.eye(n, dtype=query.dtype)[:, None, :, None]
    apart = query.reshape(slots, kv_heads // n, n, group, 1, head_dim)
    wide = (apart * own).reshape(slots, kv_heads // n, n * group, n * head_dim)
    mixed = attend(wide, layer, length, scale).reshape(slots, kv_heads // n, n, group, n, head_dim)
    return (mixed * own).sum(4).reshape(query.shape)


def _xla(query: jax.Array, layer: LayerCache, length: jax.Array, scale: float) -> jax.Array:
    """Of queries [slots, heads, group, head_dim]."""
    keys = "bkhs" if layer.layout.transposed else "bksh"
    scores = jnp.einsum(f"bkgh,{keys}->bkgs", query, layer.key, preferred_element_type=jnp.float32) * scale
    mask = (jnp.arange(scores.shape[-1]) < jnp.maximum(length, 1)[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(layer.value.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, layer.value)


def _paged(query: jax.Array, layer: LayerCache, length: jax.Array, scale: float) -> jax.Array:
    """As `_xla`."""
    slots, heads, group, head_dim = query.shape
    # Each key head of each slot is a sequence of its own for the kernel: so the cache is its array of pages as it lies.
    rows, room = slots * heads, layer.value.shape[2]
    page = _page(room)
    pages = lambda x: x.reshape(1, rows * room // page, page, head_dim)
    mixed = paged_attention(
        # In float32 from here on, as the kernel computes: scaling must not round.
        query.reshape(rows, group, head_dim).astype(jnp.float32) * scale,
        pages(layer.key),
        pages(layer.value),
        jnp.repeat(length, heads),
        jnp.arange(rows * room // page, dtype=jnp.int32).reshape(rows, room // page),
        pages_per_compute_block=1,
        # A chip whose two cores make one device shares out the sequences; with one core this must be left out.
        megacore_mode="batch" if _cores() == 2 and rows % 2 == 0 else None,
    )
    return mixed.astype(query.dtype).reshape(query.shape)


def _page(room: int) -> int:
    """Length of a page: the largest divisor of a slot's room that is not above `_PAGE`."""
    return next(size for size in range(min(room, _PAGE), 0, -1) if room % size == 0)


def _cores() -> int:
    """Cores of a device of the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.abstract_device.num_cores or 1

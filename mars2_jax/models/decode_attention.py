"""Attention of one new token a slot over the slot's cache, by one of three implementations.

- "xla": plain matmuls and a softmax over the whole cache, whatever a slot's length.
- "xla_cpu": the same; its keys are stored as XLA's CPU backend reads them fastest, see `models.cache.LayerCache`.
- "paged": the Pallas kernel for TPU that JAX ships. It reads as much of each slot as the slot is long.

The kernel was made for sequences that are scattered over pages. Here every slot has its own fixed part of one array, so
the table of pages is a constant, a page may be large, and nothing allocates.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mars2_jax.errors import ConfigError
from mars2_jax.models.cache import LayerCache
from mars2_jax.parallel.mesh import partition_spec

__all__ = ["choose_decode_attention", "decode_attention"]

_LANES = 128
"""The kernel moves whole vectors of this many numbers."""

_PAGE = 512
"""Longest page, in entries: what the kernel reads of one head at a time. Shorter ones leave it waiting for memory
between pages, longer ones make it read more beyond a slot's end."""


def choose_decode_attention(
    name: str, *, platform: str, dtype: Any, head_dim: int, key: str = "rollout.attention"
) -> str:
    """The implementation to use: the one asked for, or for "auto" the fastest that runs.

    Args:
      name: "auto", "xla" or "paged".
      platform: "cpu", "cuda", "rocm" or "tpu": of the devices that will run it, see `parallel.mesh.platform`.
      dtype: type of queries, keys and values.
      head_dim: their last axis.
      key: where `name` comes from, for the message.

    Returns:
      "xla_cpu", "xla" or "paged".

    Raises:
      ConfigError: the one asked for cannot run there; says why.
    """
    obstacle = _paged_obstacle(platform, dtype, head_dim)
    if name == "paged" and obstacle is not None:
        raise ConfigError(f"config.{key} is {name!r}, but {obstacle}: set it to 'auto' or 'xla'")
    if name == "paged" or (name == "auto" and obstacle is None):
        return "paged"
    return "xla_cpu" if platform == "cpu" else "xla"


def _paged_obstacle(platform: str, dtype: Any, head_dim: int) -> str | None:
    if platform != "tpu":
        return f"the paged kernel runs on TPUs only, and the mesh is of {platform} devices"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the paged kernel rounds keys and values to bfloat16, and the model's dtype is {jnp.dtype(dtype).name}"
    if head_dim % _LANES:
        return f"the paged kernel takes a head_dim that is a multiple of {_LANES}, and the model's is {head_dim}"
    return None


def decode_attention(
    query: Float[Array, "slots 1 kv_heads group head_dim"], layer: LayerCache, length: Int[Array, " slots"]
) -> Float[Array, "slots 1 kv_heads group head_dim"]:
    """Softmax attention of one token a slot over the first `length` entries of its cache, scaled by 1/sqrt(head_dim).

    Args:
      query: each key head serves `group` query heads.
      layer: the cache, of which the new token is an entry already.
      length: entries to see; 0 for an idle slot, whose result has no meaning (it is finite if the cache is).
    """
    if layer.attention == "paged":
        return _on_each_device(query, layer, length)
    q = query[:, 0]
    keys = "bkhs" if layer.transposed else "bksh"
    scores = jnp.einsum(f"bkgh,{keys}->bkgs", q, layer.key, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    mask = (jnp.arange(scores.shape[-1]) < jnp.maximum(length, 1)[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(layer.value.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, layer.value)[:, None]


def _on_each_device(query: jax.Array, layer: LayerCache, length: jax.Array) -> jax.Array:
    """The kernel, which knows nothing of a mesh: each device runs it on its own slots and key heads."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _paged(query, layer.key, layer.value, length, cores=1)
    # Slots or heads that the mesh does not divide are computed by every device.
    entries = partition_spec(mesh, ("rows", "kv_heads"), layer.key.shape[:2])
    queries = partition_spec(mesh, ("rows", None, "kv_heads"), query.shape[:3])
    rows = PartitionSpec(*entries[:1])
    cores = mesh.abstract_device.num_cores or 1

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array) -> jax.Array:
        return _paged(query, key, value, length, cores=cores)

    # The kernel's output does not say over which mesh axes it varies (check_vma).
    mapped = jax.shard_map(kernel, in_specs=(queries, entries, entries, rows), out_specs=queries, check_vma=False)
    return mapped(query, layer.key, layer.value, length)


def _paged(query: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array, *, cores: int) -> jax.Array:
    slots, _, kv_heads, group, head_dim = query.shape
    # Each key head of each slot is a sequence of its own for the kernel: so the cache is its array of pages as it lies.
    rows, room = slots * kv_heads, key.shape[2]
    page = _page(room)
    pages = lambda x: x.reshape(1, rows * room // page, page, head_dim)
    mixed = paged_attention(
        # In float32 from here on, as the kernel computes: scaling must not round.
        query.reshape(rows, group, head_dim).astype(jnp.float32) * head_dim**-0.5,
        pages(key),
        pages(value),
        jnp.repeat(length, kv_heads),
        jnp.arange(rows * room // page, dtype=jnp.int32).reshape(rows, room // page),
        pages_per_compute_block=1,
        # A chip whose two cores make one device shares out the sequences; with one core this must be left out.
        megacore_mode="batch" if cores == 2 and rows % 2 == 0 else None,
    )
    return mixed.astype(query.dtype).reshape(query.shape)


def _page(room: int) -> int:
    """Length of a page: the largest divisor of a slot's room that is not above `_PAGE`."""
    return next(size for size in range(min(room, _PAGE), 0, -1) if room % size == 0)

"""Causal attention over whole sequences, for training, scoring and prefill, by one of three implementations.

- "xla": plain matmuls and a softmax, everywhere, for a block of queries at a time: keys after the block are left out.
- "cudnn": NVIDIA's fused kernel, through `jax.nn.dot_product_attention`; float16 or bfloat16.
- "splash": the block-sparse Pallas kernel for TPU that JAX ships. Blocks above the diagonal are skipped.

The fused kernels know nothing of a mesh: they run through `jax.shard_map` over the one in context, each device on its
own rows and key heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mars2_jax.errors import ConfigError
from mars2_jax.models.attention import attention, causal_mask
from mars2_jax.parallel.mesh import partition_spec

__all__ = ["ATTENTION_OUTPUT", "causal_attention", "choose_attention", "shares_prefixes"]

ATTENTION_OUTPUT = "attention_output"
"""Name under which `jax.checkpoint` policies find what the fused kernels keep for their backward pass."""

_XLA_LEAST_BLOCK, _XLA_BLOCKS = 64, 16
"""Least size of a block of queries in tokens, and the largest number of blocks, each of which is compiled for itself.
On CPUs scores that stay in a core's cache count for more than the matmuls that are saved."""

_SPLASH_LANES = 128
"""The kernel's blocks are multiples of this many tokens."""

_SPLASH_BLOCK = 512
"""Tokens of a block, both of queries and of keys, where the sequence is that long."""


def choose_attention(name: str, *, platform: str, dtype: Any, head_dim: int, key: str = "model.attention") -> str:
    """The implementation to use: the one asked for, or for "auto" the fastest that runs.

    Args:
      name: "auto", "xla", "cudnn" or "splash".
      platform: "cpu", "cuda", "rocm" or "tpu": of the devices that will run it, see `parallel.mesh.platform`.
      dtype: type of queries, keys and values.
      head_dim: their last axis.
      key: where `name` comes from, for the message.

    Raises:
      ConfigError: the one asked for cannot run there; says why.
    """
    obstacles = {"cudnn": _cudnn_obstacle(platform, dtype, head_dim), "splash": _splash_obstacle(platform, head_dim)}
    if name == "auto":
        return next((kind for kind, obstacle in obstacles.items() if obstacle is None), "xla")
    if obstacle := obstacles.get(name):
        raise ConfigError(f"config.{key} is {name!r}, but {obstacle}: set it to 'auto' or 'xla'")
    return name


def _cudnn_obstacle(platform: str, dtype: Any, head_dim: int) -> str | None:
    if platform != "cuda":
        return f"cuDNN runs on NVIDIA GPUs only, and the mesh is of {platform} devices"
    if jnp.dtype(dtype).itemsize != 2:
        return f"cuDNN attention computes in bfloat16 or float16, and the model's dtype is {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > 128:
        return (
            f"cuDNN attention takes a head_dim that is a multiple of 8 and at most 128, and the model's is {head_dim}"
        )
    return None


def _splash_obstacle(platform: str, head_dim: int) -> str | None:
    if platform != "tpu":
        return f"the splash kernel runs on TPUs only, and the mesh is of {platform} devices"
    if head_dim % 16:
        return f"the splash kernel takes a head_dim that is a multiple of 16, and the model's is {head_dim}"
    return None


def causal_attention(
    query: Float[Array, "rows length kv_heads group head_dim"],
    key: Float[Array, "rows length kv_heads head_dim"],
    value: Float[Array, "rows length kv_heads head_dim"],
    segment_ids: Int[Array, "rows length"] | None = None,
    prefix_ids: Int[Array, "rows length"] | None = None,
    *,
    implementation: str = "xla",
) -> Float[Array, "rows length kv_heads group head_dim"]:
    """Softmax attention of every token over itself and the tokens before it, scaled by 1/sqrt(head_dim).

    Args:
      query: each key head serves `group` query heads.
      key: keys; padding goes at the end, where causality hides it.
      value: values.
      segment_ids: tokens see only tokens of their own segment; None is one segment a row.
      prefix_ids: a segment that each token sees as well, that of a prompt which several responses share; None is its
        own. Not with "splash".
      implementation: "xla", "cudnn" or "splash", see `choose_attention`.
    """
    if implementation == "xla":
        return _xla(query, key, value, segment_ids, prefix_ids)
    kernel = {"cudnn": _cudnn, "splash": _splash}[implementation]
    return _on_each_device(kernel, query, key, value, segment_ids, prefix_ids)


def shares_prefixes(implementation: str) -> bool:
    """Whether an implementation takes `prefix_ids`. The mask of the splash kernel compares one number a token."""
    return implementation != "splash"


def _xla(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, prefixes: jax.Array | None
) -> jax.Array:
    length = query.shape[1]
    block = _round_up(-(-length // _XLA_BLOCKS), _XLA_LEAST_BLOCK)
    mixed = []
    for start in range(0, length, block):
        end = min(start + block, length)
        mask = causal_mask(start, end, segments, prefixes)
        mixed.append(attention(query[:, start:end], key[:, :end], value[:, :end], mask))
    return jnp.concatenate(mixed, axis=1)


def _on_each_device(
    kernel: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, prefixes: Any
):
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(query, key, value, segments, prefixes)
    # Rows or heads that the mesh does not divide are computed by every device.
    split = partition_spec(mesh, ("rows", None, "kv_heads"), query.shape[:3])
    rows = PartitionSpec(*split[:1])
    # The kernels' outputs do not say over which mesh axes they vary (check_vma).
    mapped = jax.shard_map(kernel, in_specs=(split, split, split, rows, rows), out_specs=split, check_vma=False)
    return mapped(query, key, value, segments, prefixes)


def _cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, prefixes: jax.Array | None
) -> jax.Array:
    mask = None if segments is None else causal_mask(0, query.shape[1], segments, prefixes)[:, 0]
    heads = query.reshape(*query.shape[:2], -1, query.shape[-1])
    mixed = jax.nn.dot_product_attention(heads, key, value, mask=mask, is_causal=True, implementation="cudnn")
    return mixed.reshape(query.shape)


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    prefixes: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    if prefixes is not None:
        raise ValueError("splash attention knows no shared prefixes: see shares_prefixes")
    length, group = query.shape[1], query.shape[3]
    block = min(_SPLASH_BLOCK, _round_up(length, _SPLASH_LANES))
    padding = _round_up(length, block) - length
    heads = query.shape[2] * group

    def by_head(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], -1, x.shape[-1]).swapaxes(1, 2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)))

    # Of the local heads, and made anew in every trace: the kernel holds arrays, which would leak from one to another.
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((length + padding,) * 2)] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION_OUTPUT,
        interpret=interpret,
    )
    ids = None
    if segments is not None:
        # Padding is after every token, and whatever its segment, causality hides it.
        padded = jnp.pad(segments, ((0, 0), (0, padding)))
        ids = splash.SegmentIds(padded, padded)
    mixed = jax.vmap(kernel)(by_head(query * query.shape[-1] ** -0.5), by_head(key), by_head(value), ids)
    return mixed[:, :, :length].swapaxes(1, 2).reshape(query.shape)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""Rotary positions and grouped-query attention, as plain functions of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mars2_jax.models.config import ModelConfig

__all__ = ["attention", "causal_mask", "rope_frequencies", "rotate"]


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angular frequency of each rotary pair, float32[head_dim / 2] (RoFormer, arXiv 2104.09864, eq. 15).

    With Llama 3.1 scaling, wavelengths above `original_max_length / low_freq_factor` are stretched by `factor`, those
    below `original_max_length / high_freq_factor` are kept, and those between are interpolated.
    """
    pair = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    freq = (1.0 / (np.float32(config.rope_theta) ** pair)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_max_length * freq / (2 * np.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(ramp, 0.0, 1.0)
    return (kept * freq + (1 - kept) * freq / scaling.factor).astype(np.float32)


def rotate(
    x: Float[Array, "batch length *heads head_dim"],
    sin: Float[Array, "batch length half"],
    cos: Float[Array, "batch length half"],
) -> Float[Array, "batch length *heads head_dim"]:
    """Rotates the pairs (i, i + head_dim/2) of every head; computed in float32, returned in x's type."""
    extra = (1,) * (x.ndim - 3)
    sin = sin.reshape(sin.shape[:2] + extra + sin.shape[2:])
    cos = cos.reshape(cos.shape[:2] + extra + cos.shape[2:])
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)


def causal_mask(
    start: int,
    end: int,
    segment_ids: Int[Array, "batch length"] | None = None,
    prefix_ids: Int[Array, "batch length"] | None = None,
) -> Bool[Array, "batch_or_1 1 1 query key"]:
    """True where one of the tokens [start, end) (second to last axis) may see one of [0, end): itself or an earlier
    one, of the same segment or of the segment that is its prefix."""
    index = jnp.arange(end)
    mask = (index[start:, None] >= index[None, :])[None]
    if segment_ids is not None:
        key = segment_ids[:, None, :end]
        seen = segment_ids[:, start:end, None] == key
        if prefix_ids is not None:
            seen |= prefix_ids[:, start:end, None] == key
        mask = mask & seen
    return mask[:, None, None]


def attention(
    query: Float[Array, "batch query kv_heads group head_dim"],
    key: Float[Array, "batch key kv_heads head_dim"],
    value: Float[Array, "batch key kv_heads head_dim"],
    mask: Bool[Array, "batch_or_1 1 1 query key"],
) -> Float[Array, "batch query kv_heads group head_dim"]:
    """Softmax attention, scaled by 1/sqrt(head_dim); each key head serves `group` query heads.

    Scores and softmax are in float32 whatever the input type. The mask lets every query see at least one key.
    """
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("bqkgh,bskh->bkgqs", query, key, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    # Divided by their sum after the matmul, when there is one number a query and head_dim, and not one a key.
    mixed = jnp.einsum("bkgqs,bskh->bqkgh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    total = jnp.moveaxis(weights.sum(-1), 3, 1)
    return (mixed / total[..., None]).astype(value.dtype)

"""How the decoder's parameters lie in Hugging Face's tensors, in both directions.

A parameter is one tensor or, for the fused query, key and value projection, three. Fusing and reshaping never mix
rows of different key heads, so that any slice of a parameter needs only the like slice of its tensors: a device reads
its own part of a checkpoint and no more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

__all__ = ["assemble", "disassemble", "sources"]

_LAYER_SOURCES = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention.qkv": "self_attn.{}_proj.weight",
    "attention.qkv_bias": "self_attn.{}_proj.bias",
    "attention.query_norm.scale": "self_attn.q_norm.weight",
    "attention.key_norm.scale": "self_attn.k_norm.weight",
    "attention.out": "self_attn.o_proj.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}
_TOP_SOURCES = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
}


def _fused(name: str) -> bool:
    return name.endswith(("attention.qkv", "attention.qkv_bias"))


def sources(name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The tensors of a parameter, in order, with their shapes.

    Args:
      name: dotted path of the parameter in the decoder, such as "blocks.0.attention.qkv".
      shape: its shape.
    """
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None:
        return {_TOP_SOURCES[name]: tuple(shape)}
    source = f"model.layers.{match[1]}.{_LAYER_SOURCES[match[2]]}"
    if _fused(name):
        k, slots, h, *tail = shape
        return {source.format(p): (k * n * h, *tail) for p, n in (("q", slots - 2), ("k", 1), ("v", 1))}
    if name.endswith("attention.out"):
        return {source: (shape[0], int(np.prod(shape[1:])))}
    return {source: tuple(shape)}


def assemble(
    name: str, shape: Sequence[int], tensors: Sequence[np.ndarray], index: tuple[slice, ...] = ()
) -> np.ndarray:
    """The slice `index` of a parameter out of its whole tensors, of which only the like slices are touched.

    Args:
      name, shape: as of `sources`.
      tensors: its tensors, in the order of `sources`; best lazy ones.
      index: a slice a dimension, step 1; () is all of it.
    """
    full = tuple(slice(0, n) for n in shape)
    index = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True)) if index else full
    if _fused(name):
        heads, slots, dims, *tail = index
        k, h = heads.stop - heads.start, shape[2]
        parts = []
        for tensor, n in zip(tensors, (shape[1] - 2, 1, 1), strict=True):
            part = tensor[(slice(heads.start * n * h, heads.stop * n * h), *tail)]
            parts.append(part.reshape((k, n, h) + part.shape[1:]))
        return np.concatenate(parts, axis=1)[:, slots, dims]
    if name.endswith("attention.out"):
        rows, heads, group, dims = index
        width = shape[2] * shape[3]
        part = tensors[0][rows, heads.start * width : heads.stop * width]
        return part.reshape(len(part), -1, *shape[2:])[:, :, group, dims]
    return tensors[0][index]


def disassemble(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A whole parameter as Hugging Face's tensors: the inverse of `assemble`."""
    shapes = sources(name, array.shape)
    if _fused(name):
        group = array.shape[1] - 2
        pieces = [array[:, :group], array[:, group], array[:, group + 1]]
    else:
        pieces = [array]
    return {source: piece.reshape(shape) for (source, shape), piece in zip(shapes.items(), pieces, strict=True)}

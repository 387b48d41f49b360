"""Weights from a checkpoint into a decoder, each placed on the mesh as it is read."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mars2_jax.errors import ModelError
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.files import Checkpoint

__all__ = ["abstract_decoder", "load"]

Reader = Callable[[str], np.ndarray]


def abstract_decoder(
    config: ModelConfig, *, dtype=jnp.float32, param_dtype=jnp.float32, attention: str = "xla"
) -> Decoder:
    """A decoder whose parameters are shapes only; nothing is allocated. Arguments as in `Decoder`."""
    return nnx.eval_shape(
        lambda: Decoder(config, nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype, attention=attention)
    )


def load(
    checkpoint: Checkpoint, *, dtype=jnp.float32, param_dtype=jnp.float32, attention: str = "xla", shardings=None
) -> Decoder:
    """Reads every parameter of a decoder from a checkpoint, tensor by tensor.

    Args:
      checkpoint: an open checkpoint.
      dtype: type of activations and matmuls.
      param_dtype: type of the stored weights.
      attention: see `Decoder`.
      shardings: None, or a tree of shardings like the decoder's `nnx.state` (see `parallel.mesh.param_shardings`).

    Raises:
      ModelError: a parameter without a tensor, a tensor that no parameter used, a shape that does not fit; the names
        are listed.
    """
    config = checkpoint.config
    graphdef, abstract = nnx.split(abstract_decoder(config, dtype=dtype, param_dtype=param_dtype, attention=attention))
    used: set[str] = set()

    def read(name: str) -> np.ndarray:
        used.add(name)
        return checkpoint.read(name)

    flat = nnx.to_flat_state(abstract)
    needed = {name for path, _ in flat for name in _sources(_dotted(path))}
    if missing := sorted(needed - checkpoint.names):
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors: {_some(missing)}")
    placement = dict(nnx.to_flat_state(shardings)) if shardings is not None else {}
    leaves = []
    for path, variable in flat:
        name = _dotted(path)
        array = _assemble(name, config, read)
        if array.shape != variable.shape:
            raise ModelError(f"{name} has shape {array.shape} in the checkpoint, {variable.shape} in the model")
        # A copy always: on CPU `device_put` may keep the NumPy buffer, which the file format owns.
        array = np.array(array, dtype=param_dtype, order="C")
        sharding = placement[path].get_value() if placement else None
        leaves.append((path, variable.replace(jax.device_put(array, sharding))))
    unused = checkpoint.names - used - _ignorable(config, checkpoint.names)
    if unused:
        raise ModelError(f"the checkpoint holds {len(unused)} tensors that the model has no place for: {_some(unused)}")
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def _dotted(path: tuple) -> str:
    return ".".join(str(p) for p in path)


def _some(names) -> str:
    names = sorted(names)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _ignorable(config: ModelConfig, names: frozenset[str]) -> set[str]:
    """Tensors that carry nothing of their own: rotary tables, and the copy of a tied head."""
    tables = {n for n in names if n.endswith("rotary_emb.inv_freq")}
    return tables | ({"lm_head.weight"} if config.tied_embeddings else set())


def _projections(kind: str) -> list[str]:
    return [f"self_attn.{p}_proj.{kind}" for p in "qkv"]


_LAYER_SOURCES = {
    "attention_norm.scale": ["input_layernorm.weight"],
    "attention.qkv": _projections("weight"),
    "attention.qkv_bias": _projections("bias"),
    "attention.query_norm.scale": ["self_attn.q_norm.weight"],
    "attention.key_norm.scale": ["self_attn.k_norm.weight"],
    "attention.out": ["self_attn.o_proj.weight"],
    "mlp_norm.scale": ["post_attention_layernorm.weight"],
    "mlp.gate": ["mlp.gate_proj.weight"],
    "mlp.up": ["mlp.up_proj.weight"],
    "mlp.down": ["mlp.down_proj.weight"],
}
_TOP_SOURCES = {
    "embedding": ["model.embed_tokens.weight"],
    "norm.scale": ["model.norm.weight"],
    "head": ["lm_head.weight"],
}


def _sources(name: str) -> list[str]:
    """Hugging Face names of the tensors that make up the parameter `name`."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None:
        return _TOP_SOURCES[name]
    return [f"model.layers.{match[1]}.{s}" for s in _LAYER_SOURCES[match[2]]]


def _assemble(name: str, config: ModelConfig, read: Reader) -> np.ndarray:
    """The parameter `name` in this project's layout; Hugging Face stores matrices as [out, in]."""
    tensors = [read(source) for source in _sources(name)]
    k, g, h = config.kv_heads, config.group, config.head_dim
    if name.endswith(("attention.qkv", "attention.qkv_bias")):
        tail = tensors[0].shape[1:]
        heads = [t.reshape((k, n, h) + tail) for t, n in zip(tensors, (g, 1, 1), strict=True)]
        return np.concatenate(heads, axis=1)
    if name.endswith("attention.out"):
        return tensors[0].reshape(-1, k, g, h)
    return tensors[0]

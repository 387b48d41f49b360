"""Weights from a checkpoint into a decoder, each placed on the mesh as it is read."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mars2_jax.errors import ModelError
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.files import Checkpoint
from mars2_jax.models.layout import assemble, sources
from mars2_jax.models.lora import Lora

__all__ = ["abstract_decoder", "check_tensors", "load", "parameter_name"]


def abstract_decoder(
    config: ModelConfig,
    *,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    attention: str = "xla",
    lora: Lora | None = None,
) -> Decoder:
    """A decoder whose parameters are shapes only; nothing is allocated. Arguments as in `Decoder`."""
    how = dict(dtype=dtype, param_dtype=param_dtype, attention=attention, lora=lora)
    return nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), **how))


def parameter_name(path: Iterable) -> str:
    """The dotted name of a parameter from its path in the decoder's state, such as "blocks.0.attention.qkv"."""
    return ".".join(str(p) for p in path)


def check_tensors(checkpoint: Checkpoint) -> None:
    """Sees that the checkpoint's tensors are those of its decoder, without reading any.

    Raises:
      ModelError: a parameter without a tensor, or a tensor that no parameter uses; the names are listed.
    """
    _check_tensors(checkpoint, nnx.to_flat_state(nnx.state(abstract_decoder(checkpoint.config))))


def _check_tensors(checkpoint: Checkpoint, flat) -> None:
    needed = {source for path, variable in flat for source in sources(parameter_name(path), variable.shape)}
    if missing := sorted(needed - checkpoint.names):
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors: {_some(missing)}")
    if unused := checkpoint.names - needed - _ignorable(checkpoint.config, checkpoint.names):
        raise ModelError(f"the checkpoint holds {len(unused)} tensors that the model has no place for: {_some(unused)}")


def load(
    checkpoint: Checkpoint, *, dtype=jnp.float32, param_dtype=jnp.float32, attention: str = "xla", shardings=None
) -> Decoder:
    """Reads every parameter of a decoder from a checkpoint, one after the other.

    With shardings, each device gets its slice straight from the file: of a safetensors checkpoint a host touches only
    the bytes that its devices need. The host holds at most one parameter at a time.

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
    flat = nnx.to_flat_state(abstract)
    _check_tensors(checkpoint, flat)
    placement = dict(nnx.to_flat_state(shardings)) if shardings is not None else {}
    loaded = {}
    # The largest first: what a parameter costs beyond its own size while it is read is then spent when little is there.
    for path, variable in sorted(flat, key=lambda item: -item[1].size):
        sharding = placement[path].get_value() if placement else None
        loaded[path] = variable.replace(_place(checkpoint, parameter_name(path), variable, sharding))
    return nnx.merge(graphdef, nnx.from_flat_state([(path, loaded[path]) for path, _ in flat]))


def _place(checkpoint: Checkpoint, name: str, like: jax.ShapeDtypeStruct, sharding) -> jax.Array:
    """One parameter on its devices."""
    wanted = sources(name, like.shape)
    tensors = [checkpoint.read(source) for source in wanted]
    for (source, shape), tensor in zip(wanted.items(), tensors, strict=True):
        if tensor.shape != shape:
            raise ModelError(f"{source} has shape {tensor.shape} in the checkpoint, {shape} in the model")
    parts: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        # JAX asks once for every device, also where several hold the same slice.
        if str(index) not in parts:
            # A copy always: on CPU a device may keep the NumPy buffer, which the file owns.
            parts[str(index)] = np.array(assemble(name, like.shape, tensors, index or ()), dtype=like.dtype, order="C")
        return parts[str(index)]

    if sharding is None:
        return jax.device_put(part(None))
    return jax.make_array_from_callback(like.shape, sharding, part)


def _some(names) -> str:
    names = sorted(names)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _ignorable(config: ModelConfig, names: frozenset[str]) -> set[str]:
    """Tensors that carry nothing of their own: rotary tables, and the copy of a tied head."""
    tables = {n for n in names if n.endswith("rotary_emb.inv_freq")}
    return tables | ({"lm_head.weight"} if config.tied_embeddings else set())

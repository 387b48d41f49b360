"""A decoder's weights to disk in Hugging Face layout, for `transformers`, vLLM and this program itself."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mars2_jax.errors import ModelError
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.layout import disassemble, sources
from mars2_jax.models.tensorfile import TensorSpec, write_tensors
from mars2_jax.models.tokenizer import ChatTokenizer
from mars2_jax.models.weights import parameter_name

__all__ = ["check_destination", "save_checkpoint"]


def check_destination(folder: pathlib.Path) -> None:
    """Sees that a checkpoint may be written to a folder: it is not there yet, or empty.

    Raises:
      ModelError: it holds something, or is a file.
    """
    try:
        free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    except OSError as e:
        raise ModelError(f"{folder} cannot be reached ({e.strerror}): choose another folder") from e
    if not free:
        raise ModelError(f"{folder} exists and is not empty: choose another folder, nothing is overwritten")


def save_checkpoint(
    folder: pathlib.Path,
    params: nnx.State,
    config: ModelConfig,
    tokenizer: ChatTokenizer,
    *,
    dtype=jnp.float32,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a checkpoint: weights, `config.json`, `generation_config.json`, tokenizer and chat template.

    The folder appears when all is there. The host holds one parameter at a time. Of a bfloat16 checkpoint that was read
    as float32, `dtype=bfloat16` gives back the very bits.

    Args:
      folder: where to; its parents are made.
      params: the decoder's `nnx.state`, all of it within reach of this process.
      config: the decoder's shape.
      tokenizer: the model's.
      dtype: float32 or bfloat16.
      max_shard_bytes: from this size on the weights are spread over several files, of at most this size each unless a
        single tensor is larger.

    Raises:
      ModelError: the folder is not empty or cannot be written. Nothing is left behind but its parents.
    """
    folder = pathlib.Path(os.path.expanduser(folder)).resolve()  # "." has no name beside which to write
    check_destination(folder)
    settings = _settings(config, tokenizer, np.dtype(dtype))
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        # Of an export that was killed.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            for name, content in settings.items():
                (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            _write_tokenizer(partial, tokenizer)
            _write_weights(partial, params, np.dtype(dtype), max_shard_bytes)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as e:
        raise ModelError(f"cannot write a checkpoint to {folder} ({e.strerror or e}): choose another folder") from e


def _settings(config: ModelConfig, tokenizer: ChatTokenizer, dtype: np.dtype) -> dict[str, dict[str, Any]]:
    """The JSON files of a checkpoint by name."""
    inner = tokenizer.tokenizer
    special = {f"{kind}_token_id": getattr(inner, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    special = {key: value for key, value in special.items() if value is not None}
    return {
        # Both names of the number type: transformers 5 writes `dtype`, older readers look for `torch_dtype`.
        "config.json": {**config.to_hf(), **special, "dtype": dtype.name, "torch_dtype": dtype.name},
        # All that ends a response, where `config.json` has room for one token.
        "generation_config.json": {**special, "eos_token_id": list(tokenizer.stop_ids)},
    }


def _write_tokenizer(folder: pathlib.Path, tokenizer: ChatTokenizer) -> None:
    tokenizer.tokenizer.save_pretrained(folder)
    # transformers 5 writes the new name of its general class; the old one is known before and after.
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: pathlib.Path, params: nnx.State, dtype: np.dtype, max_shard_bytes: int) -> None:
    parameters = {parameter_name(path): variable[...] for path, variable in nnx.to_flat_state(params)}
    shards = _shards(parameters, dtype, max_shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    where: dict[str, str] = {}
    size = 0
    for name, shard in zip(names, shards, strict=True):
        specs = {source: spec for tensors in shard.values() for source, spec in tensors.items()}
        write_tensors(folder / name, specs, _tensors(parameters, shard, dtype))
        where |= dict.fromkeys(specs, name)
        size += sum(spec.nbytes for spec in specs.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(
    parameters: Mapping[str, jax.Array], dtype: np.dtype, max_bytes: int
) -> list[dict[str, dict[str, TensorSpec]]]:
    """The files to write: of each its parameters, of each of those its tensors. A parameter lies in one file."""
    shards: list[dict[str, dict[str, TensorSpec]]] = [{}]
    filled = 0
    for name, array in parameters.items():
        tensors = {source: TensorSpec(dtype, shape) for source, shape in sources(name, array.shape).items()}
        size = sum(spec.nbytes for spec in tensors.values())
        if shards[-1] and filled + size > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensors
        filled += size
    return shards


def _tensors(
    parameters: Mapping[str, jax.Array], names: Mapping[str, Any], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
        yield from disassemble(name, np.asarray(parameters[name]).astype(dtype)).items()

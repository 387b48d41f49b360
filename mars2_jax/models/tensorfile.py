"""The safetensors file format, read lazily and written tensor by tensor.

The format (https://huggingface.co/docs/safetensors) is 8 bytes of header length, a JSON header of name, type, shape and
offsets, and the tensors' little-endian bytes. The `safetensors` package has no way to it that suits large models in
JAX: its NumPy reader has no bfloat16, its JAX reader puts every whole tensor on the first device, both keep all of the
file mapped (so that a loaded model counts twice against the host's memory), and its writer wants all tensors at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np

from mars2_jax.errors import ModelError

__all__ = ["TensorFile", "TensorSpec", "write_tensors"]

_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# The longest header that the `safetensors` package accepts.
_MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """The tensors of one file, by name. Nothing is read but the header until an array is used.

    Attributes:
      specs: type and shape of every tensor.

    Raises:
      ModelError: no such file, damaged, cut short, or of number types that are no weights' (quantized ones).
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.specs: dict[str, TensorSpec] = {}
        self._offsets: dict[str, int] = {}
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, _MAX_HEADER):
                    raise ValueError("it has no safetensors header")
                header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    self._add(name, entry, base=8 + length, size=size)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise ModelError(f"cannot read {path}: {e}; download the checkpoint again") from e

    def _add(self, name: str, entry: Mapping, *, base: int, size: int) -> None:
        if entry["dtype"] not in _DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name!r} has the type {entry['dtype']}, which is not supported (supported: "
                f"{', '.join(_DTYPES)}); take a checkpoint that is not quantized"
            )
        spec = TensorSpec(_DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"]))
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= size - base or end - start != spec.nbytes:
            raise ValueError(f"tensor {name!r} lies outside the file or has another size than its shape")
        self.specs[name], self._offsets[name] = spec, base + start

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the file: bytes are read where the array is used, and its memory goes with it."""
        spec = self.specs[name]
        if spec.nbytes == 0:
            return np.zeros(spec.shape, spec.dtype)
        return np.memmap(self.path, spec.dtype, "r", offset=self._offsets[name], shape=spec.shape)


def write_tensors(
    path: pathlib.Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes a file from tensors that come one by one, in the order of `specs`.

    Raises:
      ValueError: a tensor is not the next of `specs`, or of another type or shape.
      OSError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # which transformers asks for
    offset = 0
    for name, spec in specs.items():
        ends = [offset, offset + spec.nbytes]
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, spec), (given, array) in zip(specs.items(), tensors, strict=True):
            if (name, spec) != (given, TensorSpec(array.dtype, array.shape)):
                raise ValueError(f"expected {name} {spec}, got {given} {array.dtype}{list(array.shape)}")
            np.ascontiguousarray(array).view(np.uint8).reshape(-1).tofile(file)
        file.flush()
        os.fsync(file.fileno())

"""Against the safetensors package: what one writes the other reads."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from mars2_jax.errors import ModelError
from mars2_jax.models.tensorfile import TensorFile, TensorSpec, write_tensors

ARRAYS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4) / 7,
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "brain": np.asarray(jnp.arange(5, dtype=jnp.bfloat16) / 3),
    "scalar": np.float32(2.5).reshape(()),
    "none": np.zeros((0, 4), np.float32),
}


def assert_same(got, expected):
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes() and got.shape == expected.shape


def test_reads_what_the_package_writes(tmp_path):
    save_file({k: jnp.asarray(v) for k, v in ARRAYS.items()}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.specs.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert_same(np.asarray(file.read(name)), array)
    with pytest.raises(ValueError, match="read-only"):
        file.read("matrix")[0] = 1
    # A slice is a view too: nothing else is read.
    assert isinstance(file.read("matrix")[1:, :2], np.memmap)


def test_the_package_reads_what_is_written(tmp_path):
    specs = {name: TensorSpec(a.dtype, a.shape) for name, a in ARRAYS.items()}
    write_tensors(tmp_path / "a.safetensors", specs, ARRAYS.items())
    for name, array in load_file(tmp_path / "a.safetensors").items():
        assert_same(np.asarray(array), ARRAYS[name])


def test_another_tensor_than_was_declared_is_refused(tmp_path):
    specs = {"x": TensorSpec(np.dtype(np.float32), (3,))}
    for name, array in (("y", np.zeros(3, np.float32)), ("x", np.zeros(3, np.float16)), ("x", np.zeros(4, np.float32))):
        with pytest.raises(ValueError, match="expected x"):
            write_tensors(tmp_path / "a.safetensors", specs, [(name, array)])


def damaged(header, data=b"\0" * 16) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors header"),
        (b"\xff" * 64, "no safetensors header"),
        ((9).to_bytes(8, "little") + b"{not json}", "cannot read"),
        (damaged({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}), "lies outside"),
        (damaged({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}), "another size"),
        (damaged({"x": {"dtype": "F32", "shape": [4]}}), "data_offsets"),
        (
            damaged({"x": {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}}),
            "F8_E4M3, which is not supported",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        TensorFile(path)

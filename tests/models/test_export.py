"""Checkpoints that are written: bit for bit what was read, all or nothing."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import load_file, save_file

from mars2_jax.errors import ModelError
from mars2_jax.models import export
from mars2_jax.models.config import Llama3Rope, ModelConfig
from mars2_jax.models.export import save_checkpoint
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.tokenizer import load_tokenizer
from mars2_jax.models.weights import load
from tests.models.test_tokenizer import PLAIN, chat_tokenizer
from tests.models.tiny import TINY, random_params

ROPE = Llama3Rope(8.0, 1.0, 4.0, 32)
CONFIGS = {
    "llama": TINY,
    "llama3": dataclasses.replace(TINY, rope_scaling=ROPE, rope_theta=5e5, tied_embeddings=False),
    "mistral": dataclasses.replace(TINY, model_type="mistral", tied_embeddings=False, max_length=128),
    "qwen2": dataclasses.replace(TINY, model_type="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(TINY, model_type="qwen3", qk_norm=True, head_dim=16, norm_eps=1e-6),
}


def write(folder, config=TINY, seed=0, **options):
    params = random_params(config, seed)
    save_checkpoint(folder, params, config, chat_tokenizer(PLAIN), **options)
    return params


def assert_same_weights(decoder, params):
    a, b = nnx.to_flat_state(nnx.state(decoder)), nnx.to_flat_state(params)
    assert [path for path, _ in a] == [path for path, _ in b]
    for (_, x), (_, y) in zip(a, b, strict=True):
        assert np.asarray(x[...]).tobytes() == np.asarray(y[...]).tobytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_written_is_read_back(tmp_path, name):
    params = write(tmp_path / "out", CONFIGS[name])
    with open_checkpoint(str(tmp_path / "out")) as checkpoint:
        assert checkpoint.config == CONFIGS[name] == ModelConfig.from_hf(tmp_path / "out")
        assert_same_weights(load(checkpoint), params)
        tokenizer = load_tokenizer(checkpoint, str(tmp_path / "out"))
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "é x"}])) == "é x"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_that_is_read_and_written_has_the_same_tensors(tmp_path, dtype):
    write(tmp_path / "first", CONFIGS["qwen2"], dtype=dtype)
    with open_checkpoint(str(tmp_path / "first")) as checkpoint:
        params = nnx.state(load(checkpoint))  # float32, whatever the file has
    save_checkpoint(tmp_path / "second", params, CONFIGS["qwen2"], chat_tokenizer(PLAIN), dtype=dtype)
    first, second = (load_file(tmp_path / f / "model.safetensors") for f in ("first", "second"))
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype == dtype
        assert np.asarray(first[name]).tobytes() == np.asarray(second[name]).tobytes()
    assert json.loads((tmp_path / "second" / "config.json").read_text())["torch_dtype"] == dtype


def test_shards_and_their_index(tmp_path):
    limit = 20_000
    params = write(tmp_path / "out", CONFIGS["llama3"], max_shard_bytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    contents = {file.name: load_file(file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in contents.items() for name in tensors}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in contents.values()]
    assert index["metadata"]["total_size"] == sum(sizes) == 4 * CONFIGS["llama3"].parameters
    assert max(sizes) <= limit
    with open_checkpoint(str(tmp_path / "out")) as checkpoint:
        assert_same_weights(load(checkpoint), params)


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("mine")
    write(tmp_path / "out")  # an empty folder is free to take
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    for name in ("out", "file"):
        with pytest.raises(ModelError, match="not empty: choose another folder"):
            write(tmp_path / name, seed=1)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_tensors", full)
    with pytest.raises(ModelError, match=r"cannot write .*No space left on device"):
        write(tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_killed_export_is_no_obstacle(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    write(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_decoder_of_no_known_family_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no llama model has qkv_bias=True"):
        write(tmp_path / "out", dataclasses.replace(TINY, qkv_bias=True))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_with_other_tensors_is_refused(tmp_path):
    write(tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)

    def refused(changed, message):
        save_file(changed, path)
        with open_checkpoint(str(tmp_path / "out")) as checkpoint, pytest.raises(ModelError, match=message):
            load(checkpoint)

    refused({**tensors, "model.layers.0.extra.weight": jnp.zeros(3)}, r"no place for: .*extra")
    less = {k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}
    refused(less, r"lacks 1 tensors: .*1.mlp.up")
    refused(tensors | {"model.norm.weight": jnp.zeros(5)}, r"model.norm.weight has shape \(5,\) .*, \(32,\)")

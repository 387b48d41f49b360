"""A checkpoint onto eight devices: each gets its own slice, all together the same weights."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
from flax import nnx

from mars2_jax.models.export import save_checkpoint
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.weights import load
from mars2_jax.parallel.mesh import make_mesh, param_shardings
from tests.models.test_tokenizer import PLAIN, chat_tokenizer
from tests.models.tiny import TINY, random_params

ROOT = pathlib.Path(__file__).resolve().parents[2]


def on_eight_devices(folder: str) -> None:
    """Runs in a process of its own, where eight devices are forced."""
    with open_checkpoint(folder) as checkpoint:
        whole = nnx.state(load(checkpoint))
        mesh = make_mesh(dict(data=2, fsdp=2, tensor=2))
        parts = nnx.state(load(checkpoint, shardings=param_shardings(mesh, whole)))
    split = 0
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert len(b.addressable_shards) == 8
        for shard in b.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(a)[shard.index])
        split += b.addressable_shards[0].data.size < a.size
    assert split == len(jax.tree.leaves(whole))


def test_every_device_gets_its_slice(tmp_path):
    save_checkpoint(tmp_path / "m", random_params(), TINY, chat_tokenizer(PLAIN))
    code = f"from tests.models.test_sharded_loading import on_eight_devices; on_eight_devices({str(tmp_path / 'm')!r})"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, timeout=250)

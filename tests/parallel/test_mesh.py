import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console

from mars2_jax.errors import ConfigError
from mars2_jax.models.weights import abstract_decoder
from mars2_jax.parallel.mesh import make_mesh, param_shardings
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.trainer import train
from tests.models.tiny import TINY
from tests.training.tiny_team import tiny_config

ROOT = pathlib.Path(__file__).resolve().parents[2]


def mesh_config(folder: pathlib.Path) -> ConfigDict:
    """One step of the tiny team, without evaluation, with rows that eight devices can share."""
    config = tiny_config(folder)
    config.learning.micro_batch_size = config.learning.train_batch_size = 8
    config.training.update(steps=1, evaluate=False)
    # Large steps would blow rounding up: Adam's first step is the sign of the gradient.
    for agent in config.agents.values():
        agent.optimizer.update(learning_rate=1e-4, eps=1e-3)
    return config


def weights(workdir) -> dict[str, np.ndarray]:
    with Checkpointer(workdir, read_only=True) as checkpointer:
        state = checkpointer.restore().state
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(state)}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    config = mesh_config(folder)
    train(FrozenConfigDict(config), str(folder / "one"), Console(file=sys.stderr))
    return folder, weights(folder / "one")


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2)])
def test_a_step_on_eight_devices_equals_one_on_one(one_device, tmp_path, sizes):
    folder, expected = one_device
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.eight_devices", str(folder), str(tmp_path), *map(str, sizes)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    _, fsdp, tensor = sizes
    assert told["devices"] == 8
    (whole, part), (up, up_part) = told["shards"]["qkv"], told["shards"]["up"]
    assert part == [whole[0] // tensor, whole[1], whole[2], whole[3] // fsdp]
    assert up_part == [up[0] // tensor, up[1] // fsdp]
    got = np.load(tmp_path / "state.npz")
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=name)


def test_axes_that_do_not_divide_are_replicated():
    mesh = AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    odd = dataclasses.replace(TINY, vocab_size=63, kv_heads=1)
    _, params = nnx.split(abstract_decoder(odd))
    shardings = param_shardings(mesh, params)
    assert shardings["embedding"].get_value().spec == PartitionSpec(None, "fsdp")
    qkv = shardings["blocks"][0]["attention"]["qkv"].get_value()
    assert qkv.spec == PartitionSpec(None, None, None, "fsdp")
    assert shardings["blocks"][0]["mlp"]["up"].get_value().spec == PartitionSpec("tensor", "fsdp")


def test_axes_are_automatic():
    """`jax.make_mesh` would make them explicit, under which looking up rows of a sharded embedding fails."""
    mesh = make_mesh(dict(data=1, fsdp=1, tensor=1))
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(data=-1, fsdp=-1, tensor=1), "at most one of them -1"),
        (dict(data=0, fsdp=1, tensor=1), "positive"),
        (dict(data=64, fsdp=1, tensor=1), "does not cover"),
        (dict(data=64, fsdp=-1, tensor=1), "does not cover"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(sizes)

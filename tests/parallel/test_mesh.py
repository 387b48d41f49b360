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
from mars2_jax.parallel.mesh import constrain, make_mesh, param_shardings, partition_spec, rollout_mesh
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


def on_eight_devices(module: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a module of this folder in a process that has eight devices."""
    # What is compiled here runs once or twice: the time goes into compilation.
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {quick}"
    done = subprocess.run(
        [sys.executable, "-m", f"tests.parallel.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_training_step_on_eight_devices_equals_one_on_one(one_device, tmp_path):
    folder, expected = one_device
    on_eight_devices("team_on_mesh", str(folder), str(tmp_path), "2", "2", "2")
    got = np.load(tmp_path / "state.npz")
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=name)


MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]


@pytest.fixture(scope="module")
def measured():
    """What `eight_devices` says of each mesh, and what XLA had to complain about it."""
    done = on_eight_devices("eight_devices", *(",".join(map(str, sizes)) for sizes in MESHES))
    complaints = done.stderr.split("--- mesh ")[1:]
    lines = map(json.loads, done.stdout.splitlines())
    return {sizes: (told, said) for sizes, told, said in zip(MESHES, lines, complaints, strict=True)}


@pytest.mark.parametrize("sizes", MESHES)
def test_loss_and_gradients_equal_those_of_one_device(measured, sizes):
    told, _ = measured[sizes]
    assert told["same_weights"]
    assert told["scale"] > 1e-2
    assert told["loss"] < 1e-5 and told["gradient"] < 1e-5 and told["scores"] < 1e-5


@pytest.mark.parametrize("sizes", MESHES)
def test_decoding_equals_that_of_one_device(measured, sizes):
    told, _ = measured[sizes]
    assert told["same_tokens"]
    assert told["logprobs"] < 1e-5


@pytest.mark.parametrize("sizes", MESHES)
def test_weights_optimizer_and_cache_are_really_split(measured, sizes):
    _, fsdp, tensor = sizes
    parts = measured[sizes][0]["parts"]
    for name, cut in {
        "qkv": [tensor, 1, 1, fsdp],
        "up": [tensor, fsdp],
        "moment": [tensor, fsdp],
        "embedding": [tensor, fsdp],
        "cache": [sizes[0] * fsdp, tensor, 1, 1],
    }.items():
        whole, part = parts[name]
        assert part == [n // k for n, k in zip(whole, cut, strict=True)], name


@pytest.mark.parametrize("sizes", MESHES)
def test_nothing_moves_and_nothing_is_compiled_twice(measured, sizes):
    told, complaints = measured[sizes]
    assert told["stays"]
    assert told["update_programs"] == 1 and told["new_programs"] == 0
    # XLA's word for an array that it copies to every device because it cannot get from one sharding to the next.
    assert "full rematerialization" not in complaints


@pytest.fixture(scope="module")
def optimizers():
    return json.loads(on_eight_devices("eight_devices", "optimizers").stdout)


# On the mesh 2, 2, 2: embedding [vocab, embed] is split by tensor and fsdp, out [embed, kv_heads, group, head_dim] by
# fsdp and tensor, up [mlp, embed] by tensor and fsdp. A moment lies as its weight does, without the axis that it lacks.
PARTS = {
    "adafactor": {
        "v embedding": [[64, 128], [32, 64]],  # no two axes of 128
        "v out": [[128, 4, 2, 8], [64, 2, 2, 8]],
        "v_row up": [[128], [64]],
        "v_col up": [[256], [128]],
    },
    "muon": {
        "mu up": [[256, 128], [128, 64]],
        "mu out": [[128, 4, 2, 8], [64, 2, 2, 8]],
        "mu embedding": [[64, 128], [32, 64]],
        "nu embedding": [[64, 128], [32, 64]],
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_other_optimizers_and_packed_rows_on_a_mesh(optimizers, name):
    told = optimizers[name]
    assert told["stays"] and told["gap"] < 1e-5
    assert told["parts"] == PARTS[name]


def test_two_axes_of_an_array_on_one_mesh_axis_are_an_error():
    mesh = AbstractMesh((1, 1, 2), ("data", "fsdp", "tensor"))
    with pytest.raises(ValueError, match="'kv_heads' and 'mlp' of one array .* both lie on the mesh axis 'tensor'"):
        partition_spec(mesh, ("kv_heads", None, "mlp"), (2, 3, 4))
    with pytest.raises(ValueError, match="'rows' and 'embed' of one array"):
        partition_spec(mesh, ("rows", "embed"), (2, 4))
    with pytest.raises(ValueError, match="'heads' is not in the rule table"):
        partition_spec(mesh, ("heads",), (2,))
    bad = nnx.State({"weight": nnx.Param(jax.ShapeDtypeStruct((4, 4), np.float32), axes=("mlp", "vocab"))})
    with pytest.raises(ValueError, match="change one of them in parallel.mesh.RULES"):
        param_shardings(mesh, bad)


def test_rows_are_split_over_as_many_mesh_axes_as_divide_them():
    mesh = AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
    spec = lambda n: partition_spec(mesh, ("rows", "kv_heads", None), (n, 4, 8))
    assert spec(16) == PartitionSpec(("data", "fsdp"))
    assert spec(4) == PartitionSpec("data")
    assert spec(3) == PartitionSpec()


def test_without_a_mesh_nothing_is_constrained():
    x = np.ones((4, 4))
    assert constrain(x, "rows", None) is x


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


def test_weights_are_handed_to_another_mesh_without_the_host():
    """From fsdp=8 to data=2, tensor=4, under `jax.transfer_guard`; then decoding there."""
    done = on_eight_devices("handover_on_mesh")
    told = json.loads(done.stdout)
    assert told["same"] and told["placed"]
    # MLP rows in four parts, and whole over the rest; the cache by slots over data, by heads over tensor.
    assert told["up"] == [16, 32]
    assert told["cache"] == [4, 1, 8, 64]
    assert told["same_tokens"] and told["logprobs"] < 1e-5
    int8 = told["int8"]
    assert int8["same"] and int8["placed"] and int8["up"] == [16, 32] and int8["up_dtype"] == "int8"
    assert "full rematerialization" not in done.stderr


def test_a_rollout_mesh_that_does_not_fit_is_refused():
    mesh = make_mesh(dict(data=1, fsdp=1, tensor=1))
    assert rollout_mesh(dict(data=0, fsdp=0, tensor=0), mesh) is mesh
    with pytest.raises(ConfigError, match=r"config\.rollout\.mesh .* does not cover 1 devices"):
        rollout_mesh(dict(data=2, fsdp=1, tensor=1), mesh)

"""Checkpoints: bit-exact, all or nothing under SIGKILL, damage found and passed over."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from mars2_jax.errors import ConfigError, DataError, StorageError
from mars2_jax.training.checkpoint import Checkpointer

REPOSITORY = Path(__file__).resolve().parents[2]


def random_bits(rng, shape, dtype):
    """Arrays of arbitrary bits, NaNs, infinities and denormals among them."""
    dtype = np.dtype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]


def state_of(seed):
    rng = np.random.default_rng(seed)
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(seed))
    weights = nnx.split(model)[1]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0, 1, 3)))
    _, optimizer_state = optimizer.update(weights, optimizer.init(weights), weights)
    arrays = {
        dtype: jnp.asarray(random_bits(rng, (5, 3), dtype))
        for dtype in ("float32", "bfloat16", "float16", "int32", "uint32", "int8")
    }
    return {
        "agents": {"coder": {"weights": weights, "optimizer": optimizer_state}},
        "arrays": arrays,
        "list": [jnp.asarray(rng.integers(0, 2, 7), bool), {"scalar": jnp.asarray(seed, jnp.int32)}],
        "numpy": rng.integers(-(2**62), 2**62, 4),
    }


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x, state
    )


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def test_round_trip_is_bit_exact_and_keeps_structure(tmp_path):
    state = state_of(0)
    meta = {"updates": {"coder": 3}, "name": "é", "list": [1, 2.5, None, True]}
    host = {
        "coder/tokens": np.arange(11, dtype=np.int32),
        "coder/logprobs": random_bits(np.random.default_rng(1), (11,), np.float32),
        "coder/empty": np.zeros((0, 3), np.float32),
        "problems": np.array(["a/1", "日本"]),
        "done": np.array([True, False]),
    }
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore(abstract(state)) is None
        checkpoints.save(1, state, meta, host)
    with Checkpointer(tmp_path) as checkpoints:
        step, restored, host_again, meta_again = checkpoints.restore(abstract(state))
        bare = checkpoints.restore()
    assert step == 1
    assert meta_again == meta
    assert_same_bits(restored, state)
    assert isinstance(restored["agents"]["coder"]["weights"], nnx.State)
    assert host_again.keys() == host.keys()
    assert_same_bits(host_again, host)
    assert_same_bits(bare.state["arrays"], state["arrays"])


def test_saved_arrays_may_be_donated_at_once(tmp_path):
    """On CPU a NumPy view of a JAX array is its very buffer; the writer must not see what an update makes of it."""
    update = jax.jit(lambda state: jax.tree.map(lambda x: x * 1.5 + 1, state), donate_argnums=0)
    rng = np.random.default_rng(0)
    original = {f"w{i}": rng.standard_normal(500_000, dtype=np.float32) for i in range(8)}
    state = update(jax.tree.map(jnp.asarray, original))
    expected = jax.tree.map(np.array, state)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(5):
            state = update(state)
        jax.block_until_ready(state)
        assert_same_bits(jax.tree.map(np.asarray, checkpoints.restore().state), expected)


def test_keeps_the_newest(tmp_path):
    with Checkpointer(tmp_path, keep=2, every=3) as checkpoints:
        assert [step for step in range(1, 8) if checkpoints.due(step)] == [3, 6]
        for step in (3, 6, 7):
            checkpoints.save(step, {"x": jnp.asarray([step])}, {})
        checkpoints.wait()
        assert checkpoints.restore().step == 7
    names = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    assert names == {"6", "7"}


def flip_a_bit_of_the_largest_array_file(directory):
    path = max((directory / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate_meta(directory):
    (directory / "meta" / "metadata").write_text('{"a"')


def remove_an_array_file(directory):
    next((directory / "state").rglob("d/*")).unlink()


def empty_host(directory):
    next((directory / "host").glob("*.npz")).write_bytes(b"")


def remove_the_seal(directory):
    next((directory / "seal").glob("*.json")).unlink()


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit_of_the_largest_array_file, truncate_meta, remove_an_array_file, empty_host, remove_the_seal],
)
def test_damaged_newest_is_passed_over_and_written_anew(tmp_path, caplog, damage):
    state = {"x": jnp.asarray(np.random.default_rng(0).standard_normal(100_000, dtype=np.float32))}
    with Checkpointer(tmp_path, keep=3) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, jax.tree.map(lambda x, step=step: x + step, state), {"s": step}, {"h": np.ones(3)})
    damage(tmp_path / "checkpoints" / "2")
    with Checkpointer(tmp_path, keep=3) as checkpoints:
        restored = checkpoints.restore(abstract(state))
        assert (restored.step, restored.meta) == (1, {"s": 1})
        assert_same_bits(restored.state, jax.tree.map(lambda x: x + 1, state))
        assert "passing over the checkpoint of step 2" in caplog.text
        checkpoints.save(2, state, {"s": "again"})
        assert checkpoints.restore(abstract(state)).meta == {"s": "again"}


def test_no_whole_checkpoint_is_an_error(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, {})
    remove_the_seal(tmp_path / "checkpoints" / "1")
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(DataError, match="no checkpoint in .* is whole"):
        checkpoints.restore()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"a": {"w": np.zeros((3, 2), np.float32)}}, r"float32\[2, 3\] for a.w, this run needs float32\[3, 2\]"),
        ({"a": {"w": np.zeros((2, 3), ml_dtypes.bfloat16)}}, r"float32\[2, 3\] for a.w, this run needs bfloat16"),
        ({"a": {"w": np.zeros((2, 3), np.float32), "v": np.zeros(1)}}, r"nothing for a.v, this run needs float64\[1\]"),
        ({"a": {}}, r"float32\[2, 3\] for a.w, this run needs nothing"),
    ],
)
def test_other_configuration_is_refused(tmp_path, target, message):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": {"w": jnp.zeros((2, 3))}}, {})
        with pytest.raises(ConfigError, match=message):
            checkpoints.restore(target)


def test_what_cannot_be_stored_exactly_is_refused(tmp_path):
    state = {"x": jnp.ones(3)}
    with Checkpointer(tmp_path) as checkpoints:
        for meta in ({"a": (1, 2)}, {1: "a"}, {"a": float("nan")}):
            with pytest.raises(ValueError, match="JSON"):
                checkpoints.save(1, state, meta)
        for array in (np.array([None]), np.ones(2, ml_dtypes.bfloat16)):
            with pytest.raises(ValueError, match="host array 'h' has dtype"):
                checkpoints.save(1, state, {}, {"h": array})
        checkpoints.save(2, state, {})
        with pytest.raises(ValueError, match="a checkpoint of step 2 exists"):
            checkpoints.save(1, state, {})


def test_read_only_neither_writes_nor_cleans_up(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, {"s": 1})
    saving = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    saving.mkdir()
    with Checkpointer(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.restore().meta == {"s": 1}
    assert saving.exists()
    with Checkpointer(tmp_path / "none", read_only=True) as checkpoints:
        assert checkpoints.restore() is None
    assert not (tmp_path / "none").exists()


KILLED = """
import sys
import jax.numpy as jnp, numpy as np
from mars2_jax.training.checkpoint import Checkpointer

with Checkpointer(sys.argv[1], keep=2) as checkpoints:
    start = checkpoints.restore()
    step = 0 if start is None else start.step
    while True:
        step += 1
        state = {f"w{i}": jnp.full((150_000,), step + i / 8) + jnp.arange(150_000) for i in range(8)}
        checkpoints.save(step, state, {"step": step}, {"h": np.full(step, step)})
        print(step, flush=True)
"""


def test_sigkill_never_leaves_half_a_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    newest = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        )
        # When step n + 1 was begun, step n was on disk; the writer is now somewhere in the middle of n + 1 or n + 2.
        begun = [int(process.stdout.readline()) for _ in range(2)]
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        begun += [int(line) for line in process.communicate()[0].split()]
        with Checkpointer(tmp_path, keep=2) as checkpoints:
            step, state, host, meta = checkpoints.restore()
        assert step >= max(begun) - 1 >= newest
        newest = step
        assert meta == {"step": step}
        assert host["h"].tolist() == [step] * step
        for i in range(8):
            expected = jnp.full((150_000,), step + i / 8) + jnp.arange(150_000)
            assert_same_bits(state[f"w{i}"], expected)
        # Opening for writing removed what the killed save had left.
        left = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
        assert all(name.isdigit() for name in left)


SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from mars2_jax.training.checkpoint import Checkpointer

devices = np.array(jax.devices())
save_mesh = jax.sharding.Mesh(devices.reshape(4, 1), ("fsdp", "tensor"))
load_mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("fsdp", "tensor"))
w = jnp.arange(64.0).reshape(8, 8)
with Checkpointer(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {"w": jax.device_put(w, NamedSharding(save_mesh, P("fsdp", None)))}, {})
    wanted = NamedSharding(load_mesh, P("tensor", "fsdp"))
    restored = checkpoints.restore({"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=wanted)}).state["w"]
    assert restored.sharding.is_equivalent_to(wanted, 2), restored.sharding
    assert {shard.data.shape for shard in restored.addressable_shards} == {(4, 4)}
    assert (np.asarray(restored) == np.asarray(w)).all()
    as_saved = checkpoints.restore().state["w"]
    assert {shard.data.shape for shard in as_saved.addressable_shards} == {(2, 8)}
"""


def test_restores_into_the_shardings_of_the_target(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    subprocess.run([sys.executable, "-c", SHARDED, str(tmp_path)], check=True, env=environment, timeout=120)


def test_seal_names_every_file(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, {}, {"h": np.ones(2)})
    root = tmp_path / "checkpoints" / "1"
    sealed = json.loads((root / "seal" / "sha256.json").read_text())
    found = {
        path.relative_to(root).as_posix()
        for item in ("state", "host", "meta")
        for path in (root / item).rglob("*")
        if path.is_file()
    }
    assert sealed.keys() == found


def test_latest_tells_step_and_meta_without_the_arrays(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() is None
        for step in (1, 2):
            checkpointer.save(step, {"x": jnp.ones(3)}, {"step was": step})
        assert checkpointer.latest() == (2, {"step was": 2})


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match="checkpoints cannot be written"):
        Checkpointer(tmp_path)


FULL = """
import sys
import jax.numpy as jnp
from mars2_jax.errors import StorageError
from mars2_jax.training.checkpoint import Checkpointer

with Checkpointer(sys.argv[1]) as checkpointer:
    try:
        checkpointer.save(1, {"x": jnp.arange(2**20)}, {})
        checkpointer.wait()
    except StorageError as error:
        print(error)
        sys.exit(7)
"""


def test_a_full_disk_is_a_users_error(tmp_path):
    """On a file system of its own with room for a quarter of the array."""
    bwrap = ["bwrap", "--dev-bind", "/", "/", "--size", str(2**20), "--tmpfs", str(tmp_path)]
    if shutil.which("bwrap") is None or subprocess.run([*bwrap, "true"], capture_output=True).returncode:
        pytest.skip("no bubblewrap here")
    done = subprocess.run(
        [*bwrap, sys.executable, "-c", FULL, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 7, done.stderr
    assert "a checkpoint cannot be written" in done.stdout and "No space left on device" in done.stdout


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_score_is_no_damaged_checkpoint(tmp_path, caplog, damage):
    options = dict(keep=2, keep_best=1, best_metric="x")
    with Checkpointer(tmp_path, **options) as checkpointer:
        for step, score in ((1, 3.0), (2, 2.0), (3, 1.0)):
            checkpointer.save(step, {"x": jnp.ones(3)}, {}, score=score)
    file = tmp_path / "checkpoints" / "2" / "metrics" / "metrics"
    assert json.loads(file.read_text()) == {"x": 2.0}
    file.write_bytes(damage)
    with Checkpointer(tmp_path, best_metric="x", read_only=True) as checkpointer:
        assert checkpointer.best() == 1 and checkpointer.latest(2) == (2, {})
    assert file.read_bytes() == damage
    with Checkpointer(tmp_path, **options) as checkpointer:
        assert checkpointer.best() == 1 and checkpointer.latest(2) == (2, {})
        checkpointer.save(4, {"x": jnp.ones(3)}, {})
        checkpointer.save(5, {"x": jnp.ones(3)}, {}, score=0.0)
    caplog.clear()
    with Checkpointer(tmp_path, **options) as checkpointer:
        assert checkpointer.best() == 1
    assert not caplog.text
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "4", "5"}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() == (5, {})

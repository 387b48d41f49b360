"""From a training run to a folder that transformers reads, and from one model file to another."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.errors import ConfigError, DataError, ModelError
from mars2_jax.learning.update import Learner
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.weights import load
from mars2_jax.parallel.mesh import make_mesh
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.export import export_agent, export_model
from mars2_jax.training.policy import ModelFile
from tests.training.tiny_team import tiny_config

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A team's run with checkpoints of steps 1 and 2, whose weights are known: (config, workdir, weights by step)."""
    folder = tmp_path_factory.mktemp("export")
    config = tiny_config(folder)
    config.agents.bob.trainable = False
    config = FrozenConfigDict(config)
    with open_checkpoint(config.agents.ann.model.path) as checkpoint:
        decoder = load(checkpoint)
    ann = config.agents.ann
    learner = Learner.create(decoder, learning=config.learning, optimizer=ann.optimizer, temperature=1.0, budget=4)
    weights = {}
    with Checkpointer(folder / "run") as checkpointer:
        for step in (1, 2):
            params = jax.tree.map(lambda x, step=step: x + step, nnx.state(decoder))
            weights[step] = jax.tree.map(np.asarray, params)
            checkpointer.save(step, {"ann": learner.init(params)}, {"config": as_json(config)})
    return config, str(folder / "run"), weights


def as_json(config):
    return json.loads(json.dumps(config.to_dict()))


def weights_of(folder):
    with open_checkpoint(str(folder)) as checkpoint:
        return nnx.state(load(checkpoint))


def assert_same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("step", [None, 1])
def test_the_weights_of_an_agent(run, tmp_path, step, capsys):
    config, workdir, weights = run
    export_agent(config, workdir, "ann", str(tmp_path / "out"), step=step)
    assert_same(weights_of(tmp_path / "out"), weights[step or 2])
    assert f"wrote ann after {step or 2} training steps to {tmp_path / 'out'}" in capsys.readouterr().out
    # It is a model as any other, with the tokenizer of the one it came from.
    path = str(tmp_path / "out")
    mesh = make_mesh(config.mesh)
    model = ConfigDict(config.agents.ann.model.to_dict() | {"path": path, "sha256": ""})
    tokenizer = ModelFile(FrozenConfigDict(model), 8, mesh).tokenizer
    original = ModelFile(config.agents.ann.model, 8, mesh).tokenizer
    message = [{"role": "user", "content": "def f(x):"}]
    np.testing.assert_array_equal(tokenizer.encode_chat(message), original.encode_chat(message))
    assert tokenizer.stop_ids == original.stop_ids


def test_a_model_in_half_precision(run, tmp_path):
    config, _, _ = run
    export_model(config.agents.ann.model.path, str(tmp_path / "out"), dtype="bfloat16")
    expected = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), weights_of(config.agents.ann.model.path))
    assert_same(weights_of(tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"agent": "eve"}, ConfigError, "--agent=eve is not an agent of this config; it has ann, bob"),
        ({"agent": "bob"}, ConfigError, "never learns .*--model="),
        ({"step": 7}, DataError, r"no checkpoint of step 7 in .*; there are \[1, 2\]"),
        ({"workdir": "/nowhere"}, DataError, "no checkpoints in /nowhere"),
        ({"out": "/dev/null/x"}, ModelError, "cannot write a checkpoint to /dev/null/x"),
        ({"out": "/dev"}, ModelError, "/dev exists and is not empty: choose another folder"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(run, tmp_path, change, error, message):
    config, workdir, _ = run
    arguments = {"workdir": workdir, "agent": "ann", "out": str(tmp_path / "out"), **change}
    with pytest.raises(error, match=message):
        export_agent(config, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_another_model_than_the_runs_is_refused(run, tmp_path):
    config, workdir, _ = run
    other = ConfigDict(config.to_dict())
    other.agents.ann.model.dtype = "float32"
    with pytest.raises(ConfigError, match="agents.ann.model differs from that of the run"):
        export_agent(FrozenConfigDict(other), workdir, "ann", str(tmp_path / "out"))


def test_damage_is_found(run, tmp_path):
    config, workdir, _ = run
    shutil.copytree(workdir, tmp_path / "run")
    victim = max((tmp_path / "run/checkpoints/1/state").rglob("*"), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match="the checkpoint of step 1 .* is not whole"):
        export_agent(config, str(tmp_path / "run"), "ann", str(tmp_path / "out"), step=1)


def convert(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mars2_jax.convert", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_the_command(run, tmp_path):
    config, _, _ = run
    done = convert(f"--model={config.agents.ann.model.path}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert_same(weights_of(tmp_path / "out"), weights_of(config.agents.ann.model.path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out=x"], "nothing to convert: give --model=PATH, or --config, --workdir and --agent of a run"),
        (["--out=x", "--model=m", "--agent=a"], "--model and --agent do not go together"),
        (["--out=x", "--model=m", "--config=configs/quickstart.py"], "--model and --config do not go together"),
        (["--model=m"], "--out is missing"),
        (["--out=x", "--workdir=w", "--agent=a"], "--config is missing"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    done = convert(*arguments)
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1, done.stderr
    assert (done.returncode, done.stdout) == (2, "")

"""Several processes that train as one, by the real command, on this machine's CPU."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mars2_jax.config import agent_config
from mars2_jax.errors import ConfigError
from mars2_jax.parallel.hosts import Coordinates
from mars2_jax.parallel.watch import LOST
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.trees import trees_path
from tests.parallel.hosts import ROOT, Run, environment, hosts_config, trees, weights, write_config

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    return write_config(folder / "config.py", hosts_config(folder))


def train_alone(config):
    """One process with all eight devices."""
    with Run(config, config.parent / f"alone_{config.stem}", 1) as run:
        ((code, _, said),) = run.wait()
    assert code == 0, said
    return run.workdir


@pytest.fixture(scope="module")
def alone(config):
    return train_alone(config)


def expect_success(run):
    ended = run.wait()
    assert all(code == 0 for code, _, _ in ended), ended
    return ended


def expect_equal(workdir, alone):
    assert trees(workdir) == trees(alone)
    got, expected = weights(workdir), weights(alone)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=name)


def error_line(said):
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    return line


def test_one_is_killed_and_together_they_go_on(config, alone, tmp_path):
    """By the script, which starts all again. What two processes learn is what one with all their devices does."""
    workdir = tmp_path / "two"
    script = subprocess.Popen(
        ["bash", "launch/local_multiprocess.sh", str(config), str(workdir), "2", "--lost_after=10"],
        cwd=ROOT,
        env=environment(config.parent, 4) | {"PYTHON": sys.executable, "CPU_DEVICES": "4", "RESTARTS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(script, (workdir / "checkpoints" / "1").exists)
        first = processes(workdir)
        assert first.keys() == {0, 1}
        os.kill(first[1], signal.SIGKILL)
        killed = time.monotonic()
        wait_for(script, lambda: processes(workdir).keys() == {0, 1} and not processes(workdir).items() & first.items())
        assert time.monotonic() - killed < 60
        out, said = script.communicate(timeout=600)
    finally:
        for pid in processes(workdir).values():
            os.kill(pid, signal.SIGKILL)
    assert script.returncode == 0, said
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert any("process 1 gave no sign of life for 10 s" in line for line in errors)
    # That of the one that was killed is told by its last words.
    assert [line.split(":")[1][:10] for line in sorted(errors)] == [" process 1"] * 2
    assert "[launch] process 1 ended with exit code 137" in said and f"exit code {LOST}" not in said
    assert "resuming after step" in out and "step 3/3" in out
    expect_equal(workdir, alone)


def processes(workdir):
    """The ids of the processes of a run, by their numbers."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it has just ended
            continue
        if f"--workdir={workdir}" in arguments and "mars2_jax.train" in arguments:
            number = next(a for a in arguments if a.startswith("--process_id="))
            found[int(number.removeprefix("--process_id="))] = int(folder.name)
    return found


def wait_for(script, condition):
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline and script.poll() is None
        time.sleep(0.1)


def test_what_cannot_work_ends_in_one_line(config, tmp_path):
    with (
        Run(config, tmp_path / "a", 2, started=[1], options=["--join_timeout=2"]) as without_first,
        Run(config, tmp_path / "b", 2, started=[0], options=["--join_timeout=4"]) as without_second,
        Run(config, tmp_path / "c", 2, own={1: ["--config.seed=5"]}) as unlike,
    ):
        ended = [*without_first.wait(), *without_second.wait(), *unlike.wait()]
    # Who is not there may be there when a script starts all again; a config stays what it is.
    assert [code for code, _, _ in ended] == [LOST, LOST, 2, 2]
    messages = [error_line(said) for _, _, said in ended]
    assert "process 0 does not answer at --coordinator_address=127.0.0.1:" in messages[0]
    assert "the 2 processes at 127.0.0.1:" in messages[1] and "were not all there within 4 s" in messages[1]
    assert messages[2] == messages[3] and "the config of process 1 differs from that of process 0" in messages[2]


@pytest.mark.slow
def test_uninterrupted_they_train_as_one_does(config, alone, tmp_path):
    with Run(config, tmp_path / "two", 2) as run:
        expect_success(run)
    expect_equal(run.workdir, alone)


@pytest.mark.slow
def test_asked_to_stop_one_stops_both_and_any_number_goes_on(config, alone, tmp_path):
    """In the middle of a search, which goes on in four processes, and in the end in one."""
    workdir = tmp_path / "run"
    for step, count in ((1, 2), (2, 4)):
        with Run(config, workdir, count, options=["--stopped_code=85"]) as run:
            run.until(trees_path(workdir, step).exists)
            run.processes[1].send_signal(signal.SIGTERM)
            ended = run.wait()
        assert [code for code, _, _ in ended] == [85] * count, ended
        assert "stopped on request" in ended[0][1]
    with Run(config, workdir, 1) as run:
        expect_success(run)
    expect_equal(workdir, alone)


@pytest.mark.slow
def test_without_process_0_the_other_ends(config, tmp_path):
    with Run(config, tmp_path / "two", 2, options=["--lost_after=10"]) as run:
        run.until(trees_path(run.workdir, 1).exists)
        run.processes[0].kill()
        killed = time.monotonic()
        _, (code, _, said) = run.wait()
    assert code != 0 and time.monotonic() - killed < 60
    assert "process 1 of 2 ended without a word of its own: it was killed, or process 0 is gone" in error_line(said)


@pytest.mark.slow
def test_adapters_shared_weights_a_reference_and_evaluations(tmp_path):
    """On a mesh with tensor parallelism, with engines on another."""
    config = hosts_config(tmp_path)
    config.mesh.update(data=2, fsdp=2, tensor=2)
    config.rollout.mesh.update(data=-1, fsdp=1, tensor=2)
    config.agents.ann.model.lora.rank = 4
    config.agents.cid = agent_config()
    config.agents.cid.update(share_weights_with="bob", role="You are cid.")
    config.learning.kl_coef = 0.1
    config.training.update(evaluate=True)
    alone, together = train_both(write_config(tmp_path / "config.py", config))
    assert any("lora" in name for name in weights(together))
    scores = [
        [{k: v for k, v in row.items() if k.startswith("eval/")} for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (together, alone)
    ]
    assert scores[0] == scores[1] and any(scores[0])


def train_both(path):
    """One process and two come to the same; their folders."""
    alone = train_alone(path)
    with Run(path, path.parent / "two", 2) as run:
        expect_success(run)
    expect_equal(run.workdir, alone)
    return alone, run.workdir


@pytest.mark.slow
def test_filtering_in_rounds_several_passes_and_offloading(tmp_path):
    config = hosts_config(tmp_path)
    config.data.update(dynamic_filtering=True, max_resamples=2)
    config.learning.update(epochs=2, max_staleness=2)
    config.agents.ann.optimizer.offload = "state"
    config.agents.bob.optimizer.offload = "all"
    _, together = train_both(write_config(tmp_path / "config.py", config))
    rows = read_metrics(together / "metrics.jsonl")
    assert any(row["search/rounds"] > 1 for row in rows) and rows[-1]["agent/ann/updates"] > 0


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_refused(config, tmp_path):
    with Run(config, tmp_path / "a", 2, own={1: [f"--workdir={tmp_path / 'b'}"]}) as run:
        ended = run.wait()
    assert [code for code, _, _ in ended] == [2, 2]
    assert "process 1 does not see what process 0 wrote to --workdir=" in error_line(ended[0][2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(address="a:1"), "--num_processes and --process_id missing"),
        (dict(count=2, index=0), "--coordinator_address missing"),
        (dict(address="a:1", count=2, index=2), "--process_id=2 must be from 0 to 1"),
        (dict(address="a:1", count=0, index=0), "--num_processes=0 must be at least 1"),
        (dict(address="10.0.0.1", count=2, index=0), "--coordinator_address=10.0.0.1 is no host:port"),
        (dict(address="a:1", count=2, index=0, detect=False), "--distributed=off, but --coordinator_address is given"),
    ],
)
def test_coordinates_that_cannot_be_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Coordinates(**given)

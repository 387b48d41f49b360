"""Several processes that train as one, by the real command, on this machine's CPU."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from mars2_jax.config import agent_config
from mars2_jax.errors import ConfigError
from mars2_jax.parallel.hosts import Coordinates
from mars2_jax.parallel.watch import LOST
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.trees import trees_path
from tests.parallel.hosts import Run, hosts_config, trees, weights, write_config

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


def kill(run, victim):
    """Kills one process; what the other ends with, its word, and after how long."""
    run.processes[victim].kill()
    killed = time.monotonic()
    code, _, said = run.wait()[1 - victim]
    return code, said, time.monotonic() - killed


def test_one_is_killed_and_together_they_go_on(config, alone, tmp_path):
    """What two processes learn, of four devices each, is what one with eight does."""
    workdir = tmp_path / "two"
    with Run(config, workdir, 2, options=["--lost_after=10"]) as run:
        run.until(trees_path(workdir, 1).exists)
        code, said, seconds = kill(run, victim=1)
    assert code == LOST and seconds < 60
    assert "process 1 gave no sign of life for 10 s" in error_line(said)
    with Run(config, workdir, 2) as run:
        (_, out, _), (_, out_1, _) = expect_success(run)
    assert "step 3/3" in out and "step" not in out_1
    expect_equal(workdir, alone)


def test_what_cannot_work_ends_in_one_line(config, tmp_path):
    with (
        Run(config, tmp_path / "a", 2, started=[1], options=["--join_timeout=2"]) as without_first,
        Run(config, tmp_path / "b", 2, started=[0], options=["--join_timeout=4"]) as without_second,
        Run(config, tmp_path / "c", 2, own={1: ["--config.seed=5"]}) as unlike,
    ):
        ended = [*without_first.wait(), *without_second.wait(), *unlike.wait()]
    assert [code for code, _, _ in ended] == [2] * 4
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
        with Run(config, workdir, count) as run:
            run.until(trees_path(workdir, step).exists)
            run.processes[1].send_signal(signal.SIGTERM)
            ended = expect_success(run)
        assert "stopped on request" in ended[0][1]
    with Run(config, workdir, 1) as run:
        expect_success(run)
    expect_equal(workdir, alone)


@pytest.mark.slow
def test_without_process_0_the_other_ends(config, tmp_path):
    with Run(config, tmp_path / "two", 2, options=["--lost_after=10"]) as run:
        run.until(trees_path(run.workdir, 1).exists)
        code, said, seconds = kill(run, victim=0)
    assert code == LOST and seconds < 60
    assert "process 0 cannot be reached" in error_line(said)


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
    config.training.update(steps=2, evaluate=True)
    path = write_config(tmp_path / "config.py", config)
    alone = train_alone(path)
    with Run(path, tmp_path / "two", 2) as run:
        expect_success(run)
    assert trees(run.workdir, 2) == trees(alone, 2)
    got, expected = weights(run.workdir), weights(alone)
    assert any("lora" in name for name in got) and got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=name)
    scores = [
        [{k: v for k, v in row.items() if k.startswith("eval/")} for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (run.workdir, alone)
    ]
    assert scores[0] == scores[1] and any(scores[0])


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

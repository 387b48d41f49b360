"""Several processes that train as one, by the real command, on this machine's CPU."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from mars2_jax.errors import ConfigError
from mars2_jax.parallel.hosts import Coordinates
from mars2_jax.parallel.watch import LOST
from mars2_jax.training.trees import trees_path
from tests.parallel.hosts import Run, free_port, hosts_config, trees, write_config
from tests.parallel.test_mesh import weights


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    return write_config(folder / "config.py", hosts_config(folder))


@pytest.fixture(scope="module")
def alone(config):
    """One process with all eight devices."""
    with Run(config, config.parent / "alone", 1) as run:
        ((code, _, said),) = run.wait()
    assert code == 0, said
    return run.workdir


def expect_equal(workdir, alone):
    assert trees(workdir) == trees(alone)
    got, expected = weights(workdir), weights(alone)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=name)


def test_two_processes_train_as_one_does(config, alone, tmp_path):
    with Run(config, tmp_path / "two", 2) as run:
        (code, out, said), (code_1, out_1, said_1) = run.wait()
    assert code == code_1 == 0, said + said_1
    assert "step 3/3" in out and not out_1
    expect_equal(run.workdir, alone)


def test_stopped_and_killed_they_go_on_together(config, alone, tmp_path):
    """SIGTERM to one stops both; SIGKILL of one ends the other; the same command goes on."""
    workdir = tmp_path / "two"
    with Run(config, workdir, 2) as run:
        run.until(trees_path(workdir, 1).exists)
        run.processes[1].send_signal(signal.SIGTERM)
        ended = run.wait()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "stopped on request" in ended[0][1]
    with Run(config, workdir, 2) as run:
        run.until(trees_path(workdir, 2).exists)
        run.processes[1].kill()
        started = time.monotonic()
        (code, _, said), _ = run.wait()
    assert time.monotonic() - started < 60
    assert code == LOST
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "process 1 gave no sign of life" in line
    with Run(config, workdir, 2) as run:
        assert [code for code, _, _ in run.wait()] == [0, 0]
    expect_equal(workdir, alone)


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

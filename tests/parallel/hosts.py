"""A tiny team's config as a file, and processes that train by it."""

from __future__ import annotations

import os
import pathlib
import pprint
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.trees import read_trees, trees_path
from tests.training.tiny_team import tiny_config, write_model

ROOT = pathlib.Path(__file__).resolve().parents[2]


def hosts_config(folder: pathlib.Path) -> ConfigDict:
    """Three steps of two agents on eight devices; three problems a step, so that two processes have unlike shares.
    Buffers are not emptied by every step: what waits in them is saved, too."""
    config = tiny_config(folder)
    for name in config.agents:
        write_model(folder / name, seed=ord(name[0]), layers=1)
    config.mesh.update(data=2, fsdp=4, tensor=1)
    config.search.nodes = 6
    # Few lengths of prompts: each is compiled for.
    config.rollout.max_prompt_tokens = 256
    config.learning.micro_batch_size = config.learning.train_batch_size = 8
    config.training.update(steps=3, evaluate=False)
    # Large steps would blow rounding up: Adam's first step is the sign of the gradient.
    for agent in config.agents.values():
        agent.optimizer.update(learning_rate=1e-4, eps=1e-3)
    return config


def write_config(path: pathlib.Path, config: ConfigDict) -> pathlib.Path:
    """The config as a file for `--config`."""
    values = pprint.pformat(config.to_dict(), width=110)
    path.write_text(f"from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({values})\n")
    return path


def weights(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint, on this process's device."""
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with Checkpointer(workdir, read_only=True) as checkpointer:
        step, _ = checkpointer.latest()
        saved = checkpointer._manager.item_metadata(step)["state"].tree
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), saved)
        state = checkpointer.restore(target).state
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(state)}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def environment(folder: pathlib.Path, devices: int) -> dict[str, str]:
    """Of a process with so many devices. What is compiled runs a few times: the time goes into compilation, and what
    one process compiled the next start need not."""
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "True",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {quick}",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "PYTHONPATH": str(ROOT),
    }


class Run:
    """The processes of one run; a context manager that leaves none behind.

    Args:
      config: a config file.
      workdir: of the run.
      count: of processes; 1 is alone, without coordinates.
      devices: of all.
      options: more of the command line.
      own: more of it for some processes.
      started: which processes there are; None are all.
    """

    def __init__(
        self,
        config: pathlib.Path,
        workdir: pathlib.Path,
        count: int,
        *,
        devices: int = 8,
        options: Sequence[str] = (),
        own: Mapping[int, Sequence[str]] = {},
        started: Sequence[int] | None = None,
    ):
        address = f"127.0.0.1:{free_port()}"
        self.workdir = workdir
        self.processes = []
        for index in range(count) if started is None else started:
            where = [f"--coordinator_address={address}", f"--num_processes={count}", f"--process_id={index}"]
            command = [sys.executable, "-m", "mars2_jax.train", f"--config={config}", f"--workdir={workdir}"]
            self.processes.append(
                subprocess.Popen(
                    [*command, *(where if count > 1 else ()), *options, *own.get(index, ())],
                    cwd=ROOT,
                    env=environment(config.parent, devices // count),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def wait(self, timeout: float = 240) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each."""
        deadline = time.monotonic() + timeout
        ended = [process.communicate(timeout=deadline - time.monotonic()) for process in self.processes]
        return [(p.returncode, *said) for p, said in zip(self.processes, ended, strict=True)]

    def until(self, condition: Callable[[], bool], timeout: float = 240) -> None:
        """Waits for it, while all processes run."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline
            for process in self.processes:
                assert process.poll() is None, process.communicate()
            time.sleep(0.02)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def trees(workdir: pathlib.Path, steps: int = 3) -> list[list[tuple]]:
    """What was written in the trees of every step, and what it earned; advantages are no choices."""
    told = ("slot", "parent", "agent", "verdict", "reward", "response")
    return [
        [(row["tree"], row["problem"], *(node[name] for name in told)) for row in rows for node in row["nodes"]]
        for rows in (read_trees(trees_path(workdir, step)) for step in range(1, steps + 1))
    ]

"""Several processes that train as one: start-up, and how they end together.

Each process has devices of its own, as a host of a TPU slice or a node of a cluster. `joined` makes them one: from then
on `jax.devices()` are those of all, and programs on them are run by all processes together.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from mars2_jax.errors import ConfigError, PeerError, UserError, in_one_line
from mars2_jax.parallel.exchange import from_leader, gather, leads
from mars2_jax.parallel.watch import Request, Watch

__all__ = ["Coordinates", "Hosts", "check_shared", "joined"]

_SHUTDOWN = 30
"""Seconds that a process which is done waits for the others to be."""


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """How the processes of a run find each other.

    Attributes:
      address: "host:port" of process 0, which listens there; None where the cluster is detected.
      count: number of processes; None likewise.
      index: of this process, from 0; None likewise.
      detect: without an address: whether to ask JAX for a cluster (Cloud TPU, SLURM, Open MPI, Kubernetes).
      timeout: seconds to wait for all processes to be there.
      patience: seconds without a sign of life after which a process is gone, see `parallel.watch`.

    Raises:
      ConfigError: some are missing or impossible; names the flag.
    """

    address: str | None = None
    count: int | None = None
    index: int | None = None
    detect: bool = True
    timeout: int = 300
    patience: int = 30

    def __post_init__(self) -> None:
        flags = {
            "--coordinator_address": self.address,
            "--num_processes": self.count,
            "--process_id": self.index,
        }
        given = [flag for flag, value in flags.items() if value is not None]
        if not given:
            return
        if missing := [flag for flag in flags if flag not in given]:
            raise ConfigError(f"{' and '.join(missing)} missing: give all three of {', '.join(flags)}, or none")
        if not self.detect:
            raise ConfigError(f"--distributed=off, but {given[0]} is given: leave one of them out")
        assert self.address is not None and self.count is not None and self.index is not None
        if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}", self.address):
            raise ConfigError(f"--coordinator_address={self.address} is no host:port, such as 10.0.0.1:8476")
        if self.count < 1:
            raise ConfigError(f"--num_processes={self.count} must be at least 1")
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"--process_id={self.index} must be from 0 to {self.count - 1}, one for each of the "
                f"--num_processes={self.count}"
            )


class Hosts:
    """The processes that `joined` made one. With one process nothing is watched."""

    def __init__(self, watch: Watch | None, end: Callable[[int], NoReturn]):
        self._watch, self._exit = watch, end

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails inside ends all processes, this one here and now: what would be closed on the way out may be
        waiting for processes that wait for this one. With one process it is raised as ever."""
        try:
            yield
        except BaseException as error:
            if self._watch is None:
                raise
            self._end(self._watch, error)

    def _end(self, watch: Watch, error: BaseException) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            # A collective of which another process is gone. The watch will soon know, say so, and end this one.
            time.sleep(watch.patience + 10)
        line, code = f"{type(error).__name__}: {error}", 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, UserError):
            line, code = str(error), error.code
        watch.fail(" ".join(line.split())[:2000], code)
        if isinstance(error, UserError):
            print(in_one_line(error), file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        self._exit(code)


class _Notes:
    """A `Board` in the key-value store that process 0 keeps for JAX."""

    def __init__(self) -> None:
        # JAX has no public name for it. Orbax takes it from here, too.
        from jax._src import distributed

        self._client: Any = distributed.global_state.client

    def post(self, name: str, note: str) -> None:
        self._client.key_value_set(f"mars2_jax/{name}", note, allow_overwrite=True)

    def read(self) -> dict[str, str]:
        entries = self._client.key_value_dir_get("mars2_jax/")
        return {name.removeprefix("mars2_jax/"): note for name, note in entries}


@contextlib.contextmanager
def joined(coordinates: Coordinates, stop: Request) -> Iterator[Hosts]:
    """Joins the other processes of the run, if there are any; the block is all that they do together.

    To be entered before anything asks for JAX's devices. An error inside ends all processes: see `Hosts.together`,
    which is to be entered once more inside everything that waits for other processes when it is closed.

    Args:
      coordinates: how they find each other.
      stop: becomes True in all processes when it does in one.

    Raises:
      PeerError: the others did not come in time, or the port is taken.
      ConfigError: they have not as many devices.
    """
    if not _initialize(coordinates) or jax.process_count() == 1:
        yield Hosts(None, sys.exit)
        return
    errors = (jax.errors.JaxRuntimeError,)
    index, count = jax.process_index(), jax.process_count()
    last_words = _last_words(index, count)

    def end(code: int) -> NoReturn:
        last_words.communicate(b"\n")
        # Not `sys.exit`: JAX would wait for the others before it lets go.
        os._exit(code)

    watch = Watch(_Notes(), index, count, stop, errors=errors, patience=coordinates.patience, end=end)
    watch.start()
    hosts = Hosts(watch, end)
    with hosts.together():
        counts = collections.Counter(device.process_index for device in jax.devices())
        if len(set(counts.values())) > 1:
            raise ConfigError(
                "processes have different numbers of devices, "
                f"{', '.join(f'process {i} has {n}' for i, n in sorted(counts.items()))}: give all the same"
            )
        yield hosts
        gather(b"")  # so that none is still at work when process 0, which keeps the notes, leaves
        watch.close()
        jax.distributed.shutdown()
        last_words.communicate(b"\n")


def _last_words(index: int, count: int) -> subprocess.Popen[bytes]:
    """A shell that waits for this process, and tells what to do where it ends without a word of its own: JAX aborts it
    with a stack trace when it loses process 0, before the watch can notice."""
    line = (
        f"error: process {index} of {count} ended without a word of its own: it was killed, or process 0 is gone; "
        "start all processes again, and the run goes on"
    )
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read word || echo '{line}' >&2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # what a terminal sends is not for it
    )


def _initialize(at: Coordinates) -> bool:
    """Starts JAX's distributed runtime; False where this process is alone."""
    if at.address is None and (not at.detect or _alone_in_slurm()):
        return False
    if at.count == 1:
        return False
    handler = signal.getsignal(signal.SIGTERM)
    # JAX's own timeout would end the process with a stack trace.
    options: dict[str, Any] = dict(initialization_timeout=at.timeout + 60, shutdown_timeout_seconds=_SHUTDOWN)
    if at.address is not None:
        _reach(at)
    late = threading.Timer(at.timeout, _give_up, (at,))
    late.daemon = True
    late.start()
    try:
        if at.address is not None:
            # Nothing of a cluster around is asked for: it would give each process one GPU.
            jax.distributed.initialize(at.address, at.count, at.index, cluster_detection_method="deactivate", **options)
        else:
            jax.distributed.initialize(**options)
    except ValueError as error:
        if at.address is None and "coordinator_address should be defined" in str(error):
            return False  # there is no cluster
        raise
    except RuntimeError as error:
        raise PeerError(f"{_where(at)} did not become one ({' '.join(str(error).split())[:300]}): {_REMEDY}") from error
    finally:
        late.cancel()
    if threading.current_thread() is threading.main_thread():
        # JAX took SIGTERM for a service of its own, which saves nothing here.
        signal.signal(signal.SIGTERM, handler)
    return True


def _alone_in_slurm() -> bool:
    """Whether this is the only task of its job step. JAX would leave it one of its GPUs."""
    return os.environ.get("SLURM_NTASKS") == "1"


def _reach(at: Coordinates) -> None:
    """Sees that process 0 can listen, or waits until it does."""
    assert at.address is not None
    host, _, port = at.address.rpartition(":")
    if at.index == 0:
        try:
            socket.create_connection(("localhost", int(port)), timeout=5).close()
        except OSError:
            return  # nobody is there
        # JAX would crash.
        raise PeerError(f"--coordinator_address={at.address} is taken by another program: choose another port")
    deadline = time.monotonic() + at.timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"process 0 does not answer at --coordinator_address={at.address} for {at.timeout} s "
                    f"({error.strerror or error}): start it, or give the address at which it is"
                ) from error
            time.sleep(0.5)


_REMEDY = (
    "start all of them, with the same --coordinator_address and --num_processes and a --process_id each, or with "
    "none of these on a cluster that JAX detects; --distributed=off trains in this process alone"
)


def _where(at: Coordinates) -> str:
    return f"the {at.count} processes at {at.address}" if at.address else "the processes of the cluster"


def _give_up(at: Coordinates) -> None:
    """Ends the process while it waits inside JAX for others that do not come."""
    print(f"error: {_where(at)} were not all there within {at.timeout} s: {_REMEDY}", file=sys.stderr, flush=True)
    os._exit(PeerError.code)


def check_shared(folder: pathlib.Path, patience: float = 60.0) -> None:
    """Sees that all processes have the folder of process 0 under this name; to be called by all, after it was made.

    Args:
      folder: of the run.
      patience: seconds that a network file system may take to show a new file.

    Raises:
      ConfigError: on all of them; says which does not.
    """
    if jax.process_count() == 1:
        return
    note = folder / ".shared"
    word = from_leader(os.urandom(16).hex().encode())
    if leads():
        note.write_bytes(word)
    deadline = time.monotonic() + patience
    while not (seen := note.exists() and note.read_bytes() == word) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [str(i) for i, saw in enumerate(gather(b"1" if seen else b"")) if not saw]
    if blind:
        raise ConfigError(
            f"process {', '.join(blind)} does not see what process 0 wrote to --workdir={folder}: give a folder that "
            "all processes share (a network file system)"
        )
    if leads():
        note.unlink()

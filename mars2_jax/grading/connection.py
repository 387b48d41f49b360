"""The service's process as its client holds it: JSON lines to it and from it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mars2_jax import errors
from mars2_jax.errors import SandboxError

__all__ = ["Connection", "ServiceDied"]

_START_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class ServiceDied(Exception):
    """The service's process is gone, or going; the message says how."""


class Connection:
    """A running service. Not for several threads.

    Attributes:
      layers: what isolates the programs; empty with isolation "none".

    Raises:
      SandboxError, ConfigError: from the constructor, where the service refuses to start; what the remedy is.
    """

    def __init__(self, isolation: str, workers: int, checkers: Sequence[str]) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "mars2_jax.grading.service", "--isolation", isolation]
        command += ["--workers", str(workers), "--parent", str(os.getpid())]
        command += [f"--checker={checker}" for checker in checkers]
        # A fresh program by exec: JAX's threads in this process do not matter to it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            bufsize=0,
            # Ctrl-C is for the parent, which then closes the service in good order.
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._begun: list[bytes] = []  # of a line whose end has not come
        self._lines: deque[bytes] = deque()
        try:
            first = self.receive(_START_SECONDS)
            if first is None:
                raise SandboxError(f"the grader's service was not ready in {_START_SECONDS:g} seconds")
            if "refused" in first:
                raise getattr(errors, first["error"])(first["refused"])
        except ServiceDied as died:
            raise SandboxError(str(died)) from died
        except BaseException:
            self.close()
            raise
        self.layers: tuple[str, ...] = tuple(first["layers"])

    def send(self, *parts: bytes) -> None:
        """Writes a line, given in parts without its end. Takes in what comes meanwhile, so that neither side waits for
        the other.

        Raises:
          ServiceDied: it cannot be written.
        """
        for part in (*parts, b"\n"):
            left = memoryview(part)
            while left:
                readable, writable, _ = select.select([self._out], [self._in], [])
                if readable:
                    self._take_in()
                if writable:
                    try:
                        left = left[os.write(self._in, left) :]
                    except BlockingIOError:
                        pass
                    except BrokenPipeError:
                        raise self._died() from None

    def receive(self, timeout: float | None) -> dict[str, Any] | None:
        """The next line; None if none came in time (in seconds; None waits for as long as it takes).

        Raises:
          ServiceDied: none will come.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._lines:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._out], [], [], left)[0]:
                return None
            self._take_in()
        return json.loads(self._lines.popleft())

    def rest(self) -> list[dict[str, Any]]:
        """The lines that have come and were not received."""
        lines = [json.loads(line) for line in self._lines]
        self._lines.clear()
        return lines

    def close(self) -> None:
        """Ends the service, and with it its workers. May be called again."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _take_in(self) -> None:
        part = os.read(self._out, 1 << 20)
        if not part:
            raise self._died()
        *ends, rest = part.split(b"\n")
        for end in ends:
            self._lines.append(b"".join([*self._begun, end]))
            self._begun.clear()
        self._begun.append(rest)

    def _died(self) -> ServiceDied:
        self._process.kill()
        code = self._process.wait()
        self.close()
        return ServiceDied(f"the grader's service died (status {code})")

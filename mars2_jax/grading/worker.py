"""One sandbox and the conversation with it. Runs in the service, one thread a worker."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from mars2_jax.errors import SandboxError
from mars2_jax.grading import sandbox, seccomp
from mars2_jax.grading.checkers import CheckerFailed, Checkers
from mars2_jax.grading.compare import COMPARATORS
from mars2_jax.grading.judge import Compare, compile_failure, judge
from mars2_jax.grading.values import NotCarried, decode, read_frame, write_all, write_frame
from mars2_jax.grading.verdict import TestResult, Verdict

__all__ = ["Worker", "WorkerDied"]

# Beyond a test's own wall limit, which the supervisor keeps: a sandbox that is silent for longer is dead.
_GRACE_SECONDS = 30.0
_START_SECONDS = 30.0
# Of a program that loops or sleeps in every one of hundreds of tests, the rest would hold a worker for an hour.
_MOST_TIMEOUTS = 3
_NOT_RUN = TestResult(Verdict.TIMEOUT, error=f"not run: {_MOST_TIMEOUTS} tests before it timed out")


class WorkerDied(Exception):
    """The sandbox is gone. `by_program`: the program was able to do that, and the machine is unlikely to have."""

    def __init__(self, reason: str, *, by_program: bool = False) -> None:
        super().__init__(reason)
        self.by_program = by_program


class Worker:
    """A sandbox that grades one program at a time. Not for several threads.

    Args:
      isolation: "bubblewrap" or "none".
      uid: see `sandbox.command`.
      checkers: who answers for custom checkers; None where there are none.

    Raises:
      SandboxError: from the constructor, where the sandbox cannot be started.
    """

    def __init__(self, isolation: str, uid: int, checkers: Checkers | None = None) -> None:
        self._checkers = checkers
        command = sandbox.command(isolation, uid)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=sandbox.ENVIRONMENT,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()

    def close(self) -> None:
        """Ends the sandbox and all that runs in it. A closed worker answers every `grade` with WorkerDied."""
        # The numbers will be given to other files: they must not be written to again.
        self._in = self._out = -1
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()  # type: ignore[union-attr]

    def grade(self, job: dict[str, Any]) -> list[TestResult | None]:
        """Runs the tests in order; None for those after the first failure where `job["stop"]` is set. Once three have
        timed out, the others count as timed out, too, and are not run.

        Raises:
          WorkerDied: the worker must be closed.
        """
        limits = job["limits"]
        patience = limits["wall_seconds"] + _GRACE_SECONDS
        tests: list[dict[str, Any]] = job["tests"]
        results: list[TestResult | None] = [None] * len(tests)
        compile_first = len(tests) > 1
        header = {key: job[key] for key in ("program", "entry_point", "limits")}
        self._send({**header, "compile": compile_first})
        if compile_first and not (compiled := self._receive(patience))["compiled"]:
            failure = compile_failure(compiled)
            return [failure if i == 0 or not job["stop"] else None for i in range(len(tests))]
        compare = self._comparator(job["compare"])
        timeouts = 0
        for i, test in enumerate(tests):
            self._send_test(test)
            result = results[i] = judge(test, self._receive(patience), compare)
            if job["stop"] and result.verdict is not Verdict.PASS:
                break
            timeouts += result.verdict is Verdict.TIMEOUT
            if timeouts == _MOST_TIMEOUTS:
                results[i + 1 :] = [_NOT_RUN] * (len(tests) - i - 1)
                break
        self._send({"kind": "end"})
        return results

    def _send_test(self, test: dict[str, Any]) -> None:
        """Sends what a program may know of a test; what it must not know goes to the assertion process alone."""
        if test["kind"] == "stdio":
            stdin = test["stdin"].encode("utf-8", "surrogateescape")
            self._send({"kind": "stdio", "bytes": len(stdin)})
            self._write(write_all, stdin)
        elif test["kind"] == "call":
            self._send({"kind": "call", "call": test["call"]})
        else:
            self._send({"kind": "assert"})
            self._send({"setup": test["setup"], "code": test["code"]})

    def _comparator(self, name: str) -> Compare:
        if name in COMPARATORS:
            outputs, values = COMPARATORS[name]
            return lambda test, expected, actual: (outputs if test["kind"] == "stdio" else values)(expected, actual)
        checkers = self._checkers
        assert checkers is not None  # The client lets only known names through.

        def ask(test: dict[str, Any], expected: Any, actual: Any) -> bool:
            given = test["stdin"] if test["kind"] == "stdio" else decode(test["call"])
            with contextlib.suppress(CheckerFailed):
                return checkers(name, given, expected, actual)
            # Its own fault only where it cannot judge the right answer either: or programs could void their grades with
            # answers that it cannot read.
            checkers(name, given, expected, expected)
            with contextlib.suppress(CheckerFailed):
                return checkers(name, given, expected, actual)
            return False

        return ask

    def _send(self, frame: dict[str, Any]) -> None:
        self._write(write_frame, frame)

    def _write(self, write: Callable[[int, Any], None], what: Any) -> None:
        try:
            write(self._in, what)
        except OSError as error:
            raise WorkerDied(self._last_words()) from error

    def _receive(self, timeout: float) -> dict[str, Any]:
        poller = select.poll()
        poller.register(self._out, select.POLLIN)
        deadline = time.monotonic() + timeout
        while not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if time.monotonic() >= deadline:
                raise WorkerDied("the sandbox does not answer")
        try:
            frame = read_frame(self._out)
        except (OSError, NotCarried) as error:
            raise WorkerDied(f"the sandbox's answer is unreadable: {error}") from error
        if frame is None:
            raise WorkerDied(self._last_words())
        if "fault" in frame:
            raise WorkerDied(frame["fault"], by_program=frame["tampered"])
        if "died" in frame:
            raise WorkerDied(f"the supervisor ended with status {frame['died']}", by_program=frame["tampered"])
        return frame

    def _last_words(self) -> str:
        """What the sandbox wrote to its standard error before it went."""
        assert self._process.stderr
        if self._process.stderr.closed:
            return "the sandbox could not be started again"
        self._process.kill()
        os.set_blocking(self._process.stderr.fileno(), False)
        try:
            said = os.read(self._process.stderr.fileno(), 1 << 16).decode("utf-8", "replace").strip()
        except BlockingIOError:
            said = ""
        return said.rpartition("\n")[2] or "the sandbox ended without a word"

    def probe(self) -> tuple[str, ...]:
        """Has a program try to leave the sandbox. Returns the layers that held it.

        Raises:
          SandboxError: it succeeded, or the sandbox cannot run programs.
        """
        limits = {"cpu_seconds": 5.0, "wall_seconds": _START_SECONDS, "memory_mb": 256, "output_kb": 16}
        filtered = seccomp.available()
        job: dict[str, Any] = {"program": sandbox.PROBE, "entry_point": None, "limits": limits, "compare": "tokens"}
        with socket.create_server(("127.0.0.1", 0)) as server:
            stdin = sandbox.probe_input(server.getsockname()[1], filtered)
            job |= {"tests": [{"kind": "stdio", "stdin": stdin, "stdout": sandbox.PROBE_OUTPUT}], "stop": False}
            try:
                (result,) = self.grade(job)
            except WorkerDied as died:
                raise SandboxError(f"the sandbox cannot start ({died}): {sandbox.remedy(str(died))}") from died
        assert result is not None
        if result.verdict is not Verdict.PASS:
            found = "; ".join((result.actual or result.error).splitlines())
            raise SandboxError(f"the sandbox does not hold ({found}): replace `bwrap`, {sandbox.UNPROTECTED}")
        return ("namespaces", "limits", "seccomp") if filtered else ("namespaces", "limits")

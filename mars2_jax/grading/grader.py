"""The grader as the rest of the program sees it: programs and problems in, grades out."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from mars2_jax.errors import DataError, GraderError, SandboxError
from mars2_jax.grading.values import NotCarried, encode
from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.tasks.problem import CallTest, Problem, StdioTest, Test

__all__ = ["Grader"]

_START_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class Grader:
    """Runs programs against the tests of their problems in a service process with sandboxed workers.

    The constructor returns once a program inside the sandbox has tried to leave it and failed. Use it as a context
    manager, from one thread at a time; close it before you fork. Nothing of a closed or killed grader stays behind.

    Every result of a program is its own doing but for INFRA, the verdict of a grade whose worker died twice, or of
    all open tickets once the service itself has died (which is not restarted: `submit` raises from then on).

    Programs see the standard library of the interpreter underneath `sys.executable`, and no installed packages.

    Args:
      isolation: "bubblewrap", or "none" to run programs unprotected, with the rights of this process.
      workers: programs run at a time; 0 is one a CPU core.

    Raises:
      SandboxError: there is no working sandbox.
    """

    def __init__(self, isolation: str = "bubblewrap", workers: int = 0) -> None:
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation {isolation!r} is not known: take 'bubblewrap' or 'none'")
        if isolation == "none":
            logging.getLogger(__name__).warning(
                "programs written by models run UNPROTECTED: grading.isolation is 'none'"
            )
        self._finished: dict[int, Grade] = {}
        self._open: dict[int, tuple[int, int]] = {}  # ticket -> numbers of public and hidden tests
        self._next_ticket = 0
        self._received = bytearray()
        self._dead = ""
        workers = workers or len(os.sched_getaffinity(0))
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "mars2_jax.grading.service", "--isolation", isolation]
        command += ["--workers", str(workers), "--parent", str(os.getpid())]
        self._service = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            bufsize=0,
            # Ctrl-C is for the parent, which then closes the service in good order.
            start_new_session=True,
        )
        try:
            first = self._read_line(_START_SECONDS)
            if first is None:
                raise SandboxError(self._dead or f"the grader's service was not ready in {_START_SECONDS:g} seconds")
            if "refused" in first:
                raise SandboxError(first["refused"])
        except BaseException:
            self.close()
            raise

    @property
    def pending(self) -> int:
        """Tickets whose grade has not been collected yet, finished or not."""
        return len(self._open) + len(self._finished)

    def submit(
        self,
        program: str,
        problem: Problem,
        *,
        stop_at_first_failure: bool = False,
        tests: Literal["all", "public"] = "all",
    ) -> int:
        """Queues a program and returns its ticket.

        Args:
          program: source text. A blank one is NO_CODE and is not run.
          problem: what it should solve.
          stop_at_first_failure: leave out the tests after the first failure (their results are None).
          tests: "public" leaves the hidden tests out (`Grade.hidden` is empty).

        Raises:
          DataError: no tests are left to run, or a test holds a value that cannot be passed to a program.
          GraderError: the grader is closed or its service has died.
        """
        if tests not in ("all", "public"):
            raise ValueError(f"tests {tests!r} is not known: take 'all' or 'public'")
        if self._dead:
            raise GraderError(
                f"the grader takes no more programs: {self._dead}; the same command again resumes the run"
            )
        hidden = problem.hidden if tests == "all" else ()
        if not problem.public + hidden:
            raise DataError(f"problem {problem.id!r} has no {tests} tests: there is nothing to grade a program by")
        ticket = self._next_ticket
        self._next_ticket += 1
        sizes = (len(problem.public), len(hidden))
        if not program.strip():
            self._finished[ticket] = Grade(Verdict.NO_CODE, (None,) * sizes[0], (None,) * sizes[1])
            return ticket
        try:
            encoded = [_test_to_json(test) for test in problem.public + hidden]
        except NotCarried as error:
            raise DataError(f"problem {problem.id!r}: a test holds {error}: use plain values (see CallTest)") from error
        request = {
            "ticket": ticket,
            "program": program.encode("utf-8", "replace").decode("utf-8"),
            "entry_point": problem.entry_point,
            "limits": dataclasses.asdict(problem.limits),
            "tests": encoded,
            "stop": stop_at_first_failure,
        }
        self._open[ticket] = sizes
        assert self._service.stdin
        line = memoryview(json.dumps(request, separators=(",", ":")).encode("ascii") + b"\n")
        try:
            while line:
                line = line[os.write(self._service.stdin.fileno(), line) :]
        except BrokenPipeError:
            self._died()
        return ticket

    def poll(self, timeout: float | None = 0) -> list[tuple[int, Grade]]:
        """The grades that have come in, in that order, each once.

        Where there is none yet, waits up to `timeout` seconds (None: for as long as it takes) for the first; returns
        an empty list at once where no ticket is open.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._open:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._collect(0.0 if self._finished else left):
                break
        grades = list(self._finished.items())
        self._finished.clear()
        return grades

    def wait(self, ticket: int) -> Grade:
        """Blocks until the ticket's grade is in. Other grades stay for `poll`. Raises KeyError for an unknown one."""
        while ticket not in self._finished:
            if ticket not in self._open:
                raise KeyError(f"ticket {ticket} is not open: it was never given out, or its grade was collected")
            self._collect(None)
        return self._finished.pop(ticket)

    def grade(
        self,
        program: str,
        problem: Problem,
        *,
        stop_at_first_failure: bool = False,
        tests: Literal["all", "public"] = "all",
    ) -> Grade:
        """Submits a program and waits for its grade."""
        return self.wait(self.submit(program, problem, stop_at_first_failure=stop_at_first_failure, tests=tests))

    def close(self) -> None:
        """Ends the service and its workers. Open tickets become INFRA. May be called again."""
        if self._service.returncode is not None:
            return
        assert self._service.stdin and self._service.stdout
        self._service.stdin.close()
        try:
            self._service.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._service.kill()
            self._service.wait()
        self._service.stdout.close()
        self._void_open("the grader is closed")

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, timeout: float | None) -> bool:
        """Takes in one grade. False if none came in time, or the service has died (open tickets are INFRA then)."""
        message = self._read_line(timeout)
        if message is None:
            return False
        ticket = message["ticket"]
        n_public, n_hidden = self._open.pop(ticket)
        results = tuple(
            None if r is None else TestResult(**{**r, "verdict": Verdict(r["verdict"])}) for r in message["results"]
        )
        assert len(results) == n_public + n_hidden
        self._finished[ticket] = Grade(_overall(results), results[:n_public], results[n_public:])
        return True

    def _read_line(self, timeout: float | None) -> dict[str, Any] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        assert self._service.stdout
        if self._dead:
            return None
        fd = self._service.stdout.fileno()
        while b"\n" not in self._received:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([fd], [], [], left)[0]:
                return None
            part = os.read(fd, 1 << 20)
            if not part:
                self._died()
                return None
            self._received += part
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return json.loads(line)

    def _died(self) -> None:
        self._service.kill()
        code = self._service.wait()
        self._void_open(f"the grader's service died (status {code})")

    def _void_open(self, reason: str) -> None:
        self._dead = self._dead or reason
        for ticket, (n_public, n_hidden) in self._open.items():
            results = (TestResult(Verdict.INFRA, error=reason),) * (n_public + n_hidden)
            self._finished[ticket] = Grade(Verdict.INFRA, results[:n_public], results[n_public:])
        self._open.clear()


def _test_to_json(test: Test) -> dict[str, Any]:
    if isinstance(test, StdioTest):
        return {"kind": "stdio", "stdin": test.stdin, "stdout": test.stdout}
    if isinstance(test, CallTest):
        call = encode((tuple(test.args), dict(test.kwargs)))
        return {"kind": "call", "call": call, "expected": encode(test.expected)}
    return {"kind": "assert", "setup": test.setup, "code": test.code}


def _overall(results: tuple[TestResult | None, ...]) -> Verdict:
    """INFRA if any test is (nothing can be said of the program then), else that of the first one that did not pass."""
    verdicts = [r.verdict for r in results if r is not None]
    if Verdict.INFRA in verdicts:
        return Verdict.INFRA
    return next((v for v in verdicts if v is not Verdict.PASS), Verdict.PASS)

"""The grader as the rest of the program sees it: programs and problems in, grades out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal

from mars2_jax.errors import DataError, GraderError, UserError
from mars2_jax.grading.checkers import parse_checkers
from mars2_jax.grading.compare import COMPARATORS
from mars2_jax.grading.connection import Connection, ServiceDied
from mars2_jax.grading.values import NotCarried, encode
from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.tasks.problem import AssertTest, CallTest, Problem, StdioTest, Test

__all__ = ["Grader", "check_comparators"]

_MAX_DEATHS = 3
"""Of the service in a row, without an answer in between; then the grader gives up."""

_log = logging.getLogger(__name__)


def check_comparators(problems: Iterable[Problem], checkers: Sequence[str]) -> None:
    """Sees that every problem's `compare` is one that there is.

    Args:
      problems: the problems.
      checkers: "name=module:function" of each custom checker (`config.grading.checkers`).

    Raises:
      DataError: names the first problem whose comparator is unknown.
      ConfigError: a checker is malformed.
    """
    known = parse_checkers(checkers).keys() | COMPARATORS.keys()
    for problem in problems:
        if problem.compare not in known:
            raise DataError(
                f"problem {problem.id!r} asks for the comparator {problem.compare!r}, which is neither built in "
                f"({', '.join(COMPARATORS)}) nor allowed: add '{problem.compare}=module:function' to "
                "config.grading.checkers"
            )


@dataclasses.dataclass
class _Request:
    """A program that the service has been given."""

    program: str
    problem: Problem
    stop: bool
    tests: Literal["all", "public"]
    sizes: tuple[int, int]  # numbers of public and hidden tests
    key: bytes = b""  # of the cache; empty where there is none
    tickets: list[int] = dataclasses.field(default_factory=list)  # all that wait for this answer; the first was sent
    sent_again: bool = False


class Grader:
    """Runs programs against the tests of their problems in a service process with sandboxed workers.

    The constructor returns once a program inside the sandbox has tried to leave it and failed. Use it as a context
    manager, from one thread at a time; close it before you fork. Nothing of a closed or killed grader stays behind.

    Every result of a program is its own doing but for INFRA: the verdict of a grade whose worker died twice, whose
    checker failed, or that was open at two deaths of the service. A service that dies is started again, and what was
    open is sent again, once; after three deaths without an answer in between the grader gives up, and `submit` raises.

    Programs see the standard library of the interpreter underneath `sys.executable`, and no installed packages.

    Args:
      isolation: "bubblewrap", or "none" to run programs unprotected, with the rights of this process.
      workers: programs run at a time; 0 is one a CPU core.
      checkers: "name=module:function" of each custom checker that problems may name (see `grading/checkers.py`).
      cache: grades to keep, so that the same program with the same tests, limits and rules is run once; the same
        program while it runs waits for the first one's answer. INFRA is not kept. A program that does not do the same
        every time has the verdict of its first run as long as it is kept. 0 keeps none.

    Attributes:
      layers: what isolates the programs, as the check at the start found it ("namespaces", "limits", and "seccomp"
        where the kernel has it).

    Raises:
      SandboxError: there is no working sandbox.
      ConfigError: a checker cannot be imported.
    """

    def __init__(
        self,
        isolation: str = "bubblewrap",
        workers: int = 0,
        *,
        checkers: Sequence[str] = (),
        cache: int = 0,
    ) -> None:
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation {isolation!r} is not known: take 'bubblewrap' or 'none'")
        if isolation == "none":
            _log.warning("programs written by models run UNPROTECTED: grading.isolation is 'none'")
        self._checkers = tuple(checkers)
        self._comparators = parse_checkers(checkers).keys() | COMPARATORS.keys()
        self._cache: OrderedDict[bytes, Grade] = OrderedDict()
        self._cache_size = cache
        self._finished: dict[int, Grade] = {}
        self._open: dict[int, _Request] = {}  # ticket -> its request; several may share one
        self._running: dict[bytes, _Request] = {}  # cache key -> open request
        self._next_ticket = 0
        self._dead = ""
        self._deaths = 0
        self._start = lambda: Connection(isolation, workers or len(os.sched_getaffinity(0)), self._checkers)
        self._service = self._start()
        self.layers = self._service.layers

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
          DataError: no tests are left to run, a test holds a value that cannot be passed to a program, or the problem
            asks for an unknown comparator.
          GraderError: the grader is closed or its service has died for good.
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
        if problem.compare not in self._comparators:
            check_comparators([problem], self._checkers)
        ticket = self._next_ticket
        sizes = (len(problem.public), len(hidden))
        if not program.strip():
            self._next_ticket += 1
            self._finished[ticket] = Grade(Verdict.NO_CODE, (None,) * sizes[0], (None,) * sizes[1])
            return ticket
        request = _Request(program, problem, stop_at_first_failure, tests, sizes, tickets=[ticket])
        job = _job(request)
        self._next_ticket += 1
        if self._cache_size:
            request.key = hashlib.sha256(b"%d,%d," % sizes + hashlib.sha256(job).digest()).digest()
            if request.key in self._cache:
                self._cache.move_to_end(request.key)
                self._finished[ticket] = self._cache[request.key]
                return ticket
            if request.key in self._running:
                request = self._open[ticket] = self._running[request.key]
                request.tickets.append(ticket)
                return ticket
            self._running[request.key] = request
        self._open[ticket] = request
        try:
            self._send(request, job)
        except ServiceDied as died:
            self._start_again(died)
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
        self._give_up("the grader is closed")
        self._service.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, request: _Request, job: bytes) -> None:
        self._service.send(b'{"ticket":%d,"job":' % request.tickets[0], job, b"}")

    def _collect(self, timeout: float | None) -> bool:
        """Takes in one answer. False if none came in time."""
        try:
            message = self._service.receive(timeout)
        except ServiceDied as died:
            self._start_again(died)
            return True
        if message is None:
            return False
        self._take(message)
        return True

    def _take(self, message: dict[str, Any]) -> None:
        self._deaths = 0
        request = self._open[message["ticket"]]
        results = tuple(
            None if r is None else TestResult(**{**r, "verdict": Verdict(r["verdict"])}) for r in message["results"]
        )
        n_public, n_hidden = request.sizes
        assert len(results) == n_public + n_hidden
        self._finish(request, Grade(_overall(results), results[:n_public], results[n_public:]))

    def _finish(self, request: _Request, grade: Grade) -> None:
        for ticket in request.tickets:
            del self._open[ticket]
            self._finished[ticket] = grade
        if request.key:
            del self._running[request.key]
            if grade.verdict is not Verdict.INFRA:
                self._cache[request.key] = grade
                if len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)

    def _void(self, request: _Request, reason: str) -> None:
        n_public, n_hidden = request.sizes
        results = (TestResult(Verdict.INFRA, error=reason),) * (n_public + n_hidden)
        self._finish(request, Grade(Verdict.INFRA, results[:n_public], results[n_public:]))

    def _requests(self) -> list[_Request]:
        return [request for ticket, request in self._open.items() if request.tickets[0] == ticket]

    def _start_again(self, died: ServiceDied) -> None:
        """Brings up another service, which is sent what was open, unless that has been sent twice."""
        while True:
            for message in self._service.rest():
                self._take(message)
            self._deaths += 1
            _log.warning("%s; it is started again", died)
            for request in self._requests():
                if request.sent_again:
                    self._void(request, f"{died}, for the second time with this program open")
            if self._deaths >= _MAX_DEATHS:
                self._give_up(f"{died}, {self._deaths} times without an answer in between")
                return
            try:
                self._service = self._start()
                for request in self._requests():
                    request.sent_again = True
                    self._send(request, _job(request))
                return
            except ServiceDied as again:
                died = again
            except (UserError, OSError) as error:
                died = ServiceDied(f"{died}, and a new one does not start: {error}")

    def _give_up(self, reason: str) -> None:
        self._dead = self._dead or reason
        for request in self._requests():
            self._void(request, reason)


def _job(request: _Request) -> bytes:
    """The request as the service reads it, but for its ticket.

    Raises:
      DataError: a test holds a value that cannot be passed to a program.
    """
    problem = request.problem
    tests = problem.tests if request.tests == "all" else problem.public
    try:
        encoded = [_test_to_json(test) for test in tests]
    except NotCarried as error:
        raise DataError(f"problem {problem.id!r}: a test holds {error}: use plain values (see CallTest)") from error
    job = {
        "program": request.program.encode("utf-8", "replace").decode("utf-8"),
        "entry_point": problem.entry_point,
        "limits": dataclasses.asdict(problem.limits),
        "tests": encoded,
        "compare": problem.compare,
        "stop": request.stop,
    }
    return json.dumps(job, separators=(",", ":")).encode("ascii")


def _test_to_json(test: Test) -> dict[str, Any]:
    if isinstance(test, StdioTest):
        return {"kind": "stdio", "stdin": test.stdin, "stdout": test.stdout}
    if isinstance(test, CallTest):
        call = encode((tuple(test.args), dict(test.kwargs)))
        return {"kind": "call", "call": call, "expected": encode(test.expected)}
    assert isinstance(test, AssertTest)
    return {"kind": "assert", "setup": test.setup, "code": test.code}


def _overall(results: tuple[TestResult | None, ...]) -> Verdict:
    """INFRA if any test is (nothing can be said of the program then), else that of the first one that did not pass."""
    verdicts = [r.verdict for r in results if r is not None]
    if Verdict.INFRA in verdicts:
        return Verdict.INFRA
    return next((v for v in verdicts if v is not Verdict.PASS), Verdict.PASS)

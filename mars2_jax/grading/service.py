"""The grader's service: `python -m mars2_jax.grading.service`. JSON lines in, JSON lines out.

Started by `Grader` as a fresh interpreter that never imports JAX. First line out: `{"layers": [..]}`, what isolates the
programs, or `{"refused": message, "error": class}`. Then a line in is `{"ticket", "job": {"program", "entry_point",
"limits", "tests", "compare", "stop"}}` and the line that answers it, in any order, is `{"ticket", "results"}`, one
entry (or null) a test. Input is left in the pipe while too much of it waits.

The service ends, and everything it started with it, when its input ends, when its parent is gone, on SIGTERM and on
SIGINT. A worker that dies is replaced, and the program that it had is tried once more; after the second time its tests
are INFRA. They are ERROR where the program must have done it: a supervisor that runs as the program's own user (as it
must where the grader is not root) can be hurt by it, and a program must not be able to void its own grade.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from operator import itemgetter
from types import FrameType
from typing import Any

from mars2_jax.errors import SandboxError, UserError
from mars2_jax.grading.checkers import Checkers
from mars2_jax.grading.verdict import TestResult, Verdict
from mars2_jax.grading.worker import Worker, WorkerDied

__all__ = ["main"]

_PARENT_SECONDS = 1.0
_FULL_SECONDS = 0.02
# Of requests that wait for a worker; one request may be larger.
_MAX_WAITING_BYTES = 256 << 20
# User ids that programs run as when the grader is root: two a worker, far above those of real users.
_FIRST_UID = 1_000_000_000


class _Service:
    """Worker threads around a queue of programs."""

    def __init__(self, isolation: str, workers: int, checkers: Sequence[str]) -> None:
        self._isolation = isolation
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._out = threading.Lock()
        self._guard = threading.Lock()
        self._ending = False
        self._checkers = [Checkers(checkers) for _ in range(workers)] if checkers else [None] * workers
        self._workers = [Worker(isolation, self._uid(index), self._checkers[index]) for index in range(workers)]
        self._layers: tuple[str, ...] = ()
        if isolation != "none":
            for worker in self._workers:
                self._layers = worker.probe()

    @staticmethod
    def _uid(index: int) -> int:
        return _FIRST_UID + 2 * (os.getpid() * 256 + index)

    def start(self) -> None:
        self._say({"layers": self._layers})
        for index in range(len(self._workers)):
            threading.Thread(target=self._work, args=(index,), daemon=True).start()

    @property
    def full(self) -> bool:
        return self._waiting_bytes > _MAX_WAITING_BYTES

    def submit(self, request: bytes) -> None:
        with self._guard:
            self._waiting_bytes += len(request)
        self._requests.put(request)

    def close(self) -> None:
        with self._guard:
            self._ending = True
            for worker in self._workers:
                worker.close()
            for checkers in self._checkers:
                if checkers is not None:
                    checkers.close()

    def _say(self, message: dict[str, Any]) -> None:
        with self._out:
            sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
            sys.stdout.flush()

    def _work(self, index: int) -> None:
        try:
            while True:
                self._serve_one(index)
        except BrokenPipeError:  # The client is gone; the main thread is about to notice.
            pass
        except BaseException:  # noqa: BLE001 -- as it says
            # A defect. The client is waiting for an answer that will not come; it starts a new service instead.
            traceback.print_exc()
            os._exit(1)

    def _serve_one(self, index: int) -> None:
        request = self._requests.get()
        with self._guard:
            self._waiting_bytes -= len(request)
        ticket, job = itemgetter("ticket", "job")(json.loads(request))
        del request  # It may be large.
        results = self._grade(index, job)
        plain = [None if r is None else {**dataclasses.asdict(r), "verdict": r.verdict.value} for r in results]
        self._say({"ticket": ticket, "results": plain})

    def _grade(self, index: int, job: dict[str, Any]) -> list[TestResult | None]:
        failure = TestResult(Verdict.INFRA)
        for _ in range(2):
            try:
                return self._workers[index].grade(job)
            except WorkerDied as died:
                verdict = Verdict.ERROR if died.by_program else Verdict.INFRA
                failure = TestResult(verdict, error=f"the sandbox died twice: {died}")
            except Exception as error:  # noqa: BLE001 -- a defect of the grader must not end the thread
                failure = TestResult(Verdict.INFRA, error=f"{type(error).__name__}: {error}")
            self._replace(index)
        return [failure if i == 0 or not job["stop"] else None for i in range(len(job["tests"]))]

    def _replace(self, index: int) -> None:
        with self._guard:
            if self._ending:
                return
            self._workers[index].close()
            try:
                self._workers[index] = Worker(self._isolation, self._uid(index), self._checkers[index])
            except (SandboxError, OSError) as error:
                # The closed worker stays: the next program finds it dead and a new start is tried.
                print(f"grader: a worker could not be restarted: {error}", file=sys.stderr, flush=True)


def _serve(service: _Service, parent: int) -> None:
    """Reads requests until the input ends or the parent is gone."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    begun: list[bytes] = []  # of a line whose end has not come
    while True:
        while service.full:
            time.sleep(_FULL_SECONDS)
            if os.getppid() != parent:
                return
        if not poller.poll(_PARENT_SECONDS * 1000):
            # Another child of the parent's may hold the pipe open after the parent's death.
            if os.getppid() != parent:
                return
            continue
        part = os.read(0, 1 << 20)
        if not part:
            return
        *ends, rest = part.split(b"\n")
        for end in ends:
            service.submit(b"".join([*begun, end]))
            begun.clear()
        begun.append(rest)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isolation", choices=("bubblewrap", "none"), required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--checker", action="append", default=[])
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    service = None
    try:
        service = _Service(arguments.isolation, arguments.workers, arguments.checker)
        service.start()
        _serve(service, arguments.parent)
    except UserError as error:
        print(json.dumps({"refused": str(error), "error": type(error).__name__}), flush=True)
    except BrokenPipeError:
        pass
    finally:
        # No second signal may interrupt this. Worker threads are not waited for: the process takes them along.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if service is not None:
            service.close()
        os._exit(0)


if __name__ == "__main__":
    main()

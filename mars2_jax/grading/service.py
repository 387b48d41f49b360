"""The grader's service: `python -m mars2_jax.grading.service`. JSON lines in, JSON lines out.

Started by `Grader` as a fresh interpreter that never imports JAX. First line out: `{"ready": true}` or
`{"refused": message}`. Then a line in is `{"ticket", "program", "entry_point", "limits", "tests", "stop"}` and the
line that answers it, in any order, is `{"ticket", "results"}`, one entry (or null) a test.

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
from types import FrameType
from typing import Any

from mars2_jax.errors import SandboxError
from mars2_jax.grading.verdict import TestResult, Verdict
from mars2_jax.grading.worker import Worker, WorkerDied

__all__ = ["main"]

_PARENT_SECONDS = 1.0
# User ids that programs run as when the grader is root: two a worker, far above those of real users.
_FIRST_UID = 1_000_000_000


class _Service:
    """Worker threads around a queue of programs."""

    def __init__(self, isolation: str, workers: int) -> None:
        self._isolation = isolation
        self._jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._out = threading.Lock()
        self._guard = threading.Lock()
        self._ending = False
        self._workers = [Worker(isolation, self._uid(index)) for index in range(workers)]
        if isolation != "none":
            for worker in self._workers:
                worker.probe()

    @staticmethod
    def _uid(index: int) -> int:
        return _FIRST_UID + 2 * (os.getpid() * 256 + index)

    def start(self) -> None:
        self._say({"ready": True})
        for index in range(len(self._workers)):
            threading.Thread(target=self._work, args=(index,), daemon=True).start()

    def submit(self, job: dict[str, Any]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        with self._guard:
            self._ending = True
            for worker in self._workers:
                worker.close()

    def _say(self, message: dict[str, Any]) -> None:
        with self._out:
            sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
            sys.stdout.flush()

    def _work(self, index: int) -> None:
        while True:
            job = self._jobs.get()
            results = self._grade(index, job)
            plain = [None if r is None else {**dataclasses.asdict(r), "verdict": r.verdict.value} for r in results]
            try:
                self._say({"ticket": job["ticket"], "results": plain})
            except BrokenPipeError:  # The client is gone; the main thread is about to notice.
                return

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
                self._workers[index] = Worker(self._isolation, self._uid(index))
            except (SandboxError, OSError) as error:
                # The closed worker stays: the next program finds it dead and a new start is tried.
                print(f"grader: a worker could not be restarted: {error}", file=sys.stderr, flush=True)


def _serve(service: _Service, parent: int) -> None:
    """Reads requests until the input ends or the parent is gone."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    pending = bytearray()
    while True:
        if not poller.poll(_PARENT_SECONDS * 1000):
            # Another child of the parent's may hold the pipe open after the parent's death.
            if os.getppid() != parent:
                return
            continue
        part = os.read(0, 1 << 20)
        if not part:
            return
        pending += part
        if b"\n" in part:
            *lines, rest = bytes(pending).split(b"\n")
            pending = bytearray(rest)
            for line in lines:
                service.submit(json.loads(line))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isolation", choices=("bubblewrap", "none"), required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    service = None
    try:
        service = _Service(arguments.isolation, arguments.workers)
        service.start()
        _serve(service, arguments.parent)
    except SandboxError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
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

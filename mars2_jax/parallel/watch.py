"""What the processes of a run have to know of each other at any moment: who is alive, failed, or was asked to stop.

Collectives cannot tell. They wait for a process that is gone, for ever on TPUs, and processes are at different places
of their searches for minutes. So a thread of each looks at a board that all can write on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mars2_jax.errors import PeerError

__all__ = ["LOST", "Board", "Request", "Watch"]

LOST = PeerError.code
"""Exit code of a process that ends because another is gone: start all again."""


class Board(Protocol):
    """Short notes by name, which all processes see. Process 0 keeps it."""

    def post(self, name: str, note: str) -> None: ...

    def read(self) -> dict[str, str]: ...


class Request(Protocol):
    """Whether the run was asked to end."""

    requested: bool


class Watch:
    """A thread that posts this process's signs of life and its wish to stop, and looks for those of the others.

    A process that was asked to stop makes all of them so: `stop.requested` becomes True everywhere within some
    `period`s. When a process failed, or gave no sign of life for `patience` seconds, or process 0 cannot be reached for
    that long, this process ends at once, with one line on stderr and the exit code of the one that failed, or `LOST`.
    It ends as if it were killed: what it holds open is closed by the system, and its grader ends with it.

    Args:
      board: the notes.
      index: of this process.
      count: of processes.
      stop: whether this process was asked to stop.
      errors: what the board may raise while process 0 cannot be reached.
      period: seconds between looks.
      patience: seconds without a sign of life after which a process is gone. One that holds Python's lock for long, or
        waits for a slow disk, is not.
      end: ends the process with an exit code, whatever its other threads do.
    """

    def __init__(
        self,
        board: Board,
        index: int,
        count: int,
        stop: Request,
        *,
        errors: tuple[type[BaseException], ...],
        period: float = 1.0,
        patience: float,
        end: Callable[[int], object],
    ):
        self._board, self._index, self._count, self._stop = board, index, count, stop
        self._errors, self._period, self.patience, self._end = errors, period, patience, end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self) -> None:
        """Looks no more."""
        self._closed.set()
        self._thread.join(5 + self._period)  # it may wait for a board that is gone

    def fail(self, message: str, code: int) -> None:
        """Tells the others that this process failed, so that they end too, with `code`; looks no more."""
        self.close()
        try:
            self._board.post(f"failed/{self._index}", f"{code} {message}")
        except self._errors:
            return  # process 0 is gone, which the others see for themselves
        if self._index == 0:
            time.sleep(3 * self._period)  # the board goes with it: the others have to read it first

    def _run(self) -> None:
        beat, stopping = 0, False
        reached = time.monotonic()
        # Of each process: its last sign of life, and when that was seen first.
        alive = {i: ("", reached) for i in range(self._count) if i != self._index}
        while not self._closed.wait(self._period):
            beat += 1
            try:
                if self._stop.requested and not stopping:
                    self._board.post("stop", str(self._index))
                    stopping = True
                self._board.post(f"alive/{self._index}", str(beat))
                notes = self._board.read()
            except self._errors:
                if time.monotonic() - reached > self.patience:
                    self._lost(f"process 0 cannot be reached for {self.patience:.0f} s")
                continue
            reached = time.monotonic()
            if "stop" in notes:
                self._stop.requested = True
            for other, (last, seen) in alive.items():
                if (failed := notes.get(f"failed/{other}")) is not None:
                    code, _, message = failed.partition(" ")
                    self._say(f"process {other} failed: {message}", int(code))
                sign = notes.get(f"alive/{other}", "")
                if sign != last:
                    alive[other] = sign, reached
                elif reached - seen > self.patience:
                    self._lost(f"process {other} gave no sign of life for {self.patience:.0f} s")

    def _lost(self, what: str) -> None:
        self._say(f"{what}: it is gone, or its machine is; start all processes again, and the run goes on", LOST)

    def _say(self, line: str, code: int) -> None:
        if self._closed.is_set():
            return
        print("error:", line, file=sys.stderr, flush=True)
        sys.stdout.flush()
        self._end(code)
        self._closed.set()

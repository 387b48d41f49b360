"""SIGTERM as a request: the run saves what it has and ends in good order, with exit code 0."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["StopRequest", "Stopped", "stop_on_sigterm"]


class Stopped(Exception):
    """Work that leaves nothing behind, such as an evaluation, was given up on request."""


class StopRequest:
    """Whether the run was asked to end.

    Attributes:
      requested: True from the request on.
    """

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Raises `Stopped` once the run was asked to end."""
        if self.requested:
            raise Stopped


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """While it is open, SIGTERM (from a scheduler, a preempted machine, `kill`) does no more than set the request.

    In a thread other than the main one, which alone may handle signals, nothing sets it.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        stop.requested = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)

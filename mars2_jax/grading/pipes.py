"""The pipes between a supervisor and the processes of a test, none of which may block it or fill its memory.

Standard library only: the sandbox runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os

__all__ = ["Pipes", "Sink", "drain", "feed"]

_PIPE_BYTES, _MAX_PIPE_BYTES = 64 << 10, 1 << 20


@dataclasses.dataclass
class Sink:
    """The reading end of a pipe: keeps all bytes, or the last `tail`; more than `cap` in total ends the test."""

    cap: int
    tail: int | None = None
    data: bytearray = dataclasses.field(default_factory=bytearray)
    total: int = 0

    def add(self, part: bytes) -> bool:
        self.total += len(part)
        self.data += part
        if self.tail is not None and len(self.data) > 2 * self.tail:
            del self.data[: -self.tail]
        return self.total <= self.cap


class Pipes:
    """The pipes between the supervisor and the processes of one test; all are closed at its end."""

    def __init__(self) -> None:
        self._ours: set[int] = set()
        self._theirs: set[int] = set()
        self.sinks: dict[int, Sink] = {}
        self.feeds: dict[int, memoryview] = {}

    def _keep(self, fd: int) -> int:
        self._theirs.add(fd)
        return fd

    def output(self, sink: Sink) -> int:
        """A pipe that fills `sink`. Returns the end for the child."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._ours.add(ours)
        self.sinks[ours] = sink
        return self._keep(theirs)

    def input(self, data: bytes | bytearray) -> int:
        """A pipe that is fed `data`. Returns the end for the child."""
        theirs, ours = os.pipe()
        if len(data) > _PIPE_BYTES:
            # Fewer turns of the loop; a user other than root may have used up what pipes may take.
            with contextlib.suppress(PermissionError):
                fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _MAX_PIPE_BYTES)
        os.set_blocking(ours, False)
        self._ours.add(ours)
        self.feeds[ours] = memoryview(data)
        return self._keep(theirs)

    def between(self) -> tuple[int, int]:
        """A pipe from one child to another: (reading end, writing end)."""
        reader, writer = os.pipe()
        return self._keep(reader), self._keep(writer)

    def close_theirs(self) -> None:
        for fd in self._theirs:
            os.close(fd)
        self._theirs.clear()

    def close_ours(self, fd: int) -> None:
        os.close(fd)
        self._ours.discard(fd)
        self.feeds.pop(fd, None)

    def close(self) -> None:
        self.close_theirs()
        for fd in list(self._ours):
            self.close_ours(fd)


def drain(fd: int, sink: Sink) -> bool:
    """Reads what is there. False once the cap is passed."""
    while True:
        try:
            part = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not part:
            return True
        if not sink.add(part):
            return False


def feed(fd: int, feeds: dict[int, memoryview]) -> bool:
    """Writes what fits. False once all is written, or nobody is left to read it."""
    try:
        feeds[fd] = feeds[fd][os.write(fd, feeds[fd][:_MAX_PIPE_BYTES]) :]
    except BlockingIOError:
        return True
    except BrokenPipeError:
        return False
    return bool(feeds[fd])

"""A run's numbers: `metrics.jsonl` (one object a line) and the same in `tensorboard/`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from mars2_jax.errors import DataError
from mars2_jax.files import storage, write_atomically

__all__ = ["MetricsWriter", "read_metrics"]


class MetricsWriter:
    """Appends to a run's metrics. A context manager.

    Each line is `{"step": int, "wall": seconds, "<name>": number, ...}`. `wall` is the time that the run has worked:
    after a resume it goes on from the last line kept. A value that is not finite is written as null, because JSON has
    no NaN and a reader must be able to tell "was not a number" from "was not measured", where the name is absent;
    TensorBoard gets the value itself and marks it.

    Args:
      workdir: the run's directory.
      resumed_step: the step whose checkpoint the run goes on from: later lines, which will be written again, are
        removed. None starts the run, and the files, over.

    Raises:
      DataError: the existing metrics.jsonl is damaged elsewhere than in its last line.
      StorageError: the files cannot be written; by every method.
    """

    def __init__(self, workdir: str | os.PathLike[str], resumed_step: int | None = None):
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / "metrics.jsonl"
        kept = [] if resumed_step is None else [row for row in read_metrics(path) if row["step"] <= resumed_step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._started = time.monotonic() - max((row["wall"] for row in kept), default=0.0)
        self._path = path
        with storage(path):
            self._file = path.open("a", encoding="utf-8")
            self._board = _Board(workdir / "tensorboard", 0 if resumed_step is None else resumed_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line and flushes it.

        Args:
          step: the training step that the values belong to; 0 is before the first.
          values: name -> number (Python, NumPy or JAX scalar).
        """
        if values.keys() & {"step", "wall"}:
            raise ValueError("the names step and wall are taken")
        numbers = {name: _number(value) for name, value in values.items()}
        row: dict[str, Any] = {"step": int(step), "wall": round(time.monotonic() - self._started, 3)}
        row.update((name, value if math.isfinite(value) else None) for name, value in numbers.items())
        with storage(self._path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
            self._board.write(int(step), numbers)

    def close(self) -> None:
        """Closes the files."""
        with storage(self._path), contextlib.closing(self._board):
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Board:
    """A file of events for TensorBoard.

    Written here and now: of a full disk the thread of tensorboardX's own writer dies, and what is added after that
    waits for it forever.

    Args:
      folder: of the files; each writer makes one.
      purge_step: TensorBoard forgets this step and those after it, which are done again.
    """

    def __init__(self, folder: Path, purge_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(folder / "events"))
        self._add(step=purge_step, file_version="brain.Event:2")
        self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        self._events.flush()

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Adds numbers of a step, and flushes them."""
        for name, value in numbers.items():
            self._add(step=step, summary=scalar(name, value))
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def _add(self, **fields: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), **fields))


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, none if there is no file. A last line cut short by a kill is left out.

    Raises:
      DataError: another line is damaged, or the file cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): it is a file of the run; move it away") from error
    rows = []
    # What follows the last line end is a line that was not finished, or nothing.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row["step"], int) and isinstance(row["wall"], int | float)):
                raise TypeError("step or wall is no number")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number} is damaged ({error}); remove the line to go on") from error
        rows.append(row)
    return rows


def _number(value: Any) -> int | float:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a metric is a number, not {value!r}")
    return value

"""The search that a run was stopped in, `<workdir>/pending_search_000002.npz`, for the run that goes on."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from mars2_jax.errors import DataError
from mars2_jax.search.saved import SavedSearch, read_search, write_search

__all__ = ["PendingSearch"]

_NAME = re.compile(r"pending_search_(\d+)\.npz(\.tmp)?")


class PendingSearch:
    """At most one search a training step, kept until a checkpoint holds what came of it.

    Args:
      workdir: the run's directory.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        self._workdir = Path(workdir)

    def path(self, step: int) -> Path:
        """The file of the search of a training step."""
        return self._workdir / f"pending_search_{step:06d}.npz"

    def keep(self, step: int, saved: SavedSearch) -> None:
        """Writes the suspended search of a step, all or nothing. Raises StorageError."""
        write_search(self.path(step), saved)

    def of(self, step: int) -> SavedSearch | None:
        """The search of a step; None where none was suspended, or the file is damaged (which is warned of)."""
        if not self.path(step).exists():
            return None
        try:
            return read_search(self.path(step))
        except DataError as error:
            logging.getLogger(__name__).warning("searching step %d anew: %s", step, error)
            return None

    def forget(self, which: Callable[[int], bool]) -> None:
        """Removes the searches of the steps that `which` is true of."""
        for path in self._workdir.glob("pending_search_*"):
            match = _NAME.fullmatch(path.name)
            if match and which(int(match[1])):
                path.unlink(missing_ok=True)

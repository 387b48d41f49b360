"""The search that a run was stopped in, `<workdir>/pending_search_000002.npz`, for the run that goes on. Its second
round, if it came to one, is in `pending_search_000002_round_2.npz`, and so on."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from mars2_jax.errors import DataError
from mars2_jax.files import storage
from mars2_jax.parallel.exchange import from_leader, leads
from mars2_jax.search.saved import SavedSearch, read_search, search_from_bytes, search_to_bytes, write_search

__all__ = ["PendingSearch"]

_NAME = re.compile(r"pending_search_(\d+)(?:_round_(\d+))?\.npz(\.tmp)?")


class PendingSearch:
    """The rounds of at most one search a training step, kept until a checkpoint holds what came of it.

    Of several processes all call the methods; process 0 alone touches the files.

    Args:
      workdir: the run's directory.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        self._workdir = Path(workdir)

    def path(self, step: int, round_: int = 1) -> Path:
        """The file of a round, from 1, of the search of a training step."""
        suffix = f"_round_{round_}" if round_ > 1 else ""
        return self._workdir / f"pending_search_{step:06d}{suffix}.npz"

    def keep(self, step: int, rounds: Sequence[SavedSearch]) -> None:
        """Writes the suspended search of a step, each round all or nothing, in order. Raises StorageError."""
        if leads():
            for number, saved in enumerate(rounds, 1):
                write_search(self.path(step, number), saved)

    def of(self, step: int) -> list[SavedSearch]:
        """The rounds of the search of a step, up to the first that is not there or damaged (which is warned of). What
        is kept of later ones is removed: a round follows from the one before it, to the bit."""
        rounds = self._read(step) if leads() else []
        if jax.process_count() == 1:
            return rounds
        count = int(from_leader(b"%d" % len(rounds)))
        sent = [from_leader(search_to_bytes(rounds[i]) if leads() else b"") for i in range(count)]
        return rounds if leads() else [search_from_bytes(data) for data in sent]

    def _read(self, step: int) -> list[SavedSearch]:
        rounds: list[SavedSearch] = []
        while (path := self.path(step, len(rounds) + 1)).exists():
            try:
                rounds.append(read_search(path))
            except DataError as error:
                where = f"step {step}" + f" from round {len(rounds) + 1}" * bool(rounds)
                logging.getLogger(__name__).warning("searching %s anew: %s", where, error)
                break
        self._forget(lambda other, round_: other == step and round_ > len(rounds))
        return rounds

    def forget(self, which: Callable[[int], bool]) -> None:
        """Removes the searches of the steps that `which` is true of."""
        self._forget(lambda step, round_: which(step))

    def _forget(self, which: Callable[[int, int], bool]) -> None:
        for path in self._workdir.glob("pending_search_*") if leads() else ():
            match = _NAME.fullmatch(path.name)
            if match and which(int(match[1]), int(match[2] or 1)):
                with storage(path):
                    path.unlink(missing_ok=True)

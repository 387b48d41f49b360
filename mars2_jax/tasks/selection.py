"""Which problems of a source are wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts.fields import DIFFICULTIES, day_of

__all__ = ["ALL", "Selection"]

ALL = "all"
"""The split that holds every problem of a source."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """A choice among problems. Made by `parse`.

    Attributes:
      split: name of the split, or `ALL`.
      levels: difficulties; none keeps all.
      limit: at most so many; 0 keeps all.
      date_from, date_to: first and last day as "2025-01-31"; "" is no bound.
    """

    split: str = ALL
    levels: tuple[str, ...] = ()
    limit: int = 0
    date_from: str = ""
    date_to: str = ""

    @classmethod
    def parse(
        cls, split: str, *, difficulty: str = "", limit: int = 0, date_from: str = "", date_to: str = ""
    ) -> Selection:
        """Checks what a config says.

        Args:
          split: name of the split.
          difficulty: comma-separated; "" keeps all.
          limit: 0 keeps all.
          date_from, date_to: days, or "".

        Raises:
          DataError: naming what is wrong.
        """
        levels = tuple(level.strip() for level in difficulty.split(",") if level.strip())
        for level in levels:
            if level not in DIFFICULTIES:
                raise DataError(f"difficulty {level!r} is not known: use some of {', '.join(DIFFICULTIES)}")
        if limit < 0:
            raise DataError(f"limit of problems is {limit}: use 0 for all, or a positive number")
        first, last = day_of(date_from, "date_from"), day_of(date_to, "date_to")
        if first and last and first > last:
            raise DataError(f"date_from is {first} and date_to is {last}: no day lies between them, exchange them")
        return cls(split, levels, limit, first, last)

    def takes(self, name: str, split: str, difficulty: str, date: str) -> bool:
        """Whether a problem is wanted.

        Args:
          name: of the problem, for messages.
          split: "" belongs to every split.
          difficulty: "" where it is not known.
          date: "" where it is not known.

        Raises:
          DataError: days choose, and it has none.
        """
        if not (self.split == ALL or split in ("", self.split)):
            return False
        if self.levels and difficulty not in self.levels:
            return False
        if not (self.date_from or self.date_to):
            return True
        if not date:
            raise DataError(f"problem {name!r} has no date to choose it by: leave date_from and date_to empty")
        return (not self.date_from or date >= self.date_from) and (not self.date_to or date <= self.date_to)

    def check(self, source: str, splits: Collection[str], found: int) -> None:
        """Sees that something was found.

        Args:
          source: for messages.
          splits: all splits that the source has.
          found: how many problems were wanted.

        Raises:
          DataError: nothing was, and why.
        """
        if found:
            return
        if self.split != ALL and self.split not in splits and "" not in splits:
            have = ", ".join(sorted(split for split in splits if split))
            raise DataError(f"problem set {source!r} has no split {self.split!r}: use one of {have or ALL}")
        days = f" from {self.date_from or 'the beginning'} to {self.date_to or 'the end'}"
        wanted = f" of difficulty {','.join(self.levels)!r}" if self.levels else ""
        wanted += days if self.date_from or self.date_to else ""
        raise DataError(
            f"problem set {source!r}, split {self.split!r}, has no problem{wanted}: leave the filter out or choose "
            "another"
        )

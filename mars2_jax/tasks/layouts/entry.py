"""What a layout is given and what it makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mars2_jax.tasks.problem import Problem

__all__ = ["Entry", "Layout", "Origin"]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a record comes from.

    Attributes:
      source: name of the problem set, which its problems carry.
      place: the file below the folder of the source, without its ending, and the number of the record, such as
        "taco/train-00000-of-00004/17": what a problem is called that has no name of its own.
      public_tests: how many tests are public where the record does not say which.
    """

    source: str
    place: str = ""
    public_tests: int = 2


@dataclasses.dataclass(frozen=True)
class Entry:
    """A problem, and what chooses among the problems of a source.

    Attributes:
      problem: the problem.
      split: "train", "test", ...; "" where the record does not say.
      date: day of its publication as "2025-01-31"; "" where the record does not say.
    """

    problem: Problem
    split: str = ""
    date: str = ""


Layout = Callable[[Mapping[str, Any], Origin], Entry]
"""From a record to an entry. Raises DataError, which names the field and the remedy; the reader adds file and line."""

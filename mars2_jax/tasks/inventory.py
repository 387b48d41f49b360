"""What is in a problem set, in numbers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from mars2_jax.tasks.layouts import Entry
from mars2_jax.tasks.problem import CallTest, StdioTest, Test

__all__ = ["Inventory"]


class Inventory:
    """Counts entries as they pass by."""

    def __init__(self) -> None:
        self._problems = 0
        self._splits: collections.Counter[str] = collections.Counter()
        self._levels: collections.Counter[str] = collections.Counter()
        self._kinds: collections.Counter[str] = collections.Counter()
        self._compared: collections.Counter[str] = collections.Counter()
        self._public = self._hidden = self._without_public = self._references = 0
        self._limits: dict[str, tuple[float, float]] = {}
        self._dates: list[str] = []

    def add(self, entry: Entry) -> None:
        problem = entry.problem
        self._problems += 1
        self._splits[entry.split or "(every)"] += 1
        self._levels[problem.difficulty or "(unknown)"] += 1
        self._kinds["+".join(sorted({_kind(test, problem.entry_point) for test in problem.tests}))] += 1
        self._compared[problem.compare] += 1
        self._public += len(problem.public)
        self._hidden += len(problem.hidden)
        self._without_public += not problem.public
        self._references += problem.reference is not None
        for name, value in dataclasses.asdict(problem.limits).items():
            least, most = self._limits.get(name, (value, value))
            self._limits[name] = (min(least, value), max(most, value))
        if entry.date:
            ends = sorted((*self._dates, entry.date))
            self._dates = [ends[0], ends[-1]]

    def as_json(self) -> dict[str, Any]:
        """The counts: `limits` are the least and the greatest, `dates` the first and the last day (or empty)."""
        return {
            "problems": self._problems,
            "splits": dict(sorted(self._splits.items())),
            "difficulties": dict(sorted(self._levels.items())),
            "kinds": dict(sorted(self._kinds.items())),
            "compare": dict(sorted(self._compared.items())),
            "public_tests": self._public,
            "hidden_tests": self._hidden,
            "without_public_tests": self._without_public,
            "references": self._references,
            "limits": {name: list(ends) for name, ends in self._limits.items()},
            "dates": list(self._dates),
        }


def _kind(test: Test, entry_point: str | None) -> str:
    if isinstance(test, StdioTest):
        return "stdin"
    if isinstance(test, CallTest):
        return "method call" if entry_point and "." in entry_point else "function call"
    return "assertions"

"""Time limits from the reference solutions, so that a program that is right but slow by far does not pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.tasks.problem import Problem

__all__ = ["Calibration", "calibrate"]

_AT_A_TIME = 64
_STEP = 0.1
"""Limits are multiples of this many seconds, so that noise in the measurement seldom changes them."""


class _Grader(Protocol):
    def submit(self, program: str, problem: Problem) -> int: ...

    def wait(self, ticket: int) -> Grade: ...


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What came of it.

    Attributes:
      problems: all problems, in their order, with their new limits.
      failed: ids of those whose reference does not pass, with its verdict; their limits are as they were.
      limited: how many limits were changed.
    """

    problems: list[Problem]
    failed: dict[str, Verdict]
    limited: int

    def report(self) -> str:
        """One line for a person."""
        references = sum(problem.reference is not None for problem in self.problems)
        line = f"CPU limits from references: {self.limited} of {len(self.problems)} problems, {references} with one"
        if self.failed:
            some = ", ".join(f"{name!r} ({verdict.value})" for name, verdict in list(self.failed.items())[:5])
            more = f" and {len(self.failed) - 5} more" if len(self.failed) > 5 else ""
            line += f"; the reference fails and the limit stays for {some}{more}"
        return line


def calibrate(
    problems: Sequence[Problem],
    grader: _Grader,
    *,
    factor: float,
    floor: float,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Sets `limits.cpu_seconds` of each problem to `factor` times what the slowest test of its reference takes, and no
    less than `floor` nor more than the problem's own limit.

    Problems without a reference are left as they are. The measurement differs a little from run to run, and so may the
    verdict of a program that is near the limit.

    Args:
      problems: problems with unique ids.
      grader: runs the references, on all tests.
      factor: above 1.
      floor: in seconds.
      progress: is told (references run, references).
    """
    todo = [problem for problem in problems if problem.reference is not None]
    failed: dict[str, Verdict] = {}
    seconds: dict[str, float] = {}
    tickets: list[int] = []
    for done, problem in enumerate(todo):
        for later in todo[len(tickets) : done + _AT_A_TIME]:
            assert later.reference is not None
            tickets.append(grader.submit(later.reference, later))
        grade = grader.wait(tickets[done])
        if grade.verdict is Verdict.PASS:
            times = [result.cpu_seconds for result in grade.public + grade.hidden if result is not None]
            # Tolerant of what binary fractions add to 0.3.
            steps = math.ceil(max(floor, factor * max(times)) / _STEP - 1e-9)
            seconds[problem.id] = min(problem.limits.cpu_seconds, steps * _STEP)
        else:
            failed[problem.id] = grade.verdict
        if progress is not None:
            progress(done + 1, len(todo))
    limits = {problem.id: problem.limits for problem in problems}
    changed = {name: s for name, s in seconds.items() if s < limits[name].cpu_seconds}
    new = [
        dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, cpu_seconds=changed[problem.id]))
        if problem.id in changed
        else problem
        for problem in problems
    ]
    return Calibration(new, failed, len(changed))

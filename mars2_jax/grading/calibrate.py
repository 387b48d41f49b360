"""Time limits from the reference solutions, so that a program that is right but slow by far does not pass."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.tasks.problem import Problem

__all__ = ["Calibration", "calibrate", "with_cpu_limit"]

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
      cpu_seconds: the new limit of each problem that gets one, by its id.
      failed: ids of those whose reference does not pass, with its verdict; their limits stay.
      problems: how many there are.
      references: how many of them have a reference.
    """

    cpu_seconds: dict[str, float]
    failed: dict[str, Verdict]
    problems: int
    references: int

    def report(self) -> str:
        """One line for a person."""
        line = (
            f"CPU limits from references: {len(self.cpu_seconds)} of {self.problems} problems, {self.references} with "
            "one"
        )
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
    """Limits of the CPU time of each problem: `factor` times what the slowest test of its reference takes, and no less
    than `floor` nor more than the problem's own limit.

    Problems without a reference are left as they are. The measurement differs a little from run to run, and so may the
    verdict of a program that is near the limit. No more than some tens of problems are in memory at a time.

    Args:
      problems: problems with unique ids.
      grader: runs the references, on all tests.
      factor: above 1.
      floor: in seconds.
      progress: is told (problems done, problems).
    """
    failed: dict[str, Verdict] = {}
    seconds: dict[str, float] = {}
    running: collections.deque[tuple[int, Problem]] = collections.deque()
    references = 0

    def take() -> None:
        ticket, problem = running.popleft()
        grade = grader.wait(ticket)
        if grade.verdict is not Verdict.PASS:
            failed[problem.id] = grade.verdict
            return
        times = [result.cpu_seconds for result in grade.public + grade.hidden if result is not None]
        # Tolerant of what binary fractions add to 0.3.
        limit = math.ceil(max(floor, factor * max(times)) / _STEP - 1e-9) * _STEP
        if limit < problem.limits.cpu_seconds:
            seconds[problem.id] = limit

    for done, problem in enumerate(problems):
        if problem.reference is not None:
            references += 1
            running.append((grader.submit(problem.reference, problem), problem))
        if len(running) == _AT_A_TIME:
            take()
        if progress is not None:
            progress(done + 1 - len(running), len(problems))
    while running:
        take()
        if progress is not None:
            progress(len(problems) - len(running), len(problems))
    return Calibration(seconds, failed, len(problems), references)


def with_cpu_limit(problem: Problem, seconds: float | None) -> Problem:
    """The problem with this limit; as it is for None."""
    if seconds is None:
        return problem
    return dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, cpu_seconds=seconds))

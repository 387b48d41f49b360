"""Verdicts: what the grader says about a program, and the reward that follows from it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

__all__ = ["Grade", "TestResult", "Verdict", "reward"]


class Verdict(str, enum.Enum):
    """The outcome of a test, or of a program (that of its first test that did not pass)."""

    PASS = "pass"
    WRONG = "wrong"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    NO_CODE = "no_code"
    INFRA = "infra"
    """The grader failed, not the program: the node is void and counts nowhere."""


@dataclasses.dataclass(frozen=True)
class TestResult:
    """One test of one program.

    Attributes:
      verdict: PASS, or how it failed.
      actual: what the program printed or returned (repr), truncated; "" where there is nothing to show.
      error: last lines of the traceback, truncated; "" where none.
      cpu_seconds: CPU time the test took.
    """

    verdict: Verdict
    actual: str = ""
    error: str = ""
    cpu_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Grade:
    """All that the grader says about a program. `public` and `hidden` line up with the problem's tests.

    A test that was not run (an earlier one failed and all had to pass) is None.
    """

    verdict: Verdict
    public: tuple[TestResult | None, ...] = ()
    hidden: tuple[TestResult | None, ...] = ()

    @property
    def public_pass(self) -> bool:
        return _all_pass(self.public)

    @property
    def hidden_pass(self) -> bool:
        """True if every hidden test passed; where the problem has none, whether the public ones did."""
        return _all_pass(self.hidden) if self.hidden else self.public_pass


def _all_pass(results: Sequence[TestResult | None]) -> bool:
    return bool(results) and all(r is not None and r.verdict is Verdict.PASS for r in results)


def reward(grade: Grade, kind: str = "all", tests: str = "all") -> float | None:
    """The reward in [0, 1] that a grade earns; None where the grader failed (INFRA) and nothing can be said.

    Args:
      grade: the grader's answer.
      kind: "all" = 1 if every test passes, else 0 (the paper's); "fraction" = share of the tests that pass.
      tests: "all" or "public": which tests pay.

    Raises:
      ValueError: for another `kind` or `tests`, or a grade without public tests where those pay.
    """
    if kind not in ("all", "fraction") or tests not in ("all", "public"):
        raise ValueError(f"reward kind {kind!r} over tests {tests!r} is not known")
    if grade.verdict is Verdict.INFRA:
        return None
    results = grade.public if tests == "public" else grade.public + grade.hidden
    if not results:
        raise ValueError(f"the grade holds no {tests} tests to pay for")
    if kind == "all":
        return float(_all_pass(results))
    return sum(r is not None and r.verdict is Verdict.PASS for r in results) / len(results)

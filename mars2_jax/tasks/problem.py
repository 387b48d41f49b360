"""What a programming problem is: a statement, tests, limits."""

from __future__ import annotations

import dataclasses
from typing import Any

from mars2_jax.errors import DataError

__all__ = ["AssertTest", "CallTest", "Limits", "Problem", "StdioTest", "Test"]


@dataclasses.dataclass(frozen=True)
class StdioTest:
    """Run the program as a script on `stdin`; its standard output is compared with `stdout` (see `Problem.compare`)."""

    stdin: str
    stdout: str


@dataclasses.dataclass(frozen=True)
class CallTest:
    """Call the problem's `entry_point` with `args` and `kwargs` and compare what it returns with `expected` (see
    `Problem.compare`).

    All values are JSON-able builtins (None, bool, int, float, str, list, dict); tuples count as lists.
    """

    args: tuple[Any, ...]
    expected: Any
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class AssertTest:
    """Statements that call the problem's `entry_point` and raise where the answer is wrong (HumanEval, MBPP).

    `setup` is code that the assertions need and that is not the candidate's (imports, helper functions that the
    statement supplies).
    """

    code: str
    setup: str = ""


Test = StdioTest | CallTest | AssertTest


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one test. CPU time decides; wall time only catches programs that sleep."""

    cpu_seconds: float = 4.0
    wall_seconds: float = 30.0
    memory_mb: int = 512
    output_kb: int = 256


@dataclasses.dataclass(frozen=True)
class Problem:
    """One programming problem.

    Attributes:
      id: unique within its source.
      statement: the text shown to the model.
      public: tests whose content may be shown to the model (feedback) and that pick the answer at test time.
      hidden: tests that only judge.
      entry_point: name of the function to write (`Solution().method` as "Solution.method"); None for programs that
        read stdin and write stdout.
      starter: code shown to the model to be completed (imports, signature, docstring); may be empty.
      limits: per-test resource limits.
      compare: when an answer is right: "tokens", "exact", "floats" or "unordered" (see `grading/compare.py`), or the
        name of a checker among `config.grading.checkers`. Assert tests, which compare for themselves, take "tokens".
      source: name of the problem set.
      difficulty: "easy", "medium", "hard" or "" where the source does not say.
      reference: a solution known to be right, or None. Never shown to a model.
    """

    id: str
    statement: str
    public: tuple[Test, ...]
    hidden: tuple[Test, ...] = ()
    entry_point: str | None = None
    starter: str = ""
    limits: Limits = Limits()
    source: str = ""
    difficulty: str = ""
    reference: str | None = None
    compare: str = "tokens"

    def __post_init__(self) -> None:
        if not self.public and not self.hidden:
            raise DataError(f"problem {self.id!r} has no tests: give it public or hidden tests, or leave it out")
        calls = any(isinstance(t, CallTest | AssertTest) for t in self.tests)
        if calls and not self.entry_point:
            raise DataError(f"problem {self.id!r} has function tests but no entry_point: name the function they call")
        if self.compare != "tokens" and any(isinstance(t, AssertTest) for t in self.tests):
            raise DataError(
                f"problem {self.id!r} has assert tests, which compare for themselves, and compare={self.compare!r}: "
                "leave it at 'tokens'"
            )

    @property
    def tests(self) -> tuple[Test, ...]:
        """Public tests, then hidden ones."""
        return self.public + self.hidden

"""Programs graded a second: scripts with 10 tests on stdin, and functions with 3 assertions.

    python -m benchmarks.grading [--workers 2] [--isolation bubblewrap] [--seconds 5]

Each program is right and short, so that what is measured is the grader. Wall time decides: run on a quiet machine.
"""

from __future__ import annotations

import argparse
import time

from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import AssertTest, Problem, StdioTest

__all__ = ["main", "programs_per_second"]

_SCRIPT = """
import sys
def main():
    n, *numbers = map(int, sys.stdin.read().split())
    best = {}
    for number in numbers:
        best[number % 7] = max(number, best.get(number % 7, 0))
    print(n, *sorted(best.values()))
main()
"""
_NUMBERS = list(range(1, 100))


def _stdin_problem() -> Problem:
    tests = []
    for n in range(10):
        best: dict[int, int] = {}
        for number in _NUMBERS[n:]:
            best[number % 7] = max(number, best.get(number % 7, 0))
        stdin = f"{n}\n" + " ".join(map(str, _NUMBERS[n:])) + "\n"
        tests.append(StdioTest(stdin, " ".join(map(str, [n, *sorted(best.values())]))))
    return Problem("ten tests on stdin", "", tuple(tests))


def _assert_problem(separate: bool) -> Problem:
    lines = [f"assert total([{n}, {n + 1}]) == {2 * n + 1}" for n in range(3)]
    codes = lines if separate else ["\n".join(lines)]
    name = "three assertions, a test each" if separate else "three assertions, one test"
    return Problem(name, "", tuple(AssertTest(code) for code in codes), entry_point="total")


def programs_per_second(grader: Grader, program: str, problem: Problem, seconds: float) -> float:
    """Grades the program over and over for about so many seconds, with 16 tickets open at any time."""
    for _ in range(4):
        assert grader.grade(program, problem).verdict is Verdict.PASS
    done, start = 0, time.perf_counter()
    for _ in range(16):
        grader.submit(program, problem)
    while (elapsed := time.perf_counter() - start) < seconds:
        for _, grade in grader.poll(timeout=1.0):
            assert grade.verdict is Verdict.PASS, grade
            done += 1
            grader.submit(program, problem)
    while grader.pending:
        grader.poll(timeout=None)
    return done / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--isolation", choices=("bubblewrap", "none"), default="bubblewrap")
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    total = "def total(numbers):\n    return sum(numbers)\n"
    with Grader(arguments.isolation, arguments.workers) as grader:
        for program, problem in (
            (_SCRIPT, _stdin_problem()),
            (total, _assert_problem(separate=False)),
            (total, _assert_problem(separate=True)),
        ):
            rate = programs_per_second(grader, program, problem, arguments.seconds)
            print(f"{problem.id:32s} {rate:7.1f} programs/s ({arguments.workers} workers, {arguments.isolation})")


if __name__ == "__main__":
    main()

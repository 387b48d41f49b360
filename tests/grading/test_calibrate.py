"""CPU limits from the references."""

import pytest

from mars2_jax.grading.calibrate import calibrate, with_cpu_limit
from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.grading.verdict import TestResult as Result  # pytest would take a name that starts with Test for a test
from mars2_jax.tasks.problem import Limits, Problem, StdioTest

TESTS = (StdioTest("", "1"), StdioTest("x", "1"))


def problem(name, reference="ok", cpu_seconds=4.0):
    return Problem(name, "", TESTS, limits=Limits(cpu_seconds=cpu_seconds, memory_mb=99), reference=reference)


class Scripted:
    """Answers with the seconds that the program's text names; "bad" is wrong."""

    def __init__(self):
        self.programs = []

    def submit(self, program, problem):
        self.programs.append(program)
        return len(self.programs) - 1

    def wait(self, ticket):
        program = self.programs[ticket]
        verdict = Verdict.WRONG if program == "bad" else Verdict.PASS
        seconds = 0.01 if program == "bad" else float(program)
        return Grade(verdict, (Result(verdict, cpu_seconds=0.001),), (Result(verdict, cpu_seconds=seconds),))


@pytest.mark.parametrize(("seconds", "limit"), [(0.01, 0.5), (0.1, 0.5), (0.2, 1.0), (0.21, 1.1), (0.7, 3.5)])
def test_limit(seconds, limit):
    found = calibrate([problem("p", str(seconds))], Scripted(), factor=5.0, floor=0.5)
    assert found.cpu_seconds == {"p": pytest.approx(limit)}
    assert with_cpu_limit(problem("p"), limit).limits == Limits(cpu_seconds=limit, memory_mb=99)


@pytest.mark.parametrize("seconds", [0.8, 0.9, 3.0])
def test_a_limit_is_never_raised(seconds):
    assert calibrate([problem("p", str(seconds))], Scripted(), factor=5.0, floor=0.5).cpu_seconds == {}
    assert with_cpu_limit(problem("p"), None) == problem("p")


def test_every_problem_once_and_in_order():
    problems = [problem(f"p{i}", None if i % 3 == 0 else f"{i / 1000}") for i in range(300)]
    problems[4] = problem("p4", "bad")
    grader, calls = Scripted(), []
    found = calibrate(problems, grader, factor=2.0, floor=0.1, progress=lambda *pair: calls.append(pair))
    references = [p for p in problems if p.reference]
    assert grader.programs == [p.reference for p in references]
    assert list(found.cpu_seconds) == [p.id for p in references if p.id != "p4"]
    assert found.failed == {"p4": Verdict.WRONG}
    assert found.cpu_seconds["p298"] == pytest.approx(0.6)
    assert calls[-1] == (300, 300) and [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert found.report() == (
        "CPU limits from references: 199 of 300 problems, 200 with one; the reference fails and the limit stays for "
        "'p4' (wrong)"
    )


def test_with_a_real_grader():
    """A program that passes in the problem's own time is too slow for the reference's."""
    spin = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\nprint(1)"
    before = problem("p", spin.format(0.02), cpu_seconds=2.0)
    with Grader("none", workers=1) as grader:
        after = with_cpu_limit(before, calibrate([before], grader, factor=5.0, floor=0.1).cpu_seconds["p"])
        assert 0.1 <= after.limits.cpu_seconds < 0.5
        slow = spin.format(0.6)
        assert grader.grade(slow, before).verdict is Verdict.PASS
        assert grader.grade(slow, after).verdict is Verdict.TIMEOUT
        assert grader.grade(after.reference, after).verdict is Verdict.PASS

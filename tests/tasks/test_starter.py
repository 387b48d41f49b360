"""The starter set is sound: right references, tests that wrong programs fail, a fair split."""

from __future__ import annotations

import collections
import shutil
from collections.abc import Callable

import pytest

from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks import sources
from mars2_jax.tasks.layouts import DIFFICULTIES
from mars2_jax.tasks.problem import CallTest, Problem
from mars2_jax.tasks.syntax import find_function, parse, parse_starter

TRAIN = sources.load("starter", "train")
TEST = sources.load("starter", "test")
ALL = TRAIN + TEST

# Bodies that a problem must not reward; FIRST and LAST are the function's parameters.
CHEAP_BODIES = (
    "return FIRST",
    "return LAST",
    "return None",
    "return 0",
    "return 1",
    "return -1",
    "return []",
    "return {}",
    "return ''",
    "return True",
    "return False",
    "pass",
)


def cheap_programs(problem: Problem) -> list[str]:
    tree = parse_starter(problem.starter)
    assert tree is not None and problem.entry_point is not None
    function = find_function(tree, problem.entry_point)
    assert function is not None
    names = [arg.arg for arg in function.args.args]
    bodies = [body.replace("FIRST", names[0]).replace("LAST", names[-1]) for body in CHEAP_BODIES]
    return [f"{problem.starter}    {body}\n" for body in bodies]


def test_size_and_split() -> None:
    assert len(TRAIN) >= 100 and len(TEST) >= 30
    assert len({p.id for p in ALL}) == len({p.entry_point for p in ALL}) == len({p.statement for p in ALL}) == len(ALL)
    counts = {split: collections.Counter(p.difficulty for p in ps) for split, ps in (("train", TRAIN), ("test", TEST))}
    for level in DIFFICULTIES:
        share = counts["test"][level] / (counts["test"][level] + counts["train"][level])
        assert 0.2 <= share <= 0.3, level


@pytest.mark.parametrize("problem", ALL, ids=lambda p: p.id)
def test_problem_is_sound(problem: Problem, passes: Callable[..., bool]) -> None:
    assert len(problem.public) == 3 and len(problem.hidden) >= 8
    calls = [test for test in problem.tests if isinstance(test, CallTest)]
    assert len({repr(test.args) for test in calls}) == len(problem.tests), "a test occurs twice"
    assert problem.starter.startswith(f"def {problem.entry_point}(") and problem.starter.endswith(":\n")
    assert problem.reference is not None and problem.reference.startswith(problem.starter)
    assert parse(problem.reference) is not None

    assert passes(problem.reference, problem)
    for program in cheap_programs(problem):
        assert not passes(program, problem, problem.public), program
        assert not passes(program, problem, problem.hidden), program


def test_the_real_grader_agrees() -> None:
    from mars2_jax.grading.grader import Grader

    # The programs are our own, so the sandbox is used where there is one and not insisted on.
    with Grader(isolation="bubblewrap" if shutil.which("bwrap") else "none", workers=2) as grader:
        references = [(p, grader.submit(p.reference, p)) for p in ALL]
        stubs = [(p, grader.submit(f"{p.starter}    pass\n", p)) for p in ALL]
        for problem, ticket in references:
            grade = grader.wait(ticket)
            assert grade.verdict is Verdict.PASS and grade.public_pass and grade.hidden_pass, problem.id
        for problem, ticket in stubs:
            grade = grader.wait(ticket)
            assert grade.verdict is Verdict.WRONG and not grade.public_pass, problem.id

"""Custom checkers: what they are given, and that whatever they do is told and stops nothing."""

import pytest

from mars2_jax.errors import ConfigError, DataError
from mars2_jax.grading import checkers
from mars2_jax.grading.checkers import CheckerFailed, Checkers, parse_checkers
from mars2_jax.grading.grader import Grader, check_comparators
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import AssertTest, CallTest, Problem, StdioTest

MODULE = "tests.grading.example_checkers"
NAMES = ("divisor", "same_sum", "raises", "leaves", "dies", "hangs", "returns_one")
SPECS = [f"{name}={MODULE}:{name}" for name in NAMES]


def stdio(compare, stdin="12", stdout="2"):
    return Problem("p", "", (StdioTest(stdin, stdout),), compare=compare)


@pytest.fixture(scope="module")
def own_grader():
    # Unprotected: the checkers are on the other side of the sandbox, and this starts sooner.
    with Grader("none", workers=1, checkers=SPECS) as grader:
        yield grader


@pytest.mark.parametrize(("answer", "verdict"), [("3", Verdict.PASS), ("5", Verdict.WRONG), ("12", Verdict.WRONG)])
def test_any_right_answer_passes(own_grader, answer, verdict):
    assert own_grader.grade(f"print({answer})", stdio("divisor")).verdict is verdict


def test_calls_are_given_as_values(own_grader):
    problem = Problem("p", "", (CallTest(([3, 4],), [3, 4], {"k": 2}),), entry_point="f", compare="same_sum")
    assert own_grader.grade("def f(x, k): return [1, 6]", problem).verdict is Verdict.PASS
    assert own_grader.grade("def f(x, k): return [7]", problem).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "checker 'raises' raised KeyError: 'no such thing'"),
        ("leaves", "checker 'leaves' raised SystemExit: 3"),
        ("dies", "checker 'dies' ended its process"),
        ("returns_one", "checker 'returns_one' raised nothing, but returned int and not bool"),
    ],
)
def test_a_checker_that_fails_is_the_graders_fault(own_grader, name, said):
    grade = own_grader.grade("print(3)", stdio(name))
    assert grade.verdict is Verdict.INFRA
    assert grade.public[0].error.startswith(said)
    assert own_grader.grade("print(3)", stdio("divisor")).verdict is Verdict.PASS


def test_a_program_cannot_void_its_grade_with_an_answer_that_the_checker_cannot_read(own_grader):
    """The checker raises here, on a text that is no number. It can judge what was expected: the answer is wrong."""
    assert own_grader.grade("print('x')", stdio("divisor")).verdict is Verdict.WRONG
    # Here it cannot judge that either.
    grade = own_grader.grade("print('x')", stdio("divisor", stdout="y"))
    assert grade.verdict is Verdict.INFRA and grade.public[0].error.startswith("checker 'divisor' raised ValueError")


def test_a_checker_that_does_not_end_is_stopped(monkeypatch):
    asked = Checkers(SPECS)
    with monkeypatch.context() as patched:
        patched.setattr(checkers, "_SECONDS", 0.2)
        with pytest.raises(CheckerFailed, match="'hangs' ended its process, or took more than 0.2 seconds"):
            asked("hangs", "", "", "")
    assert asked("divisor", "12", "", "4") is True
    asked.close()
    asked.close()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("x", "must be 'name=module:function'"),
        ("x=y", "must be 'name=module:function'"),
        ("x=m:f()", "must be 'name=module:function'"),
        ("exact=m:f", "built in"),
        ("x=no_such_module_at_all:f", "x=no_such_module_at_all:f cannot be imported (ModuleNotFoundError: No module"),
        (f"x={MODULE}:f", "cannot be imported (AttributeError"),
        (f"x={MODULE}:NOT_A_FUNCTION", "is not a function"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(spec, said):
    with pytest.raises(ConfigError) as caught:
        Grader("none", workers=1, checkers=[spec])
    assert str(caught.value).startswith("config.grading.checkers")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_taken_once():
    with pytest.raises(ConfigError, match="names 'x' twice"):
        parse_checkers(["x=a:b", "x=c:d"])
    assert parse_checkers(["x=a.b:c", "y-1=d:e"]) == {"x": ("a.b", "c"), "y-1": ("d", "e")}


def test_data_alone_chooses_no_code(own_grader):
    wanted = r"'p' asks for the comparator 'os:abort', .*\(tokens, exact, floats, unordered\).*config.grading.checkers"
    for problem in (stdio("os:abort"),):
        with pytest.raises(DataError, match=wanted):
            check_comparators([stdio("exact"), problem], SPECS)
        with pytest.raises(DataError, match=wanted):
            own_grader.submit("print(1)", problem)
    with pytest.raises(DataError, match="'p' has assert tests.*'exact'"):
        Problem("p", "", (AssertTest("f()"),), entry_point="f", compare="exact")


def test_built_in_comparators_reach_the_grader(own_grader):
    assert own_grader.grade("print('b\\na')", stdio("unordered", "", "a\nb")).verdict is Verdict.PASS
    assert own_grader.grade("print(2.0)", stdio("exact", "", "2")).verdict is Verdict.WRONG
    assert own_grader.grade("print(2.0)", stdio("tokens", "", "2")).verdict is Verdict.PASS
    assert own_grader.grade("import os\nos.write(1, b'\\xff')", stdio("exact", "", "\ufffd")).verdict is Verdict.WRONG
    any_order = Problem("p", "", (CallTest((), [1, 2]),), entry_point="f", compare="unordered")
    assert own_grader.grade("def f(): return (2, 1)", any_order).verdict is Verdict.PASS

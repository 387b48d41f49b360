"""From what a process left behind to a verdict, whatever it left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.grading.checkers import CheckerFailed
from mars2_jax.grading.compare import COMPARATORS
from mars2_jax.grading.judge import MAX_TEXT, judge, tidy
from mars2_jax.grading.verdict import Verdict


def test_tidy_hides_the_graders_frames_and_paths():
    text = (
        'Traceback (most recent call last):\n  File "/grader/mars2_jax/grading/child.py", line 1, in f\n    exec(x)\n'
        '  File "program.py", line 2, in <module>\n    json.loads(1)\n'
        '  File "/home/someone/lib/python3.11/json/__init__.py", line 3, in loads\n    raise TypeError\nTypeError\n'
    )
    assert tidy(text) == (
        'Traceback (most recent call last):\n  File "program.py", line 2, in <module>\n    json.loads(1)\n'
        '  File "json/__init__.py", line 3, in loads\n    raise TypeError\nTypeError'
    )


hostile = st.text() | st.sampled_from(
    [
        '{"value":1}',
        '{"value":{"t":1}}',
        '{"value":' + "[" * 900 + "]" * 900 + "}",
        '{"value":{"i":"0x' + "f" * 9000 + '"}}',
        '{"value":1e999}',
        '{"value":{"s":[[]]}}',
        '{"value":{"c":[{"i":"0x1' + "0" * 400 + '"},0]}}',
        '{"raise":1}',
        '{"raise":["A","B"]}',
        '{"not_carried":[]}',
        '{"outcome":[],"kind":{},"error":1,"actual":null}',
        '{"outcome":"pass"}',
        "[]",
        "1",
        "",
    ]
)


@settings(deadline=None)
@given(
    test=st.sampled_from(
        [
            {"kind": "stdio", "stdout": "1.5"},
            {"kind": "call", "expected": 1.5},
            {"kind": "call", "expected": [1.5, {"d": [["a", 1]]}]},
            {"kind": "assert"},
        ]
    ),
    text=hostile,
    status=st.sampled_from([0, 256, 9, 11, 40, 255 << 8]),
    end=st.sampled_from(["exit", "exit", "cpu", "wall", "memory", "output"]),
)
def test_whatever_a_program_says_is_judged(test, text, status, end):
    report = {"end": end, "status": status, "cpu": 0.1, "stdout": text, "stderr": text, "value": text, "outcome": text}
    for outputs, values in COMPARATORS.values():
        compare = lambda test, *pair, o=outputs, v=values: (o if test["kind"] == "stdio" else v)(*pair)
        result = judge(test, report, compare)
        check(result, text)


def check(result, text):
    # None of these is right, and none may pass for a fault of the grader's.
    assert result.verdict not in (Verdict.PASS, Verdict.INFRA) or text.split() == ["1.5"]
    assert len(result.actual) <= MAX_TEXT
    assert len(result.error) <= MAX_TEXT


@pytest.mark.parametrize("test", [{"kind": "stdio", "stdout": "1"}, {"kind": "call", "expected": 1}])
def test_a_checker_that_fails_is_no_fault_of_the_programs(test):
    def compare(test, expected, actual):
        raise CheckerFailed("checker 'c' raised KeyError: 1")

    report = {"end": "exit", "status": 0, "cpu": 0.1, "stdout": "1", "stderr": "", "value": '{"value":1}'}
    result = judge(test, report, compare)
    assert (result.verdict, result.error) == (Verdict.INFRA, "checker 'c' raised KeyError: 1")


def test_any_signal_can_be_told():
    report = {"end": "exit", "status": 40, "cpu": 0.1, "stdout": "", "stderr": "", "value": ""}
    result = judge({"kind": "call", "expected": 1}, report, lambda *pair: True)
    assert (result.verdict, result.error) == (Verdict.ERROR, "killed by signal 40")


def test_a_million_digits_are_compared():
    same, _ = COMPARATORS["floats"]
    assert not same("0.5", "9" * 1_000_001)

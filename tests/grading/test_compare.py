"""Comparison rules, against their definition and against Python's own equality."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.grading.compare import MAX_TEXT, judge, same_output, same_value, tidy
from mars2_jax.grading.verdict import Verdict

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("1 2 3\n", "1  2\r\n3", True),
        ("", "\n", True),
        ("", "0", False),
        ("1 2", "1", False),
        ("20", "21", False),
        ("3", "3.0", True),
        ("3", "3.0000001", False),
        ("1000000", "1000000.5", False),
        ("1000000000000000000001", "1000000000000000000002", False),
        ("0.3333333", "0.33333333333", True),
        ("0.5", "0.6", False),
        ("1e10", "10000000000.0", True),
        ("1.5", "nan", False),
        ("nan", "nan", True),
        ("1.5", "1_5", False),
        ("1000.0", "1_000", False),
        ("1.0", "Infinity", False),
        ("1e5000", "2e5000", False),
        ("YES", "yes", False),
        ("0x10", "16", False),
    ],
)
def test_output(expected, actual, same):
    assert same_output(expected, actual) is same


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ([1, (2, 3)], (1, [2, 3]), True),
        (10**20, 10**20 + 1, False),
        (2, 2.0, True),
        (2, 2.0000001, False),
        (0.1 + 0.2, 0.3, True),
        (2.0, 2.0000001, True),
        (1e7, 10000001, False),
        (1e7, 10000001.0, False),
        (0.5, 10**400, False),
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        (math.inf, math.inf, True),
        (math.inf, 1e308, False),
        (1.5, "1.5", False),
        ({"a": [0.1 + 0.2]}, {"a": (0.3,)}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1], {1}, False),
        (None, False, False),
        ("", [], False),
        (True, 1, True),
    ],
)
def test_value(expected, actual, same):
    assert same_value(expected, actual) is same


@settings(deadline=None)
@given(plain)
def test_equal_values_agree(value):
    assert same_value(value, value)


@settings(deadline=None)
@given(plain, plain)
def test_what_agrees_is_equal_up_to_tolerance(left, right):
    def rounded(value):
        if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
            return "about"
        if isinstance(value, list):
            return [rounded(v) for v in value]
        return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value

    if rounded(left) != rounded(right) and "about" not in repr((rounded(left), rounded(right))):
        assert not same_value(left, right)


@settings(deadline=None)
@given(st.lists(st.text(alphabet=st.characters(blacklist_categories=("Z", "C")), min_size=1), max_size=5))
def test_white_space_does_not_count(tokens):
    assert same_output(" ".join(tokens), "\n\t".join(tokens) + "\n")


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
    status=st.sampled_from([0, 256, 9, 11, 255 << 8]),
    end=st.sampled_from(["exit", "exit", "cpu", "wall", "memory", "output"]),
)
def test_whatever_a_program_says_is_judged(test, text, status, end):
    report = {"end": end, "status": status, "cpu": 0.1, "stdout": text, "stderr": text, "value": text, "outcome": text}
    result = judge(test, report)
    # None of these is right, and none may pass for a fault of the grader's.
    assert result.verdict not in (Verdict.PASS, Verdict.INFRA) or text.split() == ["1.5"]
    assert len(result.actual) <= MAX_TEXT
    assert len(result.error) <= MAX_TEXT

"""Comparison rules, against their definition and against Python's own equality."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.grading.compare import COMPARATORS, same_output, same_value

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
        ("0011", "11", False),
        ("05:30 007", "05:30 7", False),
        ("7", "007", True),
        ("0", "-0", True),
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


@pytest.mark.parametrize(
    ("name", "expected", "actual", "same"),
    [
        ("exact", "a b\n\nc\n", "a b  \r\n\t\nc", True),
        ("exact", "a\n", "a\n\n \n", True),
        ("exact", "", "\n", True),
        ("exact", "a b", "a  b", False),
        ("exact", "a b", " a b", False),
        ("exact", "a\n\nb", "a\nb", False),
        ("exact", "3", "3.0", False),
        ("exact", "1.5", "1.50", False),
        ("exact", "\x0c\u00a0", "", False),  # A no-break space is text.
        ("exact", "\ufffd", "\udcff", False),  # A byte that is no UTF-8 is not the character that stands for one.
        ("floats", "1000000 x", "1000000.5 x", True),
        ("floats", "20", "21", False),
        ("floats", "0", "1e-7", True),
        ("floats", "1e400", "1.0000000001e400", True),
        ("floats", "1e400", "1.1e400", False),
        ("floats", "9" * 400, "9" * 399 + "8", True),
        ("floats", "1", "one", False),
        ("floats", "1", "nan", False),
        ("unordered", "1 2\n3 4\n", "3  4\n\n1 2.0", True),
        ("unordered", "1 2\n3 4\n", "3 4\n2 1", False),
        ("unordered", "1\n1\n2", "1\n2\n2", False),
        ("unordered", "1\n1", "1", False),
        ("unordered", "", "\n \n", True),
        ("unordered", "0.5\nx", "x\n0.50000001", True),
        ("unordered", "a 0.1\nb 0.2", "b 0.1\na 0.2", False),
    ],
)
def test_outputs(name, expected, actual, same):
    assert COMPARATORS[name][0](expected, actual) is same


@pytest.mark.parametrize(
    ("name", "expected", "actual", "same"),
    [
        ("exact", [1, {"a": None}], [1, {"a": None}], True),
        ("exact", [1], (1,), False),
        ("exact", 1, 1.0, False),
        ("exact", 1, True, False),
        ("exact", 0.3, 0.1 + 0.2, False),
        ("exact", 0.0, -0.0, True),
        ("exact", math.nan, math.nan, True),
        ("exact", {"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ("exact", {1: 0}, {True: 0}, False),
        ("exact", {1, "x", (2,)}, {(2,), 1, "x"}, True),
        ("exact", {1}, frozenset({1}), False),
        ("exact", ["1,2"], ["1", "2"], False),
        ("exact", "1", 1, False),
        ("floats", 1000000, 1000001, True),
        ("floats", [20], [21], False),
        ("floats", {"a": 1}, {"a": 0.9999999}, True),
        ("floats", 10**400, 10**400 + 1, True),
        ("floats", 10**400, 2 * 10**400, False),
        ("floats", 10**400, math.inf, False),
        ("floats", True, 1.0000001, False),
        ("floats", "1", 1, False),
        ("floats", 2.0, 2.0000001, True),
        ("unordered", [1, 2, 2], (2, 1, 2), True),
        ("unordered", [1, 2, 2], [1, 1, 2], False),
        ("unordered", [[1, 2], [3]], [[3], [1, 2]], True),
        ("unordered", [[1, 2], [3]], [[3], [2, 1]], False),  # The outermost list only.
        ("unordered", ["a", None, {"x": 0.3}], [{"x": 0.1 + 0.2}, "a", None], True),
        ("unordered", [{"a": 1, "b": 2}], [{"b": 2, "a": 1}], True),
        ("unordered", [{"a": 1, "b": 2}], [{"b": 1, "a": 2}], False),
        ("unordered", [True, 0.5], [0.5, 1], True),
        ("unordered", [math.nan, 1], [1, math.nan], True),
        ("unordered", [1 + 0j, {1, 2}], [{2, 1}, 1], True),
        ("unordered", [10**400, 1.5], [1.5, 10**400], True),
        ("unordered", [10**400], [10**400 + 1], False),
        ("unordered", "ab", "ba", False),
        ("unordered", [1], {1}, False),
    ],
)
def test_values(name, expected, actual, same):
    assert COMPARATORS[name][1](expected, actual) is same


@settings(deadline=None)
@given(plain)
def test_every_comparator_agrees_with_equality(value):
    for _, same in COMPARATORS.values():
        assert same(value, value)

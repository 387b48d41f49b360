"""When two outputs, or two returned values, are the same: the comparators that a problem chooses from by name.

A program's output is data here and nothing else: it has been parsed into exact builtins before it comes here.

============  ====================================================  ==================================================
comparator    standard output                                       returned value
============  ====================================================  ==================================================
"tokens"      token by token; numbers as in `same_output`           as Python's `==`, with tolerance for floats: see
                                                                    `same_value`
"exact"       equal but for white space at the ends of lines and    equal in type and value at every level; neither
              empty lines at the end                                tolerance nor lists for tuples
"floats"      token by token; any two numbers within `TOLERANCE`,   as "tokens", and any two numbers within
              integers too                                          `TOLERANCE`, integers too
"unordered"   the lines that are not blank, in any order; each as   the items of the outermost list or tuple in any
              in "tokens"                                           order; each as in "tokens"
============  ====================================================  ==================================================

Members of sets and keys of dicts are always compared as by `==` (by "exact" in their types, too).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable
from decimal import Decimal, DecimalException
from fractions import Fraction
from functools import partial
from typing import Any

from mars2_jax.grading.matching import Number, Shape, same_in_any_order
from mars2_jax.grading.values import dumps, encode

__all__ = ["COMPARATORS", "TOLERANCE", "same_output", "same_value"]

TOLERANCE = 1e-6
"""Relative and absolute tolerance where a number is not an integer."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_DIGITS = re.compile(r"[+-]?0\d+", re.ASCII)
"""No quantity, but a code, a time or a binary numeral, whose zeros in front belong to the answer."""
_LINE_END = " \t\r\v\f"


def same_output(expected: str, actual: str) -> bool:
    """Whether two outputs agree token by token (tokens are what white space separates).

    Where the expected token is an integer, the other must be the same number ("3.0" is, "3.0000001" is not). Where it
    is a number with a point or an exponent, a difference within `TOLERANCE` is accepted. Other tokens, and digits that
    begin with a zero ("0011"), must be equal.
    """
    return _same_tokens(expected.split(), actual.split())


def same_value(expected: Any, actual: Any) -> bool:
    """Whether a returned value agrees with the expected one. Both are made of exact builtins.

    As Python's `==`, except: lists and tuples of equal items agree; floats agree within `TOLERANCE` where the expected
    number is a float and one of the two is not an integer; NaN agrees with NaN.
    """
    return _same_value(expected, actual, _same_number)


def _same_tokens(expected: list[str], actual: list[str], integers: bool = False) -> bool:
    return len(expected) == len(actual) and all(map(partial(_same_token, integers=integers), expected, actual))


def _same_token(expected: str, actual: str, integers: bool = False) -> bool:
    """`integers`: the tolerance is for them, too."""
    if expected == actual:
        return True
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(actual)) or _DIGITS.fullmatch(expected):
        return False
    if not integers and _INTEGER.fullmatch(expected):
        return Decimal(expected) == Decimal(actual)
    left, right = float(expected), float(actual)
    if math.isfinite(left) and math.isfinite(right):
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    # Beyond the range of floats. The largest exponent that `_NUMBER` lets through is harmless here.
    exact = Decimal(expected), Decimal(actual)
    try:
        return abs(exact[0] - exact[1]) <= Decimal(TOLERANCE) * max(map(abs, exact))
    except DecimalException:  # A million digits: beyond the range of Decimal's arithmetic.
        return False


def _same_value(expected: Any, actual: Any, same_number: Callable[[Any, Any], bool]) -> bool:
    if isinstance(expected, list | tuple):
        if not isinstance(actual, list | tuple) or len(expected) != len(actual):
            return False
        return all(_same_value(*pair, same_number) for pair in zip(expected, actual, strict=True))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or len(expected) != len(actual):
            return False
        return all(key in actual and _same_value(value, actual[key], same_number) for key, value in expected.items())
    if _is_number(expected) and _is_number(actual):
        return same_number(expected, actual)
    return bool(expected == actual)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _same_number(expected: float, actual: float) -> bool:
    if expected == actual or not isinstance(expected, float):
        return expected == actual
    if expected.is_integer() and (isinstance(actual, int) or actual.is_integer()):
        return False
    return _close(expected, actual)


def _close(expected: float, actual: float) -> bool:
    """Within `TOLERANCE`; NaN and NaN are."""
    try:
        left, right = float(expected), float(actual)
    except OverflowError:  # An integer beyond the range of floats.
        if any(isinstance(x, float) and not math.isfinite(x) for x in (expected, actual)):
            return False
        exact = Fraction(expected), Fraction(actual)
        return abs(exact[0] - exact[1]) <= Fraction(TOLERANCE) * max(map(abs, exact))
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _exact_output(expected: str, actual: str) -> bool:
    return _lines(expected) == _lines(actual)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip(_LINE_END) for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _exact_value(expected: Any, actual: Any) -> bool:
    return _canonical(expected) == _canonical(actual)


def _canonical(value: Any) -> bytes:
    """A text that two values share where they are equal in type and value at every level."""
    if isinstance(value, list | tuple):
        return b"%s(%s)" % (type(value).__name__.encode(), b",".join(map(_canonical, value)))
    if isinstance(value, set | frozenset):
        return b"%s(%s)" % (type(value).__name__.encode(), b",".join(sorted(map(_canonical, value))))
    if isinstance(value, dict):
        return b"dict(%s)" % b",".join(sorted(_canonical(k) + b":" + _canonical(v) for k, v in value.items()))
    if isinstance(value, float) and value == 0.0:  # The two zeros are equal.
        return b"0.0"
    return dumps(encode(value))


def _floats_output(expected: str, actual: str) -> bool:
    return _same_tokens(expected.split(), actual.split(), integers=True)


def _floats_value(expected: Any, actual: Any) -> bool:
    return _same_value(expected, actual, _same_number_within)


def _same_number_within(expected: float, actual: float) -> bool:
    # True and False are answers, not quantities.
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected == actual
    return _close(expected, actual)


def _unordered_output(expected: str, actual: str) -> bool:
    left, right = ([tokens for line in text.split("\n") if (tokens := line.split())] for text in (expected, actual))
    return same_in_any_order(left, right, _same_tokens, _shape_of_tokens)


def _unordered_value(expected: Any, actual: Any) -> bool:
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        return same_in_any_order(expected, actual, same_value, _shape_of_value)
    return same_value(expected, actual)


def _shape_of_tokens(tokens: list[str]) -> Shape:
    skeleton: list[str | None] = []
    numbers: list[Number] = []
    exact: list[bool] = []
    for token in tokens:
        number = _NUMBER.fullmatch(token) is not None
        skeleton.append(None if number else token)
        if number:
            numbers.append(Decimal(token))
            exact.append(_INTEGER.fullmatch(token) is not None)
    return Shape(tuple(skeleton), tuple(numbers), tuple(exact))


def _shape_of_value(value: Any) -> Shape:
    numbers: list[Number] = []
    skeleton = _skeleton(value, numbers)
    return Shape(skeleton, tuple(numbers), tuple(not isinstance(number, float) for number in numbers))


def _skeleton(value: Any, numbers: list[Number]) -> Hashable:
    """What values must share to agree, their numbers apart, which are added to `numbers` in an order of its own."""
    if isinstance(value, list | tuple):
        return "list", tuple(_skeleton(item, numbers) for item in value)
    if isinstance(value, dict):
        # Agreeing dicts have equal keys, in whatever order; equal keys have equal hashes, and few others have.
        items = sorted(value.items(), key=lambda item: hash(item[0]))
        if len({hash(key) for key in value}) < len(items):
            return "dict", frozenset(value)
        return "dict", tuple((key, _skeleton(item, numbers)) for key, item in items)
    if isinstance(value, set | frozenset):
        return "set", frozenset(value)
    if isinstance(value, complex) and not value.imag:  # As a number, it may equal one.
        value = value.real
    if _is_number(value):
        if value != value:
            return "nan"
        numbers.append(value)
        return None
    return "value", value


_Same = Callable[[Any, Any], bool]

COMPARATORS: dict[str, tuple[_Same, _Same]] = {
    "tokens": (same_output, same_value),
    "exact": (_exact_output, _exact_value),
    "floats": (_floats_output, _floats_value),
    "unordered": (_unordered_output, _unordered_value),
}
"""Name -> whether (expected, actual) agree, of standard outputs and of returned values."""

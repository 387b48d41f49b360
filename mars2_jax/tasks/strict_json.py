"""JSON as the files of problem sets should hold it: nothing lost, nothing guessed.

Beyond `json.loads`: NaN and infinities are errors, as are numbers out of range and keys that stand twice in an object;
an integer may have as many digits as it likes.
"""

from __future__ import annotations

import collections
import json
import math
from typing import Any, NoReturn

__all__ = ["loads"]

_DIGITS = 4000
"""Python refuses to convert longer runs at once (`sys.int_info.default_max_str_digits`)."""

_MOST_DIGITS = 1_000_000


def loads(text: str | bytes, *, infinite: bool = False) -> Any:
    """The value that `text` stands for.

    Args:
      text: a JSON text.
      infinite: admit NaN, Infinity and numbers out of range, which other people's files hold.

    Raises:
      ValueError: it is not JSON, or nested too deeply; the message is one line.
    """
    try:
        return json.loads(
            text,
            parse_constant=float if infinite else _no_constant,
            parse_float=float if infinite else _finite,
            parse_int=_integer,
            object_pairs_hook=_distinct,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is out of range")
    return value


def _integer(text: str) -> int:
    if len(text) <= _DIGITS:
        return int(text)
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, more than {_MOST_DIGITS}")
    digits, value = text.lstrip("-"), 0
    for at in range(0, len(digits), _DIGITS):
        part = digits[at : at + _DIGITS]
        value = value * 10 ** len(part) + int(part)
    return -value if text.startswith("-") else value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return record

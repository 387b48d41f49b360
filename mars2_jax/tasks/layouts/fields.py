"""Reading the fields of a record: what all layouts share. Every error names the field and the remedy."""

from __future__ import annotations

import dataclasses
import datetime
import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks import strict_json
from mars2_jax.tasks.problem import CallTest, Limits, StdioTest, Test

__all__ = [
    "DIFFICULTIES",
    "check_entry_point",
    "check_plain",
    "day_of",
    "difficulty_of",
    "limits_for",
    "optional_text",
    "parse_json",
    "split_tests",
    "text_of",
    "without_carriage_returns",
]

DIFFICULTIES = ("easy", "medium", "hard")

_MAX_NESTING = 100
"""Levels that the values of a record may be nested."""


def text_of(record: Mapping[str, Any], field: str) -> str:
    """A string that must be there and not be blank."""
    if field not in record or record[field] is None:
        raise DataError(f"field {field!r} is missing: add it, or name the layout that this file has")
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"field {field!r} must be a string that is not empty")
    check_plain(value)
    return value


def optional_text(record: Mapping[str, Any], field: str) -> str:
    """A string, or "" where the field is missing, null or blank."""
    value = record.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"field {field!r} must be a string, is a {type(value).__name__}: correct it or leave it out")
    check_plain(value)
    return value if value.strip() else ""


def parse_json(value: Any, field: str) -> Any:
    """What a string of JSON in a field stands for; a value that is not a string stands for itself."""
    if not isinstance(value, str):
        return value
    try:
        return strict_json.loads(value, infinite=True)
    except ValueError as error:
        raise DataError(f"field {field!r} holds no JSON ({_short(error)}): is the file whole?") from None


def check_plain(value: Any, depth: int = 0) -> None:
    """Refuses what cannot be passed on: text with lone surrogates (no tokenizer takes it), values nested too deeply."""
    if depth > _MAX_NESTING:
        raise DataError(f"a value is nested deeper than {_MAX_NESTING} levels: make it flatter")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            message = "a text holds half of a surrogate pair (\\ud800 to \\udfff): write the whole character"
            raise DataError(message) from None
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_plain(key, depth + 1)
            check_plain(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_plain(inner, depth + 1)


def check_entry_point(name: str, field: str = "entry_point") -> str:
    """A function's name, or "Solution.method"."""
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".", 1)):
        raise DataError(f"field {field!r} is {name!r}: use a function's name or 'Solution.method'")
    return name


def difficulty_of(value: Any, names: Mapping[str, str]) -> str:
    """One of `DIFFICULTIES`, or "" for what `names` (in lower case) does not list."""
    return names.get(value.strip().lower(), "") if isinstance(value, str) else ""


def day_of(value: Any, field: str) -> str:
    """The day of a date or a time as "2025-01-31"; "" where there is none."""
    if value is None or value == "":
        return ""
    if isinstance(value, datetime.date):  # a datetime is one
        return value.isoformat()[:10]
    try:
        return datetime.datetime.fromisoformat(value).date().isoformat()
    except (TypeError, ValueError):
        raise DataError(f"field {field!r} is {value!r}: write a date as 2025-01-31") from None


def without_carriage_returns(text: str) -> str:
    """Windows line ends would reach programs that read bytes."""
    return text.replace("\r\n", "\n")


def split_tests(tests: Sequence[Test], public: int) -> tuple[tuple[Test, ...], tuple[Test, ...]]:
    """Public and hidden tests where the record does not tell them apart.

    The first `public` are public (records begin with the examples of the statement), but one always stays hidden, or
    nothing would tell a program that solves the problem from one that repeats its examples.
    """
    if not tests:
        raise DataError("there are no tests: leave the record out")
    at = min(public, len(tests) - 1)
    return tuple(tests[:at]), tuple(tests[at:])


def limits_for(tests: Sequence[Test], least: Limits) -> Limits:
    """Limits with room for the largest input and output of the tests."""
    output = max((_size(t.stdout if isinstance(t, StdioTest) else "") for t in tests), default=0)
    read = max((_size(t.stdin) if isinstance(t, StdioTest) else _call_size(t) for t in tests), default=0)
    return dataclasses.replace(
        least,
        output_kb=max(least.output_kb, 2 * output // 1024 + 64),
        # Numbers in a list take some twenty times the space of their digits.
        memory_mb=max(least.memory_mb, 256 + 20 * read // (1 << 20)),
    )


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def _call_size(test: Test) -> int:
    # Near enough: integers too long for JSON are no reason for more memory.
    try:
        return len(json.dumps(test.args, default=str)) if isinstance(test, CallTest) else 0
    except (ValueError, TypeError):
        return 0


def _short(error: ValueError) -> str:
    return " ".join(str(error).split())[:200]

"""A problem as a line of text and back: exactly, whatever plain values its tests hold.

This project's own layout will not do: JSON has no tuples, sets, integers of thousands of digits or NaN, and keys of
dictionaries are strings there.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.grading.values import NotCarried, decode, encode
from mars2_jax.tasks.problem import AssertTest, CallTest, Limits, Problem, StdioTest, Test

__all__ = ["from_text", "to_text"]

_KINDS: dict[str, type[Test]] = {"stdio": StdioTest, "call": CallTest, "assert": AssertTest}


def to_text(problem: Problem) -> str:
    """One line of JSON.

    Raises:
      DataError: a test holds a value that is not plain.
    """
    record = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    record |= {name: [_test(test) for test in record[name]] for name in ("public", "hidden")}
    record["limits"] = dataclasses.asdict(problem.limits)
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def from_text(text: str | bytes) -> Problem:
    """The problem whose `to_text` is `text`."""
    record = json.loads(text)
    record |= {name: tuple(_read(test) for test in record[name]) for name in ("public", "hidden")}
    return Problem(**{**record, "limits": Limits(**record["limits"])})


def _test(test: Test) -> list[Any]:
    if isinstance(test, CallTest):
        try:
            return ["call", encode((tuple(test.args), test.expected, dict(test.kwargs)))]
        except NotCarried as error:
            raise DataError(f"a test holds {error}: use plain values") from None
    kind = "stdio" if isinstance(test, StdioTest) else "assert"
    return [kind, [getattr(test, field.name) for field in dataclasses.fields(test)]]


def _read(form: list[Any]) -> Test:
    kind, values = form
    return _KINDS[kind](*(decode(values) if kind == "call" else values))

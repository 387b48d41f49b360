"""This project's own layout: JSON Lines, one problem a line.

| field | type | |
|---|---|---|
| `id` | string | required; unique in the source |
| `statement` | string | required; the text shown to the model |
| `entry_point` | string | name of the function to write, or "Solution.method"; left out for programs that read stdin |
| `starter` | string | code shown to the model to be completed: imports, signature, docstring |
| `public` | list of tests | may be shown to the model |
| `hidden` | list of tests | only judge; `public` and `hidden` must not both be empty |
| `difficulty` | string | "easy", "medium" or "hard" |
| `split` | string | "train", "test", ...; a problem without it belongs to every split |
| `date` | string | day of publication, "2025-01-31", for `data.date_from` and `data.date_to` |
| `limits` | object | any of `cpu_seconds`, `wall_seconds`, `memory_mb`, `output_kb`: the limits of each test |
| `compare` | string | how results are compared with what is expected; "tokens" by default |
| `reference` | string | a solution known to be right; never shown to a model |

A test is one of three objects:
  `{"args": [...], "expected": value, "kwargs": {...}}`   a call and what it returns (`kwargs` may be left out)
  `{"stdin": string, "stdout": string}`                   a run of the program and what it prints
  `{"code": string, "setup": string}`                     statements that raise where the program is wrong

`mars2_jax/tasks/data/problem.schema.json` says the same as a JSON schema.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts.entry import Entry, Origin
from mars2_jax.tasks.layouts.fields import DIFFICULTIES, check_entry_point, check_plain, day_of
from mars2_jax.tasks.problem import AssertTest, CallTest, Limits, Problem, StdioTest, Test
from mars2_jax.tasks.syntax import parse

__all__ = ["own_problem"]

_STRINGS = ("id", "statement", "entry_point", "starter", "difficulty", "split", "date", "compare", "reference")
_FIELDS = (*_STRINGS, "public", "hidden", "limits")
_MOST = Limits(cpu_seconds=3600.0, wall_seconds=7200.0, memory_mb=1 << 20, output_kb=1 << 20)
"""Beyond these, a limit is a slip of the keyboard: hours for one test, a terabyte, a gigabyte of output."""


def own_problem(record: Mapping[str, Any], origin: Origin) -> Entry:
    """An entry from a record of this project's layout.

    Raises:
      DataError: naming the field and the remedy.
    """
    _known(record, _FIELDS, "field")
    for name in _STRINGS:
        if name in record and not (isinstance(record[name], str) and record[name].strip()):
            raise DataError(f"field {name!r} must be a string that is not empty: give one or leave the field out")
    check_plain(dict(record))
    for name in ("id", "statement"):
        if name not in record:
            raise DataError(f"field {name!r} is missing: add it")
    difficulty = record.get("difficulty", "")
    if difficulty not in ("", *DIFFICULTIES):
        raise DataError(f"field 'difficulty' is {difficulty!r}: use one of {', '.join(DIFFICULTIES)}")
    entry_point = record.get("entry_point")
    problem = Problem(
        id=record["id"],
        statement=record["statement"],
        public=_tests(record, "public"),
        hidden=_tests(record, "hidden"),
        entry_point=None if entry_point is None else check_entry_point(entry_point),
        starter=record.get("starter", ""),
        limits=_limits(record.get("limits", {})),
        source=origin.source,
        difficulty=difficulty,
        reference=record.get("reference"),
        compare=record.get("compare", "tokens"),
    )
    return Entry(problem, record.get("split", ""), day_of(record.get("date"), "date"))


def _tests(record: Mapping[str, Any], field: str) -> tuple[Test, ...]:
    tests = record.get(field, [])
    if not isinstance(tests, list):
        raise DataError(f"field {field!r} must be a list of tests")
    return tuple(_test(test, f"{field}[{i}]") for i, test in enumerate(tests))


def _test(test: Any, where: str) -> Test:
    if isinstance(test, dict) and "expected" in test:
        _known(test, ("args", "expected", "kwargs"), f"{where} field")
        args, kwargs = test.get("args", []), test.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise DataError(f"field '{where}': 'args' must be a list and 'kwargs' an object")
        return CallTest(args=tuple(args), expected=test["expected"], kwargs=kwargs)
    for kind, required in ((StdioTest, ("stdin", "stdout")), (AssertTest, ("code",))):
        if isinstance(test, dict) and all(name in test for name in required):
            _known(test, tuple(f.name for f in dataclasses.fields(kind)), f"{where} field")
            if not all(isinstance(value, str) for value in test.values()):
                raise DataError(f"field '{where}': all values of this kind of test must be strings")
            if kind is AssertTest:
                _check_assertions(test, where)
            return kind(**test)
    raise DataError(f"field '{where}' is no test: give it 'args' and 'expected', or 'stdin' and 'stdout', or 'code'")


def _limits(limits: Any) -> Limits:
    if not isinstance(limits, dict):
        raise DataError("field 'limits' must be an object")
    most = dataclasses.asdict(_MOST)
    _known(limits, tuple(most), "limits field")
    for name, value in limits.items():
        whole = name in ("memory_mb", "output_kb")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise DataError(f"field 'limits.{name}' must be {'an integer' if whole else 'a number'}")
        if not 0 < value <= most[name]:
            raise DataError(f"field 'limits.{name}' is {value}: it must be above 0 and at most {most[name]}")
    return Limits(**limits)


def _check_assertions(test: Mapping[str, str], where: str) -> None:
    """Code that cannot run fails every program, and code that does nothing passes every one."""
    for name, code in test.items():
        tree = parse(code)
        if tree is None:
            raise DataError(f"field '{where}.{name}' is no Python that can be parsed: correct it")
        if name == "code" and not tree.body:
            raise DataError(f"field '{where}.code' holds no statement: write assertions")


def _known(record: Mapping[str, Any], fields: tuple[str, ...], what: str) -> None:
    for name in record:
        if name not in fields:
            raise DataError(f"unknown {what} {name!r}: remove it, or use one of {', '.join(fields)}")

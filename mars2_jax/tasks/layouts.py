"""From a record of a problem file to a `Problem`: one function for each layout.

This project's own layout is JSON Lines, one problem a line:

| field | type | |
|---|---|---|
| `id` | string | required; unique in the file |
| `statement` | string | required; the text shown to the model |
| `entry_point` | string | name of the function to write, or "Solution.method"; left out for programs that read stdin |
| `starter` | string | code shown to the model to be completed: imports, signature, docstring |
| `public` | list of tests | may be shown to the model |
| `hidden` | list of tests | only judge; `public` and `hidden` must not both be empty |
| `difficulty` | string | "easy", "medium" or "hard" |
| `split` | string | "train", "test", ...; a problem without it belongs to every split |
| `limits` | object | any of `cpu_seconds`, `wall_seconds`, `memory_mb`, `output_kb`: the limits of each test |
| `reference` | string | a solution known to be right; never shown to a model |

A test is one of three objects:
  `{"args": [...], "expected": value, "kwargs": {...}}`   a call and what it returns (`kwargs` may be left out)
  `{"stdin": string, "stdout": string}`                   a run of the program and what it prints
  `{"code": string, "setup": string}`                     statements that raise where the program is wrong
"""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Mapping
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.problem import AssertTest, CallTest, Limits, Problem, StdioTest, Test
from mars2_jax.tasks.syntax import context_statements, find_function, parse, source_of

__all__ = ["DIFFICULTIES", "human_eval_problem", "own_problem"]

DIFFICULTIES = ("easy", "medium", "hard")

_STRINGS = ("id", "statement", "entry_point", "starter", "difficulty", "split", "reference")
_FIELDS = (*_STRINGS, "public", "hidden", "limits")
_MOST = Limits(cpu_seconds=3600.0, wall_seconds=7200.0, memory_mb=1 << 20, output_kb=1 << 20)
"""Beyond these, a limit is a slip of the keyboard: hours for one test, a terabyte, a gigabyte of output."""

_MAX_NESTING = 100
"""Levels that the values of a test may be nested."""


def own_problem(record: Mapping[str, Any], source: str) -> Problem:
    """A problem from a record of this project's layout. `split` is checked and left to the reader.

    Raises:
      DataError: naming the field and the remedy.
    """
    _known(record, _FIELDS, "field")
    for name in _STRINGS:
        if name in record and not (isinstance(record[name], str) and record[name].strip()):
            raise DataError(f"field {name!r} must be a string that is not empty: give one or leave the field out")
    _check_text(record)
    for name in ("id", "statement"):
        if name not in record:
            raise DataError(f"field {name!r} is missing: add it")
    difficulty = record.get("difficulty", "")
    if difficulty not in ("", *DIFFICULTIES):
        raise DataError(f"field 'difficulty' is {difficulty!r}: use one of {', '.join(DIFFICULTIES)}")
    entry_point = record.get("entry_point")
    if entry_point is not None and not all(
        part.isidentifier() and not keyword.iskeyword(part) for part in entry_point.split(".", 1)
    ):
        raise DataError(f"field 'entry_point' is {entry_point!r}: use a function's name or 'Solution.method'")
    return Problem(
        id=record["id"],
        statement=record["statement"],
        public=_tests(record, "public"),
        hidden=_tests(record, "hidden"),
        entry_point=entry_point,
        starter=record.get("starter", ""),
        limits=_limits(record.get("limits", {})),
        source=source,
        difficulty=difficulty,
        reference=record.get("reference"),
    )


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


def _check_text(value: Any, depth: int = 0) -> None:
    """Refuses what cannot be passed on: text with lone surrogates (no tokenizer takes it), values nested too deeply."""
    if depth > _MAX_NESTING:
        raise DataError(f"a value is nested deeper than {_MAX_NESTING} levels: make it flatter")
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise DataError("a text holds half of a surrogate pair (\\ud800 to \\udfff): write the whole character")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_text(key, depth + 1)
            _check_text(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_text(inner, depth + 1)


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


def human_eval_problem(record: Mapping[str, Any], source: str) -> Problem:
    """A problem from a record of HumanEval (Chen et al. 2021, arXiv 2107.03374): all of its tests are hidden ones.

    The prompt is both the statement and the starter. Its imports and helper functions also go into the test's setup,
    because some `check` functions call them.

    Raises:
      DataError: naming the field and the remedy.
    """
    for name in ("task_id", "prompt", "entry_point", "canonical_solution", "test"):
        if not isinstance(record.get(name), str):
            raise DataError(f"field {name!r} is missing or not a string: is this file HumanEval?")
    prompt, entry_point = record["prompt"], record["entry_point"]
    reference = prompt + record["canonical_solution"]
    tree = parse(reference)
    if tree is None or find_function(tree, entry_point) is None:
        raise DataError(f"the prompt with its canonical solution does not define {entry_point!r}: is the file damaged?")
    return Problem(
        id=record["task_id"],
        statement=prompt,
        public=(),
        hidden=(
            AssertTest(
                code=f"{record['test'].rstrip()}\n\n\ncheck({entry_point})\n",
                setup=source_of(reference, context_statements(tree, entry_point)),
            ),
        ),
        entry_point=entry_point,
        starter=prompt,
        source=source,
        reference=reference,
    )

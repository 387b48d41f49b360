"""DeepCoder-Preview (agentica-org, 2025) in the shapes of its four parts.

| field | |
|---|---|
| `problem` | the statement |
| `tests` | JSON, one of the shapes below |
| `solutions` | a list of programs, fenced or not; the first of Python 3 is the reference |
| `starter_code`, `metadata` | of the part lcbv5: the signature to complete, and `{"func_name": name}` |

| part | `tests` |
|---|---|
| taco | `{"inputs": [...], "outputs": [...], "fn_name": name}`, as in TACO |
| primeintellect | a list of `{"type": "stdin_stdout" or "function_call", "input", "output", "fn_name"}` |
| codeforces | a list of `{"input", "output"}` |
| lcbv5 | a list of `{"testtype": "stdin" or "functional", "input", "output", "metadata"}`, as in LiveCodeBench |

A problem is called by its file and its place there. Its first tests are public (`public_tests`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts.apps import LIMITS, function_tests, program_tests, reference_of, solutions_of
from mars2_jax.tasks.layouts.entry import Entry, Origin
from mars2_jax.tasks.layouts.fields import (
    check_entry_point,
    limits_for,
    optional_text,
    parse_json,
    split_tests,
    text_of,
)
from mars2_jax.tasks.layouts.functions import entry_point_of, with_typing
from mars2_jax.tasks.layouts.livecodebench import livecodebench_tests
from mars2_jax.tasks.problem import Problem, Test

__all__ = ["deepcoder_problem"]

_PROGRAMS, _FUNCTIONS = ("stdin_stdout", "stdin", None), ("function_call", "functional")


def deepcoder_problem(record: Mapping[str, Any], origin: Origin) -> Entry:
    """An entry from a record of DeepCoder-Preview.

    Raises:
      DataError: naming the field and the remedy.
    """
    starter, solutions = optional_text(record, "starter_code"), solutions_of(record)
    metadata = parse_json(record.get("metadata") or {}, "metadata")
    tests = parse_json(record.get("tests"), "tests")
    if isinstance(tests, dict) and "inputs" not in tests and "input" in tests:
        tests = [tests]
    if isinstance(tests, dict):
        name, made = _columns(tests, starter, solutions)
    elif isinstance(tests, list):
        name, made = _rows(tests, metadata if isinstance(metadata, dict) else {}, starter, solutions)
    else:
        raise DataError("field 'tests' must be a JSON list or object: is the file DeepCoder-Preview?")
    public, hidden = split_tests(made, origin.public_tests)
    problem = Problem(
        id=origin.place,
        statement=text_of(record, "problem"),
        public=public,
        hidden=hidden,
        entry_point=name,
        starter=with_typing(starter) if name else "",
        limits=limits_for(made, LIMITS),
        source=origin.source,
        reference=reference_of(solutions, name),
    )
    return Entry(problem)


def _columns(tests: dict[str, Any], starter: str, solutions: list[str]) -> tuple[str | None, Sequence[Test]]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not tests.get("fn_name"):
        return None, program_tests(inputs, outputs, "tests")
    name = entry_point_of(check_entry_point(str(tests["fn_name"]), "tests.fn_name"), starter, *solutions[:3])
    return name, function_tests(inputs, outputs, "tests", name, (starter, *solutions[:3]))


def _rows(
    tests: list[Any], metadata: dict[str, Any], starter: str, solutions: list[str]
) -> tuple[str | None, Sequence[Test]]:
    if not tests:
        raise DataError("field 'tests' holds no tests: leave the record out")
    for i, test in enumerate(tests):
        if not isinstance(test, dict) or "input" not in test or "output" not in test:
            raise DataError(f"field 'tests[{i}]' must be an object with 'input' and 'output'")
    kinds = {test.get("type", test.get("testtype")) for test in tests}
    for kind in kinds - {*_PROGRAMS, *_FUNCTIONS}:
        raise DataError(f"field 'tests' has tests of type {kind!r}: it must be one of stdin_stdout and function_call")
    if kinds <= {*_PROGRAMS}:
        inputs, outputs = [test["input"] for test in tests], [test["output"] for test in tests]
        return None, program_tests(inputs, outputs, "tests")
    if len(kinds) > 1:
        raise DataError("field 'tests' has tests of programs and of functions: is the file damaged?")
    named = {_name(test) or metadata.get("func_name") for test in tests}
    if len(named) != 1 or not isinstance(name := named.pop(), str):
        raise DataError("field 'tests' does not name one function that its tests call ('fn_name' or 'func_name')")
    entry_point = entry_point_of(check_entry_point(name, "tests.fn_name"), starter, *solutions[:3])
    if kinds == {"functional"} or all(isinstance(test["input"], str) for test in tests):
        return entry_point, livecodebench_tests([{**test, "testtype": "functional"} for test in tests], "tests")
    inputs, outputs = [test["input"] for test in tests], [test["output"] for test in tests]
    return entry_point, function_tests(inputs, outputs, "tests", entry_point, (starter, *solutions[:3]))


def _name(test: dict[str, Any]) -> Any:
    metadata = test.get("metadata")
    return test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, dict) else None)

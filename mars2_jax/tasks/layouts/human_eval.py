"""HumanEval (Chen et al. 2021, arXiv 2107.03374) and HumanEval+ (Liu et al. 2023, arXiv 2305.01210).

| field | |
|---|---|
| `task_id`, `prompt`, `entry_point`, `canonical_solution` | strings; the solution goes on where the prompt ends |
| `test` | HumanEval: code that defines `check(candidate)` |
| `base_input`, `plus_input`, `atol` | HumanEval+ as evalplus ships it: lists of arguments, and a tolerance |

The prompt is both the statement and the starter. All tests are hidden ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts.differential import differential_test, recorded_test
from mars2_jax.tasks.layouts.entry import Entry, Origin
from mars2_jax.tasks.layouts.fields import check_entry_point, check_plain, parse_json, text_of
from mars2_jax.tasks.problem import AssertTest, Limits, Problem
from mars2_jax.tasks.syntax import context_statements, find_function, parse, source_of

__all__ = ["PLUS_LIMITS", "check_test", "human_eval_problem", "plus_tests"]

PLUS_LIMITS = Limits(cpu_seconds=20.0, wall_seconds=60.0, memory_mb=1024, output_kb=1 << 16)
"""Hundreds of inputs stand in one test, some results are megabytes, and the reference takes its time, too."""


def human_eval_problem(record: Mapping[str, Any], origin: Origin) -> Entry:
    """An entry from a record of HumanEval or HumanEval+.

    The prompt's imports and helper functions also go into the test's setup, because some `check` functions call them.

    Raises:
      DataError: naming the field and the remedy.
    """
    prompt, solution = text_of(record, "prompt"), text_of(record, "canonical_solution")
    entry_point = check_entry_point(text_of(record, "entry_point"))
    reference = prompt + solution
    tree = parse(reference)
    if tree is None or find_function(tree, entry_point) is None:
        raise DataError(f"the prompt with its canonical solution does not define {entry_point!r}: is the file damaged?")
    if "base_input" in record or "plus_input" in record:
        tests, limits = plus_tests(record, entry_point, reference), PLUS_LIMITS
    else:
        context = source_of(reference, context_statements(tree, entry_point))
        test = check_test(text_of(record, "test"), entry_point, context)
        tests, limits = (test,), Limits() if test.setup == context else PLUS_LIMITS
    problem = Problem(
        id=text_of(record, "task_id"),
        statement=prompt,
        public=(),
        hidden=tests,
        entry_point=entry_point,
        starter=prompt,
        limits=limits,
        source=origin.source,
        reference=reference,
    )
    return Entry(problem, split="test")


def check_test(test: str, entry_point: str, context: str) -> AssertTest:
    """The test of a `check` function.

    Args:
      test: code that defines `check(candidate)`.
      entry_point: the function that it is called with.
      context: code that the check may need.
    """
    tree = parse(test)
    if tree is None:
        raise DataError("field 'test' is no Python that can be parsed: is the file damaged?")
    if "numpy" in test:
        if (recorded := recorded_test(entry_point, test)) is None:
            raise DataError("field 'test' needs NumPy, which programs under test do not have: use another release")
        return recorded
    if find_function(tree, "check") is None:
        raise DataError("field 'test' defines no function check: is this file HumanEval?")
    return AssertTest(code=f"{test.rstrip()}\n\n\ncheck({entry_point})\n", setup=context)


def plus_tests(record: Mapping[str, Any], name: str, reference: str) -> tuple[AssertTest, ...]:
    """The base inputs as one test, the added ones as another."""
    atol = record.get("atol", 0)
    if isinstance(atol, bool) or not isinstance(atol, int | float):
        raise DataError("field 'atol' must be a number")
    tests = []
    for field in ("base_input", "plus_input"):
        inputs = parse_json(record.get(field), field) or []  # MBPP+ 0.1.0 has an empty object for none
        if not isinstance(inputs, list) or not all(isinstance(args, list | tuple) for args in inputs):
            raise DataError(f"field {field!r} must be a list of lists of arguments")
        check_plain(inputs)
        if inputs:
            tests.append(differential_test(name, reference, inputs, atol))
    if not tests:
        raise DataError("fields 'base_input' and 'plus_input' hold no inputs: leave the record out")
    return tuple(tests)

"""APPS (Hendrycks et al. 2021, arXiv 2105.09938) and TACO (Li et al. 2023, arXiv 2312.14852).

| field | |
|---|---|
| `question` | the statement |
| `input_output` | JSON: `{"inputs": [...], "outputs": [...], "fn_name": name}`; without `fn_name` programs read stdin |
| `solutions` | JSON: a list of programs, of which the first of Python 3 is the reference |
| `starter_code` | the signature to complete, or "" |
| `difficulty` | APPS: introductory, interview, competition; TACO: EASY, MEDIUM, MEDIUM_HARD, HARD, VERY_HARD |
| `problem_id` or `id` | APPS: a number; a TACO problem is called by its file and its place there |
| `date` | TACO: day of publication |

An input or output of a program is a text, or a list of its lines. An input of a function is the list of its arguments.
Its output may be the value, or a list that holds it; `unwrapped` says when. Dictionaries with keys such as "7" mean the
number (JSON has no other keys). The first tests are public (`public_tests`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts.entry import Entry, Origin
from mars2_jax.tasks.layouts.fields import (
    check_entry_point,
    check_plain,
    day_of,
    difficulty_of,
    limits_for,
    optional_text,
    parse_json,
    split_tests,
    text_of,
    without_carriage_returns,
)
from mars2_jax.tasks.layouts.functions import annotated_depth, entry_point_of, with_imports, with_typing
from mars2_jax.tasks.problem import CallTest, Limits, Problem, StdioTest, Test
from mars2_jax.tasks.syntax import defines, parse, used_names

__all__ = ["LIMITS", "apps_problem", "function_tests", "program_tests", "reference_of", "solutions_of", "unwrapped"]

LIMITS = Limits(cpu_seconds=4.0, memory_mb=1024)

_PYTHON_2 = {"basestring", "long", "raw_input", "unichr", "unicode", "xrange"}

_DIFFICULTIES = {
    "introductory": "easy",
    "interview": "medium",
    "competition": "hard",
    "easy": "easy",
    "medium": "medium",
    "medium_hard": "hard",
    "hard": "hard",
    "very_hard": "hard",
}


def apps_problem(record: Mapping[str, Any], origin: Origin) -> Entry:
    """An entry from a record of APPS or TACO.

    Raises:
      DataError: naming the field and the remedy.
    """
    question, starter = text_of(record, "question"), optional_text(record, "starter_code")
    tests = parse_json(record.get("input_output"), "input_output")
    if not isinstance(tests, dict):
        raise DataError("field 'input_output' holds no tests: leave the record out")
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    solutions = solutions_of(record)
    entry_point = None
    if name is None:
        made: Sequence[Test] = program_tests(inputs, outputs, "input_output")
    else:
        entry_point = entry_point_of(check_entry_point(str(name), "input_output.fn_name"), starter, *solutions[:3])
        made = function_tests(inputs, outputs, "input_output", entry_point, (starter, *solutions[:3]))
    public, hidden = split_tests(made, origin.public_tests)
    number = record.get("problem_id", record.get("id"))
    problem = Problem(
        id=f"{origin.source}/{number}" if isinstance(number, int | str) and number != "" else origin.place,
        statement=question,
        public=public,
        hidden=hidden,
        entry_point=entry_point,
        starter=with_typing(starter) if entry_point else "",
        limits=limits_for(made, LIMITS),
        source=origin.source,
        difficulty=difficulty_of(record.get("difficulty"), _DIFFICULTIES),
        reference=reference_of(solutions, entry_point),
    )
    return Entry(problem, date=_day(record.get("date")))


def program_tests(inputs: Any, outputs: Any, field: str) -> list[StdioTest]:
    """Tests of programs from lists of inputs and outputs."""
    _check_pairs(inputs, outputs, field)
    return [
        StdioTest(_text(read, f"{field}.inputs[{i}]"), _text(printed, f"{field}.outputs[{i}]"))
        for i, (read, printed) in enumerate(zip(inputs, outputs, strict=True))
    ]


def function_tests(inputs: Any, outputs: Any, field: str, entry_point: str, sources: Sequence[str]) -> list[CallTest]:
    """Tests of functions from lists of lists of arguments and of outputs.

    Args:
      inputs, outputs: of the tests.
      field: where they stand, for messages.
      entry_point: the function.
      sources: the starter and solutions, whose annotations may say what is returned.
    """
    _check_pairs(inputs, outputs, field)
    for i, args in enumerate(inputs):
        if not isinstance(args, list):
            raise DataError(f"field '{field}.inputs[{i}]' must be the list of a function's arguments")
    check_plain([inputs, outputs])
    outputs = unwrapped(outputs, entry_point, sources)
    return [
        CallTest(args=tuple(map(_numbered, args)), expected=_numbered(expected))
        for args, expected in zip(inputs, outputs, strict=True)
    ]


def unwrapped(outputs: list[Any], entry_point: str, sources: Sequence[str]) -> list[Any]:
    """Expected values, out of the lists that they may stand in.

    The graders of these data sets let a result pass that equals the output or the first item of it, so both occur, and
    a whole problem is of one kind. Where they are wrapped, all outputs are lists of one item. That is taken at its word
    unless the starter or a solution annotates what the function returns: then they are wrapped if they are nested more
    deeply than the annotation says.
    """
    if not all(isinstance(output, list) and len(output) == 1 for output in outputs):
        return outputs
    said = next((depth for source in sources if (depth := annotated_depth(source, entry_point)) is not None), None)
    if said is not None and max(map(_depth, outputs)) <= said:
        return outputs
    return [output[0] for output in outputs]


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _numbered(value: Any) -> Any:
    if isinstance(value, dict) and value and all(_is_number(key) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _is_number(key: str) -> bool:
    digits = key.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 20


def _check_pairs(inputs: Any, outputs: Any, field: str) -> None:
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise DataError(f"field {field!r} must hold lists of inputs and outputs")
    if len(inputs) != len(outputs):
        raise DataError(f"field {field!r} holds {len(inputs)} inputs and {len(outputs)} outputs: is the file damaged?")
    if not inputs:
        raise DataError(f"field {field!r} holds no tests: leave the record out")


def _text(value: Any, where: str) -> str:
    if isinstance(value, list):
        return "\n".join(_text(line, where) for line in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"field '{where}' must be a text or a list of lines, is a {type(value).__name__}")
    check_plain(value)
    return without_carriage_returns(value)


def solutions_of(record: Mapping[str, Any]) -> list[str]:
    """The solutions of a record, out of the fences that some stand in."""
    value = record.get("solutions")
    solutions = parse_json(value, "solutions") if not isinstance(value, str) or value.strip() else []
    if solutions is None:
        return []
    if isinstance(solutions, str):
        solutions = [solutions]
    if not isinstance(solutions, list) or not all(isinstance(solution, str) for solution in solutions):
        raise DataError("field 'solutions' must be a JSON list of programs")
    return [_unfenced(solution) for solution in solutions]


def _unfenced(solution: str) -> str:
    text = without_carriage_returns(solution)
    if text.lstrip().startswith("```"):
        text = text.strip().partition("\n")[2].rpartition("```")[0]
    return text


def reference_of(solutions: Sequence[str], entry_point: str | None) -> str | None:
    """The first solution that is of Python 3 and defines the function; None if there is none."""
    for solution in solutions:
        tree = parse(solution)
        if tree is not None and tree.body and defines(tree, entry_point) and not used_names(tree) & _PYTHON_2:
            return with_imports(solution)
    return None


def _day(value: Any) -> str:
    try:
        return day_of(value, "date")
    except DataError:  # collected from many sites, each with its own way to write it
        return ""

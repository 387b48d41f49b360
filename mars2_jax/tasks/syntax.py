"""Reading Python source without running it: does it parse, what does it define, what does it need."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

__all__ = [
    "bound_names",
    "context_statements",
    "defines",
    "find_function",
    "lines_of",
    "own_returns",
    "parse",
    "parse_starter",
    "source_of",
    "used_names",
    "valid_prefix",
]


def parse(code: str) -> ast.Module | None:
    """The syntax tree of a program; None where Python would refuse to compile it."""
    tree = _tree_or_bad_line(code)
    return tree if isinstance(tree, ast.Module) else None


def lines_of(code: str) -> list[str]:
    """The lines of a program as Python numbers them, ends included; `str.splitlines` also splits at form feeds."""
    return re.findall(r"[^\n]*\n|[^\n]+", code)


def valid_prefix(code: str) -> str:
    """The longest run of whole top-level statements from the start of `code` that parses; "" if there is none.

    Cut at top-level lines only: half a function is a wrong program, not a shorter one.
    """
    lines = lines_of(code)
    end = len(lines)
    while end > 0:
        tree = _tree_or_bad_line("".join(lines[:end]))
        if isinstance(tree, ast.Module):
            break
        end = max(min(tree, end) - 1, 0)  # what holds the offending line cannot be right, however it goes on
        while end > 0 and (lines[end][0].isspace() or lines[end][0] in ")]}#"):
            end -= 1
    return "".join(lines[:end])


def _tree_or_bad_line(code: str) -> ast.Module | int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like: the model's business, not the user's
            tree = ast.parse(code)
    except SyntaxError as error:
        return max(error.lineno or 1, 1)
    except (ValueError, RecursionError, MemoryError):  # null bytes, surrogates, absurd nesting
        return 1
    # `ast.parse` accepts a bare `return`, which is how the body of a function without its header looks.
    return next(own_returns(tree), tree)


def own_returns(scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Lines with a `return` or `yield` of a function, or of a module, where it is an error; nested functions' not."""
    todo: list[ast.AST] = list(scope.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            yield node.lineno
        todo.extend(ast.iter_child_nodes(node))


def parse_starter(starter: str) -> ast.Module | None:
    """The syntax tree of code that is to be completed: as it is, or with `pass` for the body that is missing."""
    starter = starter.rstrip() + "\n"
    for stub in ("", "    pass\n", "        pass\n"):
        if (tree := parse(starter + stub)) is not None:
            return tree
    return None


def find_function(tree: ast.Module, entry_point: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The top-level `def` of `entry_point`, or the method where it reads "Solution.method"; the last one counts."""
    owner, _, name = entry_point.rpartition(".")
    body: list[ast.stmt] = tree.body
    if owner:
        classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner]
        body = classes[-1].body if classes else []
    found = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    return found[-1] if found else None


def defines(tree: ast.Module, entry_point: str | None) -> bool:
    """Whether the program defines `entry_point` (a `def`, or a name that is assigned); True if there is none."""
    if entry_point is None or find_function(tree, entry_point) is not None:
        return True
    return any(isinstance(n, ast.Assign | ast.AnnAssign) and entry_point in bound_names(n) for n in tree.body)


def bound_names(statement: ast.stmt) -> set[str]:
    """The names that a top-level statement binds; {"*"} for a star import."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def used_names(node: ast.AST) -> set[str]:
    """The names that a piece of a program reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def context_statements(tree: ast.Module, entry_point: str) -> list[ast.stmt]:
    """What stands in a starter besides what the candidate has to write: imports, constants, helper functions."""
    mine = entry_point.partition(".")[0]
    return [n for n in tree.body if mine not in bound_names(n) and not _is_docstring(n)]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def source_of(code: str, statements: list[ast.stmt]) -> str:
    """The text of some top-level statements of `code`, decorators included, in their order; "" for none."""
    lines = lines_of(code)
    parts = []
    for node in statements:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        parts.append("".join(lines[first - 1 : node.end_lineno]).rstrip("\n") + "\n")
    return "".join(parts)

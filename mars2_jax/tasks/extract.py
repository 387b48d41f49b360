"""The program in a model's answer.

The rules, in the order in which they win (each has an example in tests/tasks/test_extract.py):
  1. Thoughts (`<think>...</think>`) are dropped first, also where the opening or the closing tag is missing.
  2. The last fenced Python block that parses and defines the entry point; blocks tagged as Python before untagged ones.
     A fence that is never closed runs to the end. Whatever follows the last whole statement that parses is cut off.
  3. The last stretch of unfenced code that does so, or the whole answer.
  4. A block, or the whole answer, that continues the starter: the body of the function without its header.
  5. A `class Solution` with a method of the entry point's name, where a plain function was asked for; a plain function,
     or a method without its class, where a method of `Solution` was.
  6. The last block or stretch that parses at all: the grader will say what it lacks.
The starter's imports and helper functions are put in front where the program uses and does not define them.
Nothing is executed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.syntax import (
    bound_names,
    context_statements,
    defines,
    find_function,
    lines_of,
    own_returns,
    parse,
    parse_starter,
    source_of,
    used_names,
    valid_prefix,
)

__all__ = ["extract_program"]

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_CODE_START = re.compile(
    r"(?:from|import|def|class|async|for|while|if|try|with)\b|@\w|print\(|[A-Za-z_]\w*(?:\s*,\s*\w+)*\s*=(?!=)"
)

# Bounds the search for unfenced code: a model that goes round in circles can write thousands of lines that look like
# the start of a program.
_MAX_PARSED_CHARS = 500_000


def extract_program(text: str, problem: Problem) -> str:
    """The program that an answer contains, ready to be graded; "" where there is none."""
    text = _without_thoughts(text.replace("\r\n", "\n").replace("\r", "\n"))
    blocks = _fenced_blocks(text)
    stretches = [text, *_unfenced_stretches(text)][::-1]
    entry = problem.entry_point

    pieces = [piece for block in blocks for piece in _readings(block)] + stretches
    programs = [(piece, tree) for piece in pieces if (tree := parse(piece)) is not None and _does_something(tree)]
    for program, tree in programs:
        if defines(tree, entry):
            return _with_context(program, tree, problem)
    if entry is None:
        return ""
    for body in [*blocks, text]:
        if continued := _continue_starter(body, problem):
            return continued
    for program, tree in programs:
        if adapter := _adapter(tree, entry):
            program = f"{program.rstrip()}\n\n\n{adapter}\n"
            return _with_context(program, ast.parse(program), problem)
    return programs[0][0] if programs else ""


def _without_thoughts(text: str) -> str:
    text = text.rpartition("</think>")[2]  # the opening tag may stand in the prompt
    return text.partition("<think>")[0]  # a thought that never ended holds no answer


def _fenced_blocks(text: str) -> list[str]:
    """Contents of the fenced blocks that may be Python, last first, those tagged as Python before the others."""
    tagged, untagged = [], []
    for match in _FENCE.finditer(text):
        language = match[1].lower()
        if language in ("python", "python3", "py"):
            tagged.append(match[2])
        elif not language:
            untagged.append(match[2])
    return tagged[::-1] + untagged[::-1]


def _readings(block: str) -> Iterator[str]:
    yield valid_prefix(block)
    if block[:1] in " \t":  # a fence inside a list item; the indented body of a function does not parse this way
        yield valid_prefix(textwrap.dedent(block))


def _unfenced_stretches(text: str) -> Iterator[str]:
    lines = lines_of(text)
    at, parsed = 0, 0
    while at < len(lines) and parsed < _MAX_PARSED_CHARS:
        if not _CODE_START.match(lines[at]):
            at += 1
            continue
        end = next((i for i in range(at, len(lines)) if lines[i].lstrip().startswith("```")), len(lines))
        stretch = "".join(lines[at:end])
        parsed += len(stretch)
        program = valid_prefix(stretch)
        if program:
            yield _without_prose(program)
        at += max(1, len(lines_of(program)))


def _without_prose(program: str) -> str:
    """Unfenced code without a last line such as `Explanation` or `Note: done`, which happens to parse."""
    tree = ast.parse(program)
    while tree.body and _is_prose(tree.body[-1]):
        tree.body.pop()
    end = tree.body[-1].end_lineno if tree.body else 0
    return "".join(lines_of(program)[:end])


def _is_prose(node: ast.stmt) -> bool:
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    return isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Await)


def _does_something(tree: ast.Module) -> bool:
    """False for text that is Python only by accident, such as sample output."""
    return any(not _is_prose(node) for node in tree.body)


def _continue_starter(body: str, problem: Problem) -> str:
    """The starter with `body` as the rest of its function; "" where that makes no program."""
    entry = problem.entry_point
    starter = problem.starter.rstrip() + "\n"
    head = parse_starter(starter)
    header = find_function(head, entry) if head and entry else None
    body = body.strip("\n")
    if header is None or not entry or not body.strip():
        return ""
    indent = " " * (header.col_offset + 4)
    readings = [indent + body.lstrip(), textwrap.indent(textwrap.dedent(body), indent)]
    if body.startswith(indent):
        readings.insert(0, body)
    best = ""
    for reading in readings:
        code = valid_prefix(starter + reading + "\n")
        tree = parse(code)
        function = find_function(tree, entry) if tree else None
        # Only a function that gives something back: prose and sample output rarely do.
        if function and any(own_returns(function)) and len(code) > len(best):
            best = code
    return best


def _adapter(tree: ast.Module, entry: str) -> str:
    """The lines that make a function of a method or the other way round; "" where the program has neither."""
    owner, _, name = entry.rpartition(".")
    if not owner:
        return f"{entry} = Solution().{entry}" if find_function(tree, f"Solution.{entry}") else ""
    function = find_function(tree, name)
    if function is None or any(owner in bound_names(node) for node in tree.body):
        return ""
    bound = [arg.arg for arg in function.args.args[:1]] == ["self"]
    return f"class {owner}:\n    {name} = {name if bound else f'staticmethod({name})'}"


def _with_context(program: str, tree: ast.Module, problem: Problem) -> str:
    """Puts the starter's imports and helpers in front of a program that needs them."""
    entry = problem.entry_point
    starter = problem.starter.rstrip() + "\n"
    head = parse_starter(starter)
    if entry is None or head is None:
        return program
    own = set().union(*(bound_names(node) for node in tree.body))
    used = used_names(tree)
    needed: list[ast.stmt] = []
    for node in reversed(context_statements(head, entry)):  # backwards: a helper may need an import above it
        names = bound_names(node)
        if names == {"*"} or (names & used and not names & own):
            needed.insert(0, node)
            used |= used_names(node)
    if not needed:
        return program
    lines = lines_of(program)
    futures = [n.end_lineno or 0 for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    at = max(futures, default=0)  # nothing may stand before `from __future__ import ...`
    return "".join(lines[:at]) + source_of(starter, needed) + "".join(lines[at:])

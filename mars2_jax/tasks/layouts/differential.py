"""Assertions that hold a program against the reference solution, input by input: HumanEval+ and MBPP+.

Liu et al. 2023, arXiv 2305.01210. Their files give inputs and a reference; what is expected is what the reference
returns. The reference runs where assertions run, in the sandbox and apart from the program, never here.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.problem import AssertTest

__all__ = ["differential_test", "literal", "recorded_test"]

_COMPARE = """\
import copy
import math
from math import inf, nan


def _floats(value):
    return isinstance(value, float) or (isinstance(value, (list, tuple)) and all(type(v) is float for v in value))


def _close(expected, actual, atol):
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(expected) != len(actual):
            return False
        return all(_close(e, a, atol) for e, a in zip(expected, actual))
    if isinstance(expected, (int, float)) and isinstance(actual, (int, float)):
        return math.isclose(expected, actual, rel_tol=1e-7, abs_tol=atol) or (expected != expected and actual != actual)
    return expected == actual


def _agree(expected, actual, atol):
    if expected == actual:
        return True
    if atol == 0 and _floats(expected):
        atol = 1e-6
    return atol != 0 and _close(expected, actual, atol)
"""

_MATCHERS = ("check_str", "text_match_three", "text_starta_endb")

_ORACLES = {
    # HumanEval/32: any root will do.
    "find_zero": "abs(sum(c * actual**i for i, c in enumerate(args[0]))) <= max(atol, 1e-4)",
    # MBPP/164 and 295: the statements leave more than one reading.
    "are_equivalent": "isinstance(actual, bool)",
    "sum_div": "_agree(expected, actual, atol) or actual == 0",
    # MBPP/558 and 581: either of two readings.
    "digit_distance_nums": (
        "expected == actual or "
        "actual == sum(abs(int(a) - int(b)) for a, b in zip(*(str(abs(n)).zfill(40) for n in args)))"
    ),
    "surface_Area": (
        "_agree(expected, actual, atol) or "
        "_close(args[0] ** 2 + 2 * args[0] * math.sqrt((args[0] / 2) ** 2 + args[1] ** 2), actual, max(atol, 1e-6))"
    ),
    # MBPP: order and repetition are left open.
    **dict.fromkeys(
        (
            "Diff",
            "common_in_nested_lists",
            "extract_singly",
            "find_char_long",
            "find_dissimilar",
            "intersection_array",
            "larg_nnum",
            "similar_elements",
        ),
        "set(expected) == set(actual)",
    ),
    # MBPP: a match object counts as True.
    **dict.fromkeys(
        _MATCHERS, "actual == bool(expected) if isinstance(actual, bool) else bool(expected) == (actual is not None)"
    ),
}
"""How results are compared where equality is not what the problem asks for; `_agree` everywhere else."""


def differential_test(name: str, reference: str, inputs: Sequence[Any], atol: float) -> AssertTest:
    """A test that calls the program and the reference with each of `inputs` and compares what they return.

    Args:
      name: the function.
      reference: a program that defines it.
      inputs: sequences of arguments.
      atol: absolute tolerance; where it is 0, floats agree within 1e-6.
    """
    setup = (
        f'{_COMPARE}\n_space = {{"__name__": "reference"}}\n'
        f'exec(compile({reference!r}, "reference.py", "exec"), _space)\n_reference = _space[{name!r}]\n'
    )
    return AssertTest(
        code=(
            f"atol = {float(atol)!r}\nfor args in {literal(list(inputs))}:\n"
            "    expected = _reference(*copy.deepcopy(args))\n" + _call_and_compare(name)
        ),
        setup=setup,
    )


def recorded_test(name: str, check: str, atol: float = 0.0) -> AssertTest | None:
    """The test of a `check` function that holds literal lists `inputs` and `results`, as the releases on the Hugging
    Face hub do; None where it holds none. Their own comparison needs NumPy, which programs under test do not have.
    """
    try:
        tree = ast.parse(check)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.List)):
            continue
        target = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
        if target in ("inputs", "results"):
            found[target] = ast.get_source_segment(check, node.value) or ""
    if len(found) < 2:
        return None
    code = f"atol = {float(atol)!r}\nfor args, expected in zip({found['inputs']}, {found['results']}, strict=True):\n"
    return AssertTest(code=code + _call_and_compare(name), setup=_COMPARE)


def _call_and_compare(name: str) -> str:
    oracle = _ORACLES.get(name, "_agree(expected, actual, atol)")
    call = f"    actual = {name}(*args)\n"
    if name in _MATCHERS:  # what is returned stays in the program's process, but that something was is known
        call = (
            f"    try:\n        actual = {name}(*args)\n    except Exception as error:\n"
            '        if not str(error).startswith("it returned a value of type"):\n            raise\n'
            "        actual = str(error)\n"
        )
    return f"{call}    assert {oracle}, args\n"


def literal(value: Any) -> str:
    """The Python expression of a plain value; that of a long integer is hexadecimal, which has no limit of digits."""
    if isinstance(value, bool | str | bytes | complex) or value is None:
        return repr(value)
    if isinstance(value, float):
        return repr(value)  # inf and nan are names that the setup defines
    if isinstance(value, int):
        return repr(value) if abs(value) < 1 << 63 else hex(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{literal(item)}, ' for item in value)})"
    if isinstance(value, set):
        return f"{{{', '.join(map(literal, value))}}}" if value else "set()"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    raise DataError(f"an input holds a {type(value).__name__}: use plain values")

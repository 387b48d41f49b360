"""What the tests of the problem sets share: running trusted programs without a grader."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from mars2_jax.tasks.problem import AssertTest, CallTest, Problem, Test


def _as_json(value: Any) -> Any:
    """Lists for tuples; True stays apart from 1."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return (type(value).__name__, value)


def _passes(program: str, problem: Problem, tests: tuple[Test, ...] | None = None) -> bool:
    """Whether a trusted program passes the tests (all of the problem's by default), run in this very process."""
    try:
        names: dict[str, Any] = {"__name__": "program"}
        exec(compile(program, "<program>", "exec"), names)
        for test in problem.tests if tests is None else tests:
            if isinstance(test, CallTest):
                function = eval((problem.entry_point or "").replace(".", "().", 1), names)
                actual = function(*copy.deepcopy(list(test.args)), **copy.deepcopy(test.kwargs))
                if _as_json(actual) != _as_json(test.expected):
                    return False
            elif isinstance(test, AssertTest):
                judge: dict[str, Any] = {}
                exec(test.setup, judge)
                judge[problem.entry_point or ""] = names[problem.entry_point or ""]
                exec(test.code, judge)
            else:
                raise TypeError(f"no local way to run a {type(test).__name__}")
    except Exception:  # noqa: BLE001 - whatever a wrong program raises, it is wrong
        return False
    return True


@pytest.fixture(scope="session")
def passes() -> Callable[..., bool]:
    return _passes

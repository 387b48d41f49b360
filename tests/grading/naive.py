"""A grader as it should not be, for `run_exploits`: programs run in its own process and judge themselves."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

__all__ = ["passes"]


def passes(program: str, problem: dict[str, Any]) -> bool:
    """Whether the program passes, as far as it lets one know."""
    for test in problem["tests"]:
        expected = test.get("stdout", test.get("expected"))
        namespace: dict[str, Any] = {"__name__": "__main__"}
        printed = io.StringIO()
        try:
            sys.stdin = io.StringIO(test.get("stdin", ""))
            with contextlib.redirect_stdout(printed):
                exec(program, namespace)
                if problem["kind"] == "call":
                    actual = namespace["answer"](*test["args"])
                elif problem["kind"] == "assert":
                    exec(test["code"], namespace)
        except SystemExit as leaving:
            if leaving.code:
                return False
        except Exception:  # noqa: BLE001 -- a failed test, whatever it is
            return False
        if problem["kind"] == "stdio" and printed.getvalue().strip() != expected.strip():
            return False
        if problem["kind"] == "call" and actual != expected:
            return False
    return True

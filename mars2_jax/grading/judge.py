"""The trusted side of a test: from what a program's process left behind to a verdict. Runs in the service only."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

from mars2_jax.grading.checkers import CheckerFailed
from mars2_jax.grading.values import NotCarried, decode, loads
from mars2_jax.grading.verdict import TestResult, Verdict

__all__ = ["MAX_TEXT", "Compare", "compile_failure", "judge", "tidy"]

MAX_TEXT = 1000
"""Characters kept of what a program printed, returned or raised."""

_ERROR_LINES = 12
_OUR_FRAMES = re.compile(r'  File "[^"]*/mars2_jax/grading/\w+\.py", line \d+, in [^\n]*\n(    [^\n]*\n)*')
_LIBRARY = re.compile(r'File "[^"]*/lib/python[\d.]+/')


Compare = Callable[[dict[str, Any], Any, Any], bool]
"""(test, expected, actual) -> whether they agree. May raise CheckerFailed."""


def judge(test: dict[str, Any], report: dict[str, Any], compare: Compare) -> TestResult:
    """The result of one test.

    Args:
      test: the test with what it expects, as `grader.py` sends it.
      report: what the supervisor saw (see runner.py). Its texts are untrusted.
      compare: whether an output or a returned value agrees with the expected one.
    """
    cpu = float(report["cpu"])
    ended = {"cpu": Verdict.TIMEOUT, "wall": Verdict.TIMEOUT, "memory": Verdict.MEMORY, "output": Verdict.OUTPUT}
    stopped = ended.get(report["end"])
    if stopped is not None:
        limit = {"cpu": "CPU time", "wall": "wall time", "memory": "memory", "output": "output size"}[report["end"]]
        return TestResult(stopped, _clip(report["stdout"] or ""), f"stopped at the limit of {limit}", cpu)
    if test["kind"] == "assert":
        verdict, actual, error = _judge_assertions(report)
    elif _failed(report):
        verdict, actual, error = _failure(report), report["stdout"] or "", _error(report)
    elif test["kind"] == "stdio":
        verdict, error = _compared(compare, test, test["stdout"], report["stdout"])
        actual = report["stdout"]
    else:
        verdict, actual, error = _judge_call(test, report, compare)
    return TestResult(verdict, _clip(actual), _printable(error)[-MAX_TEXT:], cpu)


def compile_failure(report: dict[str, Any]) -> TestResult:
    """The result of every test of a program that could not be compiled."""
    never = lambda test, expected, actual: False
    return judge({"kind": "stdio", "stdout": ""}, {**report, "status": report["status"] or 256}, never)


def _compared(compare: Compare, test: dict[str, Any], expected: Any, actual: Any) -> tuple[Verdict, str]:
    try:
        return (Verdict.PASS if compare(test, expected, actual) else Verdict.WRONG), ""
    except CheckerFailed as failure:
        return Verdict.INFRA, str(failure)


def _judge_call(test: dict[str, Any], report: dict[str, Any], compare: Compare) -> tuple[Verdict, str, str]:
    try:
        reply = loads(report["value"].encode())
        if not isinstance(reply, dict):
            raise NotCarried("not a reply")
        if "raise" in reply:
            name, _, text = (str(part) for part in reply["raise"])
            return (Verdict.MEMORY if name == "MemoryError" else Verdict.ERROR), "", tidy(text)
        if "not_carried" in reply:
            return Verdict.ERROR, "", f"the program returned {str(reply['not_carried'])[:200]}, which is no plain value"
        value = decode(reply["value"])
    except (NotCarried, KeyError, TypeError, ValueError, RecursionError):
        return Verdict.ERROR, "", "the program ended before it returned a value"
    verdict, error = _compared(compare, test, decode(test["expected"]), value)
    return verdict, _shown(value), error


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python refuses to write integers of thousands of digits.
        return f"({type(value).__name__} too long to show)"


def _judge_assertions(report: dict[str, Any]) -> tuple[Verdict, str, str]:
    try:
        outcome = loads(report["outcome"].encode())
        said, kind, error, actual = (str(outcome[key]) for key in ("outcome", "kind", "error", "actual"))
    except (NotCarried, KeyError, TypeError):
        return Verdict.ERROR, "", "the assertions did not come to an end: " + _error(report)
    if said == "error" and kind == "end":
        return _failure(report), "", _error(report)
    verdict = {"pass": Verdict.PASS, "wrong": Verdict.WRONG, "infra": Verdict.INFRA}.get(said, Verdict.ERROR)
    if said == "error" and kind == "MemoryError":
        verdict = Verdict.MEMORY
    return verdict, actual, "" if said == "pass" else tidy(error)


def _failed(report: dict[str, Any]) -> bool:
    return bool(report["status"] != 0)


def _failure(report: dict[str, Any]) -> Verdict:
    # Nobody but the kernel, out of memory, sends SIGKILL to a program whose test has not been stopped.
    killed = os.WIFSIGNALED(report["status"]) and os.WTERMSIG(report["status"]) == signal.SIGKILL
    last = report["stderr"].strip().rpartition("\n")[2]
    return Verdict.MEMORY if killed or last.startswith("MemoryError") else Verdict.ERROR


def _error(report: dict[str, Any]) -> str:
    text = tidy(report["stderr"])
    if os.WIFSIGNALED(report["status"]):
        number = os.WTERMSIG(report["status"])
        known = {int(s): s.name for s in signal.Signals}  # Not all of the real-time signals have names.
        name = known.get(number, f"signal {number}")
        return f"{text}\nkilled by {name}".strip()
    code = os.waitstatus_to_exitcode(report["status"])
    return text or (f"the program exited with status {code}" if code else "the program ended before it returned")


def tidy(text: str) -> str:
    """The last lines of a traceback, without the grader's frames and with the library's paths shortened."""
    text = _LIBRARY.sub('File "', _OUR_FRAMES.sub("", text)).strip()
    return "\n".join(text.splitlines()[-_ERROR_LINES:])[-MAX_TEXT:]


def _printable(text: str) -> str:
    """The text with lone surrogates written out: a program may raise or return them, and no tokenizer or file takes
    them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _clip(text: str) -> str:
    text = _printable(text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."

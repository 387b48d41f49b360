"""What a model is told: messages for a first attempt at a problem and for the refinement of a program.

A refinement starts with the very text of the first attempt (so that its keys and values can be shared), then shows the
program and what the public tests say about it. Nothing of the hidden tests is ever shown, nor of the reference.

Long programs and long feedback are cut to a number of characters. A caller with a budget of tokens takes the first of
`refinement_candidates` whose tokens fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, assert_never

from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.tasks.problem import AssertTest, CallTest, Problem, StdioTest, Test

__all__ = ["Feedback", "Message", "attempt_messages", "refinement_candidates", "refinement_messages"]

Message = dict[str, str]
"""`{"role": "system" | "user", "content": text}`, as chat templates take it."""

Feedback = Literal["summary", "detailed"]

_MAX_EXAMPLES = 3
_MAX_EXAMPLE_CHARS = 400


def attempt_messages(problem: Problem, role: str = "") -> list[Message]:
    """The messages that ask for a first program.

    Args:
      problem: what to solve. Its public tests are shown as examples where the statement does not hold them already.
      role: system prompt of the agent; "" leaves the system message out.
    """
    return _messages(role, f"{_task(problem)}\n\n{_request(problem)}")


def refinement_messages(
    problem: Problem,
    role: str,
    program: str,
    grade: Grade,
    *,
    feedback: Feedback = "detailed",
    max_program_chars: int = 4000,
    max_feedback_chars: int = 1000,
) -> list[Message]:
    """The messages that ask for a better program than `program`.

    Args:
      problem: what to solve.
      role: system prompt of the agent; "" leaves the system message out.
      program: the program to refine; "" if the previous answer held none.
      grade: its grade, of which only the public results are used.
      feedback: "summary" says right or wrong; "detailed" also shows the first public test that failed: its input, what
        was expected, what came out or the error.
      max_program_chars: a longer program is cut in its middle, with a line that says so; 0 leaves it out.
      max_feedback_chars: the same for every input, output and error in the feedback.
    """
    parts = [_task(problem)]
    if not program.strip():
        parts.append("A previous answer held no complete Python program.")
        return _messages(role, "\n\n".join([*parts, _request(problem)]))
    if max_program_chars > 0:
        parts.append(f"A previous program:\n{_code(_cut(program.strip(), max_program_chars))}")
    parts.append(_verdict_text(problem, grade, feedback, max_feedback_chars))
    return _messages(role, "\n\n".join([*parts, _request(problem, "improved ")]))


def refinement_candidates(
    problem: Problem,
    role: str,
    program: str,
    grade: Grade,
    *,
    feedback: Feedback = "detailed",
) -> Iterator[list[Message]]:
    """Refinement prompts for the same program, each shorter than the one before.

    First the feedback is cut, then the program, and at last the program is left out. A caller takes the first that
    fits; if none does, the statement itself is too long.
    """
    for program_chars, feedback_chars in ((4000, 1000), (4000, 200), (2000, 200), (1000, 200), (500, 100), (0, 100)):
        yield refinement_messages(
            problem,
            role,
            program,
            grade,
            feedback=feedback,
            max_program_chars=program_chars,
            max_feedback_chars=feedback_chars,
        )


def _messages(role: str, text: str) -> list[Message]:
    system = [{"role": "system", "content": role}] if role else []
    return [*system, {"role": "user", "content": text}]


def _task(problem: Problem) -> str:
    """Statement, starter and examples: the part that all prompts of a problem share."""
    statement, starter = problem.statement.strip(), problem.starter.strip()
    if starter and starter == statement:  # HumanEval: the statement is the docstring
        parts = [f"Complete this Python function:\n{_code(problem.starter.rstrip())}"]
    else:
        parts = [statement]
        if starter and starter not in statement:
            parts.append(_code(problem.starter.rstrip()))
    shown = [test for test in problem.public if not _stated(test, problem)][:_MAX_EXAMPLES]
    if shown:
        examples = "\n".join(_cut(_example(test, problem.entry_point), _MAX_EXAMPLE_CHARS) for test in shown)
        parts.append(f"Examples:\n{examples}")
    return "\n\n".join(parts)


def _request(problem: Problem, adjective: str = "") -> str:
    if problem.entry_point is None:
        what = "program, which reads standard input and writes standard output,"
    elif "." in problem.entry_point:
        what = f"class `{problem.entry_point.partition('.')[0]}`"
    else:
        what = f"function `{problem.entry_point}`"
    return f"Write the whole {adjective}{what} in one ```python block."


def _verdict_text(problem: Problem, grade: Grade, feedback: Feedback, limit: int) -> str:
    results = zip(problem.public, grade.public, strict=False)  # a program that never ran has no results
    failed = [(test, result) for test, result in results if result is not None and result.verdict is not Verdict.PASS]
    if failed:
        if feedback == "summary":
            return "It is wrong."
        test, result = failed[0]
        return _failure(test, result, problem.entry_point, limit)
    if grade.public_pass:
        return "It passes the shown tests. Make sure that it is right for every other input as well."
    return "It may be wrong. Check it against the task and correct what is not right."


def _failure(test: Test, result: TestResult, entry_point: str | None, limit: int) -> str:
    """What happened in a test that failed, in a few lines."""
    match test:
        case CallTest():
            lines = [f"It fails the test `{_cut(_example(test, entry_point), limit)}`."]
        case AssertTest():
            lines = [f"It fails this test:\n{_code(_cut(test.code.strip(), limit))}"]
        case StdioTest():
            lines = [f"It fails the test with this input:\n{_block(test.stdin, limit)}"]
            lines.append(f"Expected output:\n{_block(test.stdout, limit)}")
        case _:
            assert_never(test)
    match result.verdict:
        case Verdict.TIMEOUT:
            lines.append("It ran too long.")
        case Verdict.MEMORY:
            lines.append("It used too much memory.")
        case Verdict.OUTPUT:
            lines.append("It printed too much.")
        case Verdict.WRONG if isinstance(test, StdioTest):
            lines.append(f"Its output:\n{_block(result.actual, limit)}")
        case Verdict.WRONG if result.actual:
            lines.append(f"It returned `{_cut(result.actual, limit)}`.")
        case _ if result.error:
            lines.append(f"It raised:\n{_block(result.error, limit)}")
        case _:
            lines.append("It is wrong.")
    return "\n".join(lines)


def _example(test: Test, entry_point: str | None) -> str:
    match test:
        case CallTest():
            return f"{_call(test, entry_point)} == {_shown(test.expected)}"
        case AssertTest():
            return test.code.strip()
        case StdioTest():
            return f"Input:\n{test.stdin.strip()}\nOutput:\n{test.stdout.strip()}"
        case _:
            assert_never(test)


def _call(test: CallTest, entry_point: str | None) -> str:
    name = (entry_point or "").replace(".", "().", 1)
    return f"{name}({', '.join([*map(_shown, test.args), *(f'{k}={_shown(v)}' for k, v in test.kwargs.items())])})"


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"({type(value).__name__} too long to show)"


def _stated(test: Test, problem: Problem) -> bool:
    """Whether the statement already shows this test."""
    match test:
        case CallTest():
            return _call(test, problem.entry_point) in problem.statement
        case AssertTest():
            return test.code.strip() in problem.statement
        case StdioTest():
            return test.stdin.strip() in problem.statement and test.stdout.strip() in problem.statement
        case _:
            assert_never(test)


def _cut(text: str, limit: int) -> str:
    """`text`, or where it is longer than `limit` its beginning and its end around a note of how much is missing.

    Text of several lines is cut between lines, and the note is a Python comment: a program that was cut still reads
    as one. The note comes on top of `limit`.
    """
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    if "\n" not in text:
        return f"{head} ... ({len(text) - len(head) - len(tail)} characters left out) ... {tail}"
    head, tail = head.rpartition("\n")[0] or head, tail.partition("\n")[2] or tail
    return f"{head}\n# ... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _block(text: str, limit: int) -> str:
    return f"```\n{_cut(text.strip(), limit)}\n```"

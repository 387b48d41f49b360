from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.grading.verdict import TestResult as Result  # pytest would take a name that starts with Test for a test
from mars2_jax.tasks import sources
from mars2_jax.tasks.problem import AssertTest, CallTest, Problem, StdioTest
from mars2_jax.tasks.prompts import attempt_messages, refinement_candidates, refinement_messages

DOUBLE = Problem(
    id="double",
    statement="Return n multiplied by 2.",
    public=(CallTest((2,), 4), CallTest((), 6, {"n": 3})),
    hidden=(CallTest((777,), 1554), CallTest((888,), 1776)),
    entry_point="double",
    starter="def double(n: int) -> int:\n",
    reference="def double(n):\n    return n + n  # secret\n",
)
SCRIPT = Problem(
    id="script",
    statement="Read a number and print twice its value.",
    public=(StdioTest("2\n", "4\n"),),
    hidden=(StdioTest("777", "1554"),),
)
MBPP = Problem(id="mbpp", statement="Double it.", public=(AssertTest("assert double(2) == 4"),), entry_point="double")
PROGRAM = "def double(n):\n    return n\n"
PASS, WRONG = Result(Verdict.PASS), Result(Verdict.WRONG, actual="2")


def test_integers_that_python_does_not_write_out() -> None:
    problem = dataclasses.replace(DOUBLE, public=(CallTest((10**5000,), [2 * 10**5000]),))
    assert "double((int too long to show)) == (list too long to show)" in attempt_messages(problem)[0]["content"]


def text_of(messages: list[dict[str, str]]) -> str:
    (message,) = messages
    assert message["role"] == "user"
    return message["content"]


def refine(problem: Problem, *public: Result | None, **kwargs: object) -> str:
    hidden = kwargs.pop("hidden", ())
    grade = Grade(Verdict.WRONG, public=public, hidden=hidden)  # type: ignore[arg-type]
    return text_of(refinement_messages(problem, "", PROGRAM, grade, **kwargs))  # type: ignore[arg-type]


def test_attempt_word_for_word() -> None:
    assert attempt_messages(DOUBLE, "You are brief.") == [
        {"role": "system", "content": "You are brief."},
        {
            "role": "user",
            "content": (
                "Return n multiplied by 2.\n\n"
                "```python\ndef double(n: int) -> int:\n```\n\n"
                "Examples:\ndouble(2) == 4\ndouble(n=3) == 6\n\n"
                "Write the whole function `double` in one ```python block."
            ),
        },
    ]
    assert text_of(attempt_messages(SCRIPT)) == (
        "Read a number and print twice its value.\n\n"
        "Examples:\nInput:\n2\nOutput:\n4\n\n"
        "Write the whole program, which reads standard input and writes standard output, in one ```python block."
    )
    method = dataclasses.replace(DOUBLE, entry_point="Solution.double", starter="")
    assert "Solution().double(2) == 4" in text_of(attempt_messages(method))
    assert "the whole class `Solution`" in text_of(attempt_messages(method))


def test_refinement_word_for_word() -> None:
    assert refine(DOUBLE, PASS, Result(Verdict.WRONG, actual="3")) == (
        "Return n multiplied by 2.\n\n"
        "```python\ndef double(n: int) -> int:\n```\n\n"
        "Examples:\ndouble(2) == 4\ndouble(n=3) == 6\n\n"
        "A previous program:\n```python\ndef double(n):\n    return n\n```\n\n"
        "It fails the test `double(n=3) == 6`.\nIt returned `3`.\n\n"
        "Write the whole improved function `double` in one ```python block."
    )


@pytest.mark.parametrize(
    ("problem", "result", "said"),
    [
        (DOUBLE, WRONG, "It fails the test `double(2) == 4`.\nIt returned `2`."),
        (DOUBLE, Result(Verdict.ERROR, error="NameError: m"), "It raised:\n```\nNameError: m\n```"),
        (DOUBLE, Result(Verdict.TIMEOUT), "It ran too long."),
        (DOUBLE, Result(Verdict.MEMORY), "It used too much memory."),
        (DOUBLE, Result(Verdict.OUTPUT), "It printed too much."),
        (SCRIPT, WRONG, "with this input:\n```\n2\n```\nExpected output:\n```\n4\n```\nIts output:\n```\n2\n```"),
        (
            SCRIPT,
            Result(Verdict.ERROR, error="EOFError"),
            "Expected output:\n```\n4\n```\nIt raised:\n```\nEOFError",
        ),
        (MBPP, Result(Verdict.WRONG, error="AssertionError"), "```python\nassert double(2) == 4\n```\nIt raised"),
        (MBPP, Result(Verdict.WRONG), "```python\nassert double(2) == 4\n```\nIt is wrong."),
    ],
)
def test_detailed_feedback(problem: Problem, result: Result, said: str) -> None:
    assert said in refine(problem, result)
    summary = refine(problem, result, feedback="summary")
    assert "It is wrong." in summary and "returned" not in summary and "raised" not in summary


def test_the_first_failure_is_shown_and_tests_not_run_are_passed_over() -> None:
    assert "It fails the test `double(2) == 4`" in refine(DOUBLE, WRONG, None)
    assert "It fails the test `double(n=3) == 6`" in refine(DOUBLE, None, WRONG)


def test_programs_that_pass_the_shown_tests() -> None:
    fails, holds = (WRONG, None), (PASS, PASS)
    neutral = "It passes the shown tests. Make sure that it is right for every other input as well."
    for hidden in (fails, holds):
        assert neutral in refine(DOUBLE, PASS, PASS, hidden=hidden)


def test_problems_with_hidden_tests_only() -> None:
    problem = dataclasses.replace(DOUBLE, public=())
    for hidden in ((WRONG, None), (PASS, PASS)):
        assert "It may be wrong." in refine(problem, hidden=hidden)


def test_no_program() -> None:
    text = text_of(refinement_messages(DOUBLE, "", "", Grade(Verdict.NO_CODE)))
    assert "A previous answer held no complete Python program." in text
    assert text.endswith("Write the whole function `double` in one ```python block.")


RESULTS = st.none() | st.builds(
    Result,
    verdict=st.sampled_from([v for v in Verdict if v is not Verdict.INFRA]),
    actual=st.text(max_size=5),
    error=st.text(max_size=5),
)
HIDDEN = st.tuples(RESULTS, RESULTS)


@given(
    public=st.tuples(RESULTS, RESULTS),
    hidden=st.tuples(HIDDEN, HIDDEN),
    feedback=st.sampled_from(["summary", "detailed"]),
    problem=st.sampled_from([DOUBLE, dataclasses.replace(DOUBLE, public=())]),
)
def test_nothing_of_the_hidden_tests_shows(public, hidden, feedback, problem) -> None:  # type: ignore[no-untyped-def]
    public = public[: len(problem.public)]
    prompts = [
        refinement_messages(problem, "", PROGRAM, Grade(verdict, public, h), feedback=feedback)
        for h in hidden
        for verdict in (Verdict.WRONG, Verdict.ERROR)
    ]
    assert all(prompt == prompts[0] for prompt in prompts)
    for secret in ("777", "888", "1554", "1776", "secret"):
        assert secret not in text_of(prompts[0])


def test_human_eval_prompt_is_shown_once() -> None:
    for problem in sources.load("human_eval", "test"):
        text = text_of(attempt_messages(problem))
        assert text.startswith("Complete this Python function:\n```python\n")
        assert text.count(f"def {problem.entry_point}(") == 1
        assert len(text) < len(problem.statement) + 130


def test_examples_in_the_statement_are_not_repeated() -> None:
    stated = dataclasses.replace(SCRIPT, statement="Print twice the number, so 2 gives 4.")
    assert "Examples" not in text_of(attempt_messages(stated))


def test_starter_prompts_are_short_and_share_their_beginning() -> None:
    for problem in sources.load("starter", "train") + sources.load("starter", "test"):
        first = text_of(attempt_messages(problem))
        assert len(first) < 1000, problem.id
        again = text_of(refinement_messages(problem, "", PROGRAM, Grade(Verdict.WRONG, (WRONG,))))
        shared = first[: first.rindex("\n\n")]
        assert again.startswith(shared)


def test_long_programs_and_feedback_are_cut_where_it_says_so() -> None:
    program = "\n".join(f"line_{i:04d} = {i}" for i in range(1000))
    result = Result(Verdict.WRONG, actual="[" + "9, " * 5000 + "]")
    text = text_of(
        refinement_messages(
            DOUBLE, "", program, Grade(Verdict.WRONG, (result,)), max_program_chars=300, max_feedback_chars=100
        )
    )
    assert len(text) < 1000
    shown = text.partition("A previous program:\n```python\n")[2].partition("\n```")[0]
    lines = shown.split("\n")
    marker = [line for line in lines if "characters left out" in line]
    assert len(marker) == 1 and marker[0].startswith("# ... ")
    assert set(lines) - set(marker) <= set(program.split("\n")), "cut between lines"
    assert lines[0] == "line_0000 = 0" and lines[-1] == "line_0999 = 999"
    missing = int(marker[0].split()[2])
    assert missing == len(program) - len(shown) + len(marker[0]) + 2  # and the line ends around the marker
    assert "characters left out) ..." in text.partition("It returned")[2]
    gone = refinement_messages(DOUBLE, "", program, Grade(Verdict.WRONG, (WRONG,)), max_program_chars=0)
    assert "line_" not in text_of(gone)


def test_candidates_shrink_to_little_more_than_the_task() -> None:
    program = "x = 1\n" * 2000
    grade = Grade(Verdict.ERROR, (Result(Verdict.ERROR, error="deep\n" * 500),))
    lengths = [len(text_of(m)) for m in refinement_candidates(DOUBLE, "", program, grade)]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) == len(lengths)
    assert lengths[-1] < len(text_of(attempt_messages(DOUBLE))) + 300

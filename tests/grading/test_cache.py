"""The same program for the same question is run once, and nothing else is taken for the same."""

import dataclasses

import pytest

from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import Limits, Problem, StdioTest
from tests.grading.test_lifecycle import kill_service

# Says something else every time that it is run.
TIME = "import time\nprint(time.time_ns())"
PROBLEM = Problem("p", "", (StdioTest("", "1"), StdioTest("x", "1")))


@pytest.fixture(scope="module")
def own_grader():
    with Grader("none", workers=2, cache=3) as grader:
        yield grader


def said(grade):
    return [result and result.actual for result in grade.public + grade.hidden]


def test_a_program_is_run_once(own_grader):
    first = own_grader.grade(TIME, PROBLEM)
    assert own_grader.grade(TIME, PROBLEM) is first
    # What a problem is called does not change what its tests say.
    assert own_grader.grade(TIME, dataclasses.replace(PROBLEM, id="q", statement="s")) is first


@pytest.mark.parametrize(
    "change",
    [
        {"public": PROBLEM.public[:1]},
        {"public": (StdioTest("", "1"), StdioTest("y", "1"))},
        {"public": (StdioTest("", "1"), StdioTest("x", "2"))},
        {"public": PROBLEM.public[:1], "hidden": PROBLEM.public[1:]},
        {"limits": Limits(cpu_seconds=3.0)},
        {"compare": "exact"},
        {"entry_point": "f"},
    ],
)
def test_another_question_is_another_run(own_grader, change):
    first = own_grader.grade(TIME, PROBLEM)
    assert not set(said(own_grader.grade(TIME, dataclasses.replace(PROBLEM, **change)))) & set(said(first))


def test_other_options_are_another_run(own_grader):
    first = own_grader.grade(TIME, PROBLEM)
    stopped = own_grader.grade(TIME, PROBLEM, stop_at_first_failure=True)
    assert (stopped.verdict, stopped.public[1]) == (Verdict.WRONG, None)
    assert said(stopped)[0] not in said(first)
    assert said(own_grader.grade(TIME + "\n", PROBLEM)) != said(first)


def test_the_oldest_is_forgotten(own_grader):
    first = own_grader.grade(TIME, PROBLEM)
    for i in range(2):
        own_grader.grade(f"{TIME}#{i}", PROBLEM)
    assert own_grader.grade(TIME, PROBLEM) is first  # It was used last, now.
    for i in range(3):
        own_grader.grade(f"{TIME}#{i + 2}", PROBLEM)
    assert own_grader.grade(TIME, PROBLEM) is not first


def test_the_same_program_at_the_same_time_waits_for_the_first(own_grader):
    program = "import time\ntime.sleep(0.2)\n" + TIME
    tickets = [own_grader.submit(program, PROBLEM) for _ in range(3)]
    assert own_grader.pending == 3
    assert own_grader.wait(tickets[1]).verdict is Verdict.WRONG
    assert own_grader.pending == 2
    (grade,) = {id(grade): grade for _, grade in own_grader.poll()}.values()
    assert grade is own_grader.grade(program, PROBLEM)


def test_what_the_grader_failed_at_is_tried_again():
    endless = "import time\ntime.sleep(1000)"
    limits = Limits(cpu_seconds=1.0, wall_seconds=1.0)
    problem = dataclasses.replace(PROBLEM, limits=limits, public=PROBLEM.public[:1])
    with Grader("none", workers=1, cache=3) as grader:
        tickets = [grader.submit(endless, problem) for _ in range(2)]
        for _ in range(2):
            kill_service(grader)
        assert [grader.wait(ticket).verdict for ticket in tickets] == [Verdict.INFRA] * 2
        assert grader.grade(endless, problem).verdict is Verdict.TIMEOUT


def test_no_cache_keeps_nothing():
    with Grader("none", workers=1) as grader:
        assert said(grader.grade(TIME, PROBLEM)) != said(grader.grade(TIME, PROBLEM))

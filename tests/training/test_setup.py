"""What is checked of the problems before a run begins, and the limits that they get."""

import io

import pytest
from ml_collections import FrozenConfigDict
from rich.console import Console

from mars2_jax.config import default_config
from mars2_jax.errors import DataError
from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.grading.verdict import TestResult as Result  # pytest would take a name that starts with Test for a test
from mars2_jax.tasks.problem import Problem, StdioTest
from mars2_jax.training import setup

PROBLEM = Problem("p", "", (StdioTest("", "1"),), compare="close", reference="print(1)")


def config(**grading):
    found = default_config()
    found.grading.update(grading)
    return FrozenConfigDict(found)


@pytest.mark.parametrize("problems", [setup.train_problems, setup.eval_problems])
def test_a_comparator_must_be_one_that_the_config_allows(monkeypatch, problems):
    monkeypatch.setattr(setup, "load", lambda *args, **kwargs: [PROBLEM])
    assert problems(config(checkers=("close=my.checkers:close",))) == [PROBLEM]
    with pytest.raises(DataError, match="'p' asks for .*'close'.*config.grading.checkers") as caught:
        problems(config())
    assert "\n" not in str(caught.value)


class Scripted:
    def submit(self, program, problem):
        assert program == PROBLEM.reference
        return 0

    def wait(self, ticket):
        return Grade(Verdict.PASS, (Result(Verdict.PASS, cpu_seconds=0.25),))


def test_limits_from_the_references():
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    assert setup.calibrated(config(), [PROBLEM], None, console) == [PROBLEM]
    assert printed.getvalue() == ""
    asked = config(time_factor=8.0, time_floor=0.5)
    (found,) = setup.calibrated(asked, [PROBLEM], Scripted(), console)
    assert found.limits.cpu_seconds == pytest.approx(2.0)
    assert "CPU limits from references: 1 of 1 problems, 1 with one\n" in printed.getvalue()

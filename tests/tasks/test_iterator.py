"""The iterator against the order as it is defined, and against itself, resumed."""

from __future__ import annotations

import collections
import json
import pathlib

import pytest

from mars2_jax.errors import ConfigError
from mars2_jax.tasks import sources
from mars2_jax.tasks.build import build
from mars2_jax.tasks.iterator import ProblemIterator
from mars2_jax.tasks.order import problems_for_step
from mars2_jax.tasks.problem import Problem, StdioTest
from tests.tasks import public_layouts as public


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), "s", (StdioTest("", ""),)) for i in range(count)]


def steps(iterator: ProblemIterator, count: int, per_step: int) -> list[list[str]]:
    return [[problem.id for problem in iterator.draw(per_step).problems] for _ in range(count)]


@pytest.mark.parametrize(("count", "per_step"), [(1, 1), (1, 4), (5, 3), (7, 7), (12, 5)])
def test_it_has_the_order_that_runs_always_had(count: int, per_step: int) -> None:
    for seed in (0, 3, 2**32 - 1):
        iterator = ProblemIterator(problems(count), problems_per_step=per_step, seed=seed)
        expected = [[str(i) for i in problems_for_step(count, step, per_step, seed)] for step in range(9)]
        assert steps(iterator, 9, per_step) == expected


def test_every_problem_comes_once_an_epoch() -> None:
    drawn = steps(ProblemIterator(problems(18), problems_per_step=6, seed=5), 9, 6)
    for epoch in range(3):
        met = collections.Counter(name for step in drawn[3 * epoch : 3 * epoch + 3] for name in step)
        assert met == collections.Counter(str(i) for i in range(18))


def test_no_problems_are_an_error() -> None:
    with pytest.raises(ValueError, match="need problems"):
        ProblemIterator([], problems_per_step=1, seed=0)


@pytest.mark.parametrize("layout", ["livecodebench", "deepcoder", "taco"])
def test_a_built_set_resumed_in_the_middle_of_an_epoch(layout: str, tmp_path: pathlib.Path) -> None:
    source = getattr(public, f"write_{layout}")(tmp_path / "files")
    build(source, str(tmp_path / "built"))
    make = lambda where: ProblemIterator(sources.load(where, "all"), problems_per_step=2, seed=1)
    straight, broken, resumed = make(source), make(str(tmp_path / "built")), make(str(tmp_path / "built"))
    expected = steps(straight, 8, 2)
    assert steps(broken, 3, 2) == expected[:3]
    state = json.loads(json.dumps(broken.get_state()))
    assert state["position"] == 6
    resumed.set_state(state)
    assert steps(resumed, 5, 2) == expected[3:]
    assert resumed.get_state()["position"] == 16


def test_a_problem_set_that_has_changed_is_refused() -> None:
    state = ProblemIterator(problems(5), problems_per_step=2, seed=0).get_state()
    for changed in (problems(6), problems(5)[::-1]):
        with pytest.raises(ConfigError, match="the problems of config.data are not those that the run"):
            ProblemIterator(changed, problems_per_step=2, seed=0).set_state(state)
    iterator = ProblemIterator(problems(5), problems_per_step=2, seed=0)
    iterator.set_state({"step": 2})  # a checkpoint of an earlier version knows no more
    assert steps(iterator, 1, 2) == [[str(i) for i in problems_for_step(5, 2, 2, 0)]]

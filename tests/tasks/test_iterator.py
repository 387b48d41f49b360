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
def test_one_shard_has_the_order_that_runs_always_had(count: int, per_step: int) -> None:
    for seed in (0, 3, 2**32 - 1):
        iterator = ProblemIterator(problems(count), problems_per_step=per_step, seed=seed)
        expected = [[str(i) for i in problems_for_step(count, step, per_step, seed)] for step in range(9)]
        assert steps(iterator, 9, per_step) == expected


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_have_every_problem_once_an_epoch_and_together_the_same_steps(shards: int) -> None:
    count, per_step = 18, 6
    make = lambda index, of: ProblemIterator(
        problems(count), problems_per_step=per_step, seed=5, shard_index=index, shard_count=of
    )
    alone = steps(make(0, 1), 9, per_step)
    shared = [steps(make(index, shards), 9, per_step) for index in range(shards)]
    for step in range(9):
        assert all(len(shard[step]) == per_step // shards for shard in shared)
        assert sorted(name for shard in shared for name in shard[step]) == sorted(alone[step])
    for epoch in range(3):
        met = collections.Counter(
            name for shard in shared for step in shard[3 * epoch : 3 * epoch + 3] for name in step
        )
        assert met == collections.Counter(str(i) for i in range(count))


def test_hosts_must_share_evenly() -> None:
    with pytest.raises(ConfigError, match=r"config\.data\.problems_per_step is 4; .* multiple of .* hosts, which is 3"):
        ProblemIterator(problems(9), problems_per_step=4, seed=0, shard_index=0, shard_count=3)
    with pytest.raises(ValueError, match="need problems"):
        ProblemIterator([], problems_per_step=1, seed=0)


@pytest.mark.parametrize("layout", ["livecodebench", "deepcoder", "taco"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_built_set_resumed_in_the_middle_of_an_epoch(layout: str, shards: int, tmp_path: pathlib.Path) -> None:
    source = getattr(public, f"write_{layout}")(tmp_path / "files")
    build(source, str(tmp_path / "built"))
    make = lambda where: [
        ProblemIterator(sources.load(where, "all"), problems_per_step=2, seed=1, shard_index=index, shard_count=shards)
        for index in range(shards)
    ]
    for straight, broken in zip(make(source), make(str(tmp_path / "built")), strict=True):
        expected = steps(straight, 8, 2)
        assert steps(broken, 3, 2) == expected[:3]
        state = json.loads(json.dumps(broken.get_state()))
        assert state["position"] == 6
    for index, resumed in enumerate(make(str(tmp_path / "built"))):
        resumed.set_state(state)
        again = steps(resumed, 5, 2)
        assert again == steps_of(make(source)[index], 3, 5)
        assert resumed.get_state()["position"] == 16


def steps_of(iterator: ProblemIterator, skipped: int, count: int) -> list[list[str]]:
    steps(iterator, skipped, 2)
    return steps(iterator, count, 2)


def test_another_number_of_hosts_may_go_on() -> None:
    one = ProblemIterator(problems(10), problems_per_step=4, seed=0)
    steps(one, 2, 4)
    two = [
        ProblemIterator(problems(10), problems_per_step=4, seed=0, shard_index=index, shard_count=2)
        for index in range(2)
    ]
    for shard in two:
        shard.set_state(one.get_state())
    assert sorted(name for shard in two for name in steps(shard, 1, 4)[0]) == sorted(steps(one, 1, 4)[0])


def test_a_problem_set_that_has_changed_is_refused() -> None:
    state = ProblemIterator(problems(5), problems_per_step=2, seed=0).get_state()
    for changed in (problems(6), problems(5)[::-1]):
        with pytest.raises(ConfigError, match="the problems of config.data are not those that the run"):
            ProblemIterator(changed, problems_per_step=2, seed=0).set_state(state)
    iterator = ProblemIterator(problems(5), problems_per_step=2, seed=0)
    iterator.set_state({"step": 2})  # a checkpoint of an earlier version knows no more
    assert steps(iterator, 1, 2) == [[str(i) for i in problems_for_step(5, 2, 2, 0)]]

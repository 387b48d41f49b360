"""The curriculum: nobody starves, the band comes first, and what is drawn follows from seed, place and rates alone."""

from __future__ import annotations

import json
import math
import pathlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.tasks import sources
from mars2_jax.tasks.build import build
from mars2_jax.tasks.curriculum import Curriculum, PassRates, next_problems
from mars2_jax.tasks.iterator import ProblemIterator
from mars2_jax.tasks.order import problem_order
from mars2_jax.tasks.prepared import PreparedProblems
from mars2_jax.tasks.problem import Problem, StdioTest
from tests.tasks import public_layouts as public

BAND = dict(low=0.2, high=0.8)
floors = st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.9, 1.0])
rate = st.sampled_from([None, 0.0, 0.125, 0.2, 0.5, 0.8, 0.875, 1.0])


def rates_of(values: list[float | None]) -> PassRates:
    rates = PassRates()
    for index, value in enumerate(values):
        if value is not None:
            rates.observe(index, value, 0.5)
    return rates


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), "s", (StdioTest("", ""),)) for i in range(count)]


@given(values=st.lists(rate, min_size=1, max_size=12), floor=floors, seed=st.integers(0, 5), epoch=st.integers(0, 60))
def test_nobody_starves_and_the_band_comes_once_an_epoch(values, floor, seed, epoch):
    """Counted from any epoch on: in e epochs, a problem outside the band comes floor·e times, within one."""
    curriculum, rates, count = Curriculum(floor=floor, decay=0.5, **BAND), rates_of(values), len(values)
    period = math.ceil(1 / floor)
    drawn: list[list[int]] = []
    for e in range(epoch, epoch + 2 * period):
        taken = [i for i in problem_order(count, seed, e) if curriculum.takes(i, seed, e, rates[i])]
        drawn.append(taken)
    for index, value in enumerate(values):
        comes = [index in taken for taken in drawn]
        if value is None or 0.2 <= value <= 0.8:
            assert all(comes)
        else:
            assert any(comes[:period]) and any(comes[period:])
            assert abs(sum(comes) - floor * len(comes)) <= 1
    # And this is what is drawn, in the order of the epochs.
    flat = [index for taken in drawn for index in taken]
    if flat:
        found, position = next_problems(count, seed, epoch * count, len(flat), curriculum, rates)
        assert found == flat
        assert epoch * count < position <= (epoch + 2 * period) * count


def test_the_band_has_its_share_of_the_draws():
    """A tenth of a thousand problems is in the band; the others come in every twentieth epoch."""
    values = [0.5 if i % 10 == 0 else float(i % 2) for i in range(1000)]
    curriculum = Curriculum(floor=0.05, decay=0.5, **BAND)
    found, _ = next_problems(1000, 0, 0, 5000, curriculum, rates_of(values))
    inside = sum(i % 10 == 0 for i in found) / len(found)
    assert inside == pytest.approx(100 / (100 + 0.05 * 900), abs=0.02)
    # In any one epoch as over all of them: the others do not come all at once.
    some = Counter(i % 10 == 0 for i in found[1000:1145])
    assert some[False] == pytest.approx(45, abs=20)


def test_rates_are_the_running_means_of_what_was_seen():
    rates, seen = PassRates(), {}
    rng = np.random.default_rng(0)
    for _ in range(200):
        index, new = int(rng.integers(0, 30)), float(rng.random())
        seen[index] = new if index not in seen else 0.7 * seen[index] + (1 - 0.7) * new
        rates.observe(index, new, 0.7)
    assert len(rates) == len(seen) < 31 and rates[99] is None
    assert {i: rates[i] for i in seen} == seen
    arrays = rates.to_arrays()
    assert arrays["index"].tolist() == sorted(seen) and arrays["rate"].dtype == np.float64
    again = PassRates.from_arrays(arrays)
    assert {i: again[i] for i in range(30)} == {i: rates[i] for i in range(30)}
    inside = sum(0.2 <= value <= 0.8 for value in seen.values()) / len(seen)
    assert rates.share(Curriculum(floor=1.0, decay=0.7, **BAND)) == inside


def outcome(seed: int, step: int, place: int) -> float | None:
    """The pass rate of a tree; None where nothing was graded."""
    return np.random.default_rng([seed, step, place]).choice([None, 0.0, 0.25, 0.5, 1.0])


@settings(deadline=None)
@given(
    curriculum=st.none() | st.builds(Curriculum, st.just(0.2), st.just(0.8), floors, st.sampled_from([0.0, 0.5])),
    count=st.integers(1, 15),
    # Rounds of a step: the first draws six problems, the others what is missing.
    steps=st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=6),
    stop=st.tuples(st.integers(0, 5), st.integers(0, 3)),
    seed=st.integers(0, 3),
)
def test_it_goes_on_after_a_stop_anywhere(curriculum, count, steps, stop, seed):
    make = lambda: ProblemIterator(problems(count), problems_per_step=6, seed=seed, curriculum=curriculum)

    def draw(iterator: ProblemIterator, number: int) -> list[int]:
        drawn = iterator.draw(number)
        assert [int(problem.id) for problem in drawn.problems] == list(drawn.indices) and len(drawn.indices) == number
        return list(drawn.indices)

    def step(iterator: ProblemIterator, number: int) -> list[int]:
        indices = [index for wanted in (6, *steps[number]) for index in draw(iterator, wanted)]
        iterator.observe(indices, [outcome(seed, number, place) for place in range(len(indices))])
        return indices

    alone = make()
    straight = [step(alone, number) for number in range(len(steps))]
    first, met = make(), []
    stop_step, stop_round = min(stop[0], len(steps) - 1), stop[1]
    for number in range(stop_step):
        met.append(step(first, number))
    # In the middle of a step: what a checkpoint has, once through its files, is from the step's start.
    state, arrays = json.loads(json.dumps(first.get_state())), first.get_arrays()
    for wanted in (6, *steps[stop_step])[:stop_round]:
        draw(first, wanted)
    first.set_state(state)
    assert step(first, stop_step) == straight[stop_step]
    second = make()
    second.set_state(state, arrays)
    met += [step(second, number) for number in range(stop_step, len(steps))]
    assert met == straight
    if curriculum is None:
        flat = [index for indices in straight for index in indices]
        assert flat == [problem_order(count, seed, i // count)[i % count] for i in range(len(flat))]


@pytest.mark.parametrize("layout", ["livecodebench", "deepcoder"])
def test_of_a_built_set_nothing_is_read_but_what_is_drawn(layout: str, tmp_path: pathlib.Path, monkeypatch) -> None:
    build(getattr(public, f"write_{layout}")(tmp_path / "files"), str(tmp_path / "built"))
    lazy = sources.load(str(tmp_path / "built"), "all")
    assert isinstance(lazy, PreparedProblems) and len(lazy) > 1
    curriculum = Curriculum(floor=0.5, decay=0.5, **BAND)
    make = lambda source: ProblemIterator(source, problems_per_step=2, seed=0, curriculum=curriculum)
    straight, built = make(list(lazy)), make(lazy)
    read = []
    get = PreparedProblems.__getitem__
    monkeypatch.setattr(PreparedProblems, "__getitem__", lambda self, index: (read.append(index), get(self, index))[1])
    for number in range(6):
        a, b = straight.draw(2), built.draw(2)
        assert a == b and read[-2:] == list(b.indices)
        metrics = [each.observe(a.indices, [outcome(0, number, 0), 1.0]) for each in (straight, built)]
        assert metrics[0] == metrics[1] and metrics[0]["curriculum/problems_tried"] >= 1
    assert len(read) == 12

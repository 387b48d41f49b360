"""Parts of a search: each goes on by itself, and together they are what the whole would have been."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mars2_jax.config import default_config
from mars2_jax.search.explore import Suspended, explore
from mars2_jax.search.saved import search_from_bytes, search_to_bytes
from mars2_jax.search.shares import explore_together, join_searches, part_of_search
from tests.search.test_explore import KEY, ScriptedGrader, equal, problem
from tests.search.test_saved import after, suspended, team

pytestmark = pytest.mark.usefixtures("quick_compiles")

TREES = 5


def grow(trees, *, saved=None, suspend=None):
    """The trees of these numbers, as one process of several grows them: a part of the search, finished or not."""
    problems, config = [problem(i) for i in trees], default_config().search
    options = dict(key=KEY, tree_ids=trees, reward="fraction", saved=saved, suspend=suspend)
    try:
        done = explore(problems, team(), ScriptedGrader(), config, **options)
    except Suspended as stop:
        return stop.saved
    return done.to_saved()


def joined(parts):
    return join_searches(parts, {"problems": [f"p{i}" for i in range(TREES)], "trees": list(range(TREES))})


@pytest.fixture(scope="module")
def whole():
    return explore(
        [problem(i) for i in range(TREES)],
        team(),
        ScriptedGrader(),
        default_config().search,
        key=KEY,
        reward="fraction",
    )


def texts(attempts):
    return [{slot: a.draft.text for slot, a in sorted(tree.items())} for tree in attempts]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_of_a_search_are_its_trees(whole, count):
    parts = [grow(list(range(TREES))[i::count]) for i in range(count)]
    search = joined(parts)
    assert not search.open and not search.ungraded
    assert texts(search.attempts) == texts(whole.attempts)
    for a, b in zip(jax.tree.leaves(search.forest), jax.tree.leaves(whole.forest), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("then", [1, 2, 3])
def test_one_that_is_suspended_in_some_goes_on_in_any_number(whole, then):
    """Two processes, one of which was done when the other was asked to stop; as a file has it."""
    parts = [grow([0, 2, 4], suspend=after(6)), grow([1, 3])]
    assert parts[0].open and not parts[1].open
    search = search_from_bytes(search_to_bytes(joined(parts)))
    shares = [range(TREES)[i::then] for i in range(then)]
    rest = [grow(list(places), saved=part_of_search(search, places)) for places in shares]
    assert texts(joined(rest).attempts) == texts(whole.attempts)
    for a, b in zip(jax.tree.leaves(joined(rest).forest), jax.tree.leaves(whole.forest), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_part_of_all_is_all():
    saved = suspended()
    part = part_of_search(saved, range(TREES))
    assert search_to_bytes(part) == search_to_bytes(saved)
    assert search_to_bytes(join_searches([part], saved.origin)) == search_to_bytes(saved)


def test_parts_that_do_not_make_the_whole_are_an_error():
    part = grow([0, 2])
    for parts in ([part], [part, part]):
        with pytest.raises(ValueError, match=r"the parts have the trees .*, not \[0, 1, 2, 3, 4\]"):
            joined(parts)


def test_one_process_searches_as_ever(whole):
    problems = [problem(i) for i in range(TREES)]
    search = default_config().search
    assert equal(explore_together(problems, team(), ScriptedGrader(), search, key=KEY, reward="fraction"), whole)

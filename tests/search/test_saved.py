"""Suspended searches: taken up again, in memory or from a file, they end as if nothing had happened."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from mars2_jax.config import default_config
from mars2_jax.errors import DataError, StorageError
from mars2_jax.rollout.types import Completion
from mars2_jax.search.explore import Suspended, _expand, explore
from mars2_jax.search.saved import read_search, write_search
from mars2_jax.search.writer import Draft
from tests.search.test_explore import KEY, ScriptedGrader, ScriptedWriter, equal, problem

pytestmark = pytest.mark.usefixtures("quick_compiles")


def run(writers, grader, *, trees=5, **options):
    config = default_config().search
    config.update(options.pop("search", {}))
    return explore([problem(i) for i in range(trees)], writers, grader, config, key=KEY, reward="fraction", **options)


def team():
    return [ScriptedWriter(f"w{a}", []) for a in range(2)]


def after(ticks: int):
    """Says no `ticks` times, then yes."""
    count = iter(range(ticks + 1))
    return lambda: next(count) == ticks


def interrupted(path, trees=5, **options):
    """A search that is suspended every second tick and taken up from the file by new writers and a new grader; also
    the steps that all writers made together, and the programs that were graded."""
    saved, steps, graded, times = None, 0, [], 0
    while True:
        writers, grader = team(), ScriptedGrader()
        try:
            result = run(writers, grader, trees=trees, saved=saved, suspend=after(2), **options)
        except Suspended as stop:
            assert not any(writer.pending for writer in writers)
            times += 1
            write_search(path, stop.saved)
            saved = read_search(path)
        else:
            assert times > 3
            return result, steps + sum(w.steps for w in writers), graded + grader.submitted
        steps += sum(writer.steps for writer in writers)
        graded += grader.submitted


@pytest.mark.parametrize("changes", [{}, dict(verdict_lag=3), dict(strategy="flat_multi")])
def test_a_search_that_is_suspended_again_and_again_ends_as_one_that_is_not(changes, tmp_path):
    writers = team()
    whole = run(writers, ScriptedGrader(), search=changes)
    result, steps, graded = interrupted(tmp_path / "search.npz", search=changes)
    assert equal(result, whole)
    texts = lambda r: [{slot: a.draft.text for slot, a in tree.items()} for tree in r.attempts]
    assert texts(result) == texts(whole)
    assert steps == sum(writer.steps for writer in writers), "something was written twice"
    assert set(graded) == {text for tree in texts(whole) for text in tree.values()}
    assert list(tmp_path.iterdir()) == [tmp_path / "search.npz"]


def test_room_for_more_trees_changes_nothing(tmp_path):
    """Fewer trees in the programs of more, suspended too."""
    whole = run(team(), ScriptedGrader(), trees=3)
    run(team(), ScriptedGrader(), trees=5)
    compiled = _expand._cache_size()
    roomy = run(team(), ScriptedGrader(), trees=3, capacity=5)
    result, _, _ = interrupted(tmp_path / "search.npz", trees=3, capacity=5)
    for other in (roomy, result):
        assert equal(other, whole) and other.forest.trees == 3 and len(other.attempts) == 3
    assert _expand._cache_size() == compiled
    with pytest.raises(ValueError, match="capacity of 2 has no room for 3 trees"):
        run(team(), ScriptedGrader(), trees=3, capacity=2)


@pytest.mark.parametrize("changes", [{}, dict(stop_when_solved=True), dict(max_depth=1, max_children=3)])
def test_a_finished_search_is_taken_up_and_asks_nobody(changes, tmp_path):
    whole = run(team(), ScriptedGrader(infra=4), search=changes)
    write_search(tmp_path / "s.npz", whole.to_saved())
    writers, grader = team(), ScriptedGrader(infra=4)
    again = run(writers, grader, search=changes, saved=read_search(tmp_path / "s.npz"), suspend=lambda: True)
    assert equal(again, whole)
    assert not grader.submitted and not any(writer.steps for writer in writers)


def test_several_open_nodes_a_tree_survive_too(tmp_path):
    result, _, _ = interrupted(tmp_path / "search.npz", trees=2, search=dict(in_tree_parallelism=3, verdict_lag=2))
    for tree in result.attempts:
        assert sorted(tree) == list(range(1, default_config().search.nodes + 1))
        for slot, attempt in tree.items():
            above = tree[attempt.parent].draft.text if attempt.parent else ""
            assert attempt.parent < slot and f"after [{above}]" in attempt.draft.text


def suspended():
    with pytest.raises(Suspended) as stop:
        run(team(), ScriptedGrader(infra=3), suspend=after(6))
    return stop.value.saved


def test_a_file_holds_all_of_it(tmp_path):
    saved = suspended()
    assert saved.open and saved.ungraded and any(node.so_far for node in saved.open)
    # A response with what JSON and UTF-8 find hard, and numbers that must not be rounded.
    tokens = np.asarray([5, 0, 7], np.int32)
    odd = Completion(
        3, tokens[:2], tokens, np.asarray([-0.1, -1e-30, 0], np.float32), (-tokens / 3).astype(np.float32), "length"
    )
    some = next(iter(saved.attempts[0].values()))
    saved.attempts[0][99] = dataclasses.replace(some, slot=99, draft=Draft(4, "\ud800 \0 é", "x = '\ud800'", odd))
    # And one of an agent that is served elsewhere.
    saved.attempts[0][98] = dataclasses.replace(some, slot=98, draft=Draft(5, "y", "", None, counted=12))
    write_search(tmp_path / "deep" / "s.npz", saved)
    back = read_search(tmp_path / "deep" / "s.npz")

    def compare(a, b):
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        elif hasattr(a, "__dataclass_fields__"):
            assert type(a) is type(b)
            for name in a.__dataclass_fields__:
                compare(getattr(a, name), getattr(b, name))
        elif isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                compare(a[key], b[key])
        elif isinstance(a, list | tuple):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                compare(x, y)
        else:
            assert a == b

    for name in ("attempts", "open", "ungraded", "ended"):
        compare(getattr(saved, name), getattr(back, name))
    compare(jax.tree.map(np.asarray, saved.forest), back.forest)
    back.check(saved.origin)


def test_a_search_with_other_arguments_does_not_take_it_up():
    saved = suspended()
    for options in (dict(trees=4), dict(search=dict(nodes=9)), dict(reward_tests="public")):
        with pytest.raises(ValueError, match="saved search was made with other"):
            run(team(), ScriptedGrader(), saved=saved, **options)


def test_files_that_are_no_saved_search_and_disks_that_refuse(tmp_path):
    saved = suspended()
    path = tmp_path / "s.npz"
    with pytest.raises(DataError, match="not a saved search"):
        read_search(path)
    write_search(path, saved)
    whole = path.read_bytes()
    method = whole.index(b"PK\x01\x02") + 10
    for damaged in (b"", b"hello", whole[: len(whole) // 2], whole[:method] + b"\7" + whole[method + 1 :]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="not a saved search"):
            read_search(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        write_search(tmp_path / "file" / "s.npz", saved)

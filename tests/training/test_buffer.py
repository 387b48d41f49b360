import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars2_jax.learning.batch import Sample, TreeArrays
from mars2_jax.training.buffer import Buffer


def tree(nodes: int, seed: int, problem=None, with_kl: bool = False) -> TreeArrays:
    rng = np.random.default_rng(seed)
    return TreeArrays(
        reward=rng.random(nodes).astype(np.float32),
        parent=rng.integers(-1, nodes, nodes).astype(np.int32),
        agent=rng.integers(-1, 2, nodes).astype(np.int32),
        graded=rng.random(nodes) < 0.7,
        length=rng.integers(0, 9, nodes).astype(np.int32),
        problem=problem,
        kl=rng.random(nodes).astype(np.float32) if with_kl else None,
    )


def sample(key, slot: int, reference: bool) -> Sample:
    rng = np.random.default_rng(slot)
    prompt, tokens = rng.integers(0, 9, 1 + slot % 4), rng.integers(0, 9, 1 + slot % 5)
    value = lambda: rng.random(len(tokens)).astype(np.float32)
    return Sample(
        key, slot, prompt.astype(np.int32), tokens.astype(np.int32), value(), value(), value() if reference else None
    )


def same(a, b) -> bool:
    names = a.__dataclass_fields__
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names if getattr(a, n) is not None) and all(
        (getattr(a, n) is None) == (getattr(b, n) is None) for n in names
    )


@given(slots=st.lists(st.integers(1, 50), max_size=12), reference=st.booleans(), taken=st.integers(0, 12))
def test_a_buffer_survives_its_checkpoint(slots, reference, taken):
    buffer = Buffer()
    # The last tree of a step is of the problem of the first.
    trees = {(step, t): tree(3 + t, 10 * step + t, (step, t % 2), reference) for step in (1, 2) for t in range(3)}
    buffer.add([sample((1 + s % 2, s % 3), s, reference) for s in slots], trees)
    buffer.take(min(taken, len(buffer)))
    again = Buffer.from_arrays(buffer.to_arrays())
    assert len(again) == len(buffer)
    (a, trees_a), (b, trees_b) = buffer.take(len(buffer)), again.take(len(again))
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    assert trees_a.keys() == trees_b.keys()
    assert all(same(trees_a[k], trees_b[k]) for k in trees_a)


def test_oldest_first_and_trees_go_when_their_last_sample_goes():
    buffer = Buffer()
    trees = {(1, 0): tree(3, 0), (1, 1): tree(3, 1)}
    buffer.add([sample((1, 0), 1, False), sample((1, 1), 2, False), sample((1, 0), 3, False)], trees)
    taken, used = buffer.take(2)
    assert [s.slot for s in taken] == [1, 2] and used.keys() == trees.keys()
    taken, used = buffer.take(1)
    assert [s.slot for s in taken] == [3] and used.keys() == {(1, 0)}
    with pytest.raises(ValueError, match="holds 0 samples"):
        buffer.take(1)


def test_trees_of_a_problem_stay_together():
    buffer = Buffer()
    trees = {(1, 0): tree(3, 0, (1, 0)), (1, 1): tree(3, 1, (1, 1)), (1, 2): tree(3, 2, (1, 0))}
    buffer.add([sample((1, 0), 1, False), sample((1, 1), 2, False), sample((1, 2), 3, False)], trees)
    _, used = buffer.take(1)
    assert used.keys() == {(1, 0), (1, 2)}
    _, used = buffer.take(1)
    assert used.keys() == {(1, 1)}
    _, used = buffer.take(1)
    assert used.keys() == {(1, 0), (1, 2)}


def test_what_another_config_kept_is_made_to_fit():
    trees = {(1, t): tree(9, t, with_kl=t == 1) for t in range(2)}
    samples = [sample((1, t), slot, reference) for t in range(2) for slot in (3, 4) for reference in (False, True)]

    def adapted(**how):
        buffer = Buffer()
        buffer.add(samples, trees)
        removed = buffer.adapt(**how)
        kept, left = buffer.take(len(buffer))
        assert removed + len(kept) == len(samples)
        assert left.keys() == {s.tree for s in kept}
        return [(s.tree[1], s.slot, s.lp_ref is not None) for s in kept], {
            key[1]: left[key].kl is not None for key in left
        }

    # Lengths are 4 + 4 and 1 + 5 tokens.
    everything = [(t, slot) for t in range(2) for slot in (3, 3, 4, 4)]
    assert adapted(longest=8, reference=False, kl=False) == ([(*s, False) for s in everything], {0: False, 1: False})
    assert adapted(longest=7, reference=False, kl=False) == (
        [(t, 4, False) for t in (0, 0, 1, 1)],
        {0: False, 1: False},
    )
    assert adapted(longest=8, reference=True, kl=False) == (
        [(t, slot, True) for t in range(2) for slot in (3, 4)],
        {0: False, 1: False},
    )
    assert adapted(longest=8, reference=True, kl=True) == ([(1, 3, True), (1, 4, True)], {1: True})

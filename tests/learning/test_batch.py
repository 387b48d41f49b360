import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars2_jax.learning.batch import Sample, TreeArrays, make_batch
from mars2_jax.models.buckets import bucket


def _tree(nodes=4, void=(), problem=None, kl=None):
    graded = np.ones(nodes, bool)
    graded[[0, *void]] = False
    return TreeArrays(
        reward=np.arange(nodes, dtype=np.float32) / nodes,
        parent=np.array([-1] + [0] * (nodes - 1), np.int32),
        agent=np.array([-1] + [0] * (nodes - 1), np.int32),
        graded=graded,
        length=np.full(nodes, 3, np.int32),
        problem=problem,
        kl=kl,
    )


def _sample(tree, slot, prompt=3, response=2, reference=True):
    lp = -np.arange(1, response + 1, dtype=np.float32)
    return Sample(
        tree=tree,
        slot=slot,
        prompt=np.arange(10, 10 + prompt),
        tokens=np.arange(50, 50 + response),
        logprobs=lp,
        lp_old=lp - 1,
        lp_ref=lp - 2 if reference else None,
    )


@given(st.integers(1, 5000), st.sampled_from([1, 4, 16, 32]))
def test_a_bucket_holds_its_size_and_wastes_at_most_a_third(size, smallest):
    got = bucket(size, smallest)
    assert got >= max(size, smallest) and got % smallest == 0
    assert got == smallest or (got - size) / got <= 1 / 3 or got <= 2 * smallest


def test_buckets_are_few():
    assert len({bucket(n, 32) for n in range(1, 33_000)}) <= 22


@given(st.integers(1, 50_000), st.integers(1, 50_000), st.sampled_from([1, 32, 64]))
def test_buckets_end_at_the_largest_size(one, other, smallest):
    size, largest = sorted((one, other))
    got, end = bucket(size, smallest, largest), bucket(largest, smallest, largest)
    assert got >= size and got % smallest == 0
    assert got == min(bucket(size, smallest), end)
    # It pads the largest size by an eighth at most, and is at most 16 blocks of a power of two.
    assert end - largest < max(largest / 8, smallest)
    units = end // smallest
    assert units // (units & -units) <= 16
    with pytest.raises(ValueError, match="above the largest"):
        bucket(largest + 1, smallest, largest)


def test_a_batch_points_every_row_at_its_node():
    trees = {"a": _tree(4), "b": _tree(6), "unused": _tree(9)}
    samples = [_sample("b", 5, prompt=4), _sample("a", 1, response=5), _sample("b", 2)]
    batch, keys = make_batch(samples, trees, micro_batch_size=2)
    assert keys == ["b", "a"]
    assert batch.reward.shape == (4, 6)
    packed = batch.samples
    assert packed.rows.tokens.shape == (2, 2, 32) and packed.lp_old.shape == (2, 2, 32)
    assert packed.tree.tolist() == [[[0], [1]], [[0], [0]]] and packed.slot.tolist() == [[[5], [1]], [[2], [0]]]
    assert packed.valid.tolist() == [[[True], [True]], [[True], [False]]]
    assert batch.filled is None and batch.kl is None
    assert packed.lp_roll[0, 1, :6].tolist() == [-1, -2, -3, -4, -5, 0]
    assert packed.lp_old[0, 1, :6].tolist() == [-2, -3, -4, -5, -6, 0]
    assert packed.lp_ref[0, 1, :6].tolist() == [-3, -4, -5, -6, -7, 0]
    assert not packed.rows.mask[1, 1].any()
    # The shorter tree and the trees that fill up the bucket hold nothing.
    assert batch.graded.sum(-1).tolist() == [5, 3, 0, 0]
    assert (batch.parent[1, 4:] == -1).all() and (batch.agent[2:] == -1).all()


def test_packed_samples_keep_their_nodes_and_their_numbers():
    trees = {"a": _tree(4), "b": _tree(6)}
    samples = [_sample("b", 5, 20, 9), _sample("a", 1, 3, 5), _sample("b", 2, 14, 8), _sample("a", 3, 1, 1)]
    batch, keys = make_batch(samples, trees, micro_batch_size=1, pack_tokens=32)
    assert keys == ["b", "a"]
    packed = batch.samples
    # 29, 22, 8, 2 tokens into rows of 32: {29, 2}, {22, 8}.
    assert int(batch.filled) == 2 and packed.rows.tokens.shape == (2, 1, 32)
    assert packed.valid.sum(-1).tolist() == [[2], [2]]
    assert packed.tree[:, 0, :2].tolist() == [[0, 1], [0, 1]] and packed.slot[:, 0, :2].tolist() == [[5, 3], [2, 1]]
    assert packed.lp_old[0, 0, :11].tolist() == [*range(-2, -11, -1), -2, 0]
    assert packed.lp_roll[1, 0, :13].tolist() == [*range(-1, -9, -1), *range(-1, -6, -1)]
    tokens = np.take_along_axis(packed.rows.tokens, packed.rows.index, -1)
    assert tokens[1, 0, :13].tolist() == [*range(50, 58), *range(50, 55)]


def test_parts_of_a_batch_have_one_shape_and_all_of_its_trees():
    trees = {"a": _tree(4), "b": _tree(6), "unused": _tree(2)}
    samples = [_sample("a", 1, 40, 3), _sample("b", 2, 3, 90)]
    parts = [make_batch([sample], trees, micro_batch_size=1, among=samples) for sample in samples]
    shapes = [[x.shape for x in jax.tree.leaves(batch)] for batch, _ in parts]
    assert shapes[0] == shapes[1] and [keys for _, keys in parts] == [["a", "b"]] * 2
    assert parts[1][0].samples.tree.tolist() == [[[1]]] and parts[1][0].samples.slot.tolist() == [[[2]]]
    alone, _ = make_batch(samples[:1], trees, micro_batch_size=1)
    assert alone.samples.rows.tokens.shape < parts[0][0].samples.rows.tokens.shape


def test_the_batches_of_a_run_have_few_shapes():
    """Of 80 updates from packed rows and 80 from a row each, 64 nodes of many lengths; the longest sample is known."""
    rng = np.random.default_rng(0)
    trees = {t: _tree(9) for t in range(16)}
    shapes = {0: set(), 1024: set()}
    for _ in range(80):
        sizes = zip(rng.integers(100, 401, 64), rng.integers(20, 301, 64))
        samples = [_sample(i % 16, 1 + i % 8, p, r) for i, (p, r) in enumerate(sizes)]
        for pack_tokens, seen in shapes.items():
            batch, _ = make_batch(samples, trees, micro_batch_size=2, longest=700, pack_tokens=pack_tokens)
            seen.add(tuple(x.shape for x in jax.tree.leaves(batch)))
    assert len(shapes[0]) == 1 and len(shapes[1024]) <= 4, shapes


def test_trees_of_one_problem_have_one_number_and_may_be_taken_along():
    trees = {"a": _tree(problem="p"), "b": _tree(problem="q"), "c": _tree(problem="p"), "d": _tree(), "e": _tree()}
    samples = [_sample("a", 1), _sample("d", 1), _sample("b", 1)]
    batch, keys = make_batch(samples, trees, micro_batch_size=1)
    assert keys == ["a", "d", "b"] and batch.problem.tolist() == [0, 1, 2, 3]
    batch, keys = make_batch(samples, trees, micro_batch_size=1, whole_problems=True)
    assert keys == ["a", "d", "b", "c"] and batch.problem.tolist() == [0, 1, 2, 0]


def test_the_kl_of_responses_is_stacked_with_their_trees():
    batch, _ = make_batch([_sample("a", 1)], {"a": _tree(kl=np.arange(4.0))}, micro_batch_size=1)
    assert batch.kl.tolist() == [[0, 1, 2, 3], *[[0] * 4] * 3]
    mixed = {"a": _tree(kl=np.arange(4.0)), "b": _tree()}
    with pytest.raises(ValueError, match="some trees have the KL"):
        make_batch([_sample("a", 1), _sample("b", 1)], mixed, micro_batch_size=1)


def test_without_a_reference_there_is_no_array_for_it():
    batch, _ = make_batch([_sample("a", 1, reference=False)], {"a": _tree()}, micro_batch_size=1)
    assert batch.samples.lp_ref is None


@pytest.mark.parametrize(
    "samples, message",
    [
        ([], "at least one sample"),
        ([_sample("c", 1)], "'c'"),
        ([_sample("a", 2)], "node 2 of tree 'a' is not graded"),
        ([_sample("a", 1), _sample("a", 3, reference=False)], "reference"),
    ],
)
def test_what_cannot_be_learned_from_is_an_error(samples, message):
    with pytest.raises(ValueError, match=message):
        make_batch(samples, {"a": _tree(void=[2])}, micro_batch_size=2)


@pytest.mark.parametrize("prompt, response", [(0, 2), (2, 0)])
def test_an_empty_prompt_or_response_is_an_error(prompt, response):
    with pytest.raises(ValueError, match="not empty"):
        _sample("a", 1, prompt=prompt, response=response)


def test_log_probabilities_must_fit_the_response():
    with pytest.raises(ValueError, match="lp_old"):
        Sample("a", 1, np.arange(3), np.arange(4), np.zeros(4), np.zeros(3))

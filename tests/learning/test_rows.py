import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars2_jax.learning.rows import in_rows, make_rows, pack, packed_length


def _samples(sizes):
    """Prompts that are all different, and responses, of the sizes given."""
    return [np.full(p, i) for i, (p, _) in enumerate(sizes)], [np.zeros(r, int) for _, r in sizes]


@given(st.lists(st.tuples(st.integers(1, 25), st.integers(1, 25)), min_size=1, max_size=40), st.integers(50, 120))
def test_packing_puts_every_sample_into_one_row_with_room(sizes, capacity):
    samples, lengths = _samples(sizes), [p + r for p, r in sizes]
    rows = pack(*samples, capacity, share=False)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    # First fit: no sample would have had room in an earlier row, as full as that one was before it.
    for later, row in enumerate(rows):
        for i in row:
            for earlier in rows[:later]:
                before = sum(lengths[j] for j in earlier if (-lengths[j], j) < (-lengths[i], i))
                assert before + lengths[i] > capacity
    assert rows == pack(*samples, capacity, share=False)
    # Where no prompt comes twice there is nothing to share.
    assert rows == pack(*samples, capacity, share=True)


def _tokens(row, prompts, responses):
    """What a row with shared prompts takes."""
    return sum(map(len, {tuple(prompts[i]): prompts[i] for i in row}.values())) + sum(len(responses[i]) for i in row)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=40), st.integers(50, 120))
def test_siblings_are_packed_after_their_prompt(samples, capacity):
    prompts, responses = [np.full(5 + 6 * k, k) for k, _ in samples], [np.zeros(r, int) for _, r in samples]
    rows = pack(prompts, responses, capacity, share=True)
    assert sorted(i for row in rows for i in row) == list(range(len(samples)))
    assert all(_tokens(row, prompts, responses) <= capacity for row in rows)
    # In their order, each stands in the first row with its prompt and room, else in the first with room for both.
    groups = {k: [i for i, (other, _) in enumerate(samples) if other == k] for k, _ in samples}
    weight = {k: _tokens(members, prompts, responses) for k, members in groups.items()}
    order = sorted(groups, key=lambda k: (-weight[k], groups[k][0]))
    so_far = [[] for _ in rows]
    for k in order:
        for i in sorted(groups[k], key=lambda i: -len(responses[i])):
            fits = [r for r, row in enumerate(so_far) if _tokens([*row, i], prompts, responses) <= capacity]
            beside = [r for r in fits if any(samples[j][0] == k for j in so_far[r])]
            so_far[(beside or fits)[0]].append(i)
    assert so_far == rows


def test_packing_wastes_little():
    rng = np.random.default_rng(0)
    sizes = [*zip(rng.integers(100, 401, 64), rng.integers(20, 301, 64))]
    rows = pack(*_samples(sizes), 1024, share=False)
    assert np.sum(sizes) / (len(rows) * 1024) > 0.92
    # Eight nodes each at eight prompts, each prompt in one row or two.
    prompts = [np.full(sizes[i // 8][0], i // 8) for i in range(64)]
    responses = [np.zeros(r, int) for _, r in sizes]
    shared = pack(prompts, responses, 2048, share=True)
    tokens = sum(len(p) for p in prompts[::8]) + sum(map(len, responses))
    assert tokens / (len(shared) * 2048) > 0.75
    assert len(shared) < 0.6 * len(pack(prompts, responses, 2048, share=False))


def test_a_sample_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="51 tokens does not fit into a row of 50"):
        pack(*_samples([(1, 2), (25, 26)]), 50, share=False)


@pytest.mark.parametrize("capacity, length", [(32, 32), (700, 704), (1280, 1280), (36_864, 36_864)])
def test_packed_rows_have_a_round_length(capacity, length):
    assert packed_length(capacity) == length


def test_rows_hold_prompt_response_and_nothing_else():
    prompts, responses = [np.array([5, 6, 7]), np.array([8])], [np.array([1, 2]), np.array([3, 4, 9])]
    rows = make_rows(prompts, responses, rows=3)
    assert rows.tokens.shape == (3, 32) and rows.mask.shape == rows.index.shape == (3, 32)
    assert rows.tokens[:, :6].tolist() == [[5, 6, 7, 1, 2, 0], [8, 3, 4, 9, 0, 0], [0] * 6]
    assert rows.index[:, :3].tolist() == [[3, 4, 1], [1, 2, 3], [1, 1, 1]]
    assert rows.mask.sum(-1).tolist() == [2, 3, 0] and rows.mask[1, :3].all()
    assert rows.segment is None and rows.position is None and rows.before is None and rows.prefix is None


def test_packed_rows_hold_one_sample_after_the_other():
    prompts = [np.array([5, 6, 7]), np.array([8]), np.array([10, 11])]
    responses = [np.array([1, 2]), np.array([3, 4, 9]), np.array([12])]
    layout = [[1, 2], [0]]
    rows = make_rows(prompts, responses, layout=layout, rows=4, packed=32, width=17)
    assert rows.tokens.shape == (4, 32) and rows.mask.shape == (4, 32)
    assert rows.tokens[:2, :8].tolist() == [[8, 3, 4, 9, 10, 11, 12, 0], [5, 6, 7, 1, 2, 0, 0, 0]]
    assert rows.segment[:2, :8].tolist() == [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert rows.index[:2, :4].tolist() == [[1, 2, 3, 6], [3, 4, 1, 1]]
    assert rows.before[:2, :4].tolist() == [[0, 1, 2, 5], [2, 3, 0, 0]]
    assert rows.position[:2, :8].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert rows.prefix is None
    assert rows.mask.sum(-1).tolist() == [4, 2, 0, 0] and not rows.segment[2:].any()
    values = [np.array([0.1, 0.2]), np.array([0.3, 0.4, 0.5]), np.array([0.6])]
    got = in_rows(values, layout, (4, 32))
    np.testing.assert_allclose(got[:2, :5], [[0.3, 0.4, 0.5, 0.6, 0], [0.1, 0.2, 0, 0, 0]], rtol=1e-6)
    assert not got[2:].any()
    assert np.take_along_axis(rows.tokens, rows.index, 1)[0, :4].tolist() == [3, 4, 9, 12]


def test_a_shared_prompt_stands_in_its_row_once():
    prompts = [np.array([5, 6, 7]), np.array([8]), np.array([5, 6, 7]), np.array([8]), np.array([5, 6, 7])]
    responses = [np.array([1, 2]), np.array([3]), np.array([4, 9, 9]), np.array([2]), np.array([1])]
    layout = [[0, 1, 2, 3], [4]]
    rows = make_rows(prompts, responses, layout=layout, packed=32, share=True)
    assert rows.tokens[:, :12].tolist() == [[5, 6, 7, 1, 2, 8, 3, 4, 9, 9, 2, 0], [5, 6, 7, 1, *[0] * 8]]
    assert rows.segment[:, :12].tolist() == [[-1, -1, -1, 1, 1, -2, 2, 3, 3, 3, 4, 0], [-1, -1, -1, 1, *[0] * 8]]
    assert rows.prefix[:, :12].tolist() == [[-1] * 5 + [-2, -2] + [-1] * 3 + [-2, 0], [-1] * 4 + [0] * 8]
    assert rows.position[:, :12].tolist() == [[0, 1, 2, 3, 4, 0, 1, 3, 4, 5, 1, 0], [0, 1, 2, 3, *[0] * 8]]
    assert rows.index[0, :7].tolist() == [3, 4, 6, 7, 8, 9, 10]
    assert rows.before[0, :7].tolist() == [2, 3, 5, 2, 7, 8, 5]
    assert rows.mask.sum(-1).tolist() == [7, 1]
    # Unshared, two prompts do not fit.
    with pytest.raises(ValueError, match="23 tokens do not fit into a row of 22"):
        make_rows([np.arange(10)] * 2, [np.arange(1), np.arange(2)], layout=[[0, 1]], packed=22)
    assert make_rows([np.arange(10)] * 2, [np.arange(1), np.arange(2)], layout=[[0, 1]], packed=22, share=True)


def test_the_last_token_is_learned_also_where_it_is_the_padding_token():
    """The mask is of lengths, not of tokens: where a tokenizer pads with its end-of-sequence token, that one counts."""
    rows = make_rows([np.array([5, 0])], [np.array([1, 0, 0])])
    assert rows.tokens[0, :6].tolist() == [5, 0, 1, 0, 0, 0]
    assert rows.mask[0].sum() == 3 and rows.mask[0, :3].all()


def test_rows_that_overflow_are_an_error():
    prompts, responses = [np.arange(20), np.arange(20)], [np.arange(1, 3)] * 2
    with pytest.raises(ValueError, match="44 tokens do not fit into a row of 32"):
        make_rows(prompts, responses, layout=[[0, 1]], packed=32)
    with pytest.raises(ValueError, match="2 prompts and 2 responses do not make 1 rows"):
        make_rows(prompts, responses, rows=1)

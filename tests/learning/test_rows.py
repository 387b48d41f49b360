import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars2_jax.learning.rows import in_rows, make_rows, pack, packed_length


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 120))
def test_packing_puts_every_sample_into_one_row_with_room(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    # First fit: no sample would have had room in an earlier row, as full as that one was before it.
    for later, row in enumerate(rows):
        for i in row:
            for earlier in rows[:later]:
                before = sum(lengths[j] for j in earlier if (-lengths[j], j) < (-lengths[i], i))
                assert before + lengths[i] > capacity
    assert rows == pack(lengths, capacity)


def test_packing_wastes_little():
    rng = np.random.default_rng(0)
    lengths = (rng.integers(100, 401, 64) + rng.integers(20, 301, 64)).tolist()
    assert sum(lengths) / (len(pack(lengths, 1024)) * 1024) > 0.92


def test_a_sample_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="51 tokens does not fit into a row of 50"):
        pack([3, 51], 50)


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
    assert rows.segment is None


def test_packed_rows_hold_one_sample_after_the_other():
    prompts = [np.array([5, 6, 7]), np.array([8]), np.array([10, 11])]
    responses = [np.array([1, 2]), np.array([3, 4, 9]), np.array([12])]
    layout = [[1, 2], [0]]
    rows = make_rows(prompts, responses, layout=layout, rows=4, packed=32, width=17)
    assert rows.tokens.shape == (4, 32) and rows.mask.shape == (4, 32)
    assert rows.tokens[:2, :8].tolist() == [[8, 3, 4, 9, 10, 11, 12, 0], [5, 6, 7, 1, 2, 0, 0, 0]]
    assert rows.segment[:2, :8].tolist() == [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert rows.index[:2, :4].tolist() == [[1, 2, 3, 6], [3, 4, 1, 1]]
    assert rows.mask.sum(-1).tolist() == [4, 2, 0, 0] and not rows.segment[2:].any()
    values = [np.array([0.1, 0.2]), np.array([0.3, 0.4, 0.5]), np.array([0.6])]
    got = in_rows(values, layout, (4, 32))
    np.testing.assert_allclose(got[:2, :5], [[0.3, 0.4, 0.5, 0.6, 0], [0.1, 0.2, 0, 0, 0]], rtol=1e-6)
    assert not got[2:].any()
    assert np.take_along_axis(rows.tokens, rows.index, 1)[0, :4].tolist() == [3, 4, 9, 12]


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

import itertools

import numpy as np
import pytest

from mars2_jax.models.layout import assemble, disassemble, sources

SHAPES = {
    "embedding": (10, 6),
    "blocks.3.attention.qkv": (2, 5, 4, 6),
    "blocks.0.attention.qkv_bias": (2, 5, 4),
    "blocks.0.attention.out": (6, 2, 3, 4),
    "blocks.0.mlp.down": (6, 8),
    "norm.scale": (6,),
}


def tensors(name):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in sources(name, SHAPES[name]).values()]


@pytest.mark.parametrize("name", SHAPES)
def test_a_slice_is_the_slice_of_the_whole(name):
    shape, given = SHAPES[name], tensors(name)
    whole = assemble(name, shape, given)
    assert whole.shape == shape
    halves = [(slice(None), slice(0, n // 2), slice(n // 2, None)) for n in shape]
    for index in itertools.product(*halves):
        np.testing.assert_array_equal(assemble(name, shape, given, index), whole[index])


@pytest.mark.parametrize("name", SHAPES)
def test_disassembling_gives_the_tensors_back(name):
    given = tensors(name)
    back = disassemble(name, assemble(name, SHAPES[name], given))
    assert list(back) == list(sources(name, SHAPES[name]))
    for expected, got in zip(given, back.values(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_heads_are_where_the_decoder_looks_for_them():
    """Query head j of a key head's group is row block (head * group + j) of q_proj."""
    q, k, v = tensors("blocks.3.attention.qkv")
    fused = assemble("blocks.3.attention.qkv", (2, 5, 4, 6), [q, k, v])
    for head, j in itertools.product(range(2), range(3)):
        start = (head * 3 + j) * 4
        np.testing.assert_array_equal(fused[head, j], q[start : start + 4])
    np.testing.assert_array_equal(fused[1, 3], k[4:8])
    np.testing.assert_array_equal(fused[1, 4], v[4:8])

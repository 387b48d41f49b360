"""The matmul's own derivative against that of JAX's einsum, and that it transposes what it says."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars2_jax.models.linear import matmul


def plain(x, weight, dtype=None):
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), preferred_element_type=dtype)


def derivatives(function, x, weight, cotangent):
    y, back = jax.vjp(function, x, weight)
    return y, *back(cotangent.astype(y.dtype))


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (5, 5)])
@pytest.mark.parametrize("batch", [(), (4,), (2, 6)])
def test_the_derivative_is_that_of_the_einsum(shape, batch):
    out, width = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight = jax.random.normal(keys[0], (*batch, width)), jax.random.normal(keys[1], shape)
    cotangent = jax.random.normal(keys[2], (*batch, out))
    got = derivatives(matmul, x, weight, cotangent)
    for a, b in zip(got, derivatives(plain, x, weight, cotangent), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_with_scores_in_float32():
    keys = jax.random.split(jax.random.key(1), 3)
    x, weight = jax.random.normal(keys[0], (16, 8), jnp.bfloat16), jax.random.normal(keys[1], (32, 8))
    cotangent = jax.random.normal(keys[2], (16, 32))
    y, to_x, to_weight = derivatives(functools.partial(matmul, dtype=jnp.float32), x, weight, cotangent)
    assert (y.dtype, to_x.dtype, to_weight.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    expected = derivatives(plain, x.astype(jnp.float32), weight.astype(jnp.bfloat16).astype(jnp.float32), cotangent)
    for a, b in zip((y, to_x, to_weight), expected, strict=True):
        # Two roundings to eight bits of mantissa, of terms of a sum of 32.
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.03 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("remat", [False, True])
def test_checkpoint_policies_see_the_matmul(remat):
    """`learning.remat="dots"` keeps the outputs of matmuls with weights: they are not computed again."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    layer = lambda x, weight: jnp.tanh(matmul(jnp.sin(x), weight))
    step = jax.checkpoint(layer, policy=policy if remat else jax.checkpoint_policies.nothing_saveable)
    loss = lambda x, weight: step(x, weight).sum()
    x, weight = jnp.ones((4, 8)), jnp.ones((16, 8))
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, weight))
    assert len(re.findall(r"dot_general\[", jaxpr)) == (3 if remat else 4)


@pytest.mark.parametrize(("shape", "copied"), [((48, 16), (16, 64)), ((16, 48), (16, 64))])
def test_the_smaller_of_activations_and_cotangent_is_transposed(shape, copied):
    """On CPU, where the transposed copy is made: [width, tokens] of the narrower one."""
    if jax.default_backend() != "cpu":
        pytest.skip("the copy is the CPU backend's")
    out, width = shape
    x, weight, cotangent = jnp.ones((64, width)), jnp.ones(shape), jnp.ones((64, out))
    to_weight = lambda x, weight, cotangent: jax.vjp(matmul, x, weight)[1](cotangent)[1]
    text = jax.jit(to_weight).lower(x, weight, cotangent).compile().as_text()
    wide = (max(shape), 64)
    assert not re.search(rf"f32\[{wide[0]},{wide[1]}\]", text), text

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.errors import ConfigError
from mars2_jax.learning.rewards import overlong_penalty, shaped_rewards
from tests.learning import reference
from tests.learning.forests import forests

# Compiled once for all examples; the learner calls it inside jit, too.
_shaped = jax.jit(shaped_rewards, static_argnames=("gamma", "lam"))


@pytest.mark.parametrize("gamma, lam", [(0.5, 0.5), (0.3, 1.0), (1.0, 0.0), (0.0, 0.5)])
@given(forest=forests)
@settings(max_examples=40, deadline=None)
def test_shaped_rewards_equal_the_loops(forest, gamma, lam):
    reward, parent, _, graded = forest
    got = _shaped(reward, parent, graded, gamma=gamma, lam=lam)
    want = [reference.shaped(r, p, g, gamma, lam) for r, p, g in zip(reward, parent, graded)]
    np.testing.assert_allclose(got, want, atol=1e-6)


@given(st.integers(0, 120), st.integers(1, 50), st.sampled_from([0.0, 0.5, 1.0]))
@settings(deadline=None)
def test_overlong_penalty_equals_the_formula(length, buffer, factor):
    got = overlong_penalty(jnp.array([length]), budget=100, buffer=buffer, factor=factor)
    np.testing.assert_allclose(got, [reference.overlong(length, 100, buffer, factor)], rtol=1e-6)


@pytest.mark.parametrize("buffer", [0, 101])
def test_an_overlong_penalty_without_a_fitting_buffer_is_an_error(buffer):
    with pytest.raises(ConfigError, match="learning.overlong_buffer"):
        overlong_penalty(jnp.array([5]), budget=100, buffer=buffer, factor=1.0)

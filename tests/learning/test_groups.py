import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.learning.groups import group_advantages, problem_advantages
from tests.learning import reference
from tests.learning.forests import forests

_group = jax.jit(group_advantages, static_argnames=("scale", "baseline", "ddof"))
_problem = jax.jit(problem_advantages)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("by_agent", [False, True])
@given(forest=forests)
@settings(max_examples=40, deadline=None)
def test_group_advantages_equal_the_loops(forest, scale, baseline, by_agent):
    reward, _, agent, graded = forest
    group = agent if by_agent else np.zeros_like(agent)
    got = _group(reward, graded, group=agent if by_agent else None, scale=scale, baseline=baseline)
    want = [reference.group_advantages(r, g, k, scale, baseline) for r, g, k in zip(reward, graded, group)]
    np.testing.assert_allclose(got, want, atol=2e-5)


@given(forest=forests, problem=st.lists(st.integers(0, 2), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_problem_advantages_are_those_of_all_its_trees_as_one_group(forest, problem):
    reward, _, _, graded = forest
    group = np.repeat(np.asarray(problem), reward.shape[1])
    want = reference.group_advantages(reward.ravel(), graded.ravel(), group, "std", "mean").reshape(reward.shape)
    got = _problem(reward, graded, np.asarray(problem, np.int32))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_many_trees_of_a_problem_need_no_array_of_all_pairs_of_nodes():
    shape = jax.ShapeDtypeStruct((256, 65), np.float32)
    lowered = _problem.lower(shape, jax.ShapeDtypeStruct(shape.shape, bool), jax.ShapeDtypeStruct((256,), np.int32))
    # All pairs are (256 · 65)² numbers, 1.1 GB of float32.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 8e6

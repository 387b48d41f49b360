"""Sampling parameters that no engine could honour."""

import math

import pytest

from mars2_jax.rollout.types import SamplingParams


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(stop="END"), r"tuple of strings, such as \('END',\)"),  # its letters would each end a response
        (dict(stop=("END", "")), "empty stop string"),
        (dict(temperature=math.inf), "out of range"),
        (dict(temperature=math.nan), "out of range"),
        (dict(top_p=0.0), "out of range"),
        (dict(min_p=1.0), "out of range"),
        (dict(max_new_tokens=0), "at least 1"),
    ],
)
def test_wrong_sampling_parameters_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)

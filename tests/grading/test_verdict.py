"""Rewards from grades."""

from fractions import Fraction

import pytest

from mars2_jax.grading.verdict import Grade, Verdict, reward
from mars2_jax.grading.verdict import TestResult as Result  # pytest would take a name that starts with Test for a test

P, W = Result(Verdict.PASS), Result(Verdict.WRONG)


@pytest.mark.parametrize(
    ("public", "hidden", "all_", "fraction", "public_all", "public_fraction"),
    [
        ((P, P), (P,), 1, Fraction(1), 1, Fraction(1)),
        ((P, P), (P, W, W, P, P), 0, Fraction(5, 7), 1, Fraction(1)),
        ((P, W, W), (), 0, Fraction(1, 3), 0, Fraction(1, 3)),
        ((W,), (P, P), 0, Fraction(2, 3), 0, Fraction(0)),
        # A test that was not run has not passed.
        ((P, W, None), (None, None, None), 0, Fraction(1, 6), 0, Fraction(1, 3)),
        ((None,), (None,), 0, Fraction(0), 0, Fraction(0)),
    ],
)
def test_reward(public, hidden, all_, fraction, public_all, public_fraction):
    grade = Grade(Verdict.WRONG, public, hidden)
    assert reward(grade, "all") == all_
    assert reward(grade, "fraction") == float(fraction)
    assert reward(grade, "all", "public") == public_all
    assert reward(grade, "fraction", "public") == float(public_fraction)
    assert grade.public_pass == bool(public_all)
    assert grade.hidden_pass == (all(r is P for r in hidden) if hidden else bool(public_all))


def test_no_reward_where_the_grader_failed():
    infra = Result(Verdict.INFRA)
    for kind in ("all", "fraction"):
        assert reward(Grade(Verdict.INFRA, (P,), (infra,)), kind) is None


def test_what_cannot_be_paid():
    grade = Grade(Verdict.PASS, (), (P,))
    assert reward(grade, "fraction") == 1.0
    with pytest.raises(ValueError, match="no public tests"):
        reward(grade, "all", "public")
    with pytest.raises(ValueError, match="'half'"):
        reward(grade, "half")

import itertools

import numpy as np
import pytest

from mars2_jax.evaluation.passk import best_attempt, pass_at_k, solves
from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.rollout.types import Completion
from mars2_jax.search.writer import Attempt, Draft

PASS, WRONG = TestResult(Verdict.PASS), TestResult(Verdict.WRONG)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        expected = np.mean([min(s) < c for s in subsets])
        assert pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses_nonsense(bad):
    with pytest.raises(ValueError):
        pass_at_k(*bad)


def attempt(slot, public, hidden, verdict) -> Attempt:
    none = np.zeros(0, np.float32)
    completion = Completion(slot, np.zeros(1, np.int32), np.zeros(0, np.int32), none, none, "stop")
    return Attempt(slot, 0, 0, 1, Draft(slot, "", "", completion), Grade(verdict, public, hidden))


def test_the_answer_has_the_best_public_score_and_the_earliest_slot():
    low = attempt(1, (PASS, WRONG), (PASS,), Verdict.WRONG)
    right = attempt(4, (PASS, PASS), (PASS,), Verdict.PASS)
    hacked = attempt(3, (PASS, PASS), (WRONG,), Verdict.WRONG)
    broken = attempt(2, (), (), Verdict.INFRA)
    assert best_attempt([low, right, hacked, broken]) is hacked
    assert best_attempt([low, right, broken]) is right
    assert best_attempt([broken]) is None
    assert [solves(a.grade) for a in (low, right, hacked)] == [False, True, False]

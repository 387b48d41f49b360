"""Metrics of a search: public and hidden tests apart, so that programs made for the public ones show."""

from types import SimpleNamespace

import numpy as np

from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.grading.verdict import TestResult as Result  # pytest would take a name that starts with Test for a test
from mars2_jax.search.forest import Status
from mars2_jax.training.records import search_metrics

P, W = Result(Verdict.PASS), Result(Verdict.WRONG)


def exploration(*trees):
    rewards = np.zeros((len(trees), 1 + max(map(len, trees))))
    status = np.full(rewards.shape, Status.EMPTY)
    for t, grades in enumerate(trees):
        for slot, grade in enumerate(grades, 1):
            status[t, slot] = Status.VOID if grade.verdict is Verdict.INFRA else Status.GRADED
            rewards[t, slot] = grade.verdict is Verdict.PASS
    return SimpleNamespace(
        attempts=[{i: SimpleNamespace(grade=grade) for i, grade in enumerate(grades, 1)} for grades in trees],
        forest=SimpleNamespace(status=status, reward=rewards, depth=np.ones(rewards.shape)),
        seconds=SimpleNamespace(decoding=1.0, selecting=0.5, grading=0.25, grader_idle=0.125),
    )


def test_public_and_hidden_results_are_told_apart():
    hard_coded = Grade(Verdict.WRONG, (P, P), (P, W))
    right, wrong = Grade(Verdict.PASS, (P, P), (P, P)), Grade(Verdict.WRONG, (W, P), (P, P))
    void = Grade(Verdict.INFRA, (Result(Verdict.INFRA),), (Result(Verdict.INFRA),))
    found = search_metrics(exploration([hard_coded, hard_coded, wrong], [right, void]))
    assert found["search/public_pass_rate"] == 3 / 4
    assert found["search/hidden_pass_rate"] == 2 / 4
    assert found["search/reward_mean"] == 1 / 4
    assert found["search/solve_rate"] == 1 / 2
    assert found["grading/infra_rate"] == 1 - 4 / 5
    assert found["search/nodes"] == 4


def test_without_public_tests_there_is_no_public_rate():
    found = search_metrics(exploration([Grade(Verdict.PASS, (), (P,))]))
    assert "search/public_pass_rate" not in found
    assert found["search/hidden_pass_rate"] == 1

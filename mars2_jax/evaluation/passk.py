"""Pass@k, and the choice of one answer out of a search tree."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mars2_jax.grading.verdict import Grade, Verdict, reward
from mars2_jax.search.writer import Attempt

__all__ = ["best_attempt", "pass_at_k", "solves"]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate of Pass@k from `samples` independent samples, `correct` of them right.

    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1), in exact integers, rounded once.

    Raises:
      ValueError: unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {correct} right out of {samples} is not defined")
    every = math.comb(samples, k)
    return (every - math.comb(samples - correct, k)) / every


def solves(grade: Grade) -> bool:
    """Whether a program is right: it passes every test, public and hidden."""
    return grade.verdict is Verdict.PASS


def best_attempt(attempts: Iterable[Attempt]) -> Attempt | None:
    """The answer that a search gives: most public tests passed, earliest first on ties (the paper's Pass@1(MCTS)).

    Nodes on which the grader failed are no candidates; None if there is no other.
    """
    candidates = [a for a in attempts if a.grade.verdict is not Verdict.INFRA]
    score = lambda a: reward(a.grade, "fraction", "public") or 0.0
    return min(candidates, key=lambda a: (-score(a), a.slot), default=None)

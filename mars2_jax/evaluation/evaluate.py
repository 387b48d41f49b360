"""What a team can do: greedy Pass@1 of each agent, and Pass@1(MCTS) and Pass@N of a search by all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxtyping import PRNGKeyArray
from ml_collections import ConfigDict

from mars2_jax.errors import DataError
from mars2_jax.evaluation.passk import best_attempt, pass_at_k, solves
from mars2_jax.grading.verdict import Verdict
from mars2_jax.search.explore import Exploration, Grader
from mars2_jax.search.shares import explore_together
from mars2_jax.search.writer import Writer
from mars2_jax.tasks.problem import Problem

__all__ = ["Scores", "evaluate_agent", "evaluate_team"]

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores in [0, 1] by name, over the problems that the grader could judge.

    Attributes:
      values: "pass@1" of one agent, or "pass@1_mcts" and "pass@n" of a search.
      problems: how many problems the scores are means of.
      exploration: the nodes behind them.
    """

    values: dict[str, float]
    problems: int
    exploration: Exploration


def evaluate_agent(
    problems: Sequence[Problem],
    writer: Writer,
    grader: Grader,
    search: ConfigDict,
    *,
    key: PRNGKeyArray,
    progress: Progress | None = None,
    suspend: Callable[[], bool] | None = None,
) -> Scores:
    """Pass@1 of one agent: one answer to each problem, judged by all its tests.

    Args:
      problems: the problems.
      writer: the agent, with the sampling that is to be measured.
      grader: judges the programs.
      search: the section `search` of the config.
      key: for the answers; a greedy writer does not use it.
      progress: called with (answers done, answers wanted).
      suspend: asked again and again; when it says True, the evaluation ends with `search.explore.Suspended`.

    Raises:
      DataError: the grader could judge none of the problems.
    """
    one = _with(search, strategy="grpo", nodes=1)
    exploration = explore_together(problems, [writer], grader, one, key=key, progress=progress, suspend=suspend)
    grades = [tree[1].grade for tree in exploration.attempts]
    judged = [g for g in grades if g.verdict is not Verdict.INFRA]
    _require(judged, writer.name)
    correct = sum(map(solves, judged))
    return Scores({"pass@1": pass_at_k(len(judged), correct, 1)}, len(judged), exploration)


def evaluate_team(
    problems: Sequence[Problem],
    writers: Sequence[Writer],
    grader: Grader,
    search: ConfigDict,
    *,
    nodes: int,
    key: PRNGKeyArray,
    progress: Progress | None = None,
    suspend: Callable[[], bool] | None = None,
) -> Scores:
    """Pass@1(MCTS) and Pass@N of a test-time search.

    The search is paid by public tests alone, and by their share that passes; hidden tests judge its answer.

    Args:
      problems: the problems; each has public tests.
      writers: the agents.
      grader: judges the programs.
      search: the section `search` of the config, its `nodes` apart.
      nodes: nodes a tree.
      key: of the search.
      progress: called with (nodes done, nodes wanted).
      suspend: as in `evaluate_agent`.

    Raises:
      DataError: a problem without public tests, or the grader could judge none.
    """
    for problem in problems:
        if not problem.public:
            raise DataError(
                f"problem {problem.id!r} has no public tests to guide a search: set config.eval.search_nodes=0"
            )
    exploration = explore_together(
        problems,
        writers,
        grader,
        _with(search, nodes=nodes),
        key=key,
        reward="fraction",
        reward_tests="public",
        progress=progress,
        suspend=suspend,
    )
    chosen = [(best_attempt(tree.values()), tree) for tree in exploration.attempts]
    judged = [(best, tree) for best, tree in chosen if best is not None]
    _require(judged, "the team")
    values = {
        "pass@1_mcts": sum(solves(best.grade) for best, _ in judged) / len(judged),
        "pass@n": sum(any(solves(a.grade) for a in tree.values()) for _, tree in judged) / len(judged),
    }
    return Scores(values, len(judged), exploration)


def _with(search: ConfigDict, **changes) -> ConfigDict:
    return ConfigDict({**search.to_dict(), **changes})


def _require(judged: Sequence[object], who: str) -> None:
    if not judged:
        raise DataError(f"the grader failed on every program of {who}: run again, and look at what it printed")

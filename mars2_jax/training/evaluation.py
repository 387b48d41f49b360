"""The evaluation of a team, before and after training or on its own: scores by metric name."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from ml_collections import FrozenConfigDict

from mars2_jax.evaluation.evaluate import evaluate_agent, evaluate_team
from mars2_jax.search.explore import Grader
from mars2_jax.tasks.problem import Problem
from mars2_jax.training.agent import Agent
from mars2_jax.training.setup import evaluation_sampling, training_sampling
from mars2_jax.viewer.terminal import Progress

__all__ = ["evaluate", "searchable"]

# The uses of a run's key; training steps fold the step into the first.
TRAIN, EVALUATE = 0, 1


def searchable(config: FrozenConfigDict, problems: Sequence[Problem]) -> bool:
    """Whether a test-time search is asked for and can be guided: all problems have public tests."""
    return config.eval.search_nodes > 0 and all(problem.public for problem in problems)


def evaluate(
    config: FrozenConfigDict, team: Sequence[Agent], problems: Sequence[Problem], grader: Grader, progress: Progress
) -> dict[str, float]:
    """Scores of every agent and of the team.

    The key is the same whenever it is called, so that before and after differ by the weights alone.

    Returns:
      `eval/<source>/<agent>/pass@1` of each agent, and `eval/<source>/pass@1_mcts` and `eval/<source>/pass@n` of the
      team's search, where it is searchable.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), EVALUATE)
    prefix = f"eval/{config.eval.source}"
    scores: dict[str, float] = {}
    for index, agent in enumerate(team):
        advance = progress.counter(f"evaluate {agent.name}", len(problems))
        writer = agent.writer(evaluation_sampling(config))
        result = evaluate_agent(
            problems, writer, grader, config.search, key=jax.random.fold_in(key, index), progress=advance
        )
        scores[f"{prefix}/{agent.name}/pass@1"] = result.values["pass@1"]
    if searchable(config, problems):
        nodes = config.eval.search_nodes
        advance = progress.counter("evaluate the team's search", len(problems) * nodes)
        writers = [agent.writer(training_sampling(config)) for agent in team]
        result = evaluate_team(
            problems,
            writers,
            grader,
            config.search,
            nodes=nodes,
            key=jax.random.fold_in(key, len(team)),
            progress=advance,
        )
        scores |= {f"{prefix}/{name}": value for name, value in result.values.items()}
    return scores

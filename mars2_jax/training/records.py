"""From a finished search to what the learner, the trees file and the metrics need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mars2_jax.errors import GraderError
from mars2_jax.grading.verdict import Verdict
from mars2_jax.learning.batch import TreeArrays
from mars2_jax.rollout.types import Completion
from mars2_jax.search.explore import Exploration
from mars2_jax.search.forest import Status
from mars2_jax.training.buffer import TreeKey

__all__ = [
    "Node",
    "check_graded",
    "most_telling",
    "pass_rate",
    "search_metrics",
    "tree_arrays",
    "tree_rows",
    "written_by",
]

Node = tuple[TreeKey, int, Completion]
"""Tree, slot, and the tokens written there."""


def check_graded(exploration: Exploration) -> None:
    """Sees that the grader could judge something: a run in which it cannot would go on, learning nothing.

    Raises:
      GraderError: it failed on every program.
    """
    grades = [attempt.grade for attempts in exploration.attempts for attempt in attempts.values()]
    if any(grade.verdict is not Verdict.INFRA for grade in grades):
        return
    said = (result.error for grade in grades for result in grade.public + grade.hidden if result and result.error)
    raise GraderError(f"the grader failed on all {len(grades)} programs of this step ({next(said, 'no word why')})")


def tree_arrays(exploration: Exploration, step: int) -> dict[TreeKey, TreeArrays]:
    """The trees as the learner takes them."""
    forest = jax.device_get(exploration.forest)
    trees = {}
    # The first tree of each problem: a step that spans two epochs may hold one twice.
    first: dict[str, TreeKey] = {}
    for t, attempts in enumerate(exploration.attempts):
        length = np.zeros(forest.parent.shape[1], np.int32)
        for slot, attempt in attempts.items():
            length[slot] = attempt.draft.tokens
        trees[step, t] = TreeArrays(
            reward=forest.reward[t],
            parent=forest.parent[t],
            agent=forest.agent[t],
            graded=forest.status[t] == Status.GRADED,
            length=length,
            problem=first.setdefault(exploration.problems[t].id, (step, t)),
        )
    return trees


def pass_rate(tree: TreeArrays) -> float | None:
    """Share of a tree's graded nodes that pass all the tests that pay; None where no node is graded."""
    return float((tree.reward[tree.graded] >= 1).mean()) if tree.graded.any() else None


def written_by(exploration: Exploration, agents: Collection[int], step: int) -> list[Node]:
    """The graded nodes that some agents of this team wrote, tree by tree in the order of their slots."""
    nodes = []
    for t, attempts in enumerate(exploration.attempts):
        for slot in sorted(attempts):
            attempt = attempts[slot]
            if attempt.agent in agents and attempt.grade.verdict is not Verdict.INFRA:
                assert attempt.draft.completion is not None  # nobody in a team that trains is served elsewhere
                nodes.append(((step, t), slot, attempt.draft.completion))
    return nodes


def tree_rows(
    exploration: Exploration,
    agents: Sequence[str],
    step: int,
    used: Mapping[TreeKey, tuple[np.ndarray, np.ndarray]],
) -> list[dict[str, Any]]:
    """The lines of `trees/step_*.jsonl`.

    Args:
      exploration: the search.
      agents: names, by the agents' numbers.
      step: the training step.
      used: shaped rewards and advantages [N] of the trees that an update has used.
    """
    forest = jax.device_get(exploration.forest)
    lines = []
    for t, attempts in enumerate(exploration.attempts):
        shaped, advantage = used.get((step, t), (None, None))
        nodes = []
        for slot in sorted(attempts):
            attempt = attempts[slot]
            status = Status(int(forest.status[t, slot]))
            graded = status is Status.GRADED
            number = lambda array, slot=slot, graded=graded: (
                float(array[slot]) if graded and array is not None else None
            )
            nodes.append(
                {
                    "slot": slot,
                    "parent": attempt.parent,
                    "agent": agents[attempt.agent],
                    "depth": attempt.depth,
                    "status": status.name,
                    "reward": number(forest.reward[t]),
                    "shaped": number(shaped),
                    "advantage": number(advantage),
                    "verdict": attempt.grade.verdict.value,
                    "hidden_pass": attempt.grade.hidden_pass,
                    "tokens": attempt.draft.tokens,
                    "response": attempt.draft.text,
                    "program": attempt.draft.program,
                }
            )
        lines.append({"step": step, "problem": exploration.problems[t].id, "tree": t, "nodes": nodes})
    return lines


def search_metrics(exploration: Exploration) -> dict[str, float]:
    """`search/*`, `grading/*` and the times of a search.

    Means are over graded nodes and over trees that have any; they are absent where there are none.
    """
    grades = [a.grade for tree in exploration.attempts for a in tree.values()]
    judged = [g for g in grades if g.verdict is not Verdict.INFRA]
    forest = jax.device_get(exploration.forest)
    graded = forest.status == Status.GRADED
    metrics = {
        "search/nodes": float(graded.sum()),
        "grading/infra_rate": 1 - len(judged) / len(grades),
        "time/search_seconds": exploration.seconds.decoding + exploration.seconds.selecting,
        "time/grade_seconds": exploration.seconds.grading,
        "time/grader_idle_seconds": exploration.seconds.grader_idle,
    }
    known = [[a for a in t.values() if a.grade.verdict is not Verdict.INFRA] for t in exploration.attempts]
    if judged:
        metrics |= {
            "search/solve_rate": float(
                np.mean([any(a.grade.verdict is Verdict.PASS for a in tree) for tree in known if tree])
            ),
            "search/reward_mean": float(forest.reward[graded].mean()),
            "search/depth_mean": float(forest.depth[graded].mean()),
            "search/hidden_pass_rate": float(np.mean([g.hidden_pass for g in judged])),
        }
    if public := [g.public_pass for g in judged if g.public]:
        metrics["search/public_pass_rate"] = float(np.mean(public))
    return metrics


def most_telling(trees: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The tree to show to a person: solved, not by every node, and as deep as possible."""

    def rank(tree: Mapping[str, Any]) -> tuple[bool, bool, int, int]:
        passed = [node["verdict"] == Verdict.PASS.value for node in tree["nodes"]]
        first = passed.index(True) if any(passed) else 0
        depth_of_pass = max((n["depth"] for n, p in zip(tree["nodes"], passed, strict=True) if p), default=0)
        return any(passed), any(passed) and not all(passed), depth_of_pass, first

    return max(trees, key=rank, default=None)

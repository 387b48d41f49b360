"""The search of one training step: a tree for each of its problems and, with dynamic filtering, for others in the place
of those that taught nothing.

A step is searched in rounds. The first draws `data.problems_per_step` problems. Each further one draws as many as there
are trees missing: trees from which no learner would learn anything (`training.filtering`) do not count. Trees are
numbered over all rounds of the step, which names them in keys and in random numbers alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import numpy as np
from ml_collections import FrozenConfigDict

from mars2_jax.learning.batch import TreeArrays
from mars2_jax.parallel.exchange import gather, share
from mars2_jax.search.explore import Exploration, Grader, Seconds, Suspended
from mars2_jax.search.saved import SavedSearch
from mars2_jax.search.shares import explore_together
from mars2_jax.tasks.iterator import ProblemIterator
from mars2_jax.training.agent import Member, reset_engines
from mars2_jax.training.buffer import TreeKey
from mars2_jax.training.filtering import telling_nodes
from mars2_jax.training.keys import step_key
from mars2_jax.training.records import Node, check_graded, tree_arrays, written_by
from mars2_jax.training.setup import training_sampling
from mars2_jax.viewer.terminal import Progress

__all__ = ["StepSearch", "SuspendedStep", "search_step"]


class SuspendedStep(Exception):
    """The search of a step was stopped on request. `rounds` is all that is needed to go on with it: its rounds so far,
    the last of which is not at its end."""

    def __init__(self, rounds: list[SavedSearch]):
        super().__init__(f"suspended in round {len(rounds)}")
        self.rounds = rounds


@dataclasses.dataclass(frozen=True)
class StepSearch:
    """All trees of a step.

    Attributes:
      exploration: the trees of all rounds, in the order of their numbers.
      trees: the same as the learner takes them, in that order.
      indices: of their problems in the problem set.
      learned: by learner, the nodes that it learns from: all that its weights wrote, where nothing is filtered.
      rounds: rounds that it took.
      spent: float64[processes, members of the team, 2]: wall seconds of decoding, and the tokens that were decoded in
        them. What a suspended search had before it went on is in neither.
    """

    exploration: Exploration
    trees: dict[TreeKey, TreeArrays]
    indices: list[int]
    learned: dict[str, list[Node]]
    rounds: int
    spent: np.ndarray

    @property
    def dropped(self) -> int:
        """Trees that nobody learns from."""
        return len(self.trees) - len({tree for nodes in self.learned.values() for tree, _, _ in nodes})

    def tokens_per_second(self, members: Collection[int]) -> float | None:
        """Of some members of the team, which decode together, in all processes: their tokens over the time of the
        process that took longest. None where nothing was decoded."""
        seconds, tokens = self.spent[:, sorted(members)].sum(axis=1).T
        return float(tokens.sum() / seconds.max()) if tokens.sum() else None


def search_step(
    step: int,
    config: FrozenConfigDict,
    team: Sequence[Member],
    voices: Mapping[str, Collection[int]],
    problems: ProblemIterator,
    grader: Grader,
    *,
    saved: Sequence[SavedSearch] = (),
    suspend: Callable[[], bool] | None = None,
    progress: Progress,
) -> StepSearch:
    """Searches the trees of a training step.

    Args:
      step: from 1.
      config: the run's.
      team: who writes.
      voices: of each learner, the numbers in the team of those that play with its weights.
      problems: is drawn from; where the step is suspended or fails, it is the caller's to set it back.
      grader: grades.
      saved: the rounds of this step when it was suspended.
      suspend: asked once a tick; when it says True, the search ends with `SuspendedStep`.
      progress: shows each round as a phase.

    Raises:
      SuspendedStep: on request.
      GraderError: it failed on every program.
    """
    wanted, filtering = config.data.problems_per_step, config.data.dynamic_filtering
    rounds: list[Exploration] = []
    indices: list[int] = []
    spent = np.zeros((len(team), 2))
    missing = wanted
    while True:
        draw, phase = problems.draw(missing), "resample" if rounds else "search"
        # As if nothing had been before: what a round finds does not hang on whether the one before was suspended.
        reset_engines(team)
        writers = [member.writer(training_sampling(config)) for member in team]
        try:
            found = explore_together(
                draw.problems,
                writers,
                grader,
                config.search,
                key=step_key(config.seed, step),
                tree_ids=range(len(indices), len(indices) + missing),
                capacity=wanted,
                reward=config.grading.reward,
                reward_tests=config.grading.reward_tests,
                progress=progress.counter(phase, len(share(missing)) * config.search.nodes),
                saved=saved[len(rounds)] if len(rounds) < len(saved) else None,
                suspend=suspend,
            )
        except Suspended as search:
            raise SuspendedStep([*(one.to_saved() for one in rounds), search.saved]) from None
        rounds.append(found)
        indices += draw.indices
        spent += [(writer.seconds, writer.tokens) for writer in writers]
        # The trees are those of all processes: so is what follows from them.
        exploration = _joined(rounds)
        check_graded(exploration)
        trees = tree_arrays(exploration, step)
        learned = {name: written_by(exploration, numbers, step) for name, numbers in voices.items()}
        if filtering:
            learned = telling_nodes(learned, trees, config.learning, config.rollout.max_new_tokens)
        result = StepSearch(exploration, trees, indices, learned, len(rounds), spent[None])
        missing = wanted - (len(trees) - result.dropped)
        if not filtering or missing <= 0 or len(rounds) > config.data.max_resamples:
            of_all = [np.frombuffer(data).reshape(spent.shape) for data in gather(spent.tobytes())]
            return dataclasses.replace(result, spent=np.stack(of_all))


def _joined(rounds: Sequence[Exploration]) -> Exploration:
    """Several searches as one; its origin is the first one's."""
    if len(rounds) == 1:
        return rounds[0]
    forest = jax.tree.map(lambda *rows: np.concatenate(rows), *(jax.device_get(one.forest) for one in rounds))
    spent = [dataclasses.asdict(one.seconds) for one in rounds]
    return Exploration(
        forest,
        [attempts for one in rounds for attempts in one.attempts],
        [problem for one in rounds for problem in one.problems],
        Seconds(**{name: sum(times[name] for times in spent) for name in spent[0]}),
        rounds[0].origin,
    )

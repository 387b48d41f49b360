"""The problems of training, draw by draw: shuffled by seed, resumed by state.

Without a curriculum it is a Grain pipeline. Its order is that of `mars2_jax.tasks.order`, a hash, and not Grain's own
shuffle: it stays the same in every version of every library. A curriculum takes from the same order what the pass rates
of the moment say (`mars2_jax.tasks.curriculum`): nothing is read ahead. Every host draws all problems; which of them it
searches is decided in `mars2_jax.search.shares`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from mars2_jax.errors import ConfigError
from mars2_jax.tasks.curriculum import Curriculum, PassRates, next_problems
from mars2_jax.tasks.order import problem_order
from mars2_jax.tasks.prepared import PreparedProblems
from mars2_jax.tasks.problem import Problem

__all__ = ["Draw", "ProblemIterator"]


_ENDLESS = 1 << 40
"""Problems; Grain's own endlessness is a number near the largest there is."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Some problems that were drawn, for one tree each.

    Attributes:
      indices: of them in the set.
      problems: in the same order.
    """

    indices: tuple[int, ...]
    problems: list[Problem]


class _Ordered(grain.MapDataset[Problem]):
    """A data set in an order of its own in each epoch."""

    def __init__(self, parent: grain.MapDataset[Problem], seed: int):
        super().__init__(parent)
        self._seed = seed

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, place = divmod(index, len(self))
        return self._parent[epoch * len(self) + problem_order(len(self), self._seed, epoch)[place]]


class ProblemIterator:
    """An endless supply of problems.

    Every problem comes once before any comes again, in each epoch in another order; a draw may span two epochs. With a
    curriculum some are passed over.

    Args:
      problems: to draw from.
      problems_per_step: so many are read ahead.
      seed: of the order.
      curriculum: which problems are passed over; None passes none.

    Raises:
      ValueError: there are no problems.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        problems_per_step: int,
        seed: int,
        curriculum: Curriculum | None = None,
    ):
        if not problems:
            raise ValueError("need problems to iterate over")
        self._problems, self._per_step, self._seed = problems, problems_per_step, seed
        self._curriculum, self._rates = curriculum, PassRates()
        # In the order of all epochs: the next problem that is drawn, or passed over.
        self._position = 0
        self._ahead: Iterator[Problem] | None = None
        if curriculum is None:
            # One step ahead in a thread where problems have to be read and decoded first.
            lazy = isinstance(problems, PreparedProblems)
            options = grain.ReadOptions(num_threads=int(lazy), prefetch_buffer_size=problems_per_step if lazy else 0)
            epochs = _ENDLESS // len(problems) + 1
            ordered = _Ordered(grain.MapDataset.source(problems), seed).repeat(epochs)
            self._ahead = iter(ordered.to_iter_dataset(options))

    def draw(self, count: int) -> Draw:
        """The next `count` problems."""
        start, size = self._position, len(self._problems)
        if self._curriculum is None:
            order = range(start, start + count)
            indices = [problem_order(size, self._seed, place // size)[place % size] for place in order]
            self._position += count
        else:
            indices, self._position = next_problems(size, self._seed, start, count, self._curriculum, self._rates)
        if self._ahead is None:
            problems = [self._problems[index] for index in indices]
        else:
            problems = [next(self._ahead) for _ in indices]
        return Draw(tuple(indices), problems)

    def observe(self, indices: Sequence[int], rates: Sequence[float | None]) -> dict[str, float]:
        """Takes the pass rates of finished trees into the curriculum.

        Args:
          indices: of the trees' problems; the same, in the same order, on every host.
          rates: of each tree, the share of its nodes that pass; None where nothing is known.

        Returns:
          Metrics: problems that were ever tried, and the share of these in the band; empty without a
          curriculum.
        """
        if self._curriculum is None:
            return {}
        for index, rate in zip(indices, rates, strict=True):
            if rate is not None:
                self._rates.observe(index, rate, self._curriculum.decay)
        return {
            "curriculum/problems_tried": float(len(self._rates)),
            "curriculum/in_band": self._rates.share(self._curriculum),
        }

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON, the same on every host. See `get_arrays`, too."""
        return {"position": self._position, "problems": self._fingerprint}

    def get_arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of the curriculum, if there is one, the same on every host."""
        return {} if self._curriculum is None else self._rates.to_arrays()

    def set_state(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Goes on where the iterator was that gave `state` and `arrays`, whatever the number of hosts was then.

        Without arrays, what is known of the problems stays as it is.

        Raises:
          ConfigError: the problems are not those that it had.
        """
        known = state.get("problems")
        if known is not None and known != self._fingerprint:
            raise ConfigError(
                "the problems of config.data are not those that the run in this workdir was started with: put the "
                "problem set back as it was, or choose another --workdir"
            )
        # Checkpoints of earlier versions count steps.
        self._position = int(state["position"] if "position" in state else state["step"] * self._per_step)
        if self._ahead is not None:
            self._ahead.set_state({"next_index": self._position})  # type: ignore[attr-defined]
        if arrays:
            self._rates = PassRates.from_arrays(arrays)

    @functools.cached_property
    def _fingerprint(self) -> str:
        """Of the problems' ids in their order. It is asked for in every step, and a set may be large."""
        ids = self._problems.ids if isinstance(self._problems, PreparedProblems) else [p.id for p in self._problems]
        return hashlib.sha256("\0".join(ids).encode("utf-8", "surrogatepass")).hexdigest()

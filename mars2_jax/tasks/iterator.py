"""The problems of training, step by step: shuffled by seed, shared out among hosts, resumed by state.

A Grain pipeline. Its order is that of `mars2_jax.tasks.order`, a hash, and not Grain's own shuffle: it stays the same
in every version of every library, and of one host it is what it always was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain

from mars2_jax.errors import ConfigError
from mars2_jax.tasks.order import problem_order
from mars2_jax.tasks.prepared import PreparedProblems
from mars2_jax.tasks.problem import Problem

__all__ = ["ProblemIterator"]


_ENDLESS = 1 << 40
"""Problems; Grain's own endlessness overflows when it is cut into batches."""


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


class ProblemIterator(Iterator[list[Problem]]):
    """An endless iterator over the problems of one step after the other.

    Every problem comes once before any comes again, in each epoch in another order; a step may span two epochs. Several
    hosts share the problems of a step: together they have what one host alone would have, so that neither their number
    nor a change of it changes what a run learns from.

    Args:
      problems: to draw from.
      problems_per_step: of all hosts together.
      seed: of the order.
      shard_index: this host's number, from 0.
      shard_count: number of hosts.

    Raises:
      ConfigError: hosts cannot share the problems of a step evenly.
      ValueError: there are no problems.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        problems_per_step: int,
        seed: int,
        shard_index: int = 0,
        shard_count: int = 1,
    ):
        if not problems:
            raise ValueError("need problems to iterate over")
        if problems_per_step % shard_count:
            raise ConfigError(
                f"config.data.problems_per_step is {problems_per_step}; it must be a multiple of the number of hosts, "
                f"which is {shard_count}"
            )
        # One step ahead in a thread where problems have to be read and decoded first.
        ahead = int(isinstance(problems, PreparedProblems))
        options = grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead)
        epochs = _ENDLESS // len(problems) + 1
        steps = _Ordered(grain.MapDataset.source(problems), seed).repeat(epochs)[shard_index::shard_count]
        steps = steps.batch(problems_per_step // shard_count, batch_fn=list)
        self._steps = iter(steps.to_iter_dataset(options))
        self._problems = problems

    def __next__(self) -> list[Problem]:
        return next(self._steps)

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain JSON, the same on every host."""
        return {"step": int(self._steps.get_state()["next_index"]), "problems": self._fingerprint()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where the iterator was that gave `state`, whatever the number of hosts was then.

        Raises:
          ConfigError: the problems are not those that it had.
        """
        known = state.get("problems")
        if known is not None and known != self._fingerprint():
            raise ConfigError(
                "the problems of config.data are not those that the run in this workdir was started with: put the "
                "problem set back as it was, or choose another --workdir"
            )
        self._steps.set_state({"next_index": int(state["step"])})

    def _fingerprint(self) -> str:
        """Of the problems' ids in their order."""
        ids = self._problems.ids if isinstance(self._problems, PreparedProblems) else [p.id for p in self._problems]
        return hashlib.sha256("\0".join(ids).encode("utf-8", "surrogatepass")).hexdigest()

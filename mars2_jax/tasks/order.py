"""The order in which training meets the problems: a function of the step, so that a resumed run needs no state."""

from __future__ import annotations

import functools
import hashlib

__all__ = ["problem_order", "problems_for_step"]


@functools.lru_cache(maxsize=8)
def problem_order(num_problems: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The permutation of `range(num_problems)` for one epoch.

    Sorted by a hash, not drawn from a random generator: it stays the same in every version of every library.
    """

    def rank(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(num_problems), key=rank))


def problems_for_step(num_problems: int, step: int, per_step: int, seed: int) -> list[int]:
    """Indices of the problems of training step `step` (from 0).

    Epochs follow each other without a gap: every problem is met once before any is met again, each epoch in an order
    of its own. A step that spans two epochs may hold a problem twice.

    Raises:
      ValueError: if there are no problems, or for a negative step or a `per_step` below 1.
    """
    if num_problems < 1 or per_step < 1 or step < 0:
        raise ValueError(f"need problems, a step and a step size, got {num_problems=} {step=} {per_step=}")
    places = range(step * per_step, (step + 1) * per_step)
    return [problem_order(num_problems, seed, p // num_problems)[p % num_problems] for p in places]

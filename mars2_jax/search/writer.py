"""The one thing a search asks of an agent: text for a problem, some time later."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from mars2_jax.grading.verdict import Grade
from mars2_jax.rollout.types import Completion
from mars2_jax.tasks.problem import Problem

__all__ = ["Attempt", "Draft", "Writer"]


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a writer returns for a ticket.

    Attributes:
      ticket: that of the request.
      text: the answer.
      program: the program in it; "" where there is none.
      completion: its tokens; None of a model that is served elsewhere, whose answers cannot be learned from.
      counted: length of such an answer by the server's count of tokens; 0 where it does not count.
    """

    ticket: int
    text: str
    program: str
    completion: Completion | None
    counted: int = 0

    @property
    def tokens(self) -> int:
        """Length of the answer in tokens."""
        return self.counted if self.completion is None else len(self.completion.tokens)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A node of a tree as the host sees it: a draft and its grade. `agent` indexes the search's writers."""

    slot: int
    parent: int
    agent: int
    depth: int
    draft: Draft
    grade: Grade


class Writer(Protocol):
    """An agent as a search sees it. All methods are called from one thread."""

    name: str

    def submit(
        self, ticket: int, problem: Problem, previous: Attempt | None, key: np.ndarray, so_far: Completion | None = None
    ) -> None:
        """Asks for a program: a first attempt, or a refinement of `previous`.

        Args:
          ticket: the caller's handle, not open.
          problem: what to solve.
          previous: the attempt to improve; None asks for a first one.
          key: uint32[2], PRNG key data.
          so_far: what an earlier `suspend` returned for the same request: it goes on from there.
        """

    def dispatch(self) -> None:
        """Starts what the next `step` will wait for, so that several writers work at the same time. May do nothing."""

    def step(self) -> list[Draft]:
        """Works for a bounded while on all open tickets and returns those that are done.

        Which these are, and their order, follows from the calls before, never from the clock. A model that is served
        elsewhere cannot promise that: it orders by ticket what has arrived.
        """

    def suspend(self) -> dict[int, Completion | None]:
        """Takes all open tickets out, and returns of each what it has so far: None where it has to be asked anew."""

    @property
    def pending(self) -> int:
        """Tickets submitted and not returned."""

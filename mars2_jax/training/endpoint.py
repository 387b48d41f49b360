"""An agent whose model is served elsewhere. It plays in evaluations; it has no weights here and cannot learn."""

from __future__ import annotations

import logging
import queue
import time
from concurrent.futures import Future
from types import TracebackType

import numpy as np
from ml_collections import FrozenConfigDict

from mars2_jax.rollout.endpoint import Endpoint, Messages, Reply
from mars2_jax.rollout.types import Completion, SamplingParams
from mars2_jax.search.writer import Attempt, Draft
from mars2_jax.tasks.extract import extract_program
from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.prompts import Feedback, attempt_messages, refinement_candidates

__all__ = ["EndpointAgent", "EndpointWriter"]

_PATIENCE = 0.02
"""Seconds that a step waits for an answer. Other agents decode between steps: they must not stall."""


class EndpointAgent:
    """A member of the team that is served elsewhere. A context manager: the connection lasts as long.

    Attributes:
      name: its name in the config.
      endpoint: the connection.
    """

    def __init__(self, name: str, run: FrozenConfigDict):
        self.name, self._run = name, run
        self.endpoint = Endpoint(name, run.agents[name].endpoint)

    def __enter__(self) -> EndpointAgent:
        self.endpoint.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.endpoint.__exit__(kind, error, trace)

    def writer(self, sampling: SamplingParams, *, single: bool = False) -> EndpointWriter:
        """Its voice in a search or in single answers, which are asked for alike: the server knows how long a prompt may
        be."""
        del single
        role, feedback = self._run.agents[self.name].role, self._run.prompts.feedback
        return EndpointWriter(self.name, self.endpoint, sampling, role=role, feedback=feedback)


class EndpointWriter:
    """A `search.writer.Writer` that asks an endpoint.

    Answers come back when they come. A search with such a writer is not reproducible: which nodes are chosen hangs on
    which answers were there first, and few servers honour the seed of a request to the letter.

    Args:
      name: the agent's name.
      endpoint: the connection, open.
      sampling: how every response is drawn.
      role: system prompt; "" for none.
      feedback: what a refinement prompt tells about the failure.

    Attributes:
      seconds: wall time spent in `step` so far.
      tokens: of the answers so far, by the server's count.
    """

    def __init__(self, name: str, endpoint: Endpoint, sampling: SamplingParams, *, role: str, feedback: Feedback):
        self.name = name
        self._endpoint, self._sampling, self._role = endpoint, sampling, role
        self._feedback: Feedback = feedback
        self._open: dict[int, tuple[Problem, Future[Reply]]] = {}
        self._arrived: queue.SimpleQueue[tuple[int, Future[Reply]]] = queue.SimpleQueue()
        self._warned = False
        self.seconds, self.tokens = 0.0, 0

    def submit(
        self, ticket: int, problem: Problem, previous: Attempt | None, key: np.ndarray, so_far: Completion | None = None
    ) -> None:
        """See `Writer.submit`. The messages are those that a local agent's chat template would get."""
        if ticket in self._open:
            raise ValueError(f"ticket {ticket} is open already")
        if so_far is not None:
            raise ValueError(f"ticket {ticket} has half a response, which a server cannot go on with")
        candidates: list[Messages] = []
        if previous is not None:
            program, grade = previous.draft.program, previous.grade
            candidates += refinement_candidates(problem, self._role, program, grade, feedback=self._feedback)
        candidates.append(attempt_messages(problem, self._role))
        # 31 bits: some servers take no more.
        seed = int(key[0] ^ key[1]) & 0x7FFFFFFF
        future, arrived = self._endpoint.ask(candidates, self._sampling, seed), self._arrived
        self._open[ticket] = problem, future
        future.add_done_callback(lambda future: arrived.put((ticket, future)))

    def dispatch(self) -> None:
        """See `Writer.dispatch`. Its requests are under way since they were submitted."""

    def step(self) -> list[Draft]:
        """See `Writer.step`: waits a moment for an answer, and returns all that are there, in order of their tickets.

        Raises:
          EndpointError, PromptTooLong: a request failed for good.
        """
        started = time.perf_counter()
        arrived: list[tuple[int, Future[Reply]]] = []
        try:
            arrived.append(self._arrived.get(timeout=_PATIENCE))
            while True:
                arrived.append(self._arrived.get_nowait())
        except queue.Empty:
            pass
        self.seconds += time.perf_counter() - started
        return [self._draft(ticket, future.result()) for ticket, future in sorted(arrived, key=lambda one: one[0])]

    def _draft(self, ticket: int, reply: Reply) -> Draft:
        problem, _ = self._open.pop(ticket)
        self.tokens += reply.tokens
        if not reply.text.strip() and not self._warned:
            self._warned = True
            logging.getLogger(__name__).warning(
                "agent %r: an answer is empty (finish_reason %r); it counts as one without a program%s",
                self.name,
                reply.finish,
                "; config.rollout.max_new_tokens must hold hidden thoughts too" if reply.finish == "length" else "",
            )
        program = extract_program(reply.text, problem)
        return Draft(ticket, reply.text, program, completion=None, counted=reply.tokens)

    def suspend(self) -> dict[int, Completion | None]:
        """See `Writer.suspend`. What is under way is given up and has to be asked anew."""
        tickets, self._open = self._open, {}
        # The old queue still gets what is given up.
        self._arrived = queue.SimpleQueue()
        for _, future in tickets.values():
            future.cancel()
        return dict.fromkeys(tickets)

    @property
    def pending(self) -> int:
        return len(self._open)

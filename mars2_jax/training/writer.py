"""An agent's voice in a search: prompts in its chat template, an engine behind, programs out."""

from __future__ import annotations

import time

import numpy as np

from mars2_jax.errors import PromptTooLong
from mars2_jax.models.tokenizer import ChatTokenizer
from mars2_jax.rollout.ports import Port
from mars2_jax.rollout.types import Completion, Request, SamplingParams
from mars2_jax.search.writer import Attempt, Draft
from mars2_jax.tasks.extract import extract_program
from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.prompts import Feedback, attempt_messages, refinement_candidates

__all__ = ["EngineWriter", "Prompter"]


class Prompter:
    """Problems and earlier attempts to prompt tokens, for one agent.

    Args:
      name: the agent's name.
      tokenizer: the model's, with its chat template.
      role: system prompt; "" for none.
      feedback: what a refinement prompt tells about the failure.
      max_tokens: longest prompt.
      key: the config key that says so, for messages.
    """

    def __init__(
        self, name: str, tokenizer: ChatTokenizer, *, role: str, feedback: Feedback, max_tokens: int, key: str
    ):
        self._key = key
        self._name, self._tokenizer, self._role = name, tokenizer, role
        self._feedback: Feedback = feedback
        self._max_tokens = max_tokens

    def attempt(self, problem: Problem) -> np.ndarray:
        """int32[P]: the prompt of a first attempt.

        Raises:
          PromptTooLong: it does not fit.
        """
        prompt = self._tokenizer.encode_chat(attempt_messages(problem, self._role))
        if len(prompt) > self._max_tokens:
            raise PromptTooLong(
                f"problem {problem.id!r} makes a prompt of {len(prompt)} tokens for agent {self._name!r}, more than "
                f"config.{self._key}={self._max_tokens}: raise it, or leave the problem out"
            )
        return prompt

    def refinement(self, problem: Problem, previous: Attempt) -> np.ndarray:
        """int32[P]: the prompt that asks for a better program; cut until it fits, the feedback first.

        Where not even the statement with a short verdict fits, the problem is asked anew.
        """
        for messages in refinement_candidates(
            problem, self._role, previous.draft.program, previous.grade, feedback=self._feedback
        ):
            prompt = self._tokenizer.encode_chat(messages)
            if len(prompt) <= self._max_tokens:
                return prompt
        return self.attempt(problem)


class EngineWriter:
    """A `search.writer.Writer` that decodes with an engine.

    Args:
      name: the agent's name.
      engine: decodes; its port to an engine, which may have others.
      tokenizer: the model's.
      prompter: makes the prompts.
      sampling: how every response is drawn.

    Attributes:
      seconds: wall time spent in `dispatch` and `step` so far.
      tokens: of the responses that it returned, those that were decoded for it: what came with `so_far` was before.
    """

    def __init__(self, name: str, engine: Port, tokenizer: ChatTokenizer, prompter: Prompter, sampling: SamplingParams):
        self.name = name
        self._engine, self._tokenizer, self._prompter, self._sampling = engine, tokenizer, prompter, sampling
        # The problem, and tokens that there were of the response when it was submitted.
        self._open: dict[int, tuple[Problem, int]] = {}
        self.seconds, self.tokens = 0.0, 0

    def submit(
        self, ticket: int, problem: Problem, previous: Attempt | None, key: np.ndarray, so_far: Completion | None = None
    ) -> None:
        """See `Writer.submit`.

        Raises:
          PromptTooLong: the statement does not fit.
        """
        if ticket in self._open:
            raise ValueError(f"ticket {ticket} is open already")
        prompt = self._prompter.attempt(problem) if previous is None else self._prompter.refinement(problem, previous)
        if so_far is not None and not np.array_equal(prompt, so_far.prompt):
            raise ValueError(f"ticket {ticket} was suspended with another prompt than it has now")
        self._engine.submit(Request(ticket, prompt, key, self._sampling, so_far))
        self._open[ticket] = problem, 0 if so_far is None else len(so_far.tokens)

    def dispatch(self) -> None:
        """See `Writer.dispatch`: the next chunk."""
        started = time.perf_counter()
        self._engine.dispatch()
        self.seconds += time.perf_counter() - started

    def step(self) -> list[Draft]:
        """See `Writer.step`: one chunk of decoding, for all that have a port to the engine."""
        drafts = []
        started = time.perf_counter()
        completions = self._engine.step()
        self.seconds += time.perf_counter() - started
        for completion in completions:
            problem, before = self._open.pop(completion.id)
            self.tokens += len(completion.tokens) - before
            text = self._tokenizer.decode(completion.tokens)
            drafts.append(Draft(completion.id, text, extract_program(text, problem), completion))
        return drafts

    def suspend(self) -> dict[int, Completion | None]:
        """See `Writer.suspend`."""
        tickets, self._open = list(self._open), {}
        return {ticket: self._engine.abort(ticket) for ticket in tickets}

    @property
    def pending(self) -> int:
        return len(self._open)

"""A request in a slot, and what it has so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mars2_jax.rollout.types import Completion, Finish, Request

__all__ = ["Running"]


@dataclasses.dataclass
class Running:
    """A request in a slot. `order` is its place in the order of submission; the arrays are the response so far."""

    request: Request
    order: int
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    scores: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        if (so_far := self.request.so_far) is not None:
            self.tokens, self.logprobs, self.scores = so_far.tokens, so_far.logprobs, so_far.scores

    @property
    def length(self) -> int:
        """Entries that it has in the cache: all its tokens but the last, which the next step reads."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def left(self) -> int:
        """Tokens that its budget still allows."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray, scores: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens, tokens])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.scores = np.concatenate([self.scores, scores])

    def cut(self, detokenize: Callable[[np.ndarray], str], new: int) -> bool:
        """Cuts the response after the token that completes a stop string, if one of the `new` last tokens does."""

        if not self.request.sampling.stop:
            return False

        # A token is at least one byte: no stop string reaches further back than this.
        first = max(0, len(self.tokens) - new - max(len(stop.encode()) for stop in self.request.sampling.stop))

        def stopped(count: int) -> bool:
            text = detokenize(self.tokens[first:count])
            return any(stop in text for stop in self.request.sampling.stop)

        if not stopped(len(self.tokens)):
            return False
        count = next(n for n in range(len(self.tokens) - new + 1, len(self.tokens) + 1) if stopped(n))
        self.tokens, self.logprobs, self.scores = self.tokens[:count], self.logprobs[:count], self.scores[:count]
        return True

    def completion(self, finish: Finish) -> Completion:
        return Completion(self.request.id, self.request.prompt, self.tokens, self.logprobs, self.scores, finish)

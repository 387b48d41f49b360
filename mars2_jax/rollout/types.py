"""What goes into an engine and what comes out. Tokens in, tokens out; no JAX, no tokenizer."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

__all__ = ["Completion", "Finish", "Request", "SamplingParams"]

Finish = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Nothing here is baked into a program: no value causes a compilation.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.
      min_p: drop tokens less likely than min_p times the most likely one; 0 drops none.
      max_new_tokens: budget of the response; the stop token counts.
      stop: strings that end a response once its text holds one of them. The tokens up to and with the one that
        completes the string are kept.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop: object = self.stop  # whatever its declared type
        if isinstance(stop, str):
            raise ValueError(f"stop is a tuple of strings, such as ({stop!r},), not a string")
        drawn = 0 <= self.temperature < math.inf
        if not (drawn and 0 <= self.top_k < 2**31 and 0 < self.top_p <= 1 and 0 <= self.min_p < 1):
            raise ValueError(f"sampling parameters out of range: {self}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, is {self.max_new_tokens}")
        if not all(self.stop):
            raise ValueError("an empty stop string would end every response before it begins")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to be continued.

    Attributes:
      id: the caller's handle, returned in the completion.
      prompt: int32[P] token ids.
      key: uint32[2], the data of a JAX PRNG key. Token number i of the response is drawn with `fold_in(key, i)`, so
        that it depends neither on the slot nor on the neighbours.
      sampling: how to draw. Its budget is that of the whole response.
      so_far: the beginning of the response, from `Engine.abort`; the rest is drawn as if it had never been interrupted.
    """

    id: int
    prompt: np.ndarray
    key: np.ndarray
    sampling: SamplingParams
    so_far: Completion | None = None

    @property
    def context(self) -> np.ndarray:
        """int32[P + R]: all its tokens so far."""
        response = self.so_far.tokens if self.so_far is not None else np.zeros(0, np.int32)
        return np.concatenate([self.prompt, response]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      id: that of the request.
      prompt: int32[P], as submitted.
      tokens: int32[R], the response; ends with the stop token where finish is "stop".
      logprobs: float32[R], log-probability of each token under the distribution it was drawn from (temperature and
        filters included; for greedy decoding under temperature 1).
      scores: float32[R], log-probability of each token under the model itself (temperature 1, no filter).
      finish: "stop" (an end token or a stop string), "length" (the budget), "abort" (taken out before its end).
    """

    id: int
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    scores: np.ndarray
    finish: Finish

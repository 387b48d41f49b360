"""The weights that the KL term of an agent's loss compares it with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mars2_jax.learning.update import Learner

__all__ = ["Reference"]


class Reference:
    """The checkpoint's weights for good, shared by all agents that name it; or, refreshed, the agent's own weights of
    some updates ago: a copy, in the type that the model computes in, of all that it learns (of adapters, these alone).

    Args:
      learner: what scores with it.
      params: the checkpoint's weights; or, with `every`, those that the agent starts from, which are copied.
      base: what lies under them, if they are adapters.
      every: updates after which the agent's weights are copied; 0 is never.
      dtype: of the copies.

    Attributes:
      every: as given.
      params: what it scores with now. Where it is refreshed, checkpoints have it.
    """

    def __init__(
        self, learner: Learner, params: nnx.State, base: nnx.State | None = None, *, every: int = 0, dtype: Any = None
    ):
        self._learner, self._base, self._dtype, self.every = learner, base, dtype, every
        self.params = self._copy(params) if every else params

    def is_policy(self, updates: int) -> bool:
        """Whether an agent that has made so many updates still has these weights."""
        return updates == 0 or self.due(updates)

    def due(self, updates: int) -> bool:
        """Whether it is to become the weights of an agent that has made so many updates."""
        return bool(self.every) and updates % self.every == 0

    def take(self, params: nnx.State) -> None:
        """Becomes a copy of these weights."""
        self.params = self._copy(params)

    def score(
        self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], *, longest: int
    ) -> list[np.ndarray]:
        """See `Learner.score_responses`."""
        return self._learner.score_responses(self.params, prompts, responses, self._base, longest=longest)

    def _copy(self, params: nnx.State) -> nnx.State:
        # Never the same arrays: updates donate the weights that are learned.
        return jax.tree.map(lambda x: jnp.array(x, self._dtype, copy=True), params)

"""What a run's seed is used for: one key for each purpose, so that none depends on how often another was used."""

from __future__ import annotations

import zlib

import jax
from jaxtyping import Array

__all__ = ["adapter_key", "evaluation_key", "step_key"]

_TRAIN, _EVALUATE, _ADAPTERS = 0, 1, 2


def step_key(seed: int, step: int) -> Array:
    """The key of one training step's search."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _TRAIN), step)


def evaluation_key(seed: int) -> Array:
    """The key of every evaluation, before and after training."""
    return jax.random.fold_in(jax.random.key(seed), _EVALUATE)


def adapter_key(seed: int, agent: str) -> Array:
    """The key that an agent's adapters start from: by its name, whatever other agents there are."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _ADAPTERS), zlib.crc32(agent.encode()))

"""Dynamic filtering (DAPO, arXiv 2503.14476, §3.2): which trees have something to teach, and to whom."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from mars2_jax.learning.advantage import response_advantages
from mars2_jax.learning.batch import TreeArrays, stack_trees
from mars2_jax.training.buffer import TreeKey

__all__ = ["telling_trees"]


def telling_trees(
    trees: Mapping[TreeKey, TreeArrays],
    voices: Mapping[str, Collection[int]],
    learning: FrozenConfigDict,
    budget: int,
) -> dict[str, set[TreeKey]]:
    """The trees that each learner would learn from: those in which a node that its weights wrote has an advantage.

    The advantages are those of an update (`response_advantages`), by the same function: a tree that is not here has the
    advantage 0 on every node of the learner. So where all its graded nodes earned the same, whatever the estimator;
    with groups of an agent's nodes also where only another's differ.

    Args:
      trees: all trees of a step: an estimator may compare those of one problem.
      voices: of each learner, the numbers in the trees of the agents that play with its weights.
      learning: the `learning` section; the KL is not in the reward, or scores would be needed first.
      budget: most tokens a response may have.
    """
    keys = list(trees)
    forest = stack_trees(list(trees.values()))
    advantage = np.asarray(_advantages(forest, learning, budget))[: len(keys)]
    agent, graded = forest["agent"][: len(keys)], forest["graded"][: len(keys)]

    def taught(numbers: Collection[int]) -> set[TreeKey]:
        found = (graded & np.isin(agent, list(numbers)) & (advantage != 0)).any(-1)
        return {keys[t] for t in np.flatnonzero(found)}

    return {name: taught(numbers) for name, numbers in voices.items()}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _advantages(forest: dict[str, Any], learning: FrozenConfigDict, budget: int) -> Float[Array, "trees nodes"]:
    return response_advantages(**forest, config=learning, budget=budget).advantage

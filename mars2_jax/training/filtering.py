"""Dynamic filtering (DAPO, arXiv 2503.14476, §3.2): which trees have something to teach, and to whom."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from mars2_jax.learning.advantage import response_advantages
from mars2_jax.learning.batch import TreeArrays, stack_trees
from mars2_jax.training.buffer import TreeKey
from mars2_jax.training.records import Node

__all__ = ["telling_nodes"]


def telling_nodes(
    written: Mapping[str, Sequence[Node]],
    trees: Mapping[TreeKey, TreeArrays],
    learning: FrozenConfigDict,
    budget: int,
) -> dict[str, list[Node]]:
    """What is left to learn from where each learner leaves out the trees in which none of its nodes has an advantage.

    The advantages are those of an update (`response_advantages`), by the same function. So a tree is left out where all
    its graded nodes earned the same, whatever the estimator; with groups of one agent's nodes also where only those of
    others differ; and with `overlong_mask` where those with an advantage were all cut off by the budget.

    Args:
      written: by learner, the nodes that it would learn from.
      trees: all trees of the step: an estimator may compare those of one problem.
      learning: the `learning` section; the KL is not in the reward, or scores would be needed first.
      budget: most tokens a response may have.
    """
    forest = stack_trees(list(trees.values()))
    advantage = dict(zip(trees, np.asarray(_advantages(forest, learning, budget)), strict=False))
    learned = lambda completion: not (learning.overlong_mask and completion.finish == "length")
    telling = {}
    for name, nodes in written.items():
        teaching = {tree for tree, slot, completion in nodes if advantage[tree][slot] != 0 and learned(completion)}
        telling[name] = [node for node in nodes if node[0] in teaching]
    return telling


@functools.partial(jax.jit, static_argnums=(1, 2))
def _advantages(forest: dict[str, Any], learning: FrozenConfigDict, budget: int) -> Float[Array, "trees nodes"]:
    return response_advantages(**forest, config=learning, budget=budget).advantage

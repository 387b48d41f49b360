"""The same trees in TreeQuest and in a `Forest`, told the same things."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from mars2_jax.search.forest import Expansion, Forest, empty, observe, reserve

STRATEGIES = {"agent_first": "stack", "node_first": "multiarm_bandit_thompson"}


@dataclasses.dataclass(frozen=True)
class Tell:
    """A new node: `agent` wrote it under slot `parent` and it earned `reward`. The n-th tell is slot n (from 1)."""

    parent: int
    agent: int
    reward: float


def forest_of(tells: Sequence[Tell], agents: int, nodes: int) -> Forest:
    """A forest of one tree."""
    forest = empty(1, nodes, agents)
    for tell in tells:
        forest, slot = reserve(forest, Expansion(jnp.array([tell.parent]), jnp.array([tell.agent])))
        forest = observe(forest, 0, slot[0], jnp.float32(tell.reward))
    return forest


def treequest_of(tells: Sequence[Tell], agents: int, order: str, posterior: str):
    """The algorithm and its state; slot s is the node with expand_idx s - 1, agent a is the action "a"."""
    treequest = pytest.importorskip("treequest")
    algorithm = treequest.ABMCTSA(dist_type=posterior, model_selection_strategy=STRATEGIES[order])
    state = algorithm.init_tree()
    actions = [str(a) for a in range(agents)]
    algorithm.ask_batch(state, 1, actions)  # makes the store of rewards and the root's state
    for tell in tells:
        parent = state.tree.get_node(tell.parent - 1)
        state.thompson_states.get_or_create(parent, actions)
        trial = state.trial_store.create_trial(parent, str(tell.agent))
        state = algorithm.tell(state, trial.trial_id, ("", tell.reward))
    return algorithm, state


def moments(rewards: Sequence[float]) -> np.ndarray:
    r = np.asarray(rewards, np.float64)
    return np.array([len(r), r.sum(), (r * r).sum()])

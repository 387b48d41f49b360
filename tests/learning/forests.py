"""Random search trees, and one worked out by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from ml_collections import FrozenConfigDict

from mars2_jax.config import default_config

SLOTS = 9
REWARDS = [0.0, 1.0, 0.25, 1 / 3, 2 / 3, 0.1]


@st.composite
def trees(draw):
    """One ragged tree in SLOTS slots: parents before children, voids with NaN rewards, empty slots at the end."""
    nodes = draw(st.integers(0, SLOTS - 1))
    levels = draw(st.sampled_from([[0.5], [0.0, 1.0], REWARDS]))
    parent = np.full(SLOTS, -1, np.int32)
    agent = np.full(SLOTS, -1, np.int32)
    reward = np.full(SLOTS, np.nan, np.float32)
    graded = np.zeros(SLOTS, bool)
    for v in range(1, nodes + 1):
        parent[v] = draw(st.integers(0, v - 1))
        agent[v] = draw(st.integers(0, 2))
        if draw(st.integers(0, 4)):
            graded[v] = True
            reward[v] = draw(st.sampled_from(levels))
    return reward, parent, agent, graded


forests = st.lists(trees(), min_size=3, max_size=3).map(lambda ts: tuple(np.stack(x) for x in zip(*ts)))


def learning(**changes) -> FrozenConfigDict:
    """The default `learning` section, changed."""
    config = default_config().learning
    config.update(changes)
    return FrozenConfigDict(config)


# A tree of eight nodes (slot: parent, reward):
#   1: 0, 1    2: 0, 0    3: 0, void    4: 1, 0    5: 1, 1    6: 2, 1    7: 4, 0    8: 7, 1
GOLDEN_REWARD = np.array([0, 1, 0, 0, 0, 1, 1, 0, 1], np.float32)
GOLDEN_PARENT = np.array([-1, 0, 0, 0, 1, 1, 2, 4, 7], np.int32)
GOLDEN_AGENT = np.array([-1, 0, 1, 0, 1, 0, 1, 0, 1], np.int32)
GOLDEN_GRADED = np.array([0, 1, 1, 0, 1, 1, 1, 1, 1], bool)
GOLDEN = (GOLDEN_REWARD, GOLDEN_PARENT, GOLDEN_AGENT, GOLDEN_GRADED)

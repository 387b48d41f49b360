"""Which nodes of a batch are in which of the updates that are made from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

__all__ = ["minibatches"]


def minibatches(
    nodes: int, *, epochs: int, parts: int, seed: int, agent: str, updates: int
) -> Iterator[tuple[int, ...]]:
    """The nodes of each update, by their numbers: `epochs` passes of `parts` updates each (PPO, arXiv 1707.06347,
    algorithm 1), every node once a pass.

    Before each pass the nodes are shuffled: sorted by a hash of the seed, the agent and the updates that it has made,
    so that nothing need be saved, and no library's generator can change it. A pass of one update, for which the order
    makes no difference, keeps it.

    Args:
      nodes: how many there are, a multiple of `parts`.
      epochs: passes.
      parts: updates a pass.
      seed: the run's.
      agent: the name of the agent that learns.
      updates: how many it has made.

    Raises:
      ValueError: the nodes cannot be shared out evenly.
    """
    if nodes % parts:
        raise ValueError(f"{nodes} nodes cannot be shared out among {parts} updates")
    size = nodes // parts
    for epoch in range(epochs):
        made = updates + epoch * parts

        def rank(node: int, made: int = made) -> bytes:
            return hashlib.blake2b(f"{seed}/{agent}/{made}/{node}".encode(), digest_size=16).digest()

        order = sorted(range(nodes), key=rank) if parts > 1 else list(range(nodes))
        yield from (tuple(order[start : start + size]) for start in range(0, nodes, size))

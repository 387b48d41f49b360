"""Host data between the processes of a run, and between them and the global mesh.

The functions that say "all processes" are meetings: every process calls them, at the same place in the same order. With
one process they return what they were given, and nothing is compiled.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from mars2_jax.errors import ConfigError
from mars2_jax.models.buckets import bucket

__all__ = ["agree_on", "any_process", "from_leader", "gather", "leads", "put", "share", "to_host"]

_CHUNK = 1 << 22
"""Bytes of each process in one all-gather: every device holds that of all processes for a moment."""


def leads() -> bool:
    """Whether this is the process that writes the run's files and talks to the terminal."""
    return jax.process_index() == 0


def share(count: int) -> range:
    """Which of `count` pieces of work are this process's: every n-th of n processes."""
    return range(jax.process_index(), count, jax.process_count())


def gather(data: bytes) -> list[bytes]:
    """What all processes gave, in their order; the lengths may differ, and be 0."""
    if jax.process_count() == 1:
        return [data]
    packed = np.frombuffer(zlib.compress(data, 1), np.uint8)
    sizes = multihost_utils.process_allgather(np.uint32(len(packed)))
    # Of a few sizes: each is a program.
    chunk = bucket(min(int(sizes.max()), _CHUNK), 1024)
    pieces = []
    for start in range(0, int(sizes.max()), chunk):
        piece = np.zeros(chunk, np.uint8)
        mine = packed[start : start + chunk]
        piece[: len(mine)] = mine
        pieces.append(multihost_utils.process_allgather(piece))
    whole = np.concatenate(pieces, axis=1)
    return [zlib.decompress(row[:size].tobytes()) for row, size in zip(whole, sizes.tolist(), strict=True)]


def from_leader(data: bytes) -> bytes:
    """What process 0 gave to it; of the others it is not looked at."""
    return gather(data if leads() else b"")[0]


def any_process(flag: bool) -> bool:
    """Whether one of all processes says so."""
    return any(gather(b"\1" if flag else b"")) if jax.process_count() > 1 else flag


def agree_on(what: str, value: str) -> None:
    """Sees that all processes have the same `value`.

    Raises:
      ConfigError: on all of them; names those that differ from process 0 in `what`.
    """
    first, *others = gather(value.encode("utf-8", "surrogatepass"))
    if different := [str(i) for i, other in enumerate(others, 1) if other != first]:
        raise ConfigError(
            f"{what} of process {', '.join(different)} differs from that of process 0: start all processes of a run "
            "with the same command on the same files"
        )


def to_host(tree: Any) -> Any:
    """A pytree of JAX arrays as NumPy's. Those on the global mesh come whole to all processes."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def one(x: Any) -> np.ndarray:
        split = isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)
        return multihost_utils.process_allgather(x, tiled=True) if split else np.asarray(x)

    return jax.tree.map(one, tree)


def put(tree: Any, sharding: Sharding) -> Any:
    """NumPy arrays, the same in all processes, onto the devices of all; each takes the parts that its own need.

    `jax.device_put` would do it too, but sends all of them around to see that they are the same.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def one(x: Any) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, tree)

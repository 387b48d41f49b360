"""Items of a checkpoint that Orbax has no handler for: arrays of the host, and the seal over all other items."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from mars2_jax.parallel.exchange import leads

__all__ = [
    "SEAL",
    "HostHandler",
    "HostRestore",
    "HostSave",
    "SealHandler",
    "SealRestore",
    "SealSave",
    "digests",
]

SEAL = "sha256.json"
"""The file of the item `seal`: what `digests` says."""

_CONTENT = ("state", "host", "meta")


def digests(root: epath.Path) -> dict[str, str]:
    """Relative path -> SHA-256, for all files of the items with content."""
    found = {}
    for item in _CONTENT:
        for path in _files(root / item):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
            found[path.relative_to(root).as_posix()] = digest.hexdigest()
    return found


def _files(directory: epath.Path) -> Iterator[epath.Path]:
    if directory.exists():
        for path in directory.iterdir():
            if path.is_dir():
                yield from _files(path)
            else:
                yield path


class HostHandler(ocp.CheckpointHandler):
    """A dict of NumPy arrays in one .npz file."""

    def save(self, directory: epath.Path, args: HostSave) -> None:
        if leads():
            with (directory / "arrays.npz").open("wb") as file:
                np.savez(file, allow_pickle=False, **dict(args.arrays))

    def restore(self, directory: epath.Path, args: HostRestore | None = None) -> dict[str, np.ndarray]:
        # Earlier versions, of one process, gave it another name.
        (path,) = directory.glob("*.npz")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)


@ocp.args.register_with_handler(HostHandler, for_save=True)
class HostSave(ocp.args.CheckpointArgs):
    """Saves these arrays, of any shapes, by name."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = arrays


@ocp.args.register_with_handler(HostHandler, for_restore=True)
class HostRestore(ocp.args.CheckpointArgs):
    """Restores what `HostSave` saved."""


class SealHandler(ocp.CheckpointHandler):
    """Writes the digests of the other items when Orbax has finished them, before the step gets its final name."""

    def save(self, directory: epath.Path, args: SealSave) -> None:
        """Nothing can be said yet: the other items are still being written."""

    def restore(self, directory: epath.Path, args: SealRestore | None = None) -> None:
        """`Checkpointer` reads the seal before it restores anything."""

    def finalize(self, directory: epath.Path) -> None:
        if not leads():
            return
        root = directory.parent
        unfinished = [item for item in _CONTENT if not (root / item).exists()]
        if unfinished:
            raise RuntimeError(f"Orbax sealed {root} before its items {unfinished} were finished")
        (directory / SEAL).write_text(json.dumps(digests(root), indent=1))


@ocp.args.register_with_handler(SealHandler, for_save=True)
class SealSave(ocp.args.CheckpointArgs):
    """Seals the checkpoint."""


@ocp.args.register_with_handler(SealHandler, for_restore=True)
class SealRestore(ocp.args.CheckpointArgs):
    """Restores nothing."""

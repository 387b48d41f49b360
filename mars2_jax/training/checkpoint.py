"""Checkpoints of a run: all or nothing, verified before they are used, bit-exact.

A checkpoint is one Orbax step directory, `checkpoints/<step>/`, of four items:

- `state`: a pytree of arrays (weights, optimizer states, ...), in Orbax's sharded array format.
- `host`: a flat dict of NumPy arrays of any length (buffers of finished nodes, ...), one .npz file. Lengths differ from
  step to step, so these arrays have no abstract target that `state` could be restored into.
- `meta`: a dict of plain JSON (step counts, the resolved config, ...).
- `seal`: the SHA-256 of every file of the other three.

Orbax writes into a temporary directory and renames it when all is there, so a killed save leaves nothing that looks
like a checkpoint. The seal covers what happens to the files later: array files have no checksums of their own, and a
damaged one may well be read without an error.

Of several processes each writes and reads its own parts of `state`; `host` and `meta`, which are the same in all, are
process 0's to write. The folder is one that all see. All call the same methods in the same order, and process 0 says
which checkpoint is whole. As many processes as there are may go on from it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as preservation

from mars2_jax.errors import ConfigError, DataError, StorageError
from mars2_jax.files import storage
from mars2_jax.parallel.exchange import from_leader, leads
from mars2_jax.training.checkpoint_items import (
    SEAL,
    HostHandler,
    HostRestore,
    HostSave,
    SealHandler,
    SealRestore,
    SealSave,
    digests,
)

__all__ = ["Checkpoint", "Checkpointer"]

_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EFBIG)


class Checkpoint(NamedTuple):
    """What `Checkpointer.restore` returns.

    Attributes:
      step: the training step after which it was saved.
      state: the pytree of arrays; nested dicts and lists where no target was given.
      host: name -> NumPy array.
      meta: the JSON object.
    """

    step: int
    state: Any
    host: dict[str, np.ndarray]
    meta: dict[str, Any]


class Checkpointer:
    """Saves and restores the checkpoints of one run. A context manager; leaving it waits for the last save.

    Args:
      workdir: the run's directory; checkpoints go to its folder `checkpoints`.
      keep: how many checkpoints are kept; older ones are deleted.
      every: steps between checkpoints, see `due`.
      keep_best: how many are kept beside the newest for their score in `best_metric`, the higher the better.
      best_metric: the metric that `keep_best` and `best` go by; "" scores none.
      read_only: neither writes nor cleans up; for commands that read a run which may still be training.

    Raises:
      StorageError: the folder cannot be written.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        keep: int = 2,
        every: int = 1,
        keep_best: int = 0,
        best_metric: str = "",
        read_only: bool = False,
    ):
        if keep < 1 or every < 1:
            raise ValueError(f"keep and every must be at least 1, are {keep} and {every}")
        self.directory = epath.Path(os.path.abspath(workdir)) / "checkpoints"
        self.every, self.best_metric = every, best_metric
        score = lambda metrics: metrics.get(best_metric, -math.inf)
        ranked: dict[str, Any] = dict(best_fn=score) if best_metric else {}
        # The seal is registered last, because Orbax finishes items in this order.
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for name, handler, save, restore in (
            ("state", ocp.StandardCheckpointHandler(), ocp.args.StandardSave, ocp.args.StandardRestore),
            ("host", HostHandler(), HostSave, HostRestore),
            ("meta", ocp.JsonCheckpointHandler(), ocp.args.JsonSave, ocp.args.JsonRestore),
            ("seal", SealHandler(), SealSave, SealRestore),
        ):
            registry.add(name, save, handler)
            registry.add(name, restore, handler)
        if read_only:
            # What Orbax would set by itself, with a warning for each.
            options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0, **ranked)
            logging.getLogger("absl").addFilter(_says_more_than_read_only)
        else:
            # Now, not after the first step: Orbax would wait minutes for a folder that it cannot make.
            with storage(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.directory).close()
            policies: list[Any] = [preservation.LatestN(keep)]
            if best_metric:
                best = preservation.BestN(get_metric_fn=score, n=keep_best, keep_checkpoints_without_metrics=False)
                policies.append(best)
            options = ocp.CheckpointManagerOptions(
                create=True,
                cleanup_tmp_directories=True,
                preservation_policy=preservation.AnyPreservationPolicy(policies),
                **ranked,
            )
        self._manager = _Manager(self.directory, options=options, handler_registry=registry)
        self._verified: set[int] = set()

    def due(self, step: int) -> bool:
        """Whether `step` is one of those that are saved by schedule."""
        return step % self.every == 0

    def save(
        self,
        step: int,
        state: Any,
        meta: Mapping[str, Any],
        host: Mapping[str, np.ndarray] | None = None,
        *,
        score: float | None = None,
    ) -> None:
        """Saves a checkpoint. Returns when the arrays are copied to host memory and may be donated; writing goes on.

        Args:
          step: the step just finished; greater than every step saved before.
          state: pytree of JAX or NumPy arrays.
          meta: what a JSON round trip leaves as it is (string keys, lists, no tuples, no NaN).
          host: name -> NumPy array of numbers, booleans or strings, of any shape.
          score: the checkpoint's `best_metric`; None where it was not measured, or is no finite number.

        Raises:
          ValueError: for meta or host data that cannot be stored exactly, or a step that was saved before.
          StorageError: this or the save before it could not be written.
        """
        if json.loads(json.dumps(dict(meta), allow_nan=False)) != dict(meta):
            raise ValueError("meta does not survive a JSON round trip: use string keys, and lists instead of tuples")
        host = {name: np.asarray(array) for name, array in (host or {}).items()}
        for name, array in host.items():
            if array.dtype.kind not in "biufcUS":
                raise ValueError(f"host array {name!r} has dtype {array.dtype}, which .npz does not store exactly")
        self.wait()
        for newer in self._steps():
            if newer < step:
                break
            if leads() and self._damage(newer) is None:
                raise ValueError(f"a checkpoint of step {newer} exists in {self.directory}; cannot save step {step}")
            # Left by a run that then fell back to an older checkpoint; in the way of this one.
            self._manager.delete(newer)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            host=HostSave(host),
            meta=ocp.args.JsonSave(dict(meta)),
            seal=SealSave(),
        )
        measured = {} if score is None or not math.isfinite(score) else {self.best_metric: float(score)}
        # It may be a time, and all processes must keep the same checkpoints.
        measured = json.loads(from_leader(json.dumps(measured).encode()))
        with self._saving():
            self._manager.save(step, args=items, metrics=measured if self.best_metric else None, force=True)

    def latest(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Step and meta of the newest checkpoint that is whole, or of that of `step`, without its arrays; None where
        there is none yet.

        Raises:
          DataError: there are checkpoints, but none is whole, or not the one that was asked for.
        """
        step = self._whole(step)
        if step is None:
            return None
        return step, self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, target: Any = None, *, step: int | None = None, partial: bool = False) -> Checkpoint | None:
        """The newest checkpoint that is whole; a damaged one is passed over with a warning.

        Args:
          target: the pytree of `state` with a `jax.ShapeDtypeStruct` (or an array) in place of each array; arrays are
            restored into its structure and shardings. None restores nested dicts and lists, sharded as when saved.
          step: the checkpoint of this step and no other; None is the newest.
          partial: the target may leave out arrays of the checkpoint, which are then not read.

        Returns:
          The checkpoint, or None where the run has none yet.

        Raises:
          DataError: there are checkpoints, but none is whole, or not the one that was asked for.
          ConfigError: the checkpoint's arrays differ from the target's in name, shape or dtype.
        """
        step = self._whole(step)
        return None if step is None else self._restore(step, target, partial)

    def best(self) -> int:
        """The step whose checkpoint has the highest `best_metric`, the latest of equals. Where none is named, it is
        the metric that the run went by last.

        Raises:
          DataError: no checkpoint has a score.
        """
        self.wait()
        self._manager.reload()
        scores = {step: self._manager.metrics(step) or {} for step in self._steps()}
        metric = self.best_metric or next((name for step in sorted(scores, reverse=True) for name in scores[step]), "")
        measured = {step: score[metric] for step, score in scores.items() if metric in score}
        if not measured:
            raise DataError(
                f"no checkpoint in {self.directory} has a score"
                + (f" in config.training.best_metric={metric!r}" if metric else ": the run had no training.best_metric")
                + ": name a step"
            )
        return max(measured, key=lambda step: (measured[step], step))

    def _whole(self, step: int | None = None) -> int | None:
        """The step, or the newest, whose checkpoint is whole; None where the run has none yet."""
        self.wait()
        self._manager.reload()
        found = self._look_for(step) if leads() else None
        said = from_leader(b"" if found is None else str(found).encode())
        return int(said) if said else None

    def _look_for(self, step: int | None) -> int | None:
        steps = self._steps()
        if step is not None:
            if step not in steps:
                raise DataError(f"no checkpoint of step {step} in {self.directory}; there are {sorted(steps)}")
            if damage := self._damage(step):
                raise DataError(f"the checkpoint of step {step} in {self.directory} is not whole: {damage}")
            return step
        for newest in steps:
            # Hashing gigabytes takes its time: once a checkpoint.
            damage = None if newest in self._verified else self._damage(newest)
            if damage is None:
                self._verified.add(newest)
                return newest
            logging.getLogger(__name__).warning("passing over the checkpoint of step %d: %s", newest, damage)
        if steps:
            raise DataError(f"no checkpoint in {self.directory} is whole; to start the run over, remove this folder")
        return None

    def _restore(self, step: int, target: Any, partial: bool) -> Checkpoint:
        if target is not None:
            _check_target(self._manager.item_metadata(step)["state"], target, self.directory / str(step), partial)
        args = dict(host=HostRestore(), meta=ocp.args.JsonRestore())
        if not partial:
            args["state"] = ocp.args.StandardRestore(target)
        items = self._manager.restore(step, args=ocp.args.Composite(**args))
        state = self._read_part(step, target) if partial else items["state"]
        return Checkpoint(step, state, items["host"], items["meta"])

    def _read_part(self, step: int, target: Any) -> Any:
        """The arrays of `target`. StandardRestore, which reads the rest of Orbax's items, knows no part of a tree."""
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            arguments = ocp.checkpoint_utils.construct_restore_args(target)
            return reader.restore(
                self.directory / str(step) / "state",
                args=ocp.args.PyTreeRestore(item=target, restore_args=arguments, partial_restore=True),
            )

    def check(self) -> None:
        """Raises what went wrong in a save so far, without waiting for one that is under way."""
        with self._saving():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits until the last save is on disk; raises what went wrong in it."""
        with self._saving():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save and ends the writer threads."""
        with self._saving():
            self._manager.close()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if (reason := _storage_reason(cause)) is not None:
                    raise StorageError(
                        f"a checkpoint cannot be written to {self.directory} ({reason}): free space or rights, then "
                        "start again; the run resumes after the last checkpoint that is whole"
                    ) from error
                cause = cause.__cause__ or cause.__context__
            raise

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _steps(self) -> list[int]:
        """Steps that have a checkpoint, whole or not, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def _damage(self, step: int) -> str | None:
        """What is wrong with the files of a checkpoint; None if they are as they were written."""
        root = self.directory / str(step)
        try:
            sealed = json.loads((root / "seal" / SEAL).read_text())
        except (OSError, ValueError) as error:
            return f"its seal cannot be read ({error})"
        try:
            found = digests(root)
        except OSError as error:
            return f"its files cannot be read ({error})"
        for name in sorted(sealed.keys() | found.keys()):
            if sealed.get(name) != found.get(name):
                return f"its file {name} is {'damaged' if name in found else 'missing'}"
        return None


def _says_more_than_read_only(record: logging.LogRecord) -> bool:
    """Orbax warns that a folder is read-only where it was told to take it so."""
    return "directory is read only" not in record.getMessage()


def _storage_reason(error: BaseException) -> str | None:
    """What the system said, where it is the system that could not write; None for other errors."""
    # Not every OSError: a defect may have been raised while another, harmless one was handled.
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return error.strerror
    # Array files are written in C++, whose errors carry the system's words and not its numbers.
    return next((os.strerror(code) for code in _STORAGE_ERRORS if os.strerror(code) in str(error)), None)


def _check_target(saved: Any, target: Any, where: epath.Path, partial: bool) -> None:
    """Orbax would cast a dtype without a word; a resumed run must not differ from one that went on."""

    def table(tree: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        leaves, _ = jax.tree.flatten_with_path(tree)
        return {_path(path): (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in leaves}

    old, new = table(getattr(saved, "tree", saved)), table(target)
    for name in sorted(new.keys() if partial else old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"the checkpoint {where} was saved with another configuration: it has {_describe(old.get(name))} for "
                f"{name}, this run needs {_describe(new.get(name))}; use that run's configuration or another --workdir"
            )


def _describe(leaf: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def _path(path: tuple[Any, ...]) -> str:
    """A leaf's path in the one spelling that a pytree and Orbax's description of it share."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


class _Manager(ocp.CheckpointManager):
    """Orbax's, which starts where a score is damaged, too: it reads those of all checkpoints at once."""

    def metrics(self, step: int) -> dict[str, float] | None:
        """The score of a checkpoint by its name; None where there is none that can be read."""
        try:
            found = super().metrics(step)
        except (OSError, ValueError) as error:
            logging.getLogger(__name__).warning("the checkpoint of step %d has no score: %s", step, error)
            return None
        return found if isinstance(found, dict) else None

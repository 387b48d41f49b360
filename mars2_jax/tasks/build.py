"""Builds a problem set: from files in any layout to ArrayRecord files with random access, by a TFDS builder.

A set that was built is read as it is needed (`mars2_jax.tasks.prepared`), or by anyone else with
`tfds.builder_from_directory(folder).as_data_source(split)`. TensorFlow takes no part.

TFDS writes into a folder of another name and renames it when all is there: a build that was killed leaves nothing that
looks like a set. The next one takes the rest away.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import io
import pathlib
import re
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow_datasets as tfds

from mars2_jax.errors import DataError
from mars2_jax.files import storage
from mars2_jax.tasks.layouts import Entry
from mars2_jax.tasks.sources import entries
from mars2_jax.tasks.stored import to_text

__all__ = ["EVERY", "INCOMPLETE", "NAME", "VERSION", "build"]

NAME, VERSION = "problems", "1.0.0"
"""Of the TFDS data set: it lies in `<folder>/problems/1.0.0`. Another version is another way to store a problem."""

INCOMPLETE = f"incomplete.*_{VERSION}"
"""What TFDS calls the folder that it writes to."""

EVERY = "every"
"""TFDS split of the problems that belong to every split."""

Progress = Callable[[int], None]


class Problems(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """The TFDS data set: an example a problem, in the order of the source."""

    VERSION = tfds.core.Version(VERSION)
    name = NAME
    # Nothing is downloaded. TFDS 4.9.10 looks for checksums with a package that it does not ask for.
    url_infos: Mapping[str, Any] = types.MappingProxyType({})

    def __init__(self, *, read: Callable[[], Iterator[Entry]], progress: Progress | None = None, **kwargs: Any):
        self._read, self._progress, self._done = read, progress, 0
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            description="Programming problems, each as a line of JSON (mars2_jax.tasks.stored).",
            features=tfds.features.FeaturesDict({"id": text, "problem": tfds.features.Text()}),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict({"index": {}}),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[Any]]:
        # Once through all of it: nothing is written of a source that is wrong somewhere, and the splits are known.
        index: dict[str, list[list[Any]]] = collections.defaultdict(list)
        for entry in self._read():
            problem = entry.problem
            row = [problem.id, problem.difficulty, entry.date, bool(problem.public)]
            try:
                index[_tfds_split(entry.split)].append(row)
            except DataError as error:
                raise DataError(f"problem {problem.id!r}: {error}") from None
            self._advance()
        self.info.metadata["index"] = dict(index)
        return {split: self._generate_examples(split) for split in index}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        number = 0
        for entry in self._read():
            if _tfds_split(entry.split) == split:
                yield number, {"id": entry.problem.id, "problem": to_text(entry.problem)}
                number += 1
                self._advance()

    def _advance(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done)


def _tfds_split(split: str) -> str:
    name = split or EVERY
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or name == "all":
        raise DataError(f"split {split!r} cannot be built: name it with letters, digits and _, and not 'all'")
    return name


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """TFDS prints progress bars of its own, and that it would download."""
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()


def build(
    source: str,
    folder: str,
    *,
    public_tests: int = 2,
    on_bad: Callable[[DataError], None] | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
    """Writes a source to a folder, which then is a source itself.

    Args:
      source: see `mars2_jax.tasks.sources`.
      folder: to write to; made where it is missing.
      public_tests: how many tests are public where the source does not say which.
      on_bad: called with what is wrong with a record that is left out; by default it is raised, and nothing is built.
      progress: called with the number of problems read or written so far, twice that of the source in the end.

    Returns:
      The folder of the TFDS data set.

    Raises:
      DataError: the source is wrong, or there is a set in the folder.
      StorageError: the folder cannot be written.
    """
    root = pathlib.Path(folder).expanduser()
    target = root / NAME / VERSION
    new = not root.exists()
    with storage(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another build is at work in {root}: wait for it or choose another folder") from None
        if target.exists():
            raise DataError(f"{root} holds a problem set already: remove it or choose another folder")
        try:
            with storage(root):
                for left in (root / NAME).glob(INCOMPLETE):
                    shutil.rmtree(left)
                told: set[str] = set()

                def tell_once(error: DataError) -> None:
                    # The source is read once for each split and once before.
                    if on_bad is not None and str(error) not in told:
                        told.add(str(error))
                        on_bad(error)

                read = lambda: entries(source, public_tests=public_tests, on_bad=tell_once if on_bad else None)
                # TFDS makes a folder for downloads, though there are none.
                with _quiet(), tempfile.TemporaryDirectory() as nowhere:
                    builder = Problems(read=read, progress=progress, data_dir=str(root))
                    builder.download_and_prepare(download_dir=nowhere)
        except BaseException:
            if new:
                shutil.rmtree(root, ignore_errors=True)
            raise
    return target

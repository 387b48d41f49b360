"""Token rows: prompts and responses as arrays of few shapes, one sample to a row or several packed into one.

Shapes are rounded up to a short list of sizes, so that programs are compiled a few times, not once a batch. Padding
never changes a result: it is masked, and in a row it comes last, where causality hides it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

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

    Packed samples see nothing of each other. Where samples share their prompts, a prompt stands once in a row, in a
    segment of its own before the responses to it, which see it and themselves.

    Attributes:
      tokens: ids.
      index: where in its row each response token stands, of one sample after the other; it is at least 1, as a prompt
        has a token.
      mask: which of these are tokens, and not padding.
      before: where the token stands that comes before each response token in its sample: of a response's first, the
        last of its prompt. None, like the next two, where a row holds one sample: it is `index` - 1.
      segment: which sample of its row a token belongs to, from 1; -1, -2, ... for shared prompts; 0 for padding.
      position: that of each token in its sample, from 0.
      prefix: the segment that a token sees besides its own: of a response that of its prompt, else its own. None where
        prompts are not shared.
    """

    tokens: Int[Array, "*rows length"]
    index: Int[Array, "*rows response"]
    mask: Bool[Array, "*rows response"]
    before: Int[Array, "*rows response"] | None = None
    segment: Int[Array, "*rows length"] | None = None
    position: Int[Array, "*rows length"] | None = None
    prefix: Int[Array, "*rows length"] | None = None


def check_row(prompt: np.ndarray, tokens: np.ndarray) -> None:
    """Raises ValueError where one of them is empty or not one-dimensional."""
    if np.ndim(prompt) != 1 or np.ndim(tokens) != 1 or not len(prompt) or not len(tokens):
        raise ValueError(
            f"a prompt and a response are one-dimensional and not empty; got {np.shape(prompt)}, {np.shape(tokens)}"
        )


def packed_length(capacity: int) -> int:
    """Tokens of a packed row that is to hold `capacity`: a little more, where kernels want a round number."""
    return bucket(capacity, _SHORTEST, capacity)


def pack(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], capacity: int, *, share: bool) -> Layout:
    """Puts samples into rows: each, from the longest down, into the first row with room for it (first-fit decreasing:
    at most 11/9 of the fewest rows there can be, plus one; Johnson 1973).

    With shared prompts, the samples of one prompt come one after the other, those of the prompt with the most tokens
    first; each goes into the first row that holds its prompt and has room for its response; where none has, into the
    first with room for both.

    Args:
      prompts: int32[P] each.
      responses: int32[R] each.
      capacity: tokens of a row.
      share: whether equal prompts stand once in a row, see `Rows`.

    Returns:
      The rows, each with the numbers of its samples. A function of the arguments, ties in the order of the numbers.

    Raises:
      ValueError: a sample is longer than a row.
    """
    keys = _prompt_keys(prompts, share)
    total: dict[Hashable, int] = {}
    first: dict[Hashable, int] = {}
    for i, key in enumerate(keys):
        total[key] = total.get(key, len(prompts[i])) + len(responses[i])
        first.setdefault(key, i)
    order = lambda i: (-total[keys[i]], first[keys[i]], -len(responses[i]), i)

    rows: list[list[int]] = []
    room: list[int] = []
    holding: dict[Hashable, list[int]] = {}
    for i in sorted(range(len(keys)), key=order):
        alone = len(responses[i])
        whole = len(prompts[i]) + alone
        if whole > capacity:
            raise ValueError(f"a sample of {whole} tokens does not fit into a row of {capacity}")
        row = min((r for r in holding.get(keys[i], ()) if room[r] >= alone), default=None)
        if row is None:
            row = next((r for r, left in enumerate(room) if left >= whole), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(capacity)
            holding.setdefault(keys[i], []).append(row)
            room[row] -= len(prompts[i])
        rows[row].append(i)
        room[row] -= alone
    return rows


def _prompt_keys(prompts: Sequence[np.ndarray], share: bool) -> list[Hashable]:
    """What tells the prompts of a row apart: their tokens, or where nothing is shared their numbers."""
    return [np.asarray(p, np.int32).tobytes() for p in prompts] if share else list(range(len(prompts)))


class _Place(NamedTuple):
    """Where in its row a sample stands."""

    sample: int
    prompt: int  # place of the prompt's first token
    response: int  # place of the response's first token
    shared: bool  # whether the prompt stands there for an earlier sample already
    number: int  # of the prompt in its row, from 1


def _places(row: Sequence[int], keys: Sequence[Hashable], prompts: Any, responses: Any) -> Iterator[_Place]:
    known: dict[Hashable, tuple[int, int]] = {}
    end = 0
    for i in row:
        shared = keys[i] in known
        if not shared:
            known[keys[i]] = (end, len(known) + 1)
            end += len(prompts[i])
        start, number = known[keys[i]]
        yield _Place(i, start, end, shared, number)
        end += len(responses[i])


def make_rows(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    layout: Layout | None = None,
    rows: int | None = None,
    longest: int | None = None,
    packed: int = 0,
    share: bool = False,
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
      share: equal prompts of a packed row stand in it once.
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
    keys = _prompt_keys(prompts, share)
    places = [list(_places(row, keys, prompts, responses)) for row in layout]
    fullest = max(row[-1].response + len(responses[row[-1].sample]) for row in places)
    if packed and fullest > packed:
        raise ValueError(f"{fullest} tokens do not fit into a row of {packed}")
    length = packed or bucket(max(fullest, length), _SHORTEST, longest)
    most = max(sum(len(responses[i]) for i in row) for row in layout)
    width = min(bucket(max(most, width), _NARROWEST), length)

    def zeros(columns: int) -> Any:
        return np.zeros((count, columns), np.int32)

    tokens, segment, position, prefix = (zeros(length) for _ in range(4))
    index, before, mask = zeros(width) + 1, zeros(width), zeros(width).astype(bool)
    for r, here in enumerate(places):
        first = 0
        for number, place in enumerate(here, 1):
            prompt, response = prompts[place.sample], responses[place.sample]
            theirs = slice(place.prompt, place.prompt + len(prompt))
            own = slice(place.response, place.response + len(response))
            if not place.shared:
                tokens[r, theirs], position[r, theirs] = prompt, np.arange(len(prompt))
                segment[r, theirs] = prefix[r, theirs] = -place.number if share else number
            tokens[r, own], position[r, own] = response, len(prompt) + np.arange(len(response))
            segment[r, own], prefix[r, own] = number, segment[r, place.prompt]
            learned = slice(first, first + len(response))
            index[r, learned] = np.arange(own.start, own.stop)
            before[r, learned] = index[r, learned] - 1
            before[r, first] = theirs.stop - 1
            first += len(response)
        mask[r, :first] = True
    if not packed:
        return Rows(tokens, index, mask)
    return Rows(tokens, index, mask, before, segment, position, prefix if share else None)


def in_rows(values: Sequence[Any], layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """Puts what each response token has, [R] for each sample, where `Rows.index` has the token: [rows, response],
    float32, 0 elsewhere."""
    array = np.zeros(shape, np.float32)
    for r, row in enumerate(layout):
        joined = np.concatenate([values[i] for i in row])
        array[r, : len(joined)] = joined
    return array

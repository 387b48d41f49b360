"""Whether two lists agree in some order, where items agree within a tolerance.

Agreement within a tolerance is not transitive (0 and 1.8e-6 both agree with 0.9e-6, not with each other), so neither
sorting nor taking the first item that agrees is right in general: the question is whether a bipartite graph has a
perfect matching. It is answered in almost linear time where that is possible:

1. Items are grouped so that no item agrees with one of another group: by their shape without numbers, by numbers that
   must be equal, and by gaps in the others that are wider than the tolerance. Groups of different sizes have no
   matching; this finds nearly all lists that do not agree.
2. In each group both sides are sorted and paired off. That is a matching, if all pairs agree. For one number an item
   it finds one wherever there is one: of two crossing pairs that agree, the uncrossed ones agree too.
3. Else a matching is looked for with augmenting paths (Kuhn's algorithm), in groups small enough for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

__all__ = ["Number", "Shape", "same_in_any_order"]

Number = int | float | Decimal

_GAP = 2e-6
"""Wider than any tolerance: relative, and absolute below 1."""

_MOST_COMPARISONS = 1 << 20
"""In step 3, all groups together. Beyond it, the lists are taken not to agree."""


class Shape(NamedTuple):
    """What is compared of an item.

    Attributes:
      skeleton: all but its numbers. Items that agree have equal ones.
      numbers: in an order that is the same for all items with this skeleton.
      exact: of each, whether an expected item asks for just this number.
    """

    skeleton: Hashable
    numbers: tuple[Number, ...]
    exact: tuple[bool, ...]


def same_in_any_order(
    expected: Sequence[Any],
    actual: Sequence[Any],
    same: Callable[[Any, Any], bool],
    shape: Callable[[Any], Shape],
) -> bool:
    """Whether the items can be paired off so that `same(expected item, actual item)` holds for each pair.

    Args:
      expected: items [n].
      actual: items; lists of different lengths do not agree.
      same: whether two items agree; implies that their skeletons are equal, exact numbers too, and that the other
        numbers differ by less than half of `_GAP`.
      shape: see `Shape`.
    """
    if len(expected) != len(actual):
        return False
    left = _by_skeleton(expected, shape)
    right = _by_skeleton(actual, shape)
    if {key: len(items) for key, items in left.items()} != {key: len(items) for key, items in right.items()}:
        return False
    comparisons_left = _MOST_COMPARISONS
    for key in left:
        groups = _groups(left[key], right[key])
        if any(len(wanted) != len(got) for wanted, got in groups):
            return False
        for wanted, got in groups:
            if all(same(e, a) for (_, e), (_, a) in zip(wanted, got, strict=True)):
                continue
            comparisons_left -= len(wanted) ** 2
            if comparisons_left < 0 or not _matched([e for _, e in wanted], [a for _, a in got], same):
                return False
    return True


_Item = tuple[Shape, Any]


def _by_skeleton(items: Sequence[Any], shape: Callable[[Any], Shape]) -> dict[Hashable, list[_Item]]:
    found: dict[Hashable, list[_Item]] = defaultdict(list)
    for item in items:
        shaped = shape(item)
        found[shaped.skeleton].append((shaped, item))
    return found


def _groups(expected: list[_Item], actual: list[_Item]) -> list[tuple[list[_Item], list[_Item]]]:
    """Both sides, split by their numbers; each side of a group is sorted by them."""
    both = expected + actual
    columns: list[list[Hashable]] = []
    for i in range(len(both[0][0].numbers)):
        numbers = [shaped.numbers[i] for shaped, _ in both]
        exact = all(shaped.exact[i] for shaped, _ in expected)
        columns.append([*numbers] if exact else _clusters(numbers))
    keys = list(zip(*columns, strict=True)) if columns else [()] * len(both)
    groups: dict[Hashable, tuple[list[_Item], list[_Item]]] = defaultdict(lambda: ([], []))
    for i, (key, item) in enumerate(zip(keys, both, strict=True)):
        groups[key][i >= len(expected)].append(item)
    for sides in groups.values():
        for side in sides:
            side.sort(key=lambda item: item[0].numbers)
    return list(groups.values())


def _clusters(numbers: list[Number]) -> list[Hashable]:
    """A label for each number; those with different labels have a gap between them."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    labels: list[Hashable] = [0] * len(numbers)
    label, before = 0, _float(numbers[order[0]])
    for i in order:
        here = _float(numbers[i])
        label += here - before > _GAP * max(1.0, abs(before), abs(here))
        labels[i], before = label, here
    return labels


def _float(number: Number) -> float:
    try:
        return float(number)
    except OverflowError:  # An integer beyond the range of floats.
        return float("inf") if number > 0 else float("-inf")


def _matched(expected: list[Any], actual: list[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Kuhn's algorithm, breadth first."""
    agrees = [[j for j, a in enumerate(actual) if same(e, a)] for e in expected]
    owner: list[int | None] = [None] * len(actual)  # of each actual item, the expected one that it is paired with
    partner: list[int | None] = [None] * len(expected)  # the same, the other way round
    for start in range(len(expected)):
        reached: dict[int, int] = {}  # actual item -> expected item that it was reached from
        queue, free = deque([start]), None
        while queue and free is None:
            i = queue.popleft()
            for j in agrees[i]:
                if j in reached:
                    continue
                reached[j] = i
                if (other := owner[j]) is None:
                    free = j
                    break
                queue.append(other)
        if free is None:
            return False
        while free is not None:  # Each item on the way gives up its partner for the next one.
            i = reached[free]
            owner[free], partner[i], free = i, free, partner[i]
    return True

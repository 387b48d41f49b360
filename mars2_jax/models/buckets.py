"""Sizes that arrays are padded to, so that programs are compiled a few times and not once a size."""

from __future__ import annotations

__all__ = ["bucket"]


def bucket(size: int, smallest: int = 1) -> int:
    """The least of smallest · {1, 2, 3, 4, 6, 8, 12, 16, ...} that holds `size`: at most a third of it is padding,
    save below the smallest, and the number of different results grows with the logarithm of the largest size.

    >>> [bucket(n, 32) for n in (1, 33, 65, 97, 129, 200)]
    [32, 64, 96, 128, 192, 256]
    """
    limit = smallest
    while limit < size:
        # 2^k -> 3 · 2^(k-1) -> 2^(k+1); from 1 the step is to 2.
        units = limit // smallest
        power = units & (units - 1) == 0
        limit = smallest * (units * 3 // 2 if power and units > 1 else units * 2 if power else units // 3 * 4)
    return limit

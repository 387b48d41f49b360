"""Sizes that arrays are padded to, so that programs are compiled a few times and not once a size."""

from __future__ import annotations

__all__ = ["bucket"]


def bucket(size: int, smallest: int = 1, largest: int | None = None) -> int:
    """The least of smallest · {1, 2, 3, 4, 6, 8, 12, 16, ...} that holds `size`: at most a third of it is padding,
    save below the smallest, and the number of different results grows with the logarithm of the largest size.

    With `largest`, the size that will not be passed, results end there: at the least multiple of a power of two, times
    `smallest`, that pads it by an eighth at most (kernels cut lengths into blocks, and want divisors).

    >>> [bucket(n, 32) for n in (1, 33, 65, 97, 129, 200)]
    [32, 64, 96, 128, 192, 256]
    >>> [bucket(n, 64, largest=36_864) for n in (1_000, 24_577, 36_864)]
    [1024, 32768, 36864]

    Raises:
      ValueError: `size` is above `largest`.
    """
    limit = smallest
    while limit < size:
        # 2^k -> 3 · 2^(k-1) -> 2^(k+1); from 1 the step is to 2.
        units = limit // smallest
        power = units & (units - 1) == 0
        limit = smallest * (units * 3 // 2 if power and units > 1 else units * 2 if power else units // 3 * 4)
    if largest is None:
        return limit
    if size > largest:
        raise ValueError(f"a size of {size} is above the largest there should be, {largest}")
    step = smallest << max(0, (largest // (8 * smallest)).bit_length() - 1)
    return min(limit, -(-largest // step) * step)

"""Statements that are the same, nearly the same, or share passages.

Texts are compared as sequences of words in lower case, n words at a time (n-grams), each a number of 64 bits: millions
of them fit in memory. A text of fewer than n words counts as one n-gram.
"""

from __future__ import annotations

import collections
import hashlib
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import UInt64

__all__ = ["Shared", "digest", "near_pairs", "ngrams", "shared_passages", "words_of"]

_WORD = re.compile(r"\w+")
_BASE = np.uint64(0x9E3779B97F4A7C15)

Shared = tuple[int, int, float]
"""Numbers of two texts, and how much they share, in (0, 1]."""


def words_of(text: str) -> list[str]:
    """The words of a text in lower case; marks between them do not count."""
    return _WORD.findall(text.lower())


def digest(words: Sequence[str]) -> str:
    """The same for texts of the same words."""
    return hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def ngrams(words: Sequence[str], n: int) -> UInt64[np.ndarray, "grams"]:
    """The distinct n-grams of a text, sorted."""
    if not words:
        return np.zeros(0, np.uint64)
    numbers = np.asarray([_number(word) for word in words], np.uint64)
    length = min(n, len(words))
    grams = np.zeros(len(words) - length + 1, np.uint64)
    with np.errstate(over="ignore"):
        for i in range(length):
            grams = grams * _BASE + numbers[i : len(numbers) - length + 1 + i]
            grams ^= grams >> np.uint64(29)
    return np.unique(grams)


def _number(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def near_pairs(texts: Sequence[UInt64[np.ndarray, "grams"]], least: float) -> Iterator[Shared]:
    """Pairs of texts whose n-grams have a Jaccard index (shared over all distinct) of at least `least`.

    Exact, and far from comparing all pairs: with its n-grams in one order for all, rare ones first, two such texts
    share one among the first |x| - ceil(least |x|) + 1 (prefix filter; Chaudhuri et al. 2006, Bayardo et al. 2007).

    Args:
      texts: sorted distinct n-grams of each.
      least: in (0, 1].

    Yields:
      Two numbers in `texts`, the greater first, and their index.
    """
    if not texts:
        return
    known, counts = np.unique(np.concatenate(texts), return_counts=True)
    at: dict[int, list[int]] = collections.defaultdict(list)
    for number, grams in enumerate(texts):
        size = len(grams)
        if not size:
            continue
        rarity = counts[np.searchsorted(known, grams)]
        prefix = grams[np.lexsort((grams, rarity))][: size - math.ceil(least * size - 1e-9) + 1].tolist()
        candidates = {other for gram in prefix for other in at.get(gram, ())}
        for other in sorted(candidates):
            if least * size <= len(texts[other]) + 1e-9 and least * len(texts[other]) <= size + 1e-9:
                shared = len(np.intersect1d(grams, texts[other], assume_unique=True))
                index = shared / (size + len(texts[other]) - shared)
                if index >= least - 1e-9:
                    yield number, other, index
        for gram in prefix:
            at[gram].append(number)


def shared_passages(
    texts: Sequence[UInt64[np.ndarray, "grams"]], others: Sequence[UInt64[np.ndarray, "grams"]]
) -> Iterator[Shared]:
    """Texts that share an n-gram with one of `others`: for each, the one it shares most with.

    Yields:
      The number of a text, that of the other, and the share of the text's n-grams that both have.
    """
    at: dict[int, list[int]] = collections.defaultdict(list)
    wanted = np.unique(np.concatenate(texts)) if texts else np.zeros(0, np.uint64)
    for number, grams in enumerate(others):
        for gram in np.intersect1d(grams, wanted, assume_unique=True).tolist():
            at[gram].append(number)
    for number, grams in enumerate(texts):
        met = collections.Counter(other for gram in grams.tolist() for other in at.get(gram, ()))
        if met:
            other, shared = min(met.items(), key=lambda pair: (-pair[1], pair[0]))
            yield number, other, shared / len(grams)

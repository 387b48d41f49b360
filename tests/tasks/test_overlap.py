"""Overlap against definitions carried out word by word."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mars2_jax.tasks.overlap import digest, near_pairs, ngrams, shared_passages, words_of

WORDS = [f"w{i}" for i in range(12)]


def plain(words: list[str], n: int) -> set[tuple[str, ...]]:
    n = min(n, len(words))
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)} if words else set()


@pytest.fixture(scope="module")
def texts() -> list[list[str]]:
    rng = random.Random(0)
    made = [[rng.choice(WORDS) for _ in range(rng.randrange(0, 25))] for _ in range(60)]
    for words in made[:30]:  # near copies
        copy = list(words)
        for _ in range(rng.randrange(0, 3)):
            if copy:
                copy[rng.randrange(len(copy))] = rng.choice(WORDS)
        made.append(copy)
    return made


@pytest.mark.parametrize("n", [1, 3, 13])
def test_ngrams_are_as_many_as_there_are(texts: list[list[str]], n: int) -> None:
    for words in texts:
        grams = ngrams(words, n)
        assert len(grams) == len(plain(words, n)) and (np.diff(grams) > 0).all()
    # The same n-gram is the same number wherever it stands; a short text is one n-gram and equals no part of a longer.
    a, b = ngrams(["x", "a", "b", "c"], 3), ngrams(["a", "b", "c", "y"], 3)
    assert len(np.intersect1d(a, b)) == 1
    assert len(np.intersect1d(ngrams(["a", "b"], 3), ngrams(["a", "b", "c"], 3))) == 0
    assert len(np.intersect1d(ngrams(["a", "b", "c"], 3), ngrams(["c", "b", "a"], 3))) == 0


@pytest.mark.parametrize("least", [0.2, 0.5, 0.8, 1.0])
def test_near_pairs_are_all_pairs_that_are_near(texts: list[list[str]], least: float) -> None:
    n = 2
    sets = [plain(words, n) for words in texts]
    expected = {}
    for i, a in enumerate(sets):
        for j, b in enumerate(sets[:i]):
            if a and b and len(a & b) / len(a | b) >= least - 1e-9:
                expected[i, j] = len(a & b) / len(a | b)
    found = {(i, j): index for i, j, index in near_pairs([ngrams(words, n) for words in texts], least)}
    assert found == pytest.approx(expected) and len(expected) > 10


def test_shared_passages_name_the_text_that_most_is_shared_with(texts: list[list[str]]) -> None:
    n = 3
    ours, theirs = texts[:45], texts[45:]
    sets, others = [plain(words, n) for words in ours], [plain(words, n) for words in theirs]
    expected = {}
    for i, a in enumerate(sets):
        most = max((len(a & b) for b in others), default=0)
        if most:
            expected[i] = most / len(a)
    found = list(shared_passages([ngrams(w, n) for w in ours], [ngrams(w, n) for w in theirs]))
    assert {i: share for i, _, share in found} == pytest.approx(expected) and len(expected) > 5
    for i, j, share in found:
        assert len(sets[i] & others[j]) / len(sets[i]) == pytest.approx(share)


def test_words_and_digests() -> None:
    assert words_of("Return  a*b,\nÉté `x_1`!") == ["return", "a", "b", "été", "x_1"]
    assert digest(words_of("Two words.")) == digest(words_of("two, WORDS")) != digest(["twowords"])
    assert list(near_pairs([], 0.5)) == [] and list(shared_passages([], [])) == []

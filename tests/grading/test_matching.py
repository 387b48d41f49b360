"""Lists in any order, against a search through all orders, and lists too long for that."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars2_jax.grading import compare
from mars2_jax.grading.compare import COMPARATORS, same_output, same_value
from mars2_jax.grading.matching import same_in_any_order

unordered_output, unordered_value = COMPARATORS["unordered"]

# Numbers that are within each other's tolerance or not, in chains: agreement is not transitive among them.
near = st.integers(0, 5).map(lambda n: n * 0.45e-6) | st.sampled_from([0, 1, 1.0, 1.0000004, 1e7, 1e7 + 4, 10**7])
items = near | st.tuples(near, near).map(list) | st.sampled_from(["a", None, {"k": 0.45e-6}, {"k": 0}])


@settings(deadline=None, max_examples=300)
@given(st.lists(items, max_size=5), st.lists(items, max_size=5))
def test_values_match_where_some_order_does(expected, actual):
    wanted = len(expected) == len(actual) and any(
        all(map(same_value, expected, order)) for order in itertools.permutations(actual)
    )
    assert unordered_value(expected, actual) is wanted


lines = st.lists(near.map(repr) | st.sampled_from(["x", "1e0", "0.0"]), min_size=1, max_size=3).map(" ".join)


@settings(deadline=None, max_examples=300)
@given(st.lists(lines, max_size=5), st.lists(lines, max_size=5))
def test_lines_match_where_some_order_does(expected, actual):
    wanted = len(expected) == len(actual) and any(
        all(map(same_output, expected, order)) for order in itertools.permutations(actual)
    )
    assert unordered_output("\n".join(expected), "\n".join(actual)) is wanted


def test_the_first_that_agrees_may_be_the_wrong_one():
    # 0 agrees with 0.9e-6 alone; 0.9e-6, which is equal to it, must leave it to 0 and take 1.8e-6.
    assert unordered_value([0.9e-6, 0.0], [0.9e-6, 1.8e-6])
    # In two dimensions no order of sorting will do.
    expected = [[0.5, 0.5000009], [0.5000009, 0.5]]
    assert unordered_value(expected, [[0.5000008, 0.5000001], [0.5000001, 0.5000008]])


def numbers(kind, long):
    pick = random.Random(1)
    if kind == "duplicates":
        return [["0.5"]] * long
    if kind == "integers":  # Relative to their size, neighbours are within the tolerance.
        return [[str(10**9 + n)] for n in range(long)]
    if kind == "dense":
        return [[f"{pick.random() * 1e-3:.12f}"] for _ in range(long)]
    if kind == "grid":
        return [[f"{n // 316 * 0.1:.3f}", f"{n % 316 * 0.1:.3f}"] for n in range(long)]
    if kind == "columns":
        return [[str(n), f"{pick.random():.6f}", "0.5"] for n in range(long)]
    return [[f"word{n}"] for n in range(long)]


@pytest.mark.parametrize("long", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["duplicates", "integers", "dense", "grid", "columns", "words"])
def test_long_outputs_take_no_quadratic_number_of_comparisons(kind, long, monkeypatch):
    made = 0

    def counted(expected, actual, same, shape):
        def count(a, b):
            nonlocal made
            made += 1
            return same(a, b)

        return same_in_any_order(expected, actual, count, shape)

    monkeypatch.setattr(compare, "same_in_any_order", counted)
    rows = numbers(kind, long)
    expected = "\n".join(map(" ".join, rows))
    random.Random(0).shuffle(rows)
    right = "\n".join(map(" ".join, rows))
    rows[long // 2] = [*rows[long // 2][:-1], "0.7654321"]
    wrong = "\n".join(map(" ".join, rows))
    assert unordered_output(expected, right)
    assert not unordered_output(expected, wrong)
    assert long <= made <= 2 * long

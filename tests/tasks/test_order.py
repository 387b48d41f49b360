import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars2_jax.tasks.order import problem_order, problems_for_step


@given(n=st.integers(1, 60), per_step=st.integers(1, 20), seed=st.integers(0, 2**32), epochs=st.integers(1, 3))
def test_every_epoch_meets_every_problem_once(n: int, per_step: int, seed: int, epochs: int) -> None:
    steps = -(-n * epochs // per_step)
    seen = [index for step in range(steps) for index in problems_for_step(n, step, per_step, seed)]
    for epoch in range(epochs):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_order_depends_on_seed_and_epoch() -> None:
    orders = {problem_order(50, seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_order_is_the_same_in_every_version() -> None:
    assert problem_order(8, seed=0, epoch=0) == GOLDEN
    assert problems_for_step(8, step=1, per_step=3, seed=0) == list(GOLDEN[3:6])


GOLDEN = (7, 0, 1, 5, 3, 4, 2, 6)


def test_positions_are_uniform() -> None:
    counts = [0] * 5
    for seed in range(2000):
        counts[problem_order(5, seed, 0).index(0)] += 1
    # chi-square with 4 degrees of freedom: 23.5 is exceeded once in 10,000
    assert sum((c - 400) ** 2 / 400 for c in counts) < 23.5


@pytest.mark.parametrize(("n", "step", "per_step"), [(0, 0, 1), (5, -1, 1), (5, 0, 0)])
def test_nonsense_is_refused(n: int, step: int, per_step: int) -> None:
    with pytest.raises(ValueError, match="need problems"):
        problems_for_step(n, step, per_step, seed=0)

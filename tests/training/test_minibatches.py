import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars2_jax.training.minibatches import minibatches


def split(nodes, **changes):
    options = dict(epochs=1, parts=1, seed=0, agent="ann", updates=0)
    return list(minibatches(nodes, **(options | changes)))


@given(size=st.integers(1, 9), parts=st.integers(1, 5), epochs=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_node_is_learned_from_once_a_pass(size, parts, epochs, seed):
    updates = split(size * parts, parts=parts, epochs=epochs, seed=seed)
    assert len(updates) == epochs * parts and {len(part) for part in updates} == {size}
    for epoch in range(epochs):
        seen = [node for part in updates[epoch * parts : (epoch + 1) * parts] for node in part]
        assert sorted(seen) == list(range(size * parts))


def test_the_order_hangs_on_seed_agent_and_update_count_alone():
    orders = [split(12, parts=3, **c) for c in (dict(), dict(seed=1), dict(agent="bob"), dict(updates=3))]
    assert orders[0] == split(12, parts=3)
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    # The second pass is that of an agent which has made the first one's updates.
    assert split(12, parts=3, epochs=2) == orders[0] + orders[3]
    # In every version.
    assert split(6, parts=2) == GOLDEN


GOLDEN = [(3, 2, 4), (0, 5, 1)]


def test_a_single_update_a_pass_keeps_the_order():
    assert split(4, epochs=2) == [(0, 1, 2, 3)] * 2


def test_nodes_that_cannot_be_shared_out_are_an_error():
    with pytest.raises(ValueError, match="7 nodes cannot be shared out among 2 updates"):
        split(7, parts=2)

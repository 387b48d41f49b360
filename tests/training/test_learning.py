"""How an agent learns from what it has written: passes, staleness, references, what is left out, host memory."""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.config import as_json
from mars2_jax.learning.batch import TreeArrays, make_batch
from mars2_jax.rollout.types import Completion
from mars2_jax.training.buffer import Buffer
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.minibatches import minibatches
from mars2_jax.training.policy import longest_sample
from mars2_jax.training.setup import Setup
from mars2_jax.validation import validate
from tests.training.test_lora import bits
from tests.training.test_trainer import assert_same_bits, final_state, run
from tests.training.tiny_team import tiny_config, write_model

pytestmark = pytest.mark.usefixtures("quick_compiles")

TREE = TreeArrays(
    reward=np.array([0, 1, 0, 0.5, 1], np.float32),
    parent=np.array([-1, 0, 0, 1, 2], np.int32),
    agent=np.array([-1, 0, 0, 0, 0], np.int32),
    graded=np.array([0, 1, 1, 1, 1], bool),
    length=np.array([0, 4, 4, 4, 4], np.int32),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("one_layer")


def make_agent(folder, *, lora=0, offload="none", **changes):
    """The only agent of a team, and the team's set-up."""
    config = tiny_config(folder)
    ann = config.agents.ann
    ann.model.path = write_model(folder / "model", layers=1)
    ann.model.lora.rank = lora
    ann.optimizer.update(offload=offload, learning_rate=0.01)
    config.agents = ConfigDict(dict(ann=ann))
    config.search.strategy = "rs2"
    config.learning.update(changes)
    validate(config)
    setup = Setup.check(FrozenConfigDict(config))
    (agent,) = setup.team()
    return agent, setup


def write(agent, step: int, finish=("stop",) * 4) -> int:
    """Four made-up nodes of a tree."""
    rng = np.random.default_rng(step)
    written = []
    for slot in range(1, 5):
        tokens = rng.integers(0, 250, 4).astype(np.int32)
        lp = np.full(4, -5.0, np.float32)
        prompt = rng.integers(0, 250, 9).astype(np.int32)
        written.append(((step, 0), slot, Completion(slot, prompt, tokens, lp, lp, finish[slot - 1])))
    return agent.remember(written, {(step, 0): TREE})


def test_passes_and_minibatches_are_updates_from_equal_parts(folder):
    agent, setup = make_agent(folder, epochs=2, minibatches=2, micro_batch_size=1, train_batch_size=4)
    state = agent.learner.init(agent.state.params)
    write(agent, 1)
    samples, trees = Buffer.from_arrays(agent.buffer.to_arrays()).take(4)
    metrics, keys, advantages = agent.update(setup.mesh)

    wanted = []
    parts = list(minibatches(4, epochs=2, parts=2, seed=0, agent="ann", updates=0))
    for part in parts:
        some = [samples[i] for i in part]
        batch, _ = make_batch(some, trees, micro_batch_size=1, longest=longest_sample(setup.config))
        state, one, whole = agent.learner.update(state, batch)
        wanted.append(one)
    assert bits(state) == bits(agent.state) and int(agent.state.step) == 4 and len(agent.buffer) == 0
    assert metrics == pytest.approx({k: np.mean([float(m[k]) for m in wanted]) for k in metrics})
    # Over the whole tree, of which each update has two nodes.
    assert keys == [(1, 0)] and np.count_nonzero(advantages.advantage) == 4
    np.testing.assert_array_equal(advantages.advantage, whole.advantage)
    # Ratios are to the weights that wrote the nodes, not to those of the update before.
    assert [abs(float(m["ratio"]) - 1) < 1e-5 for m in wanted] == [True, False, False, False]
    assert all(float(m["logprob_gap"]) > 0 for m in wanted)


def test_stale_nodes_are_dropped(folder):
    agent, setup = make_agent(folder, train_batch_size=4, micro_batch_size=2, max_staleness=1)
    for step in (1, 2, 3):
        write(agent, step)
    assert agent.drop_stale() == 0
    agent.update(setup.mesh)
    # One update old: as old as is allowed.
    assert agent.drop_stale() == 0 and len(agent.buffer) == 8
    write(agent, 4)
    agent.update(setup.mesh)
    again = Buffer.from_arrays(agent.buffer.to_arrays())
    assert agent.drop_stale() == 4 and len(agent.buffer) == 4
    samples, trees = agent.buffer.take(4)
    assert {s.written_at for s in samples} == {1} and trees.keys() == {(4, 0)}
    # Checkpoints of earlier versions do not tell.
    assert again.drop(1) == 4
    arrays = {name: array for name, array in again.to_arrays().items() if name != "written_at"}
    old = Buffer.from_arrays(arrays)
    assert len(old) == 4 and old.drop(1) == 4


@pytest.mark.parametrize("lora", [0, 3])
def test_a_reference_is_refreshed_and_saved(folder, tmp_path, lora):
    agent, setup = make_agent(folder, lora=lora, train_batch_size=4, micro_batch_size=4, reference_every=2)
    reference = lambda a: a.checkpoint()["ann-reference"]
    assert bits(reference(agent)) == bits(agent.state.params)
    # Of adapters, these alone.
    assert [x.shape for x in jax.tree.leaves(reference(agent))] == [
        x.shape for x in jax.tree.leaves(agent.state.params)
    ]

    def learn(one, step):
        write(one, step)
        samples, _ = Buffer.from_arrays(one.buffer.to_arrays()).take(4)
        one.update(setup.mesh)
        return samples

    start = bits(agent.state.params)
    assert all((s.lp_ref == s.lp_old).all() for s in learn(agent, 1))
    assert bits(reference(agent)) == start != bits(agent.state.params)
    assert all((s.lp_ref != s.lp_old).any() for s in learn(agent, 2))
    second = bits(agent.state.params)
    assert bits(reference(agent)) == second != start
    assert all((s.lp_ref == s.lp_old).all() for s in learn(agent, 3))

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, agent.checkpoint(), {"config": as_json(setup.config)})
    (again,) = setup.team()
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        again.restore(checkpointer.restore(again.abstract_checkpoint()).state)
    assert bits(reference(again)) == second != bits(again.state.params)
    one, other = learn(agent, 4), learn(again, 4)
    assert all((a.lp_ref == b.lp_ref).all() for a, b in zip(one, other, strict=True))
    # The reference's numbers are those of the weights that it was made of.
    by_hand = again.learner.score_responses(
        reference_at(setup, second), [s.prompt for s in one], [s.tokens for s in one], again.base
    )
    for sample, want in zip(one, by_hand, strict=True):
        np.testing.assert_allclose(sample.lp_ref, want, atol=1e-6)
    assert bits(again.checkpoint()) == bits(agent.checkpoint())


def reference_at(setup, wanted):
    """The weights of these bits, as a state."""
    (agent,) = setup.team()
    leaves, structure = jax.tree.flatten(agent.state.params)
    return jax.tree.unflatten(
        structure, [np.frombuffer(b, x.dtype).reshape(x.shape) for b, x in zip(wanted, leaves, strict=True)]
    )


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_responses_that_the_budget_cut_off_are_not_learned_from(folder, kl_in):
    finish = ("stop", "length", "stop", "length")
    agent, setup = make_agent(folder, train_batch_size=2, micro_batch_size=2, overlong_mask=True, kl_in=kl_in)
    assert write(agent, 1, finish) == 2 and len(agent.buffer) == 2
    _, _, used = agent.update(setup.mesh)
    # They stand in their tree: with an advantage, and in those of the others.
    assert np.count_nonzero(used.advantage) == 4
    write(agent, 2, finish)
    samples, trees = agent.buffer.take(2)
    assert [s.slot for s in samples] == [1, 3]
    if kl_in == "reward":
        # So does what they cost.
        assert np.count_nonzero(trees[2, 0].kl) == 4
    assert write(agent, 3, ("length",) * 4) == 4 and len(agent.buffer) == 0
    whole, _ = make_agent(folder, train_batch_size=2, micro_batch_size=2, kl_in=kl_in)
    assert write(whole, 1, finish) == 0 and len(whole.buffer) == 4


@pytest.mark.parametrize("lora", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_an_optimizer_in_host_memory_gives_the_same_bits(folder, tmp_path, lora):
    states = {}
    for offload in ("none", "state", "all"):
        agent, setup = make_agent(folder, lora=lora, offload=offload, train_batch_size=4, micro_batch_size=2)
        for step in (1, 2):
            write(agent, step)
            agent.update(setup.mesh)
        agent.hand_over()
        kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}
        assert (kinds(agent.state.opt_state) == {"pinned_host"}) == (offload != "none")
        assert (kinds(agent.state.params) == {"pinned_host"}) == (offload == "all")
        assert "pinned_host" not in kinds(agent.engine.params)
        states[offload] = bits(agent.state)
    assert states["none"] == states["state"] == states["all"]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, agent.checkpoint(), {"config": as_json(setup.config)})
    (again,) = setup.team()
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        again.restore(checkpointer.restore(again.abstract_checkpoint()).state)
    assert bits(again.state) == states["none"]
    assert jax.tree.map(lambda x: x.sharding, again.state) == jax.tree.map(lambda x: x.sharding, agent.state)


@pytest.mark.slow
def test_a_run_with_all_of_it_resumes_with_the_same_bits(tmp_path):
    def config(steps):
        config = tiny_config(tmp_path)
        config.learning.update(epochs=2, minibatches=2, max_staleness=5, reference_every=3, overlong_mask=True)
        config.agents.ann.optimizer.offload = "state"
        config.agents.bob.optimizer.offload = "all"
        config.agents.bob.model.lora.rank = 2
        config.training.update(steps=steps, evaluate=False)
        return config

    run(config(3), tmp_path / "straight")
    for steps in (1, 2, 3):
        run(config(steps), tmp_path / "pieces")
    assert_same_bits(final_state(tmp_path / "straight"), final_state(tmp_path / "pieces"))

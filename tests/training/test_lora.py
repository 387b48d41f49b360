"""Agents that learn adapters, beside others, on one checkpoint."""

import collections
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.config import as_json
from mars2_jax.errors import ConfigError
from mars2_jax.learning.batch import TreeArrays
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.weights import load
from mars2_jax.rollout.types import Completion, Request, SamplingParams
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.evaluation import _load_checkpoint
from mars2_jax.training.export import export_agent
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.resuming import check_resumable
from mars2_jax.training.setup import Setup
from mars2_jax.validation import validate
from tests.training.test_trainer import assert_same_bits, final_state, killed_and_resumed, run
from tests.training.tiny_team import tiny_config, write_model


def team_config(folder, agents: str) -> ConfigDict:
    """Agents of one checkpoint: l learns adapters with Muon, f all its weights with AdamW, z is frozen."""
    config = tiny_config(folder)
    proto = config.agents.ann
    proto.model.path = write_model(folder / "one_layer", layers=1)
    config.agents = ConfigDict()
    for number, kind in enumerate(agents):
        agent = config.agents[f"{kind}{number}"] = proto.copy_and_resolve_references()
        agent.model.lora.rank = 3 if kind == "l" else 0
        agent.trainable = kind != "z"
        agent.optimizer.update(name="muon" if kind == "l" else "adamw", learning_rate=0.03)
    validate(config)
    return config


LEARNERS = ("l0", "f1")


def live(shape, before=frozenset()) -> dict[str, int]:
    """Distinct buffers of arrays of a shape by type, those apart that were there before."""
    gc.collect()
    buffers = {(x.unsafe_buffer_pointer(), str(x.dtype)) for x in jax.live_arrays() if x.shape == shape}
    return dict(collections.Counter(dtype for pointer, dtype in buffers if (pointer, dtype) not in before))


def pointers(shape) -> frozenset:
    gc.collect()
    return frozenset((x.unsafe_buffer_pointer(), str(x.dtype)) for x in jax.live_arrays() if x.shape == shape)


TREE = TreeArrays(
    reward=np.array([0, 1, 0, 0, 1], np.float32),
    parent=np.array([-1, 0, 0, 1, 2], np.int32),
    agent=np.array([-1, 0, 0, 0, 0], np.int32),
    graded=np.array([0, 1, 1, 1, 1], bool),
    length=np.array([0, 4, 4, 4, 4], np.int32),
)


def learn(setup: Setup, agent, seed: int) -> None:
    """One update from four made-up nodes of a tree."""
    rng = np.random.default_rng(seed)
    key, written = (seed, 0), []
    for slot in range(1, 5):
        tokens = rng.integers(0, 250, 4).astype(np.int32)
        lp = np.full(4, -5.0, np.float32)
        written.append((key, slot, Completion(slot, rng.integers(0, 250, 9).astype(np.int32), tokens, lp, lp, "stop")))
    agent.remember(written, {key: TREE})
    agent.update(setup.mesh)
    agent.hand_over()


def members(setup: Setup, **options) -> dict:
    return {agent.name: agent for agent in setup.team(**options)}


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A mixed team after an update: its config, set-up, agents, workdir with a checkpoint, and buffers it has made."""
    folder = tmp_path_factory.mktemp("mixed")
    config = team_config(folder, "lfz")
    before = pointers((48, 32))
    setup = Setup.check(FrozenConfigDict(config))
    team = members(setup)
    for name in LEARNERS:
        learn(setup, team[name], 1)
    with Checkpointer(folder) as checkpointer:
        state = {name: team[name].state for name in LEARNERS}
        checkpointer.save(1, state, {"config": as_json(config), "evaluations": {}})
    return config, setup, team, folder, live((48, 32), before)


def restore(folder, team) -> dict:
    with Checkpointer(folder, read_only=True) as checkpointer:
        return checkpointer.restore({name: team[name].abstract_state() for name in LEARNERS}).state


@pytest.mark.slow
def test_a_team_of_four_adapters_on_one_base_costs_one_base(tmp_path):
    config = team_config(tmp_path, "llll")
    for agent in config.agents.values():
        agent.model.dtype = "bfloat16"
    setup = Setup.check(FrozenConfigDict(config))
    abstract = nnx.state(setup.files[config.agents.l0.model.path].abstract())
    shapes = collections.Counter(x.shape for x in jax.tree.leaves(abstract))
    before = {shape: pointers(shape) for shape in shapes}
    team = setup.team()
    for shape, count in shapes.items():
        assert live(shape, before[shape]) == {"bfloat16": count}, shape
    # Four times other adapters, all that is learned.
    starts = {x.tobytes() for a in team for x in [np.asarray(a.state.params["blocks"][0]["mlp"]["up_lora"]["a"][...])]}
    assert len(starts) == 4
    assert all(len(jax.tree.leaves(agent.state.params)) == 10 for agent in team)


def test_other_agents_may_stand_on_the_same_base(trained):
    config, _, team, _, made = trained
    # Of both weights of this shape: the base, and the full agent's own weight and two moments.
    assert made == {"float32": 2 * (1 + 3)}
    with open_checkpoint(config.agents.l0.model.path) as checkpoint:
        assert bits(nnx.state(load(checkpoint))) == bits(team["z2"].engine.params) == bits(team["l0"].base)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(team["l0"].state.params))
    assert bits(team["f1"].state.params) != bits(team["l0"].base)


def test_the_engine_decodes_with_the_adapters_and_the_reference_is_without(trained):
    agent = trained[2]["l0"]
    prompt = np.arange(40, 52, dtype=np.int32)
    agent.engine.submit(Request(0, prompt, np.zeros(2, np.uint32), SamplingParams(max_new_tokens=4)))
    done = []
    while not done:
        done = agent.engine.step()
    agent.remember([((9, 0), 1, done[0])], {(9, 0): TREE})
    (sample,), _ = agent.buffer.take(1)
    np.testing.assert_allclose(sample.logprobs, sample.lp_old, atol=1e-5)
    # The reference is the base: adapters of zero.
    none = jax.tree.map(jnp.zeros_like, agent.state.params)
    start = agent.learner.score_responses(none, [prompt], [done[0].tokens], agent.base)[0]
    np.testing.assert_allclose(sample.lp_ref, start, atol=1e-5)
    assert np.abs(sample.lp_old - start).max() > 1e-3


def test_an_exported_agent_computes_what_it_did(trained, tmp_path):
    config, _, team, folder, _ = trained
    adapted, full = team["l0"], team["f1"]
    export_agent(FrozenConfigDict(config), str(folder), "l0", str(tmp_path / "out"))
    with open_checkpoint(str(tmp_path / "out")) as checkpoint:
        merged = nnx.state(load(checkpoint))
    prompt, response = [np.arange(9)], [np.arange(20, 24)]
    got = full.learner.score_responses(merged, prompt, response)[0]
    want = adapted.learner.score_responses(adapted.state.params, prompt, response, adapted.base)[0]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_resumed_team_goes_on_with_the_same_bits(trained):
    _, setup, team, folder, _ = trained
    again = members(setup)
    saved = restore(folder, again)
    for name in LEARNERS:
        again[name].set_state(saved[name])
        for agent in (team[name], again[name]):
            learn(setup, agent, 2)
        assert bits(team[name].state) == bits(again[name].state)


def test_evaluation_takes_the_adapters_from_the_checkpoint(trained):
    config, _, _, folder, _ = trained
    team = members(Setup.check(FrozenConfigDict(config), learn=False), learn=False)
    with Checkpointer(folder, read_only=True) as checkpointer:
        assert _load_checkpoint(list(team.values()), checkpointer) == 1
    saved = restore(folder, team)["l0"].params
    assert bits(nnx.filter_state(team["l0"].engine.params, nnx.LoRAParam)) == bits(saved)


@pytest.mark.parametrize(("key", "value"), [("rank", 4), ("alpha", 1.0), ("targets", ("mlp",))])
def test_other_adapters_are_refused_on_resuming(trained, key, value):
    config, _, _, folder, _ = trained
    other = config.copy_and_resolve_references()
    other.agents.l0.model.lora[key] = value
    with Checkpointer(folder, read_only=True) as checkpointer:
        _, meta = checkpointer.latest()
    with pytest.raises(ConfigError, match=rf"config.agents.l0.model.lora.{key} is .*, but the run .* started with"):
        check_resumable(meta["config"], as_json(other))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_and_resumed_gives_the_same_bits(tmp_path):
    config = team_config(tmp_path, "lfl")
    config.training.evaluate = False
    run(config, tmp_path / "whole")
    killed_and_resumed(config, tmp_path)
    assert_same_bits(final_state(tmp_path / "whole"), final_state(tmp_path / "run"))
    assert not any("'gate'" in name for name in final_state(tmp_path / "run") if "l0" in name)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(rows[-1][f"agent/{name}/logprob_gap"] < 1e-4 for name in config.agents)

"""A homogeneous team: two roles on one set of weights."""

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.config import agent_config, validate
from mars2_jax.errors import ConfigError
from mars2_jax.training.agent import Agent, Role
from mars2_jax.training.evaluation import run_evaluation
from mars2_jax.training.export import export_agent
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.setup import Setup, train_problems, training_sampling
from mars2_jax.training.trees import read_trees, trees_path
from tests.training.test_trainer import assert_same_bits, final_state, run
from tests.training.tiny_team import tiny_config


def homogeneous(folder) -> ConfigDict:
    """ann, and zoe on ann's weights; and ben in between, who has his own and is frozen."""
    config = tiny_config(folder)
    ann, bob = config.agents.ann, config.agents.bob
    zoe = agent_config()
    zoe.update(share_weights_with="ann", role="You are zoe.")
    bob.trainable = False
    config.agents = ConfigDict(dict(ann=ann, ben=bob, zoe=zoe))
    validate(config)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("homogeneous")


@pytest.fixture(scope="module")
def finished(folder):
    config = homogeneous(folder)
    return config, folder / "run", run(config, folder / "run")


def test_both_play_and_the_owner_learns_from_both(finished):
    config, workdir, _ = finished
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if "search/nodes" in row]
    written = 0
    for step, row in enumerate(rows, start=1):
        nodes = [n for tree in read_trees(trees_path(workdir, step)) for n in tree["nodes"]]
        for name in ("ann", "ben", "zoe"):
            mine = [n for n in nodes if n["agent"] == name]
            assert row[f"agent/{name}/nodes"] == len(mine) > 0
            assert row[f"agent/{name}/tokens"] == sum(n["tokens"] for n in mine)
            assert row[f"agent/{name}/reward_mean"] == pytest.approx(sum(n["reward"] for n in mine) / len(mine))
        written += row["agent/ann/nodes"] + row["agent/zoe/nodes"]
        batch = config.learning.train_batch_size
        assert row["agent/ann/updates"] == written // batch and row["agent/ann/buffer"] == written % batch
        assert row["agent/ann/logprob_gap"] < 1e-4
        assert {name for name in row if name.startswith("agent/zoe/")} == {
            f"agent/zoe/{name}" for name in ("nodes", "tokens", "reward_mean")
        }
        assert {"agent/ann/tokens_per_second", "agent/ben/tokens_per_second"} <= row.keys()
        used = {n["agent"] for n in nodes if n["advantage"] is not None}
        assert {"ann", "zoe"} <= used


def test_the_weights_are_there_once(finished):
    config, workdir, _ = finished
    names = final_state(workdir).keys()
    assert any("ann" in name for name in names) and not any("zoe" in n or "ben" in n for n in names)
    setup = Setup.check(FrozenConfigDict(config))
    ann, ben, zoe = setup.team()
    assert isinstance(ann, Agent) and isinstance(ben, Agent) and isinstance(zoe, Role)
    assert zoe.owner is ann and len(setup.files) == 2
    assert ben.state is None and ann.state is not None


def test_resumed_it_ends_with_the_same_bits(finished, folder):
    _, workdir, _ = finished
    for steps in (1, 2):
        part = homogeneous(folder)
        part.training.update(steps=steps, evaluate=False)
        run(part, folder / "pieces")
    assert_same_bits(final_state(workdir), final_state(folder / "pieces"))
    for step in (1, 2):
        assert trees_path(workdir, step).read_text() == trees_path(folder / "pieces", step).read_text()


def test_evaluation_of_its_checkpoint(finished):
    config, workdir, printed = finished
    last = read_metrics(workdir / "metrics.jsonl")[-1]
    scores = run_evaluation(FrozenConfigDict(config), str(workdir))
    assert {name.split("/")[2] for name in scores if name.endswith("pass@1")} == {"ann", "ben", "zoe"}
    assert scores == {name: pytest.approx(last[name]) for name in scores}
    assert "zoe/pass@1" in printed
    other = config.copy_and_resolve_references()
    other.agents.zoe = config.agents.ann.copy_and_resolve_references()
    with pytest.raises(ConfigError, match="config.agents.zoe.model differs from that of the run"):
        run_evaluation(FrozenConfigDict(other), str(workdir))


def test_its_weights_are_exported_under_their_owners_name(finished, tmp_path):
    config, workdir, _ = finished
    with pytest.raises(ConfigError, match="agent 'zoe' has the weights of 'ann': export --agent=ann"):
        export_agent(FrozenConfigDict(config), str(workdir), "zoe", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    export_agent(FrozenConfigDict(config), str(workdir), "ann", str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_role_is_what_tells_them_apart(finished):
    """Every node has the prompt of its author's role."""
    config, _, _ = finished
    frozen = FrozenConfigDict(config)
    ann, _, zoe = Setup.check(frozen).team(learn=False)
    (problem, *_) = train_problems(frozen)
    key = np.asarray([1, 2], np.uint32)
    prompts = {}
    writers = [member.writer(training_sampling(frozen)) for member in (ann, zoe)]
    for writer in writers:
        writer.submit(7, problem, None, key)  # one ticket for both: they do not clash
    while any(writer.pending for writer in writers):
        for writer in writers:
            for draft in writer.step() if writer.pending else []:
                assert draft.ticket == 7
                prompts[writer.name] = ann.tokenizer.tokenizer.decode(draft.completion.prompt)
    assert "system: You are ann." in prompts["ann"] and "system: You are zoe." in prompts["zoe"]


def test_a_frozen_owner_teaches_nobody(finished, tmp_path):
    config = homogeneous(tmp_path)
    config.agents.ann.trainable = False
    with pytest.raises(ConfigError, match="no agent is trainable"):
        run(config, tmp_path / "run")
    scores = run_evaluation(FrozenConfigDict(config), None)
    assert len(scores) == 5

"""A homogeneous team: two roles on one set of weights."""

import io

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console

from mars2_jax.config import agent_config
from mars2_jax.errors import ConfigError
from mars2_jax.training.agent import Agent, Role
from mars2_jax.training.evaluation import run_evaluation
from mars2_jax.training.export import export_agent
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.setup import Setup, train_problems, training_sampling
from mars2_jax.training.trees import read_trees, trees_path
from mars2_jax.validation import validate
from tests.training.test_trainer import assert_same_bits, final_state, run
from tests.training.tiny_team import tiny_config, write_model

pytestmark = pytest.mark.usefixtures("quick_compiles")


def homogeneous(folder) -> ConfigDict:
    """ann, and zoe on ann's weights; and ben in between, who has his own and is frozen."""
    config = tiny_config(folder)
    ann, bob = config.agents.ann, config.agents.bob
    zoe = agent_config()
    zoe.share_weights_with = "ann"
    bob.trainable = False
    config.agents = ConfigDict(dict(ann=ann, ben=bob, zoe=zoe))
    # Few shapes: most of the time goes into compiling. Every prompt has between 128 and 250 tokens.
    for name, agent in config.agents.items():
        agent.role = f"You are {name}. {'Think before you answer. ' * 3}"
    for seed, name in enumerate(("ann", "ben")):
        config.agents[name].model.path = write_model(folder / f"{name}_of_one_layer", seed, layers=1)
    config.rollout.update(slots=2, max_prompt_tokens=250)
    config.data.problems_per_step = config.eval.limit = 2
    config.eval.search_nodes = config.search.nodes
    config.training.evaluate = False
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
            # A response that ends before its budget is not cut off.
            full = sum(n["tokens"] == config.rollout.max_new_tokens for n in mine)
            assert row[f"agent/{name}/truncated"] == pytest.approx(full / len(mine))
        written += row["agent/ann/nodes"] + row["agent/zoe/nodes"]
        batch = config.learning.train_batch_size
        assert row["agent/ann/updates"] == written // batch and row["agent/ann/buffer"] == written % batch
        assert row["agent/ann/logprob_gap"] < 1e-4
        assert {name for name in row if name.startswith("agent/zoe/")} == {
            f"agent/zoe/{name}" for name in ("nodes", "tokens", "reward_mean", "truncated")
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
        part.training.steps = steps
        run(part, folder / "pieces")
    assert_same_bits(final_state(workdir), final_state(folder / "pieces"))
    for step in (1, 2):
        assert trees_path(workdir, step).read_text() == trees_path(folder / "pieces", step).read_text()


def test_evaluation_of_its_checkpoint(finished):
    config, workdir, _ = finished
    out = io.StringIO()
    scores = run_evaluation(FrozenConfigDict(config), str(workdir), Console(file=out, width=120))
    assert {name.split("/")[2] for name in scores if name.endswith("pass@1")} == {"ann", "ben", "zoe"}
    assert "zoe/pass@1" in out.getvalue() and "after 2 training steps" in out.getvalue()
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


def test_their_requests_meet_in_one_engine_and_differ_by_the_role(finished, monkeypatch):
    frozen = FrozenConfigDict(finished[0])
    ann, _, zoe = Setup.check(frozen).team(learn=False)
    asked = []
    monkeypatch.setattr(ann.engine, "submit", asked.append)
    for member in (ann, zoe):
        # One ticket for both: they do not clash.
        member.writer(training_sampling(frozen)).submit(7, train_problems(frozen)[0], None, np.zeros(2, np.uint32))
    prompts = [ann.tokenizer.tokenizer.decode(request.prompt) for request in asked]
    assert "system: You are ann." in prompts[0]
    assert prompts[1] == prompts[0].replace("ann", "zoe")
    assert asked[0].id != asked[1].id


def test_a_frozen_owner_teaches_nobody(finished, tmp_path):
    config = homogeneous(tmp_path)
    config.agents.ann.trainable = False
    with pytest.raises(ConfigError, match="no agent is trainable"):
        run(config, tmp_path / "run")
    scores = run_evaluation(FrozenConfigDict(config), None)
    assert len(scores) == 5

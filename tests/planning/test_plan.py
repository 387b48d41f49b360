"""Plans of a tiny team, compiled for the smallest topology as the command does it; and what is said of mistakes."""

import importlib.util
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console

from mars2_jax.config import agent_config, default_config
from mars2_jax.errors import ConfigError, ModelError, PlanError
from mars2_jax.parallel.mesh import make_mesh
from mars2_jax.planning.models import model_shape
from mars2_jax.planning.plan import make_plan
from mars2_jax.planning.programs import team_programs
from mars2_jax.validation import validate

ROOT = pathlib.Path(__file__).resolve().parents[2]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

MODEL = dict(
    model_type="qwen3",
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=256,
    rms_norm_eps=1e-6,
    max_position_embeddings=2**20,
)


def tiny(folder, **rollout):
    """Two agents of one architecture; the second one does not learn."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = default_config()
    for name in ("author", "frozen"):
        config.agents[name] = agent_config()
        config.agents[name].model.path = str(folder)
    config.agents.frozen.trainable = False
    config.mesh.update(data=1, fsdp=2, tensor=2)
    config.rollout.update(slots=4, max_prompt_tokens=64, max_new_tokens=64, **rollout)
    config.learning.update(train_batch_size=4, micro_batch_size=2, remat="layer", scan_unroll=1)
    validate(config)
    return FrozenConfigDict(config)


def written(config, folder):
    """A config file that the command reads."""
    path = folder / "config_file.py"
    path.write_text(
        f"from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({config.to_dict()!r})\n"
    )
    return path


def run(config, folder, *options):
    return subprocess.run(
        [sys.executable, "-m", "mars2_jax.plan", f"--config={written(config, folder)}", *options],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "tpu,cpu"},  # the command must not try to take a TPU
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def fitting(tmp_path_factory):
    """The command on a team that fits: its result, and the plan it wrote."""
    folder = tmp_path_factory.mktemp("plan")
    done = run(tiny(folder), folder, "--topology=v5e:2x2", f"--json={folder / 'plan.json'}")
    assert done.returncode == 0, done.stderr + done.stdout
    return done, json.loads((folder / "plan.json").read_text())


@needs_libtpu
def test_a_team_that_fits(fitting):
    done, plan = fitting
    assert plan["fits"] and plan["needed_bytes"] < plan["chip"]["hbm"]
    assert done.stderr == ""
    assert "fits v5e:2x2 with 15." in done.stdout.splitlines()[-1] + done.stdout.splitlines()[-2]


@needs_libtpu
def test_each_program_is_compiled_once(fitting):
    programs = fitting[1]["programs"]
    assert [(p["kind"], p["agents"]) for p in programs] == [
        ("prefill", ["author", "frozen"]),
        ("decode", ["author", "frozen"]),
        ("score", ["author"]),
        ("update", ["author"]),
    ]
    # Updates and decoding put their results where their arguments were.
    update, decode = programs[3]["memory"], programs[1]["memory"]
    assert update["aliased"] > 0.9 * update["outputs"]
    assert decode["aliased"] > 0.9 * decode["outputs"]


@needs_libtpu
def test_costs_follow_from_the_sizes(fitting):
    costs = {p["kind"]: p["cost"] for p in fitting[1]["programs"]}
    d, f, v, layers, heads, group = 128, 256, 256, 2, 4, 4 + 2 * 2
    weights = layers * (d * group * 128 + heads * 128 * d + 3 * d * f)
    # One token of each of four slots, on four devices: the weights, the head, and attention over half of 128 entries.
    decode = costs["decode"]["iteration"]["flops"]
    expected = 4 * 2 * (weights + d * v + layers * heads * 2 * 128 * 128 / 2) / 4
    assert decode == pytest.approx(expected, rel=0.05)
    # Four rows of 128 tokens, on four devices: forward, again (remat, all but the last matmul of a layer), and two
    # matmuls backward for each; the head without remat on the 64 tokens of the response.
    matmuls = 2 * 128 * (4 * weights - layers * d * f) + 3 * 2 * 64 * d * v
    # Attention, half of it under the diagonal: two matmuls forward, the same again, and seven backward.
    attention = (2 + 2 + 7) * layers * heads * 2 * 128 * 128 * 128 / 2
    update = costs["update"]["once"]
    assert update["flops"] == pytest.approx(matmuls + attention, rel=0.01)
    assert update["unknown_kernels"] == 0
    assert update["collectives"]["all-gather"]["count"] > 0


@needs_libtpu
def test_residents(fitting):
    residents = {(r["agent"], r["what"]): r["bytes"] for r in fitting[1]["residents"]}
    master = residents["author", "master weights"]
    assert residents["author", "optimizer state"] == pytest.approx(2 * master, rel=1e-3)
    # In bfloat16: what it decodes with, and the checkpoint's own weights, as the reference and for the frozen agent.
    assert residents["author", "checkpoint's weights"] * 2 == master == 2 * residents["author", "engine weights"]
    assert ("frozen", "checkpoint's weights") not in residents
    # 4 slots x 128 tokens, keys and values of 2 heads of 128 in 2 layers, bfloat16, in four parts.
    assert residents["frozen", "key-value cache"] == 4 * 128 * 2 * 2 * 128 * 2 * 2 / 4
    assert ("frozen", "master weights") not in residents


def test_four_agents_with_adapters_keep_one_base(tmp_path):
    """Nothing is compiled: of the CPU's own device, what stays on it."""
    run = ConfigDict(tiny(tmp_path).to_dict())
    one = run.agents.author
    one.model.lora.rank = 2
    run.agents = ConfigDict({f"a{i}": one.copy_and_resolve_references() for i in range(4)})
    run.mesh.update(data=1, fsdp=1, tensor=1)
    shape, _ = model_shape(str(tmp_path))
    mesh = make_mesh(run.mesh, jax.devices()[:1])
    programs, residents = team_programs(FrozenConfigDict(run), dict.fromkeys(run.agents, shape), mesh)
    weights = [r for r in residents if r.what == "checkpoint's weights"]
    assert [(r.agent, r.bytes) for r in weights] == [("a0", 4 * shape.parameters)]  # float32 on a CPU
    # Rank 2 on both sides of the fused projection (8 heads of 128 wide), of the output and of the MLP's three matmuls.
    sides = (128 + 8 * 128) + (4 * 128 + 128) + 3 * (128 + 256)
    adapters = [r.bytes for r in residents if r.what == "master weights"]
    assert adapters == [4 * 2 * 2 * sides] * 4
    assert [(p.kind, len(p.agents)) for p in programs] == [("prefill", 4), ("decode", 4), ("score", 4), ("update", 4)]


def test_what_is_offloaded_is_on_no_device(tmp_path):
    run = ConfigDict(tiny(tmp_path).to_dict())
    run.mesh.update(data=1, fsdp=1, tensor=1)
    shape, _ = model_shape(str(tmp_path))
    mesh = make_mesh(run.mesh, jax.devices()[:1])

    def planned(offload):
        run.agents.author.optimizer.offload = offload
        programs, residents = team_programs(FrozenConfigDict(run), dict.fromkeys(run.agents, shape), mesh)
        mine = {r.what: (r.bytes, r.host_bytes) for r in residents if r.agent == "author"}
        return mine["master weights"], mine["optimizer state"], {p.kind: p.resident for p in programs}

    weights, counts = 4 * shape.parameters, 8
    assert planned("none")[:2] == ((weights, 0), (2 * weights + counts, 0))
    assert planned("state")[:2] == ((weights, 0), (counts, 2 * weights))
    assert planned("all")[:2] == ((0, weights), (counts, 2 * weights))
    # Scores and updates bring what they need and does not stay.
    before, after = planned("none")[2], planned("all")[2]
    assert before["score"] - after["score"] == weights
    assert before["update"] - after["update"] == 3 * weights
    run.learning.reference_every = 5
    assert planned("none")[2] == before
    _, residents = team_programs(FrozenConfigDict(run), dict.fromkeys(run.agents, shape), mesh)
    assert ("author", "reference", weights) in [(r.agent, r.what, r.bytes) for r in residents]


def test_roles_on_one_set_of_weights_cost_nothing_more(tmp_path):
    run = ConfigDict(tiny(tmp_path).to_dict())
    run.mesh.update(data=1, fsdp=1, tensor=1)
    shape, _ = model_shape(str(tmp_path))
    mesh = make_mesh(run.mesh, jax.devices()[:1])

    def planned():
        programs, residents = team_programs(FrozenConfigDict(run), dict.fromkeys(run.agents, shape), mesh)
        return [(p.kind, p.agents, p.size) for p in programs], residents

    alone = planned()
    run.agents.critic = agent_config()
    run.agents.critic.share_weights_with = "author"
    validate(run)
    assert planned() == alone


@needs_libtpu
def test_a_team_that_does_not_fit(tmp_path):
    config = tiny(tmp_path, prompt_memory=2**26)
    done = run(config, tmp_path, "--topology=v5e:2x2", f"--json={tmp_path / 'plan.json'}")
    assert done.returncode == 1, done.stderr + done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    over = (plan["needed_bytes"] - plan["chip"]["hbm"]) / 2**30
    # 64 Mi tokens of 2 KiB, split over the heads only, of two agents.
    assert over == pytest.approx(2 * 64 - 15.75, abs=0.5)
    told = re.search(r"does not fit v5e:2x2 by ([\d.]+) GiB a device", " ".join(done.stdout.split()))
    assert float(told[1]) == pytest.approx(over, abs=0.01)


@needs_libtpu
def test_mistakes_are_told(tmp_path):
    config = tiny(tmp_path)
    quiet = Console(file=io.StringIO())
    with pytest.raises(PlanError, match="v7:2x2 is unknown: write"):
        make_plan(config, "v7:2x2", console=quiet)
    with pytest.raises(PlanError, match="unknown to libtpu"):
        make_plan(config, "v5e:3x3", console=quiet)
    with pytest.raises(ConfigError, match="does not cover 8 devices"):
        make_plan(config, "v5e:2x4", console=quiet)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        make_plan(config, "v5e:2x2", console=quiet)


def test_without_libtpu(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'mars2_jax\[tpu\]'"):
        make_plan(tiny(tmp_path), "v5e:2x2", console=Console(file=io.StringIO()))

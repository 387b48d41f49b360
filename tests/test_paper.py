"""The configs that ship, and the ablations, which are changes of the config and nothing else."""

import io
import pathlib
import runpy
from collections.abc import Callable

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console

from mars2_jax.paper import VARIANTS, ablate
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.trainer import train
from mars2_jax.validation import validate
from tests.training.tiny_team import tiny_config

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
FAST = ("plus",)


def load(name: str) -> Callable[..., ConfigDict]:
    return runpy.run_path(str(CONFIGS / name))["get_config"]


def differences(a: ConfigDict, b: ConfigDict) -> set[str]:
    flat = lambda tree, prefix="": {
        key: value
        for name, child in tree.items()
        for key, value in (
            flat(child, f"{prefix}{name}.") if isinstance(child, dict) else {prefix + name: child}
        ).items()
    }
    one, other = flat(a.to_dict()), flat(b.to_dict())
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


@pytest.mark.parametrize("file", ["mars2", "mars2_8b"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_configs_are_valid(file, variant):
    validate(load(f"{file}.py")(variant))


@pytest.mark.parametrize("variant", ["pair", "trio"])
def test_the_14b_teams_are_valid(variant):
    config = load("mars2_14b.py")(variant)
    validate(config)
    assert len(config.agents) == {"pair": 2, "trio": 3}[variant]


def test_an_ablation_changes_what_it_is_about():
    config = load("mars2.py")
    changed = {variant: differences(config(), config(variant)) for variant in VARIANTS}
    assert changed["mars2"] == changed["beta"] == set()
    assert changed["no_shaping"] == {"learning.gamma"}
    assert changed["gaussian"] == {"search.posterior"}
    assert changed["node_first"] == {"search.order"}
    assert changed["agent_group"] == {"learning.group"}
    assert changed["flat_multi"] == {"search.strategy", "learning.estimator"}
    team = {key for key in changed["rs2"] if key.startswith("agents.qwen.")}
    assert changed["rs2"] - team == {"search.strategy"} and changed["grpo"] - team == changed["flat_multi"]
    assert changed["plus"] == {f"learning.{key}" for key in ("ratio", "tis", "overlong_buffer", "overlong_factor")}
    with pytest.raises(ValueError, match="no variant 'nothing'; there are mars2, plus"):
        config("nothing")


@pytest.mark.parametrize(
    "variant", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_an_ablation_trains(tmp_path, variant):
    config = ablate(tiny_config(tmp_path), variant)
    config.training.evaluate = False
    validate(config)
    train(FrozenConfigDict(config), str(tmp_path / "run"), Console(file=io.StringIO()))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for name in config.agents:
        losses = [row[f"agent/{name}/loss"] for row in rows if f"agent/{name}/loss" in row]
        assert losses and np.isfinite(losses).all()
        assert rows[-1][f"agent/{name}/updates"] >= 1
    if variant in ("flat_multi", "grpo"):
        assert rows[-1]["search/depth_mean"] == 1

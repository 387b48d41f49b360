"""What engines decode with where it is not what is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import FrozenConfigDict

from mars2_jax.errors import ConfigError
from mars2_jax.models.quantize import quantize
from mars2_jax.training.setup import Setup
from tests.training.test_lora import learn, team_config

GATE = ("blocks", 0, "mlp", "gate")


def flat(state: nnx.State) -> dict:
    return {path: variable[...] for path, variable in nnx.to_flat_state(state)}


def test_engines_in_eight_bits_and_training_in_float(tmp_path):
    config = team_config(tmp_path, "lfz")
    config.rollout.weights = "int8"
    setup = Setup.check(FrozenConfigDict(config))
    team = {agent.name: agent for agent in setup.team()}
    engines = {name: flat(agent.engine.params) for name, agent in team.items()}
    for params in engines.values():
        assert params[GATE].dtype == jnp.int8
    # Adapters stand on the frozen agent's codes; they themselves, embedding and head stay in float.
    assert engines["l0"][GATE] is engines["z2"][GATE]
    assert engines["l0"][(*GATE[:-1], "gate_lora", "a")].dtype == jnp.float32
    assert engines["f1"][("embedding",)].dtype == jnp.float32
    # What is trained, saved and exported knows nothing of it, and neither does the reference.
    for name in ("l0", "f1"):
        assert {x.dtype for x in jax.tree.leaves(team[name].state.params)} == {jnp.dtype("float32")}
        assert not any(str(path[-1]).endswith("_scale") for path, _ in nnx.to_flat_state(team[name].state.params))
    before = np.asarray(engines["f1"][GATE])
    learn(setup, team["f1"], 1)
    after = flat(team["f1"].engine.params)
    want = flat(quantize(team["f1"].state.params))
    assert after.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(np.asarray(after[path]), np.asarray(value), err_msg=str(path))
    assert (np.asarray(after[GATE]) != before).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "paged"}, "config.rollout.attention is 'paged', but the paged kernel runs on TPUs only"),
        ({"mesh.data": 2, "mesh.fsdp": 1, "mesh.tensor": 1}, "config.rollout.mesh .* does not cover 1 devices"),
    ],
)
def test_what_cannot_run_is_refused_before_weights_are_read(tmp_path, changes, message):
    config = team_config(tmp_path, "f")
    config.rollout.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        Setup.check(FrozenConfigDict(config))

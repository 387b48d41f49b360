import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mars2_jax.config import agent_config
from mars2_jax.errors import ConfigError
from mars2_jax.learning.optimizer import learning_rate, make_optimizer, state_shardings
from mars2_jax.models.lora import Lora
from mars2_jax.models.weights import abstract_decoder
from tests.models.tiny import TINY, random_decoder

NAMES = ["adamw", "adafactor", "muon"]


def _config(**changes):
    config = agent_config().optimizer
    config.update(changes)
    return config


def _rates(count, **changes):
    return [float(learning_rate(_config(**changes), jnp.asarray(i))) for i in range(count)]


def test_warm_up_is_linear_and_loses_no_update():
    assert _rates(6, learning_rate=0.4, warmup_updates=4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_rates_decay_after_the_warm_up_and_stay():
    options = dict(learning_rate=1.0, warmup_updates=2, decay_updates=4, final_learning_rate=0.2)
    got = _rates(8, schedule="linear", **options)
    assert got == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    got = _rates(8, schedule="cosine", **options)
    half = [0.2 + 0.8 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]
    assert got == pytest.approx([0.5, 1, *half, 0.2], abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_steps_follow_the_schedule(name):
    def steps(**changes):
        optimizer = make_optimizer(_config(name=name, learning_rate=0.4, max_grad_norm=1e9, **changes))
        params = nnx.State({"embedding": nnx.Param(jnp.zeros((1, 1))), "up": nnx.Param(jnp.zeros((1, 1)))})
        gradient, state, taken = jax.tree.map(jnp.ones_like, params), optimizer.init(params), []
        for _ in range(6):
            change, state = optimizer.update(gradient, state, params)
            taken.append([-float(change[key][0, 0]) for key in ("embedding", "up")])
        return np.asarray(taken)

    at_full_rate = steps()
    np.testing.assert_allclose(steps(warmup_updates=4) / at_full_rate, np.r_[1:5, 4, 4][:, None] / [4, 4], rtol=1e-5)
    if name != "muon":  # whose Nesterov steps are longer at first, and whose matrices of one number are not rescaled
        np.testing.assert_allclose(at_full_rate, 0.4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lora", [None, Lora(2, 4.0, frozenset({"attention", "mlp"}))], ids=["weights", "adapters"])
def test_weight_decay_is_times_the_rate_and_spares_norms_and_biases(name, lora):
    config = _config(name=name, learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(config)
    _, params = random_decoder(dataclasses.replace(TINY, qkv_bias=True), lora)
    if lora is not None:
        params = nnx.filter_state(params, nnx.LoRAParam)
    gradient = jax.tree.map(jnp.zeros_like, params)
    change, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(gradient, params)
    for (path, x), old in zip(jax.tree_util.tree_leaves_with_path(change), jax.tree.leaves(params), strict=True):
        place = jax.tree_util.keystr(path)
        decays = "bias" not in place and "scale" not in place
        np.testing.assert_allclose(x, -0.05 * old if decays else 0 * old, atol=1e-7, err_msg=place)


def _orthogonal(matrix):
    """Five of Muon's steps towards the nearest orthogonal matrix."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    """The first update, against NumPy: a layer's matrix steps by 0.2 √(its longer side) times its orthogonalised
    gradient, each head's queries, keys and values for themselves; everything else by the sign of its gradient, and a
    Nesterov step more."""
    config = _config(name="muon", learning_rate=0.1, max_grad_norm=1e9)
    optimizer = make_optimizer(config)
    _, params = random_decoder(dataclasses.replace(TINY, qkv_bias=True))
    _, gradient = random_decoder(dataclasses.replace(TINY, qkv_bias=True))
    change, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(gradient, params)
    orthogonalised = 0
    for (path, got), g in zip(jax.tree_util.tree_leaves_with_path(change), jax.tree.leaves(gradient), strict=True):
        name, g = jax.tree_util.keystr(path), np.asarray(g, np.float64)
        if "'qkv']" in name:
            matrices = g.reshape(-1, *g.shape[2:])
        elif any(f"'{weight}']" in name for weight in ("out", "gate", "up", "down")):
            matrices = g.reshape(1, g.shape[0], -1)
        else:
            np.testing.assert_allclose(got, -0.1 * np.sign(g) * (1 + 0.9 / 1.9), rtol=1e-3, err_msg=name)
            continue
        longer = max(matrices.shape[1:])
        want = np.stack([_orthogonal(m) for m in matrices]).reshape(g.shape) * 0.2 * longer**0.5
        np.testing.assert_allclose(got, -0.1 * want, atol=2e-4, err_msg=name)
        orthogonalised += 1
    assert orthogonalised == 5 * TINY.layers


def test_muon_takes_both_sides_of_adapters():
    _, params = random_decoder(TINY, Lora(2, 4.0, frozenset({"attention", "mlp"})))
    params = nnx.filter_state(params, nnx.LoRAParam)
    state = make_optimizer(_config(name="muon")).init(params)
    assert len(jax.tree.leaves(optax.tree.get(state, "mu", filtering=lambda path, _: "muon" in str(path)))) == len(
        jax.tree.leaves(params)
    )


def test_adafactor_is_that_of_optax_without_scaling_by_the_weights():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(128, 160)), jnp.float32), "v": jnp.ones(7)}
    ours = make_optimizer(_config(name="adafactor", learning_rate=0.1, max_grad_norm=1e9))
    theirs = optax.adafactor(0.1, multiply_by_parameter_scale=False)
    a, b = ours.init(params), theirs.init(params)
    for _ in range(3):
        gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
        change, a = jax.jit(ours.update)(gradient, a, params)
        want, b = jax.jit(theirs.update)(gradient, b, params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), change, want)
    numbers = sum(x.size for x in jax.tree.leaves(a))
    assert numbers < 128 + 160 + 20, "rows and columns, no matrix"


@pytest.mark.parametrize("name", NAMES)
def test_on_one_device_the_state_lies_with_the_weights(name):
    _, params = random_decoder()
    state = make_optimizer(_config(name=name)).init(params)
    places = set(jax.tree.leaves(state_shardings(params, state)))
    assert places == {jax.tree.leaves(params)[0].sharding}


def test_an_unknown_optimizer_or_schedule_is_an_error():
    with pytest.raises(ConfigError, match="optimizer.name='sgd' is unknown"):
        make_optimizer(_config(name="sgd"))
    with pytest.raises(ConfigError, match="optimizer.schedule='step' is unknown"):
        learning_rate(_config(schedule="step", decay_updates=3), jnp.asarray(0))


def test_abstract_weights_have_a_state_too():
    params = nnx.state(abstract_decoder(TINY))
    shapes = jax.eval_shape(make_optimizer(_config(name="muon")).init, params)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))

"""The update of an agent that learns adapters over a frozen base."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from mars2_jax.learning import update as update_lib
from mars2_jax.learning.batch import make_batch
from mars2_jax.learning.update import Learner
from mars2_jax.models.lora import Lora, merge_lora
from mars2_jax.models.weights import abstract_decoder
from tests.learning.test_update import TINY, TREES, _host, _learner, _samples
from tests.models.tiny import random_decoder

pytestmark = pytest.mark.usefixtures("quick_compiles")

LORA = Lora(2, 8.0, frozenset({"attention", "mlp"}))


@pytest.fixture(scope="module")
def adapted():
    """A learner of adapters, adapters that change something, and their base."""
    _, params = random_decoder(TINY, LORA)
    adapters, base = nnx.filter_state(params, nnx.LoRAParam, nnx.Param)
    return _learner(abstract_decoder(TINY, lora=LORA)), adapters, base


def test_an_update_follows_from_the_gradient_of_the_merged_weights(adapted):
    """dA = scale · Bᵀ dW, dB = scale · dW Aᵀ; then clipping by the adapters' own norm, and the first step of Adam."""
    learner, adapters, base = adapted
    plain = _learner(abstract_decoder(TINY))
    batch, _ = make_batch(_samples(), TREES, micro_batch_size=5)
    before = _host(base)
    state, metrics, trees = learner.update(learner.init(adapters), batch, base)
    assert all((a == b).all() for a, b in zip(before, _host(base), strict=True))
    assert jax.tree.structure(state.params) == jax.tree.structure(adapters)

    samples = jax.tree.map(lambda x: x[0], batch.samples)
    loss = functools.partial(update_lib._loss, plain)
    gradient, terms = jax.jit(jax.grad(loss, has_aux=True))(
        merge_lora(nnx.merge_state(adapters, base), LORA), samples, trees.advantage[samples.tree, samples.slot], None
    )
    whole = {path: np.asarray(g[...] / terms.denominator, np.float64) for path, g in nnx.to_flat_state(gradient)}
    start = {path: np.asarray(x[...], np.float64) for path, x in nnx.to_flat_state(adapters)}
    wanted = {}
    for path in start:
        *module, name, side = path
        dw = whole[*module, name.removesuffix("_lora")]
        a, b = start[*module, name, "a"], start[*module, name, "b"]
        d_weight, rows, columns = dw.reshape(b[..., 0].size, -1), b.reshape(-1, LORA.rank), a.reshape(LORA.rank, -1)
        product = rows.T @ d_weight if side == "a" else d_weight @ columns.T
        wanted[path] = LORA.scale * product.reshape(start[path].shape)
    norm = np.sqrt(sum((g**2).sum() for g in wanted.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    settings = learner.optimizer
    for path, new in nnx.to_flat_state(state.params):
        g = wanted[path] * min(1.0, settings.max_grad_norm / norm)
        step = -settings.learning_rate * g / (np.abs(g) + settings.eps)
        np.testing.assert_allclose(np.asarray(new[...]) - start[path], step, atol=2e-6, rtol=1e-3)


def test_agents_of_equal_adapters_share_the_compiled_update(adapted):
    learner, *_ = adapted

    def other(lora: Lora) -> Learner:
        return _learner(abstract_decoder(TINY, lora=lora))

    assert other(LORA) == learner and hash(other(LORA)) == hash(learner)
    assert other(Lora(2, 4.0, LORA.targets)) != learner

"""The update of an agent that learns adapters over a frozen base."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from mars2_jax.learning import update as update_lib
from mars2_jax.learning.batch import make_batch
from mars2_jax.learning.update import Learner
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.lora import Lora, merge_lora
from tests.learning.test_update import TINY, TREES, _host, _learner, _samples

LORA = Lora(2, 8.0, frozenset({"attention", "mlp"}))


@pytest.fixture(scope="module")
def adapted():
    """A learner of adapters, adapters that change something, and their base."""
    model = Decoder(TINY, nnx.Rngs(params=0, lora=1), lora=LORA)
    adapters, base = nnx.state(model, nnx.LoRAParam), nnx.state(model, nnx.Not(nnx.LoRAParam))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), adapters)
    return _learner(model), adapters, base


def test_an_update_follows_from_the_gradient_of_the_merged_weights(adapted):
    """dA = scale · Bᵀ dW and dB = scale · dW Aᵀ; then clipping by the adapters' own norm, and the first step of Adam."""
    learner, adapters, base = adapted
    plain = _learner(Decoder(TINY, nnx.Rngs(params=0)))
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


def test_scores_with_a_base_are_those_of_the_merged_weights(adapted):
    learner, adapters, base = adapted
    prompts, responses = [s.prompt for s in _samples()], [s.tokens for s in _samples()]
    got = learner.score_responses(adapters, prompts, responses, base)
    plain = _learner(Decoder(TINY, nnx.Rngs(params=0)))
    merged = merge_lora(nnx.merge_state(adapters, base), LORA)
    want = plain.score_responses(merged, prompts, responses)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_agents_of_equal_adapters_share_the_compiled_update(adapted):
    learner, *_ = adapted

    def other(lora: Lora) -> Learner:
        return _learner(nnx.eval_shape(lambda: Decoder(TINY, nnx.Rngs(params=5, lora=6), lora=lora)))

    assert other(LORA) == learner and hash(other(LORA)) == hash(learner)
    assert other(Lora(2, 4.0, LORA.targets)) != learner

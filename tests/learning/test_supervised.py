"""The supervised update: its loss and gradient are those of plain cross entropy, whatever the batch looks like."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from mars2_jax.config import agent_config, default_config
from mars2_jax.learning.supervised import fit, make_pair_batch, mean_loss
from mars2_jax.learning.update import Learner
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.export import save_checkpoint
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.lora import Lora
from mars2_jax.models.weights import load
from tests.models.tiny import random_decoder

pytestmark = pytest.mark.usefixtures("quick_compiles")

TINY = ModelConfig(
    vocab_size=31, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=32, tied_embeddings=False
)


def optimizer(**changes) -> ConfigDict:
    config = agent_config().optimizer
    config.update(changes)
    return config


LINEAR = dict(learning_rate=1e6, eps=1e6, b1=0.0, b2=0.0, max_grad_norm=1e9)
"""AdamW's first step, rate · g / (|g| + eps), is then the gradient itself, to a millionth."""


def learner_of(graphdef, **changes) -> Learner:
    learning = default_config().learning
    learning.update(dict(micro_batch_size=2) | changes)
    return Learner.create(
        nnx.merge(graphdef, random_decoder(TINY)[1]), learning, optimizer(**LINEAR), temperature=1.0, budget=16
    )


def pairs(vocab: int = TINY.vocab_size, count: int = 5):
    rng = np.random.default_rng(0)
    draw = lambda most: rng.integers(0, vocab, rng.integers(1, most)).astype(np.int32)
    return [draw(15) for _ in range(count)], [draw(12) for _ in range(count)]


def gradient_and_metrics(learner, params, batch, base=None):
    """By the update: what it took off the weights."""
    before = jax.tree.map(np.asarray, params)
    state, metrics = fit(learner, learner.init(params), batch, base)
    assert int(state.step) == 1
    taken = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    return taken, {name: float(value) for name, value in metrics.items()}


@functools.lru_cache
def naive():
    """Loss and gradient, each pair alone and unpadded, the whole vocabulary's logits, by JAX's own log-softmax."""
    graphdef, params = random_decoder(TINY)
    prompts, responses = pairs()

    def loss(params):
        model, total = nnx.merge(graphdef, params), 0.0
        for prompt, response in zip(prompts, responses, strict=True):
            logits = model.logits(model(np.concatenate([prompt, response])[None]))[0]
            log_p = jax.nn.log_softmax(logits)[len(prompt) - 1 : -1]
            total -= log_p[jnp.arange(len(response)), response].sum()
        return total / sum(map(len, responses))

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


@pytest.mark.parametrize(("micro", "pack"), [(2, 0), (5, 0), (2, 64)], ids=lambda value: str(value))
def test_loss_and_gradient_are_those_of_cross_entropy_however_the_batch_is_cut(micro, pack):
    graphdef, params = random_decoder(TINY)
    prompts, responses = pairs()
    batch = make_pair_batch(prompts, responses, micro_batch_size=micro, pack_tokens=pack)
    gradient, metrics = gradient_and_metrics(learner_of(graphdef), params, batch)
    loss, expected = naive()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["tokens"] == sum(map(len, responses))
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(expected)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4) and metrics["learning_rate"] == 1e6
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-3)


def test_the_held_out_loss_is_the_same_number():
    graphdef, params = random_decoder(TINY)
    for changes in ({}, {"pack_tokens": 64}):
        assert mean_loss(learner_of(graphdef, **changes), params, *pairs()) == pytest.approx(naive()[0], rel=1e-5)


@pytest.mark.parametrize("pack", [0, 64])
def test_the_mask_covers_the_response_and_nothing_else(pack):
    """Read back from the rows: what is predicted are the responses' tokens, to their last, from what stands before."""
    prompts, responses = pairs()
    batch = make_pair_batch(prompts, responses, micro_batch_size=2, pack_tokens=pack)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.rows)
    found = []
    for r in range(len(rows.tokens)):
        targets = rows.index[r][rows.mask[r]]
        segment = np.ones_like(rows.tokens[r]) if rows.segment is None else rows.segment[r]
        for number in range(1, segment.max() + 1):
            own = targets[segment[targets] == number]
            if not len(own):
                continue
            assert (np.diff(own) == 1).all()
            start = int(np.argmax(segment == number))
            found.append((rows.tokens[r, start : own[0]].tolist(), rows.tokens[r, own].tolist()))
            # After the last of them the segment ends: nothing of it is left out.
            after = own[-1] + 1
            assert pack == 0 or after == len(segment) or segment[after] != number
    assert sorted(found) == sorted((p.tolist(), r.tolist()) for p, r in zip(prompts, responses, strict=True))


def test_adapters_learn_and_their_base_does_not():
    lora = Lora(2, 4.0, frozenset(("attention", "mlp")))
    graphdef, params = random_decoder(TINY, lora)
    adapters, base = nnx.split_state(params, nnx.LoRAParam, ...)
    held = jax.tree.map(np.asarray, base)
    prompts, responses = pairs()
    learning = default_config().learning
    learning.micro_batch_size = 2
    learner = Learner.create(
        nnx.merge(graphdef, params), learning, optimizer(learning_rate=0.03), temperature=1.0, budget=16
    )
    batch = make_pair_batch(prompts, responses, micro_batch_size=5)
    state, losses = learner.init(adapters), []
    for _ in range(20):
        state, metrics = fit(learner, state, batch, base)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.85 * losses[0]
    for before, after in zip(jax.tree.leaves(held), jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(before, after)
    assert mean_loss(learner, state.params, prompts, responses, base) < losses[0]


@pytest.mark.parity
@pytest.mark.parametrize("family", ["qwen2"])
def test_loss_and_gradient_are_those_of_transformers(tmp_path, family):
    """Labels of -100 on prompts and padding, cross entropy in PyTorch, the gradient of every tensor of the file."""
    torch = pytest.importorskip("torch")
    from tests.models.test_parity import SHAPE, write_checkpoint
    from tests.models.test_tokenizer import PLAIN, chat_tokenizer

    model = write_checkpoint(tmp_path / "model", family)
    prompts, responses = pairs(SHAPE["vocab_size"], count=4)
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    tokens, labels = torch.zeros(4, width).long(), torch.full((4, width), -100)
    attended = torch.zeros(4, width).long()
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        whole = torch.tensor(np.concatenate([prompt, response])).long()
        tokens[i, : len(whole)], attended[i, : len(whole)] = whole, 1
        labels[i, len(prompt) : len(whole)] = whole[len(prompt) :]
    loss = model(tokens, attention_mask=attended, labels=labels).loss
    loss.backward()

    with open_checkpoint(str(tmp_path / "model")) as checkpoint:
        graphdef, params = nnx.split(load(checkpoint))
    learning = default_config().learning
    learner = Learner.create(nnx.merge(graphdef, params), learning, optimizer(**LINEAR), temperature=1.0, budget=16)
    batch = make_pair_batch(prompts, responses, micro_batch_size=2, pack_tokens=48)
    gradient, metrics = gradient_and_metrics(learner, params, batch)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    # The layout of the file is linear in the weights: gradients go through it as weights do.
    save_checkpoint(
        tmp_path / "gradient", jax.tree.map(jnp.asarray, gradient), checkpoint.config, chat_tokenizer(PLAIN)
    )
    ours = load_file(tmp_path / "gradient" / "model.safetensors")
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        np.testing.assert_allclose(ours[name], want, atol=5e-5, rtol=2e-3, err_msg=name)

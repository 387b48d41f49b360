"""The paged kernel, in Pallas' interpreter, and both layouts of the keys, against NumPy and through an engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from mars2_jax.errors import ConfigError
from mars2_jax.models import cache as kv
from mars2_jax.models import decode_attention as lib
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decode_attention import choose_decode_attention, decode_attention
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Request, SamplingParams
from tests.models.tiny import tiny_decoder

ROOM, KV_HEADS, HEAD_DIM = 384, 2, 128
# One entry, a full slot, idle ones at both ends and in the middle, and lengths at and beside the end of a page.
LENGTHS = np.asarray([0, 1, ROOM, 0, 128, 129, 300, 0], np.int32)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run in Pallas' interpreter; JAX's paged attention has no argument for it."""
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


def inputs(group, dtype):
    rng = np.random.default_rng(group)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    slots = len(LENGTHS)
    query = draw(slots, 1, KV_HEADS, group, HEAD_DIM)
    return query, draw(slots, ROOM, KV_HEADS, HEAD_DIM), draw(slots, ROOM, KV_HEADS, HEAD_DIM)


def by_hand(query, key, value):
    """Attention of each slot that is not idle, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query[:, 0], key, value))
    mixed = {}
    for slot, length in enumerate(LENGTHS):
        if length:
            scores = np.einsum("kgh,skh->kgs", query[slot], key[slot, :length]) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed[slot] = np.einsum("kgs,skh->kgh", weights, value[slot, :length])
    return mixed


def check(got, want, atol):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    for slot, mixed in want.items():
        np.testing.assert_allclose(got[slot, 0], mixed, atol=atol, err_msg=f"slot {slot} of length {LENGTHS[slot]}")


@pytest.mark.parametrize("attention", ["xla", "xla_cpu"])
def test_xla_equals_attention_by_hand(attention):
    query, key, value = inputs(3, jnp.float32)
    got = jax.jit(decode_attention)(query, kv.layer_cache(key, value, attention), LENGTHS)
    check(got, by_hand(query, key, value), 1e-5)


@pytest.mark.parametrize(("group", "cores"), [(3, 1), (8, 2)])
def test_the_paged_kernel_equals_attention_by_hand(monkeypatch, interpreted, group, cores):
    monkeypatch.setattr(lib, "_PAGE", 128)
    query, key, value = inputs(group, jnp.bfloat16)
    layer = kv.layer_cache(key, value, "paged")
    got = lib._paged(query, layer.key, layer.value, jnp.asarray(LENGTHS), cores=cores)
    assert got.dtype == jnp.bfloat16
    check(got, by_hand(query, key, value), 2e-2)


def test_pages_divide_the_room():
    assert [lib._page(room) for room in (64, 192, 512, 768, 1536, 40_960)] == [64, 192, 512, 384, 512, 512]


def test_an_engine_with_the_paged_kernel(interpreted):
    config = ModelConfig(vocab_size=64, embed_dim=32, layers=1, heads=2, kv_heads=1, head_dim=128, mlp_dim=48)
    decoder = tiny_decoder(config=config, scale=2.0)
    rng = np.random.default_rng(0)
    # Four requests in two slots, one of which falls idle.
    prompts = [rng.integers(2, 64, n).astype(np.int32) for n in (3, 40, 1, 20)]
    requests = [
        Request(i, prompt, np.asarray([1, i], np.uint32), SamplingParams(temperature=0, max_new_tokens=3 + i))
        for i, prompt in enumerate(prompts)
    ]

    def run(attention):
        engine = Engine(decoder, slots=2, chunk=4, capacity=64, stop_ids=(), attention=attention)
        for request in requests:
            engine.submit(request)
        done = {}
        while engine.pending:
            done |= {c.id: c for c in engine.step()}
        return [done[i] for i in range(len(requests))]

    want = run("xla_cpu")
    got = run("paged")
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        # The kernel rounds keys and values to bfloat16.
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-2)


def test_caches_grow_and_take_prompts_in_every_layout():
    config = ModelConfig(vocab_size=8, embed_dim=8, layers=1, heads=2, kv_heads=2, head_dim=4, mlp_dim=8)
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(1, 5, 2, 4)), jnp.float32) for _ in range(2))
    new = jnp.asarray(rng.normal(size=(2, 3, 1, 2, 4)), jnp.float32)
    for attention in ("xla", "xla_cpu"):
        cache = kv.insert(kv.empty(config, 3, 6, jnp.float32, attention), (kv.layer_cache(key, value, attention),), 1)
        layer = kv.append(kv.grow(cache, 8)[0], *new, jnp.asarray([0, 5, 8]))
        assert kv.cache_length((layer,)) == 8
        keys = np.asarray(layer.key.swapaxes(2, 3) if attention == "xla_cpu" else layer.key)
        want = np.zeros((3, 2, 8, 4))
        want[1, :, :5] = key[0].swapaxes(0, 1)
        want[0, :, 0], want[1, :, 5] = new[0, 0, 0], new[0, 1, 0]  # the third slot is full
        np.testing.assert_array_equal(keys, want)
        np.testing.assert_array_equal(np.asarray(layer.value)[1, :, :5], np.asarray(value[0].swapaxes(0, 1)))


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "chosen"),
    [
        ("cpu", jnp.float32, 128, "xla_cpu"),
        ("cuda", jnp.bfloat16, 128, "xla"),
        ("tpu", jnp.bfloat16, 128, "paged"),
        ("tpu", jnp.bfloat16, 256, "paged"),
        ("tpu", jnp.bfloat16, 64, "xla"),
        ("tpu", jnp.float32, 128, "xla"),
    ],
)
def test_auto_is_the_fastest_that_runs(platform, dtype, head_dim, chosen):
    choose = functools.partial(choose_decode_attention, platform=platform, dtype=dtype, head_dim=head_dim)
    assert choose("auto") == chosen
    assert choose("xla") == ("xla_cpu" if platform == "cpu" else "xla")


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "message"),
    [
        ("cpu", jnp.float32, 128, "TPUs only, and the mesh is of cpu devices"),
        ("tpu", jnp.float32, 128, "rounds keys and values to bfloat16, and the model's dtype is float32"),
        ("tpu", jnp.bfloat16, 64, "multiple of 128, and the model's is 64"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(platform, dtype, head_dim, message):
    with pytest.raises(ConfigError, match=message) as caught:
        choose_decode_attention("paged", platform=platform, dtype=dtype, head_dim=head_dim)
    assert str(caught.value).startswith("config.rollout.attention is 'paged', but")
    assert "set it to 'auto' or 'xla'" in str(caught.value)

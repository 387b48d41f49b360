"""The paged kernel, in Pallas' interpreter, and both layouts of the keys, against NumPy and through an engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from mars2_jax.errors import ConfigError
from mars2_jax.models import cache as kv
from mars2_jax.models import decode_attention as lib
from mars2_jax.models.cache import Layout
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decode_attention import choose_layout, decode_attention
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Request, SamplingParams
from tests.models.tiny import tiny_decoder

ROOM, KV_HEADS = 384, 2
# One entry, a full slot, idle ones at both ends and in the middle, and lengths at and beside the end of a page.
LENGTHS = np.asarray([0, 1, ROOM, 0, 128, 129, 300, 0], np.int32)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run in Pallas' interpreter; JAX's paged attention has no argument for it."""
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


def inputs(group, dtype, head_dim=128):
    rng = np.random.default_rng(group)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    slots = len(LENGTHS)
    query = draw(slots, 1, KV_HEADS, group, head_dim)
    return query, draw(slots, ROOM, KV_HEADS, head_dim), draw(slots, ROOM, KV_HEADS, head_dim)


def by_hand(query, key, value):
    """Attention of each slot that is not idle, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query[:, 0], key, value))
    mixed = {}
    for slot, length in enumerate(LENGTHS):
        if length:
            scores = np.einsum("kgh,skh->kgs", query[slot], key[slot, :length]) / np.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed[slot] = np.einsum("kgs,skh->kgh", weights, value[slot, :length])
    return mixed


def check(got, want, atol):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    for slot, mixed in want.items():
        np.testing.assert_allclose(got[slot, 0], mixed, atol=atol, err_msg=f"slot {slot} of length {LENGTHS[slot]}")


def attend(query, key, value, layout):
    """The last entry of each slot comes in as its new token; what lies beyond it is of another sequence."""
    last, slot = np.maximum(LENGTHS - 1, 0), np.arange(len(LENGTHS))
    without = lambda x: kv.layer_cache(x.at[slot, last].set(9), x.at[slot, last].set(9), layout)
    cache = dataclasses.replace(without(key), value=without(value).value)
    new = (key[slot, last][:, None], value[slot, last][:, None])
    mixed, longer = jax.jit(decode_attention)(query, *new, cache, jnp.asarray(last), jnp.asarray(LENGTHS > 0))
    longer, want = jax.device_get((longer, kv.layer_cache(key, value, layout)))
    for slot in np.flatnonzero(LENGTHS):
        np.testing.assert_array_equal(longer.key[slot], want.key[slot])
        np.testing.assert_array_equal(longer.value[slot], want.value[slot])
    return mixed


@pytest.mark.parametrize("layout", [Layout(), Layout(transposed=True), Layout(side_by_side=2)])
def test_xla_equals_attention_by_hand(layout):
    query, key, value = inputs(3, jnp.float32, head_dim=64)
    got = attend(query, key, value, layout)
    check(got, by_hand(query, key, value), 1e-5)


@pytest.mark.parametrize(("group", "head_dim", "cores"), [pytest.param(3, 128, 1, marks=pytest.mark.slow), (4, 64, 2)])
def test_the_paged_kernel_equals_attention_by_hand(monkeypatch, interpreted, group, head_dim, cores):
    monkeypatch.setattr(lib, "_PAGE", 128)
    monkeypatch.setattr(lib, "_cores", lambda: cores)
    query, key, value = inputs(group, jnp.bfloat16, head_dim)
    got = attend(query, key, value, Layout("paged", side_by_side=128 // head_dim))
    assert got.dtype == jnp.bfloat16
    check(got, by_hand(query, key, value), 2e-2)


def test_pages_divide_the_room():
    assert [lib._page(room) for room in (64, 192, 512, 768, 1536, 40_960)] == [64, 192, 512, 384, 512, 512]


@pytest.mark.slow
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

    def run(layout):
        engine = Engine(decoder, slots=2, chunk=4, capacity=64, stop_ids=(), layout=layout)
        for request in requests:
            engine.submit(request)
        done = {}
        while engine.pending:
            done |= {c.id: c for c in engine.step()}
        return [done[i] for i in range(len(requests))]

    want = run(None)
    got = run(Layout("paged"))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        # The kernel rounds keys and values to bfloat16.
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-2)


def test_caches_grow_and_take_prompts_in_every_layout():
    config = ModelConfig(vocab_size=8, embed_dim=8, layers=1, heads=2, kv_heads=2, head_dim=4, mlp_dim=8)
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(1, 5, 2, 4)), jnp.float32) for _ in range(2))
    new = jnp.asarray(rng.normal(size=(2, 3, 1, 2, 4)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def grown(layout):
        cache = kv.insert(kv.empty(config, 3, 6, jnp.float32, layout), (kv.layer_cache(key, value, layout),), 1)
        return kv.append(kv.grow(cache[0], 8), *new, jnp.asarray([0, 5, 8]))

    for layout in (Layout(), Layout(transposed=True), Layout(side_by_side=2)):
        layer = grown(layout)
        assert kv.cache_length((layer,)) == 8
        for got, prompt, entry in ((layer.key, key, new[0]), (layer.value, value, new[1])):
            want = np.zeros((3, 8, 2, 4))
            want[1, :5] = prompt[0]
            want[0, 0], want[1, 5] = entry[0, 0], entry[1, 0]  # the third slot is full
            got = got.swapaxes(2, 3) if layout.transposed and got is layer.key else got
            by_position = np.asarray(got).swapaxes(1, 2).reshape(want.shape)
            np.testing.assert_array_equal(by_position, want.astype(np.float32))


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "kv_heads", "chosen"),
    [
        ("cpu", jnp.float32, 128, 8, Layout(transposed=True)),
        ("cuda", jnp.bfloat16, 64, 8, Layout()),
        ("tpu", jnp.bfloat16, 128, 1, Layout("paged")),
        ("tpu", jnp.bfloat16, 256, 1, Layout("paged")),
        ("tpu", jnp.bfloat16, 64, 2, Layout("paged", side_by_side=2)),
        ("tpu", jnp.bfloat16, 64, 3, Layout()),
        ("tpu", jnp.bfloat16, 80, 8, Layout()),
        ("tpu", jnp.float32, 64, 2, Layout(side_by_side=2)),
    ],
)
def test_auto_is_the_fastest_that_runs(platform, dtype, head_dim, kv_heads, chosen):
    choose = functools.partial(choose_layout, platform=platform, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads)
    assert choose("auto") == chosen
    assert choose("xla") == dataclasses.replace(chosen, kernel="xla")


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "kv_heads", "message"),
    [
        ("cpu", jnp.float32, 128, 2, "TPUs only, and the mesh is of cpu devices"),
        ("tpu", jnp.float32, 128, 2, "rounds keys and values to bfloat16, and the model's dtype is float32"),
        ("tpu", jnp.bfloat16, 64, 3, "reads rows of 128 numbers, and the model's head_dim is 64"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(platform, dtype, head_dim, kv_heads, message):
    with pytest.raises(ConfigError, match=message) as caught:
        choose_layout("paged", platform=platform, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads)
    assert str(caught.value).startswith("config.rollout.attention is 'paged', but")
    assert "set it to 'auto' or 'xla'" in str(caught.value)

"""The fused kernels against plain matmuls. No TPU and no GPU here: splash runs in Pallas' interpreter, and of cuDNN the
arguments are tested."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars2_jax.errors import ConfigError
from mars2_jax.models import causal_attention as lib
from mars2_jax.models.causal_attention import causal_attention, choose_attention, shares_prefixes

ROWS, LENGTH, KV_HEADS, GROUP, HEAD_DIM = 2, 130, 1, 2, 64


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH, KV_HEADS, HEAD_DIM)
    query = rng.normal(size=(*shape[:3], GROUP, HEAD_DIM))
    return tuple(jnp.asarray(x, jnp.float32) for x in (query, rng.normal(size=shape), rng.normal(size=shape)))


SEGMENTS = jnp.asarray(np.stack([np.arange(LENGTH) // 50, np.zeros(LENGTH)]), jnp.int32)


# The second and third segment see the first, too.
PREFIXES = jnp.zeros((ROWS, LENGTH), jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 3))
def value_and_gradients(implementation, inputs, segments, valid, prefixes=None):
    """Of a function of the first `valid` positions, the others being padding."""

    def function(query, key, value):
        mixed = causal_attention(query, key, value, segments, prefixes, implementation=implementation)[:, :valid]
        return jnp.sin(mixed).sum(), mixed

    return jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)(*inputs)


@pytest.mark.parametrize(
    "segments, prefixes",
    [(None, None), (SEGMENTS, None), (SEGMENTS, PREFIXES)],
    ids=["rows", "segments", "shared prefixes"],
)
def test_xla_equals_its_formula(inputs, segments, prefixes):
    """Of queries in three blocks (64, 64 and 2), against a loop in NumPy; gradients against those of the plain form."""

    def plain(query, key, value):
        visible = np.tril(np.ones((LENGTH, LENGTH), bool))[None]
        if segments is not None:
            own = np.asarray(segments)[:, None]
            seen = np.asarray(segments)[:, :, None] == own
            visible = visible & (seen if prefixes is None else seen | (np.asarray(prefixes)[:, :, None] == own))
        scores = jnp.einsum("bqkgh,bskh->bkgqs", query, key) / HEAD_DIM**0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bkgqs,bskh->bqkgh", weights, value)

    def sees(row, i, j):
        if segments is None or segments[row, j] == segments[row, i]:
            return True
        return prefixes is not None and prefixes[row, i] == segments[row, j]

    (_, mixed), gradients = value_and_gradients("xla", inputs, segments, LENGTH, prefixes)
    query, key, value = (np.asarray(x, np.float64) for x in inputs)
    for row in range(ROWS):
        for i in range(LENGTH):
            seen = [j for j in range(i + 1) if sees(row, i, j)]
            scores = np.einsum("gh,sh->gs", query[row, i, 0], key[row, seen, 0]) / HEAD_DIM**0.5
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            np.testing.assert_allclose(mixed[row, i, 0], weights @ value[row, seen, 0], atol=1e-5)
    expected = jax.jit(jax.grad(lambda *inputs: jnp.sin(plain(*inputs)).sum(), argnums=(0, 1, 2)))(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradients, expected)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["rows", "segments"])
def test_splash_equals_xla(monkeypatch, inputs, segments):
    # Two blocks a side: one on the diagonal, one below it, one above it that is skipped; and padding to their multiple.
    monkeypatch.setattr(lib, "_SPLASH_BLOCK", 128)
    monkeypatch.setattr(lib, "_splash", functools.partial(lib._splash, interpret=True))
    want = value_and_gradients("xla", inputs, segments, 129)
    got = value_and_gradients("splash", inputs, segments, 129)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
    assert np.all(np.asarray(got[1][1])[:, 129:] == 0)  # no gradient to keys after the last valid query


def test_cudnn_is_asked_for_the_same_attention(monkeypatch, inputs):
    asked = []

    def plain(*args, implementation, **options):
        asked.append(implementation)
        return original(*args, implementation="xla", **options)

    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)

    @jax.jit
    def largest_gap(*ids):
        fused = causal_attention(*inputs, *ids, implementation="cudnn")
        return jnp.abs(fused - causal_attention(*inputs, *ids)).max()

    assert largest_gap(None) < 1e-5 and largest_gap(SEGMENTS) < 1e-5 and largest_gap(SEGMENTS, PREFIXES) < 1e-5
    assert asked == ["cudnn"] * 3


def test_splash_takes_no_shared_prefixes(inputs):
    assert [shares_prefixes(name) for name in ("xla", "cudnn", "splash")] == [True, True, False]
    with pytest.raises(ValueError, match="splash attention knows no shared prefixes"):
        causal_attention(*inputs, SEGMENTS, PREFIXES, implementation="splash")


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "chosen"),
    [
        ("cpu", jnp.float32, 128, "xla"),
        ("cuda", jnp.bfloat16, 128, "cudnn"),
        ("cuda", jnp.float32, 128, "xla"),
        ("cuda", jnp.bfloat16, 100, "xla"),
        ("rocm", jnp.bfloat16, 128, "xla"),
        ("tpu", jnp.bfloat16, 128, "splash"),
        ("tpu", jnp.float32, 64, "splash"),
        ("tpu", jnp.bfloat16, 72, "xla"),
    ],
)
def test_auto_is_the_fastest_that_runs(platform, dtype, head_dim, chosen):
    choose = functools.partial(choose_attention, platform=platform, dtype=dtype, head_dim=head_dim)
    assert choose("auto") == choose(chosen) == chosen
    assert choose("xla") == "xla"


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "head_dim", "message"),
    [
        ("splash", "cpu", jnp.float32, 128, "TPUs only, and the mesh is of cpu devices"),
        ("splash", "tpu", jnp.bfloat16, 72, "multiple of 16, and the model's is 72"),
        ("cudnn", "tpu", jnp.bfloat16, 128, "NVIDIA GPUs only, and the mesh is of tpu devices"),
        ("cudnn", "cuda", jnp.float32, 128, "the model's dtype is float32"),
        ("cudnn", "cuda", jnp.bfloat16, 256, "at most 128, and the model's is 256"),
    ],
)
def test_an_implementation_that_cannot_run_is_refused(name, platform, dtype, head_dim, message):
    with pytest.raises(ConfigError, match=message) as caught:
        choose_attention(name, platform=platform, dtype=dtype, head_dim=head_dim, key="agents.ann.model.attention")
    assert str(caught.value).startswith(f"config.agents.ann.model.attention is '{name}'")
    assert "set it to 'auto' or 'xla'" in str(caught.value)

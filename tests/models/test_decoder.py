import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mars2_jax.errors import ModelError
from mars2_jax.models.attention import rope_frequencies
from mars2_jax.models.config import Llama3Rope, ModelConfig
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.weights import abstract_decoder
from tests.models.tiny import TINY, logits, tiny_decoder


def test_later_tokens_do_not_change_earlier_logits():
    decoder = tiny_decoder()
    tokens = np.arange(10) % TINY.vocab_size
    changed = tokens.copy()
    changed[7:] = 60
    np.testing.assert_array_equal(logits(decoder, tokens)[:7], logits(decoder, changed)[:7])
    assert np.abs(logits(decoder, tokens)[7:] - logits(decoder, changed)[7:]).max() > 1e-3


def test_segments_do_not_see_each_other():
    decoder = tiny_decoder()
    first, second = np.array([3, 4, 5]), np.array([6, 7, 8, 9])
    packed = jnp.asarray(np.concatenate([first, second]))[None]
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2, 3]])
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2]])
    together = decoder.logits(decoder(packed, positions=positions, segment_ids=segments))[0]
    np.testing.assert_allclose(together[:3], logits(decoder, first), atol=1e-5)
    np.testing.assert_allclose(together[3:], logits(decoder, second), atol=1e-5)


def test_a_token_of_another_segment_moves_nothing():
    decoder = tiny_decoder()
    positions, segments = jnp.asarray([[0, 1, 2, 0, 1, 2]]), jnp.asarray([[1, 1, 1, 2, 2, 2]])
    run = jax.jit(lambda tokens: decoder(tokens, positions=positions, segment_ids=segments)[0])
    before, after = run(jnp.asarray([[3, 4, 5, 6, 7, 8]])), run(jnp.asarray([[3, 9, 5, 6, 7, 8]]))
    np.testing.assert_array_equal(before[0], after[0])  # earlier in the segment
    np.testing.assert_array_equal(before[3:], after[3:])  # later, but of another
    assert np.abs(before[1:3] - after[1:3]).max(-1).min() > 1e-3


def test_only_relative_positions_matter():
    decoder = tiny_decoder()
    tokens = jnp.asarray([[5, 6, 7, 8]])
    near = decoder(tokens, positions=jnp.arange(4)[None])
    far = decoder(tokens, positions=jnp.arange(4)[None] + 100)
    np.testing.assert_allclose(near, far, atol=1e-4)


def test_rope_theta_is_used():
    other = dataclasses.replace(TINY, rope_theta=10.0)
    params = nnx.state(tiny_decoder())
    tokens = np.arange(8)
    a = logits(nnx.merge(nnx.graphdef(Decoder(TINY, nnx.Rngs(0))), params), tokens)
    b = logits(nnx.merge(nnx.graphdef(Decoder(other, nnx.Rngs(0))), params), tokens)
    assert np.abs(a - b).max() > 1e-2


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gradient(params, remat, scan_unroll):
    graphdef = nnx.graphdef(Decoder(TINY, nnx.Rngs(0)))
    return jax.grad(
        lambda p: (nnx.merge(graphdef, p)(jnp.arange(6)[None], remat=remat, scan_unroll=scan_unroll) ** 2).sum()
    )(params)


@pytest.mark.parametrize(("remat", "scan_unroll"), [("dots", 0), ("layer", 0), ("none", 1), ("dots", 1), ("layer", 2)])
def test_remat_and_scan_change_no_gradient(remat, scan_unroll):
    params = nnx.state(tiny_decoder(scale=1.0))
    expected, got = _gradient(params, "none", 0), _gradient(params, remat, scan_unroll)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-6), expected, got)


def test_remat_keeps_what_it_says():
    """What the backward pass reads of the forward pass, beside the arguments."""
    graphdef, params = nnx.split(tiny_decoder())
    tokens = jnp.arange(16)[None].repeat(4, 0)

    def kept(remat):
        _, backward = jax.vjp(lambda p: nnx.merge(graphdef, p)(tokens, remat=remat), params)
        return sum(x.size for x in jax.tree.leaves(backward)) - sum(x.size for x in jax.tree.leaves(params))

    assert kept("layer") < kept("dots") < kept("none")
    with pytest.raises(ValueError, match="remat 'all'"):
        kept("all")


def test_gradients_of_weights_need_no_transposed_activations():
    """On CPU: where a matmul is of [rows, length, width], XLA makes a copy [width, rows, length] of it."""
    if jax.default_backend() != "cpu":
        pytest.skip("looks at what the CPU backend compiles")
    graphdef, params = nnx.split(tiny_decoder())

    def loss(params):
        model = nnx.merge(graphdef, params)
        return model.logits(model(jnp.zeros((4, 16), jnp.int32))).sum()

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    # Attention has its own, of more axes: the pattern fits the text.
    assert re.search(r"= f32\[[\d,]+\]\S* transpose\(", text)
    assert not re.findall(r"= f32\[\d+,4,16\]\S* transpose\(", text)


def test_a_scan_has_one_layer_in_it():
    graphdef, params = nnx.split(tiny_decoder())
    trace = lambda n: str(jax.make_jaxpr(lambda p: nnx.merge(graphdef, p)(jnp.arange(6)[None], scan_unroll=n))(params))
    assert trace(0).count("dot_general") == TINY.layers * trace(1).count("dot_general")


@pytest.mark.parametrize(
    "change", [{}, {"tied_embeddings": False}, {"qkv_bias": True}, {"qk_norm": True}, {"kv_heads": 4}]
)
def test_parameter_count(change):
    config = dataclasses.replace(TINY, **change)
    params = nnx.state(Decoder(config, nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(params)) == config.parameters


def test_abstract_decoder_allocates_nothing():
    params = nnx.state(abstract_decoder(dataclasses.replace(TINY, vocab_size=10**9)))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))


def test_llama3_rope_stretches_only_long_wavelengths():
    base = dataclasses.replace(TINY, head_dim=64, rope_theta=500_000.0)
    scaled = dataclasses.replace(base, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192))
    plain, stretched = rope_frequencies(base), rope_frequencies(scaled)
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(stretched[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(stretched[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any()
    assert np.all((stretched[between] < plain[between]) & (stretched[between] > plain[between] / 8))


def test_impossible_shapes_are_refused():
    with pytest.raises(ModelError, match="5 query heads"):
        dataclasses.replace(TINY, heads=5)
    with pytest.raises(ModelError, match="odd"):
        dataclasses.replace(TINY, head_dim=7)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2", "vocab_size": 1}, "lacks the key"),
        ([], "holds a list and not an object"),
        (
            {"model_type": "llama", "hidden_size": "32", "num_attention_heads": 4},
            "hidden_size is '32'; it must be a whole",
        ),
        ({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 0}, "num_attention_heads is 0; it must be"),
        ({"model_type": "llama", "rope_scaling": 3, "hidden_size": 8, "num_attention_heads": 1}, "must be an object"),
    ],
)
def test_unsupported_checkpoints_are_refused(tmp_path, raw, message):
    import json

    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(tmp_path)


def test_unknown_rope_type_is_refused(tmp_path):
    import json

    raw = dict(
        model_type="llama",
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
    )
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="rope type 'yarn'"):
        ModelConfig.from_hf(tmp_path)

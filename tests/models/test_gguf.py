"""GGUF files written by the gguf package: every number type, Llama 3's rotary factors and tokenizer."""

import gguf
import numpy as np
import pytest

from mars2_jax.errors import ModelError
from mars2_jax.models.attention import rope_frequencies
from mars2_jax.models.config import Llama3Rope
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.tokenizer import load_tokenizer
from mars2_jax.models.weights import load

Q = gguf.GGMLQuantizationType
WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 256, 4, 2, 64, 256, 512


def write_gguf(path, tensors, architecture="llama", metadata=None, tokens=None):
    """A GGUF file of one layer's description and the given tensors: name -> array, or (quantized bytes, type)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_feed_forward_length(MLP)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(131072)
    writer.add_rope_freq_base(500_000.0)
    for add in metadata or ():
        add(writer)
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def weights(rng=None):
    """float32 tensors of a whole one-layer Llama, under their GGUF names."""
    rng = rng or np.random.default_rng(0)
    normal = lambda *shape: rng.normal(0, 0.1, shape).astype(np.float32)
    return {
        "token_embd.weight": normal(VOCAB, WIDTH),
        "output_norm.weight": 1 + normal(WIDTH),
        "blk.0.attn_norm.weight": 1 + normal(WIDTH),
        "blk.0.ffn_norm.weight": 1 + normal(WIDTH),
        "blk.0.attn_q.weight": normal(HEADS * HEAD_DIM, WIDTH),
        "blk.0.attn_k.weight": normal(KV_HEADS * HEAD_DIM, WIDTH),
        "blk.0.attn_v.weight": normal(KV_HEADS * HEAD_DIM, WIDTH),
        "blk.0.attn_output.weight": normal(WIDTH, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": normal(MLP, WIDTH),
        "blk.0.ffn_up.weight": normal(MLP, WIDTH),
        "blk.0.ffn_down.weight": normal(WIDTH, MLP),
    }


def quantized(array, kind):
    """Bytes of the type, and what they stand for by the gguf package. K-quants, which it cannot make, are random."""
    try:
        data = gguf.quants.quantize(array, kind)
    except NotImplementedError:
        blocks, size = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(1)
        data = rng.integers(0, 256, (*array.shape[:-1], array.shape[-1] // blocks, size), np.uint8)
        # The scales are float16 and may be anything but infinite or no number.
        scales = {Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,)}[kind]
        for at in scales:
            data[..., at : at + 2] = rng.normal(0, 0.01, (*data.shape[:-1], 1)).astype(np.float16).view(np.uint8)
        data = data.reshape(*array.shape[:-1], -1)
    return data, gguf.quants.dequantize(data, kind)


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", KINDS)
def test_every_number_type(tmp_path, name):
    kind, arrays = Q[name], weights()
    exact = arrays["blk.0.ffn_down.weight"]
    data, expected = quantized(exact, kind)
    if not name.endswith("_K"):
        # Not of the package alone: within the step of the type of what was put in.
        assert np.abs(expected - exact).max() < {"F32": 1e-9, "F16": 1e-3, "BF16": 2e-3}.get(name, 0.05)
    arrays["blk.0.ffn_down.weight"] = (data, kind)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", arrays)) as checkpoint:
        decoder = load(checkpoint)
    np.testing.assert_array_equal(decoder.blocks[0].mlp.down[...], expected)
    assert np.isfinite(expected).all() and expected.std() > 0


def test_a_number_type_that_is_unknown_is_refused(tmp_path, monkeypatch):
    def unknown(*_):
        raise NotImplementedError

    path = write_gguf(tmp_path / "m.gguf", weights())
    monkeypatch.setattr(gguf.quants, "dequantize", unknown)
    with open_checkpoint(path) as checkpoint, pytest.raises(ModelError, match="quantization F32, which is not"):
        checkpoint.read("model.norm.weight")


def llama_cpp_factors(theta=500_000.0, factor=8.0, original=8192):
    """rope_freqs.weight as llama.cpp's converter makes it, transcribed: one division of wavelengths a frequency."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD_DIM)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_the_scaling_that_made_them(tmp_path, factor):
    factors = llama_cpp_factors(factor=factor)
    assert np.unique(factors).size > 1
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", weights() | {"rope_freqs.weight": factors})) as checkpoint:
        config = checkpoint.config
        assert config.rope_scaling == Llama3Rope(factor, 1.0, 4.0, 8192)
        assert "rope_freqs.weight" not in checkpoint.names
    plain = 500_000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(rope_frequencies(config), plain / factors, rtol=1e-5)


@pytest.mark.parametrize(
    "factors", [llama_cpp_factors(original=4096), np.full(HEAD_DIM // 2, 4.0, np.float32), np.ones(3, np.float32)]
)
def test_other_rotary_factors_are_refused(tmp_path, factors):
    path = write_gguf(tmp_path / "m.gguf", weights() | {"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match="rope_freqs.weight is not Llama 3.1's"), open_checkpoint(path):
        pass


def test_other_rotary_scaling_is_refused(tmp_path):
    yarn = lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    path = write_gguf(tmp_path / "m.gguf", weights(), metadata=[yarn])
    with pytest.raises(ModelError, match="rotary scaling 'yarn'"), open_checkpoint(path):
        pass


WORDS = ["he", "hello", "12", "123", "ll", "llo", "Ġw", "Ġwo", "ab"]
MERGES = ["h e", "1 2", "12 3", "l l", "ll o", "Ġ w", "Ġw o", "a b"]


def tokenizer_metadata(pre, template="{{ messages[0]['content'] }}"):
    """A byte-level vocabulary with some words. "hello" is a token that no merge leads to."""
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS, "<|begin|>", "<|end|>"]
    types = [1] * (len(tokens) - 2) + [3, 3]

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(len(tokens) - 2)
        writer.add_eos_token_id(len(tokens) - 1)
        writer.add_chat_template(template)

    return add


TEXT = "help world 12345 ab'S\r\n\n  x_y=é 1234567\t\t!!<|end|> ok"


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_tokens_are_those_of_transformers_own_gguf_reader(tmp_path, pre):
    from transformers import AutoTokenizer

    llama = pre == "llama-bpe"
    path = write_gguf(
        tmp_path / "m.gguf",
        {"token_embd.weight": np.zeros((VOCAB, WIDTH), np.float32)},
        architecture="llama" if llama else "qwen3",
        metadata=[tokenizer_metadata(pre)],
    )
    with open_checkpoint(path) as checkpoint:
        ours = load_tokenizer(checkpoint, path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert ours.encode(TEXT).tolist() == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.decode(ours.encode(TEXT)) == TEXT.replace("<|end|>", "")
    # What that reader leaves out and the originals do: Llama 3 looks a word up before it merges, Qwen composes accents.
    assert len(ours.encode("hello")) == (1 if llama else 2)
    assert np.array_equal(ours.encode("e\u0301"), ours.encode("\u00e9")) == (not llama)
    vocab = ours.tokenizer.get_vocab()
    assert (vocab["123"] in ours.encode("12345")) == llama
    assert vocab["<|end|>"] in ours.stop_ids


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", weights(), metadata=[tokenizer_metadata("tekken")])
    with open_checkpoint(path) as checkpoint, pytest.raises(ModelError, match="pre-tokenizer 'tekken'"):
        load_tokenizer(checkpoint, path)

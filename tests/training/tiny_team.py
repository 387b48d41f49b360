"""A team that trains in seconds: real checkpoints in Hugging Face layout, of a model that knows forty programs.

The vocabulary is the 256 bytes and some tokens that are whole fenced programs. The output head is zero for bytes and
random for programs, so that a random model answers with programs, some right and some wrong.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
from ml_collections import ConfigDict
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mars2_jax.config import agent_config, default_config

BODIES = [
    "return x",
    "return x + 1",
    "return 2 * x",
    "return x - 1",
    "return -x",
    "return x * x",
    "return 0",
    "return x if x > 0 else 0",
    "return abs(x)",
    "return str(x)",
    "return [x]",
    "return x / 0",
    "return None",
    "return x + 2",
    "return 3 * x",
    "return max(x, 2)",
]
PROGRAMS = [f"```python\ndef f(x):\n    {body}\n```\n" for body in BODIES]
ANSWERS = {"same": "x", "next": "x + 1", "double": "2 * x", "square": "x * x", "positive": "x if x > 0 else 0"}
LAYERS, WIDTH, HEADS, KV_HEADS, MLP = 2, 32, 4, 2, 48


def write_model(folder: pathlib.Path, seed: int = 0, layers: int = LAYERS) -> str:
    """Writes a random Qwen3 checkpoint with its tokenizer; returns the folder's path."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    inner.add_tokens([AddedToken(p, special=False, normalized=False) for p in PROGRAMS])
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=template).save_pretrained(
        folder
    )
    vocab = inner.get_vocab_size()
    rng = np.random.default_rng(seed)
    head_dim = WIDTH // HEADS
    normal = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)
    one = lambda n: np.ones(n, np.float32)
    head = np.zeros((vocab, WIDTH), np.float32)
    head[len(alphabet) :] = rng.normal(0, 0.5, (vocab - len(alphabet), WIDTH))
    tensors = {
        "model.embed_tokens.weight": normal(vocab, WIDTH),
        "model.norm.weight": one(WIDTH),
        "lm_head.weight": head,
    }
    for i in range(layers):
        layer = {
            "input_layernorm": one(WIDTH),
            "post_attention_layernorm": one(WIDTH),
            "self_attn.q_proj": normal(WIDTH, WIDTH),
            "self_attn.k_proj": normal(KV_HEADS * head_dim, WIDTH),
            "self_attn.v_proj": normal(KV_HEADS * head_dim, WIDTH),
            "self_attn.o_proj": normal(WIDTH, WIDTH),
            "self_attn.q_norm": one(head_dim),
            "self_attn.k_norm": one(head_dim),
            "mlp.gate_proj": normal(MLP, WIDTH),
            "mlp.up_proj": normal(MLP, WIDTH),
            "mlp.down_proj": normal(WIDTH, MLP),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    save_file(tensors, folder / "model.safetensors")
    config = dict(
        model_type="qwen3",
        vocab_size=vocab,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        intermediate_size=MLP,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_problems(path: pathlib.Path) -> str:
    """Writes problems that some of the programs solve; returns the path."""
    lines = []
    for name, answer in ANSWERS.items():
        case = lambda x, answer=answer: {"args": [x], "expected": eval(answer, {"x": x})}
        lines.append(
            dict(
                id=name,
                statement=f"Return {answer}.",
                entry_point="f",
                starter="def f(x):",
                public=[case(x) for x in (2, 3)],
                hidden=[case(x) for x in (-1, 0, 5)],
                reference=f"def f(x):\n    return {answer}",
            )
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def tiny_config(folder: pathlib.Path) -> ConfigDict:
    """Two agents on two models, two steps."""
    config = default_config()
    for seed, name in enumerate(("ann", "bob")):
        agent = agent_config()
        agent.model.path = write_model(folder / name, seed)
        agent.role = f"You are {name}."
        agent.optimizer.learning_rate = 1e-3
        config.agents[name] = agent
    config.data.source = config.eval.source = write_problems(folder / "problems.jsonl")
    config.data.problems_per_step = 3
    config.search.nodes = 8
    config.rollout.slots = 4
    config.rollout.chunk = 2
    config.rollout.max_prompt_tokens = 700
    config.rollout.max_new_tokens = 4
    config.rollout.stop = ("```\n",)
    config.grading.workers = 1
    config.learning.train_batch_size = 4
    config.learning.micro_batch_size = 2
    config.eval.search_nodes = 4
    config.eval.split = "train"
    return config

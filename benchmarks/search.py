"""Steps a second of this project's search beside TreeQuest 0.3.3's, in one process.

    python -m benchmarks.search [--repeats 3]

A step is one selection, one new node, one reward (a uniform random number from the host) and its backup. Both grow a
tree from nothing; ours selects for all trees in one compiled call and gets its rewards from the host in another, as in
a real search. Compilation is not timed. Two cases, both with 2 agents and the gaussian posterior:
64 trees of 64 nodes (TreeQuest: one tree after the other), and 1 tree of 1,024 nodes.
"""

from __future__ import annotations

import functools
import time
from statistics import median

import jax
import numpy as np
import treequest
from absl import app, flags

from mars2_jax.search.forest import Forest, empty, observe, reserve
from mars2_jax.search.select import select

_REPEATS = flags.DEFINE_integer("repeats", 3, "Repetitions with other seeds; the median is printed.")
_AGENTS = 2


@functools.partial(jax.jit, static_argnames=("order", "posterior"), donate_argnums=0)
def _grow(forest: Forest, key: jax.Array, order: str, posterior: str) -> tuple[Forest, jax.Array]:
    return reserve(forest, select(forest, key, order=order, posterior=posterior))


_observe = jax.jit(observe, donate_argnums=0)


def ours(trees: int, nodes: int, order: str, posterior: str, seed: int) -> list[float]:
    """Grows a forest; returns the time stamp of every step (of all trees at once)."""
    forest, key, rng = empty(trees, nodes, _AGENTS), jax.random.key(seed), np.random.default_rng(seed)
    row, stamps = np.arange(trees), [time.perf_counter()]
    for _ in range(nodes):
        forest, slot = _grow(forest, key, order, posterior)
        forest = _observe(forest, row, np.asarray(slot), rng.random(trees, np.float32))
        stamps.append(time.perf_counter())
    jax.block_until_ready(forest)
    stamps[-1] = time.perf_counter()
    return stamps


def theirs(trees: int, nodes: int, order: str, posterior: str, seed: int) -> list[float]:
    """The same with TreeQuest, one tree after the other; time stamps of every step of the last tree, shifted."""
    strategy = {"agent_first": "stack", "node_first": "multiarm_bandit_thompson"}[order]
    actions, rng = [f"agent{a}" for a in range(_AGENTS)], np.random.default_rng(seed)
    np.random.seed(seed)
    started = time.perf_counter()
    for _ in range(trees):
        algorithm = treequest.ABMCTSA(dist_type=posterior, model_selection_strategy=strategy)
        state = algorithm.init_tree()
        stamps = [time.perf_counter()]
        for _ in range(nodes):
            state, (trial,) = algorithm.ask_batch(state, 1, actions)
            state = algorithm.tell(state, trial.trial_id, ("", float(rng.random())))
            stamps.append(time.perf_counter())
    return [started, *stamps[1:]]


def main(argv: list[str]) -> None:
    del argv
    print(f"{'case':34s} {'ours steps/s':>13s} {'treequest':>11s} {'ratio':>7s} {'last 10 %: ours':>16s} {'treequest':>11s}")
    for trees, nodes in ((64, 64), (1, 1024)):
        for posterior in ("gaussian", "beta"):
            for order in ("node_first", "agent_first"):
                ours(trees, nodes, order, posterior, 0)  # compiles
                mine = [ours(trees, nodes, order, posterior, seed) for seed in range(_REPEATS.value)]
                # A few trees are enough to know TreeQuest's rate: it takes them one by one.
                few = min(trees, 4)
                peer = [theirs(few, nodes, order, posterior, seed) for seed in range(1 if nodes > 64 else _REPEATS.value)]
                rates = []
                for runs, count in ((mine, trees), (peer, few)):
                    rates.append(median(count * nodes / (stamps[-1] - stamps[0]) for stamps in runs))
                tail = nodes // 10
                last = [
                    median(count * tail / (stamps[-1] - stamps[-1 - tail]) for stamps in runs)
                    for runs, count in ((mine, trees), (peer, 1))
                ]
                case = f"{trees} x {nodes} {posterior} {order}"
                print(
                    f"{case:34s} {rates[0]:13.0f} {rates[1]:11.0f} {rates[0] / rates[1]:6.1f}x {last[0]:16.0f} {last[1]:11.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    app.run(main)

"""Steps a second of this project's search beside TreeQuest 0.3.3's, in one process.

    python -m benchmarks.search [--repeats 3]

A step is one selection, one new node, one reward (a uniform random number from the host) and its backup. Both grow a
tree from nothing; ours selects for all trees in one compiled call and gets its rewards from the host in another, as in
a real search. Compilation is not timed. Two sizes, with 2 agents:
64 trees of 64 nodes (TreeQuest: one tree after the other), and 1 tree of 1,024 nodes.
"""

from __future__ import annotations

import functools
import itertools
import time
from statistics import median
from typing import Literal

import jax
import numpy as np
import treequest
from absl import app, flags

from mars2_jax.search.forest import Forest, empty, observe, reserve
from mars2_jax.search.select import select

_REPEATS = flags.DEFINE_integer("repeats", 3, "Repetitions with other seeds; the median is printed.")
_AGENTS = 2
_SIZES = ((64, 64), (1, 1024))  # trees, nodes
_POSTERIORS: tuple[Literal["gaussian", "beta"], ...] = ("gaussian", "beta")
_ORDERS = ("node_first", "agent_first")


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


def theirs(trees: int, nodes: int, order: str, posterior: Literal["gaussian", "beta"], seed: int) -> list[float]:
    """The same with TreeQuest, one tree after the other; time stamps of every step of the last tree, shifted."""
    strategy = {"agent_first": "stack", "node_first": "multiarm_bandit_thompson"}[order]
    actions, rng = [f"agent{a}" for a in range(_AGENTS)], np.random.default_rng(seed)
    np.random.seed(seed)
    started = time.perf_counter()
    for _ in range(trees):
        algorithm: treequest.ABMCTSA[str] = treequest.ABMCTSA(dist_type=posterior, model_selection_strategy=strategy)
        state = algorithm.init_tree()
        stamps = [time.perf_counter()]
        for _ in range(nodes):
            state, (trial,) = algorithm.ask_batch(state, 1, actions)
            state = algorithm.tell(state, trial.trial_id, ("", float(rng.random())))
            stamps.append(time.perf_counter())
    return [started, *stamps[1:]]


def main(argv: list[str]) -> None:
    del argv
    print(f"{'':34s} {'all steps':^26s} {'last 10 %':^18s}")
    print(f"{'steps/s':34s} {'ours':>9s} {'treequest':>9s} {'ratio':>6s} {'ours':>8s} {'treequest':>9s}")
    for (trees, nodes), posterior, order in itertools.product(_SIZES, _POSTERIORS, _ORDERS):
        ours(trees, nodes, order, posterior, 0)  # compiles
        few = min(trees, 4)  # TreeQuest takes them one by one: a few tell its rate
        seeds = range(_REPEATS.value)
        mine = [ours(trees, nodes, order, posterior, seed) for seed in seeds]
        peer = [theirs(few, nodes, order, posterior, seed) for seed in seeds]
        tail = max(nodes // 10, 1)
        rate, peer_rate = _rate(mine, trees * nodes, nodes), _rate(peer, few * nodes, nodes)
        last, peer_last = _rate(mine, trees * tail, tail), _rate(peer, tail, tail)
        case = f"{trees} x {nodes} {posterior} {order}"
        print(
            f"{case:34s} {rate:9.0f} {peer_rate:9.0f} {rate / peer_rate:5.1f}x {last:8.0f} {peer_last:9.0f}", flush=True
        )


def _rate(runs: list[list[float]], steps: int, stamps: int) -> float:
    """Median over the runs of `steps` over the time that the last `stamps` stamps span."""
    return median(steps / (run[-1] - run[-1 - stamps]) for run in runs)


if __name__ == "__main__":
    app.run(main)

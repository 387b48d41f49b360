"""Run with eight forced host devices. Prints one JSON line about each mesh of the command line, or one about other
optimizers than AdamW and packed rows on the mesh 2,2,2.

python -m tests.parallel.eight_devices 8,1,1 2,2,2 ...
python -m tests.parallel.eight_devices optimizers
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mars2_jax.config import agent_config, default_config
from mars2_jax.learning.batch import Sample, TreeArrays, TreeBatch, make_batch
from mars2_jax.learning.update import Learner
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import init_decoder
from mars2_jax.parallel.mesh import MESH_AXES, make_mesh, rows
from mars2_jax.rollout import programs
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Request, SamplingParams

CONFIG = ModelConfig(
    vocab_size=64, embed_dim=32, layers=2, heads=8, kv_heads=4, head_dim=8, mlp_dim=64, qk_norm=True, qkv_bias=True
)
ROWS, BUDGET, DECAY = 8, 9, 0.5


def tree_batch(pack_tokens: int = 0) -> TreeBatch:
    """One tree of two micro-batches."""
    rng = np.random.default_rng(0)
    slots = np.arange(2 * ROWS + 1)
    tree = TreeArrays(
        reward=(slots % 3 == 0).astype(np.float32),
        parent=np.where(slots == 0, -1, 0).astype(np.int32),
        agent=np.where(slots == 0, -1, 0).astype(np.int32),
        graded=slots > 0,
        length=np.full(len(slots), BUDGET, np.int32),
    )
    samples = []
    for slot in slots[1:]:
        lp = rng.normal(-4, 0.1, BUDGET).astype(np.float32)
        prompt, tokens = rng.integers(0, 64, 5 + slot % 4), rng.integers(0, 64, BUDGET)
        samples.append(Sample("tree", int(slot), prompt, tokens, lp, lp, lp))
    return make_batch(samples, {"tree": tree}, micro_batch_size=ROWS, pack_tokens=pack_tokens)[0]


def requests(round_: int) -> list[Request]:
    draw = np.random.default_rng
    return [
        Request(i, draw(i).integers(2, 64, 2 + i).astype(np.int32), np.asarray([round_, i], np.uint32), sampling)
        for i in range(10)
        for sampling in [SamplingParams(max_new_tokens=6, top_p=1.0 if i % 2 else 0.9)]
    ]


# Wide enough for Adafactor, which keeps rows and columns of matrices with two axes of 128 or more.
WIDE = dataclasses.replace(CONFIG, embed_dim=128, layers=1, mlp_dim=256)


def learn(mesh, name: str, *, packed: bool) -> tuple[list[np.ndarray], dict, bool]:
    """Two updates with an optimizer: the weights after them, in which parts its state lies, and whether it stays there.

    Of one kind of moment each: Adafactor's rows and columns of the embedding and of an output projection, Muon's
    momentum of a matrix and Adam's of the embedding.
    """
    model = init_decoder(WIDE, jax.random.key(0), mesh)
    learning, optimizer = default_config().learning, agent_config().optimizer
    learning.update(ratio="gspo", aggregation="seq_mean", pack_tokens=32 if packed else 0)
    # Adafactor's steps are of the learning rate's size even where a gradient is rounding.
    optimizer.update(name=name, learning_rate=1e-5)
    learner = Learner.create(model, learning, optimizer, temperature=1.0, budget=BUDGET)
    batch, state = tree_batch(32 if packed else 0), learner.init(nnx.state(model))
    if mesh is not None:
        batch = dataclasses.replace(batch, samples=jax.device_put(batch.samples, rows(mesh, leading=1)))
    before = jax.tree.map(lambda x: x.sharding, state)
    for _ in range(2):
        state, _, _ = learner.update(state, batch)
    parts = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state):
        place = jax.tree_util.keystr(path)
        if x.ndim and any(f"'{weight}']" in place for weight in ("embedding", "out", "up")) and x.size > 1:
            kind = next(kind for kind in ("v_row", "v_col", "mu", "nu", "v") if f".{kind}[" in place)
            weight = next(weight for weight in ("embedding", "out", "up") if f"'{weight}']" in place)
            parts[f"{kind} {weight}"] = [list(x.shape), list(x.addressable_shards[0].data.shape)]
    weights = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    return weights, parts, before == jax.tree.map(lambda x: x.sharding, state)


def optimizers(mesh) -> dict:
    """Of each optimizer: how far two packed updates on the mesh are from two unpacked ones on one device, and `parts`
    and `stays` of `learn`."""
    told = {}
    for name in ("adafactor", "muon"):
        one, _, _ = learn(None, name, packed=False)
        with jax.set_mesh(mesh):
            got, parts, stays = learn(mesh, name, packed=True)
        gap = max(float(np.abs(a - b).max()) for a, b in zip(one, got, strict=True))
        told[name] = dict(gap=gap, parts=parts, stays=stays)
    return told


def measure(mesh, scan_unroll: int) -> dict:
    """Two updates and two rounds of decoding on a mesh, or on one device without any."""
    model = init_decoder(CONFIG, jax.random.key(0), mesh)
    first = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
    learning, optimizer = default_config().learning, agent_config().optimizer
    learning.scan_unroll = scan_unroll
    # With these the first moment after one update is half the gradient, and no rounding is blown up.
    optimizer.update(b1=DECAY, learning_rate=1e-3, eps=1e-3, max_grad_norm=1e9)
    learner = Learner.create(model, learning, optimizer, temperature=1.0, budget=BUDGET)
    batch, state = tree_batch(), learner.init(nnx.state(model))
    if mesh is not None:
        batch = dataclasses.replace(batch, samples=jax.device_put(batch.samples, rows(mesh, leading=1)))
    scores = learner.score(state.params, jax.tree.map(lambda x: x[0], batch.samples.rows))
    program, before = learner.program(state), jax.tree.map(lambda x: x.sharding, state)
    state, metrics, _ = program(state, batch, None)
    gradient = [np.asarray(x) / DECAY for x in jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))]
    loss = float(metrics["loss"])
    state, _, _ = program(state, batch, None)

    engine = Engine(nnx.merge(nnx.graphdef(model), state.params), slots=8, chunk=4, capacity=64, stop_ids=(0,))
    compiled, rounds = [], []
    for round_ in range(2):
        for request in requests(round_):
            engine.submit(request)
        done = {}
        while engine.pending:
            for c in engine.step():
                done[c.id] = (c.tokens.tolist(), c.logprobs)
        rounds.append([done[i] for i in sorted(done)])
        compiled.append(programs.compilations())
        cache = engine._cache
        engine.reset()
    layer = state.params["blocks"][0]
    split = {
        "qkv": layer["attention"]["qkv"][...],
        "up": layer["mlp"]["up"][...],
        "embedding": state.params["embedding"][...],
        "moment": optax.tree.get(state.opt_state, "mu")["blocks"][0]["mlp"]["up"][...],
        "cache": cache[0].key,
    }
    return dict(
        first=first,
        scores=np.asarray(scores),
        loss=loss,
        gradient=gradient,
        tokens=[[tokens for tokens, _ in r] for r in rounds],
        logprobs=np.concatenate([lp for r in rounds for _, lp in r]),
        parts={name: [list(x.shape), list(x.addressable_shards[0].data.shape)] for name, x in split.items()},
        stays=before == jax.tree.map(lambda x: x.sharding, state),
        update_programs=program._cache_size(),
        new_programs=compiled[1] - compiled[0],
    )


def main() -> None:
    if sys.argv[1:] == ["optimizers"]:
        print(json.dumps(optimizers(make_mesh(dict(zip(MESH_AXES, (2, 2, 2), strict=True))))))
        return
    one = measure(None, 0)
    for number, sizes in enumerate(sys.argv[1:]):
        print(f"--- mesh {sizes}", file=sys.stderr, flush=True)
        mesh = make_mesh(dict(zip(MESH_AXES, map(int, sizes.split(",")), strict=True)))
        with jax.set_mesh(mesh):
            got = measure(mesh, number % 2)
        gap = lambda a, b: max(float(jnp.abs(x - y).max()) for x, y in zip(a, b, strict=True))
        told = {name: got[name] for name in ("parts", "stays", "update_programs", "new_programs")}
        told |= dict(
            same_weights=all((a == b).all() for a, b in zip(one["first"], got["first"], strict=True)),
            same_tokens=one["tokens"] == got["tokens"],
            loss=abs(one["loss"] - got["loss"]),
            scale=max(float(np.abs(g).max()) for g in one["gradient"]),
            gradient=gap(one["gradient"], got["gradient"]),
            scores=gap([one["scores"]], [got["scores"]]),
            logprobs=gap([one["logprobs"]], [got["logprobs"]]) if one["tokens"] == got["tokens"] else None,
        )
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

"""Run with eight forced host devices: hands weights from a training mesh to a rollout mesh and decodes on both. Prints
one JSON line.

python -m tests.parallel.handover_on_mesh
"""

import dataclasses
import json

import jax
import numpy as np
from flax import nnx

from mars2_jax.models.decoder import Decoder, init_decoder
from mars2_jax.models.weights import abstract_decoder
from mars2_jax.parallel.mesh import make_mesh, param_shardings, rollout_mesh
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.handover import Handover
from tests.parallel.eight_devices import CONFIG, requests

SMALL = dataclasses.replace(CONFIG, layers=1)


def decode(decoder: Decoder) -> tuple[list, np.ndarray, Engine]:
    engine = Engine(decoder, slots=8, chunk=8, capacity=64, stop_ids=(0,))
    for request in requests(0):
        engine.submit(request)
    done = {}
    while engine.pending:
        done |= {c.id: c for c in engine.step()}
    completions = [done[i] for i in sorted(done)]
    return [c.tokens.tolist() for c in completions], np.concatenate([c.logprobs for c in completions]), engine


def hand_over(handover: Handover, params: nnx.State) -> tuple[nnx.State, dict]:
    """The weights on the other mesh; and whether they are the same, lie where they should, and took no detour."""
    with jax.transfer_guard("disallow_explicit"):
        moved = jax.block_until_ready(handover(params))
    pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(jax.jit(handover.convert)(params)), strict=True)
    return moved, dict(
        placed=jax.tree.map(lambda x: x.sharding, moved) == param_shardings(handover.mesh, moved),
        same=all(bool((np.asarray(a) == np.asarray(b)).all()) for a, b in pairs),
        up=list(moved["blocks"][0]["mlp"]["up"][...].addressable_shards[0].data.shape),
        up_dtype=str(moved["blocks"][0]["mlp"]["up"].dtype),
    )


def main() -> None:
    training = make_mesh(dict(data=1, fsdp=8, tensor=1))
    decoding = rollout_mesh(dict(data=2, fsdp=1, tensor=-1), training)
    # The mesh of the training stays in context throughout, as in a run.
    with jax.set_mesh(training):
        model = init_decoder(SMALL, jax.random.key(0), training)
        params = nnx.state(model)
        tokens, logprobs, _ = decode(model)
        handover = Handover(abstract_decoder(SMALL), training, decoding)
        moved, told = hand_over(handover, params)
        got, scores, engine = decode(nnx.merge(nnx.graphdef(handover.decoder), moved))
        cache = list(engine._cache[0].key.addressable_shards[0].data.shape)
        _, int8 = hand_over(Handover(abstract_decoder(SMALL), training, decoding, int8=True), params)
    told |= dict(cache=cache, same_tokens=got == tokens, logprobs=float(np.abs(scores - logprobs).max()), int8=int8)
    print(json.dumps(told))


if __name__ == "__main__":
    main()

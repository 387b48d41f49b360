"""Compiles an update for eight TPU chips that are not there, and prints what is in it.

python -m tests.parallel.compile_for_tpu
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from mars2_jax.config import agent_config, default_config
from mars2_jax.learning.update import Learner
from mars2_jax.models.causal_attention import choose_attention
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.weights import abstract_decoder
from mars2_jax.parallel.mesh import make_mesh, param_shardings, platform, rows
from tests.parallel.eight_devices import BUDGET, tree_batch

CONFIG = ModelConfig(vocab_size=1024, embed_dim=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp_dim=512)


def compiled_update(mesh, model, offload: str):
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    learning, optimizer = default_config().learning, agent_config().optimizer
    learning.update(scan_unroll=1, remat="dots")
    optimizer.offload = offload
    learner = Learner.create(model, learning, optimizer, temperature=1.0, budget=BUDGET)
    params = nnx.state(model)
    state = learner.abstract(jax.tree.map(place, params, param_shardings(mesh, params)))
    batch = tree_batch()
    samples = jax.tree.map(lambda x: place(x, rows(mesh, leading=1)), batch.samples)
    return learner.program(state).lower(state, dataclasses.replace(batch, samples=samples), None).compile()


def main() -> None:
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = make_mesh(dict(data=1, fsdp=4, tensor=2), chips)
    attention = choose_attention("auto", platform=platform(mesh), dtype=jnp.bfloat16, head_dim=CONFIG.head_dim)
    model = abstract_decoder(CONFIG, dtype=jnp.bfloat16, attention=attention)
    with jax.set_mesh(mesh):
        compiled = {offload: compiled_update(mesh, model, offload) for offload in ("none", "state", "all")}
    memory = {offload: one.memory_analysis() for offload, one in compiled.items()}
    told = dict(
        attention=attention,
        kernels=compiled["none"].as_text().count('custom_call_target="tpu_custom_call"'),
        arguments={offload: one.argument_size_in_bytes for offload, one in memory.items()},
        in_host={offload: one.host_argument_size_in_bytes for offload, one in memory.items()},
        aliased={offload: one.host_alias_size_in_bytes for offload, one in memory.items()},
        whole=12 * CONFIG.parameters,
    )
    print(json.dumps(told))


if __name__ == "__main__":
    main()

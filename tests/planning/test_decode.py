"""The decode program of a small team, compiled for TPUs that are not there: what stands in it, and what does not."""

import importlib.util
import re

import jax
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.parallel.mesh import make_mesh
from mars2_jax.planning.cost import account
from mars2_jax.planning.hlo import parse
from mars2_jax.planning.models import model_shape
from mars2_jax.planning.programs import team_programs
from mars2_jax.planning.topology import topology_devices
from tests.planning.test_plan import MODEL, tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

# So long that a copy of the cache would cost more than all the rest.
LENGTH, SLOTS, LAYERS = 32_768, 8, MODEL["num_hidden_layers"]


def compiled(folder, topology, *, head_dim=128, kv_heads=4, **rollout):
    """The text of a decode program of two layers, and its memory."""
    run = ConfigDict(tiny(folder).to_dict())
    del run.agents["frozen"]
    run.mesh.update(data=1, fsdp=2, tensor=2)
    run.rollout.update(slots=SLOTS, max_prompt_tokens=64, max_new_tokens=LENGTH - 64)
    run.rollout.update(rollout)
    _, devices = topology_devices(topology)
    shape, _ = model_shape(str(folder))
    shape = type(shape)(**{**vars(shape), "head_dim": head_dim, "kv_heads": kv_heads})
    programs, _ = team_programs(FrozenConfigDict(run), {"author": shape}, make_mesh(run.mesh, devices))
    program = next(program for program in programs if program.kind == "decode")
    with jax.set_mesh(program.mesh):
        result = program.lower().compile()
    return result.as_text(), result.memory_analysis()


def copies(text):
    """Instructions that make an array of the cache's length, but for writes in place."""
    made = re.findall(rf"= (\w+\[[\d,]*\b{LENGTH}\b[\d,]*\]\S*) (\w[\w-]*)\(", text)
    harmless = {"parameter", "bitcast", "get-tuple-element", "scatter", "fusion"}
    # Those that lie in the core's own memory are on their way to it.
    return [(shape, opcode) for shape, opcode in made if opcode not in harmless and "S(1)" not in shape]


@pytest.mark.parametrize("topology", ["v5e:2x2", pytest.param("v5p:2x2x1", marks=pytest.mark.slow)])
def test_the_paged_kernel_reads_the_cache_as_it_lies(tmp_path, topology):
    text, memory = compiled(tmp_path, topology)
    kernels = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert len(kernels) == LAYERS and all("paged_attention" in line.split("=")[0] for line in kernels)
    assert copies(text) == []
    # Keys and values of one device's slots and heads: the program needs next to nothing beside them.
    cache = 2 * LAYERS * SLOTS * 4 * LENGTH * 128 * 2 // 4
    assert memory.alias_size_in_bytes >= cache and memory.temp_size_in_bytes < cache / 50
    cost = account(parse(text)).iteration
    # Half of the cache is read: see `planning.cost`.
    assert cost.hbm_bytes == pytest.approx(cache / 2, rel=0.1) and cost.unknown_kernels == 0
    # Four query heads of the model, one for each key head.
    assert cost.flops == pytest.approx(LAYERS * 2 * 2 * SLOTS * 4 * 128 * LENGTH / 2 / 4, rel=0.1)


@pytest.mark.slow
def test_two_heads_of_64_side_by_side_for_the_kernel(tmp_path):
    text, memory = compiled(tmp_path, "v5e:2x2", head_dim=64)
    assert text.count('custom_call_target="tpu_custom_call"') == LAYERS
    assert copies(text) == []
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 20


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(), dict(attention="xla"), dict(weights="int8")])
def test_other_decode_programs_copy_nothing_either(tmp_path, options):
    text, memory = compiled(tmp_path, "v5e:2x2", mesh=dict(data=2, fsdp=1, tensor=2), **options)
    assert ("tpu_custom_call" in text) == ("attention" not in options)
    assert not any(opcode == "copy" for _, opcode in copies(text))
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 20
    if "weights" in options:
        # The codes go into the matmuls as they are: no weight is written in another type.
        matmuls = [c for c in parse(text).computations.values() if any(i.opcode == "convolution" for i in c)]
        arrays = [array for c in matmuls for i in c if i.opcode == "parameter" for array in i.arrays]
        assert sum(array.dtype == "s8" for array in arrays) >= 5 * LAYERS

"""The account of a compiled program: against hand counts on small texts, against formulas on what libtpu compiles."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mars2_jax.planning.chips import CHIPS
from mars2_jax.planning.cost import Cost, Traffic, account
from mars2_jax.planning.hlo import parse
from mars2_jax.planning.topology import topology_devices

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def cost_of(*lines, computations="", devices=8, parameters=("f32[64,32]{1,0}",)):
    """The account of an entry computation of these lines, whose parameters are %p0, %p1, ..."""
    given = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(parameters)]
    body = "\n".join([*given, *(f"  {line}" for line in lines)])
    head = f"HloModule test, num_partitions={devices}\n\n{computations}\n\n"
    return account(parse(f"{head}ENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"))


GROUPS = {
    "iota": "replica_groups=[2,4]<=[8]",
    "transposed": "replica_groups=[2,4]<=[4,2]T(1,0)",
    "list": "replica_groups={{0,1,2,3},{4,5,6,7}}",
    "mesh": "replica_groups=mesh['a'=2,'b'=4] {'b'}",
    "mesh axes": "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b','c'}",
    "part of a mesh axis": "replica_groups=mesh['a'=8] {'a':(1)4}",
}
# 64 x 32 float32 a device, 4 devices a group.
SIZE, N = 64 * 32 * 4, 4
KINDS = {
    "all-gather": (N * SIZE, (N - 1) * SIZE),
    "all-reduce": (SIZE, 2 * (N - 1) / N * SIZE),
    "reduce-scatter": (SIZE, (N - 1) / N * SIZE),
    "all-to-all": (SIZE, (N - 1) / N * SIZE),
    "collective-permute": (SIZE, SIZE),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_traffic_of_collectives(kind, groups):
    once = cost_of(f"ROOT %c = f32[64,32]{{1,0}} {kind}(%p0), channel_id=1, {GROUPS[groups]}").once
    assert once.collectives == {kind: Traffic(1, *KINDS[kind])}


def test_all_devices_where_no_groups_are_named():
    once = cost_of("ROOT %c = f32[64,32]{1,0} all-reduce(%p0), channel_id=1, replica_groups={}").once
    assert once.collectives["all-reduce"].sent == 2 * 7 / 8 * SIZE


def test_asynchronous_forms_count_once():
    pair = cost_of(
        f"%s = (f32[64,32]{{1,0}}, f32[256,32]{{1,0}}) all-gather-start(%p0), channel_id=1, {GROUPS['iota']}",
        "ROOT %d = f32[256,32]{1,0} all-gather-done(%s)",
    ).once
    assert pair.collectives == {"all-gather": Traffic(1, *KINDS["all-gather"])}
    # As TPUs do it: one fusion starts it, one goes on with it beside a matmul, one ends it.
    fused = "\n\n".join(
        f"%{part} (q: f32[64,32]) -> f32[256,32] {{\n  %q.{part} = f32[64,32]{{1,0}} parameter(0)\n"
        f"  ROOT %g.{part} = f32[256,32]{{1,0}} all-gather(%q.{part}), channel_id=7, {GROUPS['iota']}\n}}"
        for part in ("start", "middle", "done")
    )
    lines = [f"%f.{p} = f32[256,32]{{1,0}} fusion(%p0), kind=kCustom, calls=%{p}" for p in ("start", "middle", "done")]
    assert cost_of(*lines[:2], "ROOT " + lines[2], computations=fused).once.collectives == pair.collectives


def test_the_tpu_form_of_a_reduce_scatter():
    fused = (
        "%all-reduce-scatter.1 (q: f32[64,32]) -> f32[16,32] {\n  %q = f32[64,32]{1,0} parameter(0)\n"
        f"  %r = f32[64,32]{{1,0}} all-reduce(%q), channel_id=3, {GROUPS['iota']}, to_apply=%add\n"
        "  %zero = s32[] constant(0)\n"
        "  ROOT %s = f32[16,32]{1,0} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={16,32}\n}"
    )
    line = "ROOT %f = f32[16,32]{1,0} fusion(%p0), kind=kCustom, calls=%all-reduce-scatter.1"
    once = cost_of(line, computations=fused).once
    assert once.collectives == {"reduce-scatter": Traffic(1, *KINDS["reduce-scatter"])}


def test_matmul_flops_and_bytes():
    dot = cost_of(
        "ROOT %d = f32[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        parameters=("f32[64,32]{1,0}", "f32[32,16]{1,0}"),
    ).once
    assert (dot.flops, dot.hbm_bytes) == (2 * 64 * 32 * 16, 4 * (64 * 32 + 32 * 16 + 64 * 16))
    # Eight matmuls of 64 x 32 by 32 x 16: the batch axis of the TPU's form multiplies padding, which costs nothing.
    batched = cost_of(
        "ROOT %d = f32[8,64,16]{2,1,0} convolution(%p0, %p1), "
        "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
        parameters=("f32[8,64,32]{2,1,0}", "f32[8,32,16]{2,1,0}"),
    ).once
    assert batched.flops == 8 * 2 * 64 * 32 * 16


def test_slices_and_updates_in_place_move_what_they_touch():
    fused = (
        "%slice (big: f32[64,1024], at: s32[]) -> f32[64,8] {\n  %big = f32[64,1024]{1,0} parameter(0)\n"
        "  %at = s32[] parameter(1)\n"
        "  ROOT %s = f32[64,8]{1,0} dynamic-slice(%big, %at, %at), dynamic_slice_sizes={64,8}\n}\n\n"
        "%update (big.1: f32[64,1024], new: f32[64,8], at.1: s32[]) -> f32[64,1024] {\n"
        "  %big.1 = f32[64,1024]{1,0} parameter(0)\n  %new = f32[64,8]{1,0} parameter(1)\n"
        "  %at.1 = s32[] parameter(2)\n"
        "  ROOT %u = f32[64,1024]{1,0} dynamic-update-slice(%big.1, %new, %at.1, %at.1)\n}"
    )
    once = cost_of(
        "%s.1 = f32[64,8]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%slice",
        "ROOT %u.1 = f32[64,1024]{1,0} fusion(%p0, %s.1, %p1), kind=kLoop, calls=%update",
        computations=fused,
        parameters=("f32[64,1024]{1,0}", "s32[]"),
    ).once
    part = 64 * 8 * 4
    # The slice is read and written; the update is read and written; the index is read twice.
    assert once.hbm_bytes == 4 * part + 2 * 4


def test_what_a_fusion_hands_through_is_read():
    fused = (
        "%inner (a: f32[64,32]) -> f32[2048] {\n  %a = f32[64,32]{1,0} parameter(0)\n"
        "  ROOT %flat = f32[2048]{0} bitcast(%a)\n}\n\n"
        "%outer (b: f32[64,32]) -> f32[] {\n  %b = f32[64,32]{1,0} parameter(0)\n"
        "  %flat.1 = f32[2048]{0} fusion(%b), kind=kLoop, calls=%inner\n  %zero = f32[] constant(0)\n"
        "  ROOT %sum = f32[] reduce(%flat.1, %zero), dimensions={0}, to_apply=%add\n}"
    )
    line = "ROOT %f = f32[] fusion(%p0), kind=kLoop, calls=%outer"
    assert cost_of(line, computations=fused).once.hbm_bytes == SIZE + 4


def test_the_cores_own_memory_is_free():
    parameters = ("f32[64,32]{1,0:T(8,128)S(1)}",)
    once = cost_of("ROOT %n = f32[64,32]{1,0:T(8,128)} negate(%p0)", parameters=parameters).once
    assert once.hbm_bytes == SIZE


def test_roofline_names_the_bound():
    chip = CHIPS["v5p"]
    assert Cost(flops=chip.flops, hbm_bytes=1).roofline(chip) == (1.0, "compute")
    assert Cost(flops=1, hbm_bytes=2 * chip.hbm_bandwidth).roofline(chip) == (2.0, "memory")
    gather = {"all-gather": Traffic(1, 1.0, 3 * chip.ici_bandwidth)}
    assert Cost(flops=1, collectives=gather).roofline(chip) == (3.0, "network")


@needs_libtpu
def test_a_sharded_scan_compiled_for_tpus():
    """Known arithmetic: a scan over layers of a two-matmul MLP, weights gathered over one axis, and its gradient."""
    layers, rows, width, hidden = 5, 256, 256, 512
    _, devices = topology_devices("v5e:2x2")
    mesh = Mesh(np.asarray(devices).reshape(2, 2), ("fsdp", "tensor"))

    def shape(size, *spec):
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def loss(up, down, x):
        layer = lambda x, w: (jax.nn.relu(x @ w[0]) @ w[1], None)
        return jnp.square(jax.lax.scan(layer, x, (up, down))[0].astype(jnp.float32)).sum()

    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1)))
        .lower(
            shape((layers, width, hidden), None, "fsdp", "tensor"),
            shape((layers, hidden, width), None, "tensor", "fsdp"),
            shape((rows, width), "fsdp", None),
        )
        .compile()
    )
    counted = account(parse(compiled.as_text()))
    assert counted.iteration is None
    # Forward, and backward to the weights and to the activations.
    assert counted.once.flops == 3 * layers * 2 * (2 * rows * width * hidden) / 4
    # XLA's own count has every loop's body once.
    assert counted.once.flops > 4 * compiled.cost_analysis()["flops"]
    assert counted.once.collectives["all-gather"].count >= 2 * layers
    assert counted.once.collectives["all-reduce"].count >= 2 * layers
    assert counted.once.hbm_bytes > 0

"""The verdict's arithmetic, on outcomes made by hand."""

import io

import jax
import pytest
from rich.console import Console

from mars2_jax.parallel.mesh import make_mesh
from mars2_jax.planning.chips import CHIPS, GIB
from mars2_jax.planning.compiled import Memory, Outcome, refused_bytes
from mars2_jax.planning.cost import Account, Cost, Traffic
from mars2_jax.planning.programs import Program, Resident
from mars2_jax.planning.report import Plan

MESH = make_mesh(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])


def outcome(kind: str, temporaries: float | None, *, needed: float) -> Outcome:
    program = Program(kind, ("a", "b"), "2 rows x 64 tokens", 128, MESH, lambda: None, GIB)
    if temporaries is None:
        return Outcome(program, None, int(needed * GIB), None)
    memory = Memory(GIB, GIB, GIB, int(temporaries * GIB), code=GIB // 4)
    cost = Account(Cost(1e12, 1e9, {"all-gather": Traffic(3, 2e9, 1e9)}), Cost(2e12) if kind == "decode" else None)
    return Outcome(program, memory, int(needed * GIB), cost)


def plan(*outcomes: Outcome) -> Plan:
    residents = [Resident("a", "master weights", 4 * GIB), Resident("b", "key-value cache", 3 * GIB)]
    mesh = {"data": 1, "fsdp": 2, "tensor": 2}
    return Plan("v5e:2x2", CHIPS["v5e"], mesh, {"a": ("path", "source")}, residents, outcomes)


def shown(it: Plan) -> str:
    console = Console(file=io.StringIO(), width=120)
    it.show(console)
    return console.file.getvalue()


def test_what_fits():
    # 7 GiB stay, and half a GiB of programs; the larger program needs 5.
    it = plan(outcome("decode", 2, needed=2), outcome("update", 5, needed=5))
    assert it.fits and it.needed == int(12.5 * GIB) and it.largest.program.kind == "update"
    text = shown(it)
    assert "fits v5e:2x2 with 3.25 GiB a device to spare: 7.50 GiB stay, the update of a, b needs 5.00 GiB more" in text
    assert "decode of a, b, a token" in text and "all-gather" in text
    data = it.to_json()
    assert data["fits"] and data["needed_bytes"] == it.needed
    assert data["programs"][0]["cost"]["iteration"]["bound"] == "compute"
    assert data["programs"][1]["cost"]["once"]["collectives"]["all-gather"]["count"] == 3


def test_what_does_not_fit():
    it = plan(outcome("decode", 2, needed=2), outcome("update", 10, needed=10))
    assert not it.fits
    assert "does not fit v5e:2x2 by 1.75 GiB a device" in shown(it)


def test_a_refused_program_does_not_fit():
    it = plan(outcome("decode", 2, needed=2), outcome("update", None, needed=20))
    assert not it.fits and it.to_json()["programs"][1]["memory"] is None
    text = shown(it)
    assert "does not fit v5e:2x2 by 11.50 GiB a device" in text and "refused" in text


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (512.00G) "
            "exceeds available HBM (15.75G).",
            512 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
            "Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G.",
            int(13.5 * GIB),
        ),
        ("INTERNAL: something else used 1.00G of 2.00G hbm", None),
    ],
)
def test_the_compilers_refusal(message, needed):
    assert refused_bytes(message, resident=4 * GIB) == needed

"""The reader of compiled programs, on texts small enough to check by eye."""

import pytest

from mars2_jax.planning.hlo import parse

TEMPLATE = """HloModule jit_f, is_scheduled=true, num_partitions=4

%condition (state: (s32[], f32[8,4])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %bound = s32[]{:T(128)} constant(LIMIT)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%counter, %bound), direction=LT, metadata={op_name="while/cond/lt (in a scan)"}
}

%body (state.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state.1 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %step = s32[]{:T(128)} constant(STEP)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %copied = s32[]{:T(128)S(6)} copy(%counter.1)
  %next = s32[]{:T(128)} add(%copied, %step)
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%state.1), index=1
  ROOT %result = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) tuple(%next, %x)
}

ENTRY %main (x.1: f32[8,4]) -> f32[8,4] {
  %x.1 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %start = s32[]{:T(128)} START
  %initial = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) tuple(%start, %x.1)
  %loop = (s32[]{:T(128)}, /*index=1*/f32[8,4]{1,0:T(8,128)}) while(%initial), condition=%condition, body=%body
  ROOT %out = f32[8,4]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def loop(limit="36", step="1", start="constant(0)", known=""):
    text = TEMPLATE.replace("LIMIT", limit).replace("STEP", step).replace("START", start)
    return text.replace("body=%body", f"body=%body{known}")


LOOP = loop()


def trip_count(**case):
    module = parse(loop(**case))
    entry = module.computations[module.entry]
    return module.trip_count(entry, entry.instructions["loop"])


def test_instructions_shapes_and_memory_spaces():
    module = parse(LOOP)
    assert (module.entry, module.devices, list(module.computations)) == ("main", 4, ["condition", "body", "main"])
    body = module.computations["body"]
    assert body.root == "result" and len(body.instructions) == 7
    result = body.instructions["result"]
    assert (result.opcode, result.operands) == ("tuple", ("next", "x"))
    assert [(a.dtype, a.shape, a.bytes, a.in_hbm) for a in result.arrays] == [
        ("s32", (), 4, True),
        ("f32", (8, 4), 128, True),
    ]
    assert not body.instructions["copied"].arrays[0].in_hbm
    less = module.computations["condition"].instructions["less"]
    assert less.operands == ("counter", "bound") and less.attribute("direction") == "LT"


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ({}, 36),
        ({"limit": "37", "step": "4"}, 10),
        ({"start": "constant(30)"}, 6),
        ({"start": "constant(40)"}, 0),
        ({"known": ', backend_config={"known_trip_count":{"n":"12"},"other":{}}'}, 12),
    ],
)
def test_trip_counts(case, count):
    assert trip_count(**case) == count


def test_a_loop_that_depends_on_data_has_no_count():
    assert trip_count(start="partition-id()") is None


@pytest.mark.parametrize("text", ["", "int main() {}", LOOP.replace("ENTRY ", "")])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="no compiled XLA program"):
        parse(text)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 64), ("pred", 32), ("f8e4m3fn", 32), ("u32", 128), ("s4", 16)])
def test_sizes_of_types(dtype, size):
    (array,) = parse(LOOP.replace("f32[8,4]", f"{dtype}[8,4]")).computations["main"].instructions["x.1"].arrays
    assert array.bytes == size

"""What one run of a compiled program costs a device: matmul FLOPs, bytes of main memory, bytes to other devices.

All of it is read off the program's text, loops included: a body counts as often as it runs. Where that depends on data
(the tokens of a decoding call), the body is accounted for apart, as one iteration.

These are the costs of what must be done, not of what the hardware makes of it: sizes are without padding, every operand
and result of a fused operation that lies in main memory is moved once, and arithmetic other than matmuls is left out.
Where a kernel reads no more than each sequence's own length, sequences are taken to be half as long as they may be.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from mars2_jax.planning.chips import Chip
from mars2_jax.planning.hlo import Array, Computation, Instruction, Module

__all__ = ["Account", "Cost", "Traffic", "account"]

# Payload and traffic of each kind, as factors of the bytes that a device puts in, among n devices. Traffic is what a
# device must send under the algorithms that send the least (Thakur et al. 2005, doi:10.1177/1094342005051521).
_COLLECTIVES = {
    "all-gather": (lambda n: n, lambda n: n - 1),
    "all-reduce": (lambda n: 1, lambda n: 2 * (n - 1) / n),
    "reduce-scatter": (lambda n: 1, lambda n: (n - 1) / n),
    "all-to-all": (lambda n: 1, lambda n: (n - 1) / n),
    "ragged-all-to-all": (lambda n: 1, lambda n: (n - 1) / n),
    "collective-permute": (lambda n: 1, lambda n: 1),
    "collective-broadcast": (lambda n: 1, lambda n: 1),
}

# Matmuls of scores' size that an attention kernel makes, by the start of its name: forward two (the scores, and their
# product with the values); backward the scores again, and one for each gradient and for that of the scores.
_KERNELS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}

# The kernel of `models.decode_attention`, by the start of its name. It reads as much of a sequence as there is.
_DECODE_KERNEL = "paged_attention"

# Length of a sequence that is being decoded, over the cache's: on average, as it grows from next to nothing to all of
# it. What the lengths will be is known to the run alone.
_MEAN_LENGTH = 0.5

# Writing a part of an array in place: which operand is the part.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}

_FREE = frozenset(
    [
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "partition-id", "replica-id"),
        # What these run is counted where it stands.
        *("while", "conditional", "call"),
        *("after-all", "opt-barrier", "domain", "async-update"),
    ]
)
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone", "Sharding")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind.

    Attributes:
      count: how many are run.
      payload: bytes of the whole arrays that are put together, reduced or moved, of one device's point of view: the
        result of an all-gather, the operand of the others.
      sent: bytes that a device sends to others.
    """

    count: int = 0
    payload: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.payload + other.payload, self.sent + other.sent)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a device does.

    Attributes:
      flops: of matmuls; a multiplication and an addition are two.
      hbm_bytes: read from and written to its main memory.
      collectives: by kind.
      unknown_kernels: hand-written kernels among it whose FLOPs are not known.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    unknown_kernels: int = 0

    def plus(self, other: Cost, times: int = 1) -> Cost:
        """This and `times` the other."""
        kinds = {**self.collectives}
        for kind, traffic in other.collectives.items():
            scaled = Traffic(traffic.count * times, traffic.payload * times, traffic.sent * times)
            kinds[kind] = kinds.get(kind, Traffic()) + scaled
        return Cost(
            self.flops + times * other.flops,
            self.hbm_bytes + times * other.hbm_bytes,
            kinds,
            self.unknown_kernels + times * other.unknown_kernels,
        )

    @property
    def sent(self) -> float:
        """Bytes sent to other devices."""
        return sum(traffic.sent for traffic in self.collectives.values())

    def roofline(self, chip: Chip) -> tuple[float, str]:
        """The least time in seconds that a chip needs, and what bounds it: "compute", "memory" or "network".

        The three overlap as if perfectly, each at its nominal rate; traffic uses all links of the chip.
        """
        times = {
            "compute": self.flops / chip.flops,
            "memory": self.hbm_bytes / chip.hbm_bandwidth,
            "network": self.sent / chip.ici_bandwidth,
        }
        bound = max(times, key=lambda name: times[name])
        return times[bound], bound


@dataclasses.dataclass(frozen=True)
class Account:
    """What a program costs.

    Attributes:
      once: all of it but the bodies of loops whose length depends on data.
      iteration: one iteration of each of those; None where there are none.
    """

    once: Cost
    iteration: Cost | None


def account(module: Module) -> Account:
    """Adds up what a compiled program costs one of the devices that run it."""
    return _Accountant(module).account(module.entry)


class _Accountant:
    def __init__(self, module: Module):
        self._module = module
        self._known: dict[str, Account] = {}

    def account(self, name: str) -> Account:
        """What one run of a computation costs."""
        if name not in self._known:
            self._known[name] = self._add_up(self._module.computations[name])
        return self._known[name]

    def _add_up(self, computation: Computation) -> Account:
        once, iteration = Cost(), None
        channels: set[str] = set()
        for instruction in computation:
            once = once.plus(self._own(computation, instruction, channels))
            for callee, times in self._callees(computation, instruction):
                inner = self.account(callee)
                if times is None:
                    # A loop in a loop, both of unknown length: one iteration of each.
                    iteration = (iteration or Cost()).plus(inner.once).plus(inner.iteration or Cost())
                else:
                    once = once.plus(inner.once, times)
                    if inner.iteration is not None:
                        iteration = (iteration or Cost()).plus(inner.iteration, times)
        return Account(once, iteration)

    def _callees(self, computation: Computation, instruction: Instruction) -> list[tuple[str, int | None]]:
        """The computations that the instruction runs as they stand, and how often. Every branch is counted."""
        if instruction.opcode == "while":
            times = self._module.trip_count(computation, instruction)
            return [(instruction.attribute(part) or "", times) for part in ("body", "condition")]
        if instruction.opcode == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
            names = re.findall(r"[\w.\-]+", listed[1]) if listed else []
            both = [instruction.attribute(f"{side}_computation") for side in ("true", "false")]
            return [(name, 1) for name in [*names, *both] if name]
        if instruction.opcode == "call":
            return [(instruction.attribute("to_apply") or "", 1)]
        return []

    def _own(self, computation: Computation, instruction: Instruction, channels: set[str]) -> Cost:
        """The cost of one instruction and of what is fused into it."""
        flops, unknown = 0.0, 0
        kinds: dict[str, Traffic] = collections.defaultdict(Traffic)
        for inside, one in self._fused(computation, instruction):
            flops += _matmul_flops(inside, one)
            if 'custom_call_target="tpu_custom_call"' in one.attributes:
                estimate = _kernel_flops(inside, one)
                flops, unknown = flops + (estimate or 0.0), unknown + (estimate is None)
            kind = one.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                # An asynchronous one may stand in the fusions that start it, run beside it and end it; all of them have
                # its channel.
                channel = one.attribute("channel_id")
                if channel is not None and channel in channels:
                    continue
                channels.add(channel or one.name)
                if kind == "all-reduce" and "all-reduce-scatter" in inside.name:
                    # How TPUs write a reduce-scatter: the slice that follows is part of the operation.
                    kind = "reduce-scatter"
                kinds[kind] += self._traffic(kind, inside, one)
        return Cost(flops, _hbm_bytes(self._module, computation, instruction), kinds, unknown)

    def _fused(self, computation: Computation, instruction: Instruction):
        """The instruction and, if it is a fusion, all instructions in it, each with its computation."""
        yield computation, instruction
        if instruction.opcode in ("fusion", "async-start"):
            inner = self._module.computations[instruction.attribute("calls") or ""]
            for one in inner:
                yield from self._fused(inner, one)

    def _traffic(self, kind: str, computation: Computation, instruction: Instruction) -> Traffic:
        size = sum(array.bytes for name in instruction.operands for array in computation.instructions[name].arrays)
        devices = _group_size(instruction.attributes, self._module.devices)
        payload, sent = _COLLECTIVES[kind]
        return Traffic(1, size * payload(devices), size * sent(devices))


def _group_size(attributes: str, devices: int) -> int:
    """Devices that take part in a collective together."""
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(listed[1].split(","))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        # An axis, or a part of one: 'axis':(before)size.
        used = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[axis] for axis, part in used)
    return devices


def _kernel_flops(computation: Computation, instruction: Instruction) -> float | None:
    """FLOPs of a hand-written kernel that `models.causal_attention` or `models.decode_attention` uses; None of others.

    Of whole sequences half of the scores lie below the diagonal; the blocks above it are skipped.
    """
    if instruction.name.startswith(_DECODE_KERNEL):
        queries, pages = _decode_kernel_arrays(computation, instruction)
        _, count, page, _ = pages.shape
        # Two matmuls, each of a sequence's queries with all of its entries.
        room = count * page / queries.shape[0]
        return 2 * 2.0 * math.prod(queries.shape) * room * _MEAN_LENGTH
    matmuls = next((count for name, count in _KERNELS.items() if instruction.name.startswith(name)), None)
    arrays = [array for name in instruction.operands for array in computation.instructions[name].arrays]
    query = next((array for array in arrays if array.dtype in ("bf16", "f32") and len(array.shape) >= 3), None)
    if matmuls is None or query is None:
        return None
    length = query.shape[-2]
    return matmuls * 2.0 * math.prod(query.shape) * length / 2


def _decode_kernel_arrays(computation: Computation, instruction: Instruction) -> tuple[Array, Array]:
    """Queries [sequences, queries of each, ..., head_dim] and pages of keys [1, pages, page, head_dim]."""
    arrays = [array for name in instruction.operands for array in computation.instructions[name].arrays]
    query, key, _ = (array for array in arrays if array.dtype in ("bf16", "f32") and len(array.shape) >= 3)
    return query, key


def _matmul_flops(computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode == "dot":
        left = computation.instructions[instruction.operands[0]].arrays[0]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        axes = [int(axis) for axis in contracted[1].split(",") if axis] if contracted else []
        return 2.0 * math.prod(instruction.arrays[0].shape) * math.prod(left.shape[axis] for axis in axes)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    return 0.0


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """The TPU's form of a matmul. A batch axis becomes a spatial one, of which most positions multiply padding."""
    left, right = (computation.instructions[name].arrays[0] for name in instruction.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise ValueError(f"the convolution {instruction.name} has no dim_labels")
    from_left, from_right, to = (
        dict(zip(names, shape))
        for names, shape in zip(labels.groups(), (left.shape, right.shape, instruction.arrays[0].shape))
    )
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    products = 1.0
    for number, axis in enumerate(sorted(label for label in to if label.isdigit())):

        def value(key: str, default: str, number: int = number) -> str:
            return fields[key].split("x")[number] if key in fields else default

        low, _, _ = value("pad", "0_0").partition("_")
        products *= _positions(
            size=from_right[axis],
            inputs=from_left[axis],
            outputs=to[axis],
            stride=int(value("stride", "1")),
            low=int(low),
            spread=int(value("lhs_dilate", "1")),
            dilation=int(value("rhs_dilate", "1")),
        )
    return 2.0 * products * to["b"] * to["f"] * from_right["i"]


def _positions(*, size: int, inputs: int, outputs: int, stride: int, low: int, spread: int, dilation: int) -> int:
    """How many pairs of a kernel position and an output position meet an element of the input."""
    count = 0
    places = np.arange(outputs, dtype=np.int64) * stride - low
    for position in range(size):
        place = places + position * dilation
        count += int(((place >= 0) & (place < (inputs - 1) * spread + 1) & (place % spread == 0)).sum())
    return count


def _hbm_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes that one instruction moves from and to main memory."""
    opcode = instruction.opcode
    if (
        opcode in _FREE
        or opcode.endswith("-done")
        or any(f'"{call}"' in instruction.attributes for call in _FREE_CALLS)
    ):
        return 0.0
    operands = [array for name in instruction.operands for array in computation.instructions[name].arrays]
    if opcode == "custom-call" and instruction.name.startswith(_DECODE_KERNEL):
        _, pages = _decode_kernel_arrays(computation, instruction)
        unread = 2 * pages.bytes * (1 - _MEAN_LENGTH)
        return sum(array.bytes for array in [*operands, *instruction.arrays] if array.in_hbm) - unread
    if opcode.endswith("-start"):
        # The value lists the operands again; what arrives is counted here, and what is read is as much.
        arrived = [array for array in instruction.arrays if array not in operands]
        moved = max((array.bytes for array in arrived), default=0)
        return float(sum(moved for array in [*operands[:1], *arrived[:1]] if array.in_hbm))
    if opcode == "fusion":
        callee = module.computations[instruction.attribute("calls") or ""]
        read = sum(
            _read(module, callee, number)
            for number, name in enumerate(instruction.operands)
            if all(array.in_hbm for array in computation.instructions[name].arrays)
        )
        return float(read + _written(callee, instruction))
    if opcode in ("dynamic-slice", "slice", "gather"):
        operands = list(instruction.arrays)
    elif opcode in _UPDATES:
        update = computation.instructions[instruction.operands[_UPDATES[opcode]]].arrays
        return float(2 * sum(array.bytes for array in update) if instruction.arrays[0].in_hbm else 0)
    return float(sum(array.bytes for array in [*operands, *instruction.arrays] if array.in_hbm))


def _read(module: Module, callee: Computation, number: int) -> int:
    """Bytes that a fusion reads of its operand: of one that it only slices, the slices."""
    parameter = next(i for i in callee if i.opcode == "parameter" and i.arguments == str(number))
    whole = sum(array.bytes for array in parameter.arrays)

    def users(name: str) -> int:
        total = 0
        for one in callee:
            if name not in one.operands:
                continue
            if one.opcode in ("dynamic-slice", "slice", "gather") and one.operands[0] == name:
                total += (
                    math.prod(one.arrays[0].shape)
                    * parameter.arrays[0].bytes
                    // max(math.prod(parameter.arrays[0].shape), 1)
                )
            elif one.opcode in _UPDATES and one.operands[0] == name:
                continue
            elif one.opcode in ("bitcast", "copy"):
                total += whole if one.name == callee.root else users(one.name)
            elif one.opcode == "fusion":
                inner = module.computations[one.attribute("calls") or ""]
                total += sum(_read(module, inner, i) for i, operand in enumerate(one.operands) if operand == name)
            else:
                return whole
        return min(total, whole)

    return users(parameter.name)


def _written(callee: Computation, fusion: Instruction) -> int:
    """Bytes that a fusion writes: of an array that it updates in place, the update."""
    root = callee.instructions[callee.root]
    results = [callee.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(results) != len(fusion.arrays):
        return sum(array.bytes for array in fusion.arrays if array.in_hbm)
    total = 0
    for array, result in zip(fusion.arrays, results):
        while result.opcode == "bitcast":
            result = callee.instructions[result.operands[0]]
        if result.opcode in _UPDATES:
            update = callee.instructions[result.operands[_UPDATES[result.opcode]]].arrays[0]
            total += update.bytes if array.in_hbm else 0
        else:
            total += array.bytes if array.in_hbm else 0
    return total

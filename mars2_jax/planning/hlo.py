"""A reader of compiled XLA programs in their text form: computations, instructions, shapes, loops.

XLA's own cost analysis counts the body of a loop once, however often it runs, and says nothing of communication. Both
stand in the text, so it is read here. Only what the accounts of `mars2_jax.planning.cost` need is understood.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

__all__ = ["Array", "Computation", "Instruction", "Module", "parse"]

_ITEM_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
"""Types whose name does not end in their number of bits."""

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([a-z][a-z0-9\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.\-]+)")
_BRACKET = re.compile(r'\\.|[()"]')


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's value.

    Attributes:
      dtype: XLA's name of the type of an element.
      shape: its dimensions.
      in_hbm: whether it lies in the device's main memory and not in a memory of its core.
    """

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool

    @property
    def bytes(self) -> int:
        """Its size without padding."""
        digits = re.search(r"\d+", self.dtype)
        bits = _ITEM_BITS.get(self.dtype, int(digits[0]) if digits else 0)
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: unique in the module.
      opcode: what it does, such as "fusion".
      arrays: its value; the arrays of a tuple are listed flat.
      operands: names of the instructions it reads.
      arguments: what stands between the parentheses, for constants and parameters.
      attributes: the rest of the line.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    def attribute(self, key: str) -> str | None:
        """A plain attribute's value, such as that of `direction`."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match and match[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the module: instructions by name, in the order of the text; `root` names the result."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def source(self, name: str) -> Instruction:
        """The instruction behind copies, and behind the packing and unpacking of tuples."""
        instruction = self.instructions[name]
        if instruction.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
            return self.source(instruction.operands[0])
        if instruction.opcode == "get-tuple-element":
            packed = self.source(instruction.operands[0])
            if packed.opcode == "tuple":
                return self.source(packed.operands[int(instruction.attribute("index") or 0)])
        return instruction


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: the part of one device.

    Attributes:
      computations: by name.
      entry: the computation that runs first.
      devices: how many devices run the program together.
    """

    computations: Mapping[str, Computation]
    entry: str
    devices: int

    def trip_count(self, caller: Computation, loop: Instruction) -> int | None:
        """How often the body of a `while` runs; None where that depends on data.

        XLA writes it down where it knows it, but not in every backend. Else it is read off the form that `jax.lax.scan`
        and `fori_loop` compile to: a counter that starts at a constant, grows by a constant, and is compared with one.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(known[1])
        condition = self.computations[loop.attribute("condition") or ""]
        body = self.computations[loop.attribute("body") or ""]
        compare = condition.source(condition.root)
        if compare.opcode != "compare" or compare.attribute("direction") != "LT":
            return None
        counter, bound = (condition.source(name) for name in compare.operands)
        slot, initial = _slot(condition, counter), caller.source(loop.operands[0])
        if slot is None or initial.opcode != "tuple":
            return None
        limit = _constant(bound)
        if limit is None and (carried := _slot(condition, bound)) is not None:
            limit = _constant(caller.source(initial.operands[carried]))
        start, step = _constant(caller.source(initial.operands[slot])), _step(body, slot)
        if limit is None or start is None or not step:
            return None
        return max(0, -(-(limit - start) // step))


def _slot(computation: Computation, instruction: Instruction) -> int | None:
    """Which element of the computation's only parameter, a tuple, the instruction takes."""
    if instruction.opcode != "get-tuple-element":
        return None
    packed = computation.instructions[instruction.operands[0]]
    return int(instruction.attribute("index") or 0) if packed.opcode == "parameter" else None


def _constant(instruction: Instruction) -> int | None:
    whole = re.fullmatch(r"-?\d+", instruction.arguments)
    return int(whole[0]) if instruction.opcode == "constant" and whole else None


def _step(body: Computation, slot: int) -> int | None:
    """What a loop's body adds to the element `slot` of its state, if that is a constant."""
    result = body.source(body.root)
    if result.opcode != "tuple":
        return None
    addition = body.source(result.operands[slot])
    if addition.opcode != "add":
        return None
    terms = [body.source(name) for name in addition.operands]
    if not any(_slot(body, term) == slot for term in terms):
        return None
    return next((value for term in terms if (value := _constant(term)) is not None), None)


def parse(text: str) -> Module:
    """Reads what `jax.stages.Compiled.as_text` returns.

    Raises:
      ValueError: no entry computation, or a line of another form.
    """
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    lines: list[str] | None = None
    for line in text.splitlines():
        if lines is None:
            if header := _HEADER.match(line):
                name, lines = header[2], []
                entry = name if header[1] else entry
        elif line == "}":
            computations[name] = _computation(name, lines)
            lines = None
        elif line.startswith("  "):
            lines.append(line.strip())
        elif line:
            # The attributes of hand-written kernels hold line breaks.
            lines[-1] += line
    if not entry:
        raise ValueError("the text holds no entry computation: it is no compiled XLA program")
    devices = re.search(r"\bnum_partitions=(\d+)", text.split("\n", 1)[0])
    return Module(computations, entry, int(devices[1]) if devices else 1)


def _computation(name: str, lines: list[str]) -> Computation:
    instructions, root = {}, ""
    for line in lines:
        is_root, instruction = _instruction(_COMMENT.sub("", line))
        instructions[instruction.name] = instruction
        root = instruction.name if is_root else root
    return Computation(name, instructions, root)


def _instruction(line: str) -> tuple[bool, Instruction]:
    start = _INSTRUCTION.match(line)
    if start is None:
        raise ValueError(f"no instruction of an XLA program: {line[:200]!r}")
    rest = line[start.end() :]
    shape, rest = _shape(rest)
    opcode = _OPCODE.match(rest)
    if opcode is None:
        raise ValueError(f"no operation in the XLA instruction {line[:200]!r}")
    end = _closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : end]
    instruction = Instruction(
        name=start[2],
        opcode=opcode[1],
        arrays=tuple(_arrays(shape)),
        operands=tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=rest[end + 1 :],
    )
    return bool(start[1]), instruction


def _shape(text: str) -> tuple[str, str]:
    """Splits off the type at the start of the text: a tuple in parentheses, or one array without spaces."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    return text[:end], text[end:]


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes; those within strings do not count."""
    depth, quoted = 0, False
    for match in _BRACKET.finditer(text, start):
        if match[0] == '"':
            quoted = not quoted
        elif not quoted:
            depth += 1 if match[0] == "(" else -1
            if depth == 0:
                return match.start()
    raise ValueError(f"a parenthesis of the XLA program does not close: {text[start : start + 200]!r}")


def _arrays(shape: str) -> Iterator[Array]:
    for dtype, dimensions, layout in _ARRAY.findall(shape):
        sizes = tuple(int(size.removeprefix("<=")) for size in dimensions.split(",") if size)
        # A memory space S(n) other than 0 is one of the core's own memories.
        yield Array(dtype, sizes, in_hbm=not re.search(r"S\([1-9]\d*\)", layout))

"""Compiling a run's programs, and what the compiler says of each."""

from __future__ import annotations

import dataclasses
import re

import jax

from mars2_jax.planning.cost import Account, account
from mars2_jax.planning.hlo import parse
from mars2_jax.planning.programs import Program

__all__ = ["Memory", "Outcome", "compile_program", "refused_bytes"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of main memory on each device, padding included.

    Attributes:
      arguments: what the program is given.
      outputs: what it returns.
      aliased: of the outputs, those that take the place of arguments.
      temporaries: what it needs while it runs.
      code: the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
      program: what was compiled.
      memory: what it needs; None where the compiler refused it because it needs too much.
      needed: bytes that it needs on a device beside the arrays that are there anyway.
      cost: what it costs; None where it was refused.
    """

    program: Program
    memory: Memory | None
    needed: int
    cost: Account | None


def compile_program(program: Program) -> Outcome:
    """Compiles a program and reads its memory and its cost. A program too large for the chip is an outcome, too."""
    try:
        # The mesh is in context as it is in the run.
        with jax.set_mesh(program.mesh):
            compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error), program.resident)
        if needed is None:
            raise
        return Outcome(program, None, needed, None)
    stats, text = compiled.memory_analysis(), compiled.as_text()
    assert stats is not None and text is not None  # the TPU compiler has both
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
    brought = max(0, memory.arguments - program.resident)
    needed = brought + memory.outputs - memory.aliased + memory.temporaries + memory.code
    return Outcome(program, memory, needed, account(parse(text)))


def refused_bytes(message: str, resident: int) -> int | None:
    """Bytes needed beside the resident ones, from the compiler's message; None where it complains of something else."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    if whole := re.search(r"[Uu]sed ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message):
        return max(0, _bytes(whole) - resident)
    if temporaries := re.search(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\)", message):
        return _bytes(temporaries)
    return None


def _bytes(match: re.Match[str]) -> int:
    return int(float(match[1]) * _UNITS[match[2]])

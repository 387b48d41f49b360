"""Whether a run fits a topology, and the tables that say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mars2_jax.planning.chips import Chip
from mars2_jax.planning.compiled import Outcome
from mars2_jax.planning.cost import Cost
from mars2_jax.planning.programs import Resident

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run on a topology.

    Attributes:
      topology: its name.
      chip: what it is made of.
      mesh: sizes of the mesh's axes.
      models: each agent's model path, and where its shape was read.
      residents: what stays on the devices.
      outcomes: of the programs.
    """

    topology: str
    chip: Chip
    mesh: Mapping[str, int]
    models: Mapping[str, tuple[str, str]]
    residents: Sequence[Resident]
    outcomes: Sequence[Outcome]

    @property
    def resident(self) -> int:
        """Bytes on each device that stay between programs; the programs themselves are among them."""
        code = sum(outcome.memory.code for outcome in self.outcomes if outcome.memory is not None)
        return sum(resident.bytes for resident in self.residents) + code

    @property
    def largest(self) -> Outcome:
        """The program that needs most memory beside what stays."""
        return max(self.outcomes, key=lambda outcome: outcome.needed)

    @property
    def needed(self) -> int:
        """Bytes on each device at the fullest moment of the run."""
        return self.resident + self.largest.needed

    @property
    def fits(self) -> bool:
        """Whether the chip has as much, and the compiler accepts every program."""
        return self.needed <= self.chip.hbm and all(outcome.memory is not None for outcome in self.outcomes)

    def verdict(self) -> str:
        """One line."""
        spare = self.chip.hbm - self.needed
        program = f"{self.largest.program.kind} of {', '.join(self.largest.program.agents)}"
        parts = f"{_gib(self.resident)} stay, the {program} needs {_gib(self.largest.needed)} more"
        sum_ = f"{parts}, the chip has {_gib(self.chip.hbm)}"
        if self.fits:
            return f"fits {self.topology} with {_gib(spare)} a device to spare: {sum_}"
        return f"does not fit {self.topology} by {_gib(-spare)} a device: {sum_}"

    def show(self, console: Console) -> None:
        """Prints the tables and the verdict."""
        devices = 1
        for size in self.mesh.values():
            devices *= size
        console.print(
            f"{self.topology}: {devices} chips of {_gib(self.chip.hbm)}, mesh "
            + ", ".join(f"{axis} {size}" for axis, size in self.mesh.items()),
            highlight=False,
        )
        for agent, (path, source) in self.models.items():
            console.print(f"{agent}: {path} (shape from {source})", highlight=False)
        console.print(self._memory_table())
        console.print(self._cost_table())
        console.print(self._collectives_table())
        console.print(self._resident_table())
        console.print(
            "FLOPs are of matmuls, without padding; + marks kernels whose FLOPs are not known. The time is the least "
            "that the chip's nominal rates allow, all overlapping. Loops count as often as they run; decoding is told "
            "for one token of each slot. All is planned for one process with all devices; where each host has its own, "
            "updates are the same, and engines decode on the devices of one host.",
            highlight=False,
        )
        console.print(self.verdict(), style="green" if self.fits else "red", highlight=False)

    def _memory_table(self) -> Table:
        table = Table(title="Memory of each program, GiB a device", title_justify="left")
        table.add_column("program")
        for column in ("arguments", "outputs", "in place", "temporaries"):
            table.add_column(column, justify="right", no_wrap=True)
        for outcome in self.outcomes:
            program, memory = outcome.program, outcome.memory
            title = f"{program.kind} of {', '.join(program.agents)}\n{program.size}"
            if memory is None:
                table.add_row(title, "refused:", "needs", _number(outcome.needed), "more", style="red")
                continue
            values = (memory.arguments, memory.outputs, memory.aliased, memory.temporaries)
            table.add_row(title, *map(_number, values))
        return table

    def _cost_table(self) -> Table:
        table = Table(title="Cost of one run of each, of a device", title_justify="left")
        table.add_column("program")
        for column in ("TFLOPs", "memory GB", "sent GB", "least time", "bound by"):
            table.add_column(column, justify="right", no_wrap=True)
        for outcome in self.outcomes:
            if (cost := _unit_cost(outcome)) is None:
                continue
            seconds, bound = cost.roofline(self.chip)
            table.add_row(
                _title(outcome),
                f"{cost.flops / 1e12:,.3g}" + ("+" if cost.unknown_kernels else ""),
                f"{cost.hbm_bytes / 1e9:,.3g}",
                f"{cost.sent / 1e9:,.3g}",
                _duration(seconds),
                bound,
            )
        return table

    def _collectives_table(self) -> Table:
        table = Table(title="Collectives of one run of each", title_justify="left")
        for column in ("program", "kind"):
            table.add_column(column)
        for column in ("count", "payload GB", "sent GB"):
            table.add_column(column, justify="right", no_wrap=True)
        for outcome in self.outcomes:
            title = _title(outcome)
            for kind, traffic in sorted((_unit_cost(outcome) or Cost()).collectives.items()):
                sizes = (f"{size / 1e9:,.3g}" for size in (traffic.payload, traffic.sent))
                table.add_row(title, kind, f"{traffic.count:,}", *sizes)
                title = ""
        return table

    def _resident_table(self) -> Table:
        table = Table(title="What stays between programs, GiB a device", title_justify="left")
        agents = list(dict.fromkeys(resident.agent for resident in self.residents))
        table.add_column("")
        for agent in agents:
            table.add_column(agent, justify="right")
        for what in dict.fromkeys(resident.what for resident in self.residents):
            sizes = {resident.agent: resident.bytes for resident in self.residents if resident.what == what}
            table.add_row(what, *(_number(sizes[agent]) if agent in sizes else "" for agent in agents))
        offloaded = {agent: sum(r.host_bytes for r in self.residents if r.agent == agent) for agent in agents}
        if any(offloaded.values()):
            table.add_row("in host memory", *(_number(offloaded[agent]) for agent in agents))
        return table

    def to_json(self) -> dict[str, Any]:
        """All of it, in bytes, FLOPs and seconds, of one device."""
        return {
            "topology": self.topology,
            "chip": dataclasses.asdict(self.chip),
            "mesh": dict(self.mesh),
            "models": {agent: {"path": path, "shape_from": source} for agent, (path, source) in self.models.items()},
            "fits": self.fits,
            "resident_bytes": self.resident,
            "needed_bytes": self.needed,
            "residents": [dataclasses.asdict(resident) for resident in self.residents],
            "programs": [_program_json(outcome, self.chip) for outcome in self.outcomes],
        }


def _per_iteration(outcome: Outcome) -> bool:
    return outcome.cost is not None and outcome.cost.iteration is not None


def _title(outcome: Outcome) -> str:
    agents = ", ".join(outcome.program.agents)
    # An update of packed rows runs over as many micro-batches as they fill.
    unit = {"decode": ", a token", "update": ", a micro-batch"}.get(outcome.program.kind, ", an iteration")
    return f"{outcome.program.kind} of {agents}" + (unit if _per_iteration(outcome) else "")


def _unit_cost(outcome: Outcome) -> Cost | None:
    """The cost that is told: of one iteration where the program's length depends on data, else of all of it."""
    if outcome.cost is None:
        return None
    return outcome.cost.iteration or outcome.cost.once


def _program_json(outcome: Outcome, chip: Chip) -> dict[str, Any]:
    program, cost = outcome.program, outcome.cost
    costs: dict[str, Any] = {}
    if cost is not None:
        for part, one in (("once", cost.once), ("iteration", cost.iteration)):
            if one is not None:
                seconds, bound = one.roofline(chip)
                costs[part] = dataclasses.asdict(one) | {"least_seconds": seconds, "bound": bound}
    return {
        "kind": program.kind,
        "agents": list(program.agents),
        "size": program.size,
        "memory": outcome.memory and dataclasses.asdict(outcome.memory),
        "needed_bytes": outcome.needed,
        "cost": costs,
    }


def _number(size: float) -> str:
    return f"{size / 2**30:,.2f}"


def _gib(size: float) -> str:
    return f"{_number(size)} GiB"


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:,.3g} {unit}"
    raise AssertionError("unreachable")

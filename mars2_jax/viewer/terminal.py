"""What a person sees of a run in the terminal: progress, a search tree, the numbers before and after."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

__all__ = ["Progress", "render_summary", "render_tree"]

_AGENT_STYLES = ("cyan", "magenta", "blue", "yellow", "bright_cyan", "bright_magenta")
_VERDICT_STYLES = {"pass": "green", "wrong": "red", "infra": "dim"}


def render_tree(nodes: Sequence[Mapping[str, Any]], agents: Sequence[str], title: str = "problem") -> Tree:
    """Draws one search tree; print the result with a `rich.console.Console`.

    Args:
      nodes: nodes as in trees/*.jsonl (`mars2_jax.training.trees.NODE_FIELDS`); `agent` is a name, `parent` 0 the root.
      agents: the names of all agents, in the order that gives each its colour.
      title: the root's label.

    Raises:
      ValueError: a node's parent is not among the nodes.
    """
    deepest = max((node["depth"] for node in nodes), default=0)
    tree = Tree(Text(f"{title}  ({len(nodes)} nodes, depth {deepest})", style="bold"), highlight=False)
    branches = {0: tree}
    # A node is always written after its parent, so slots are an order from the root down.
    for node in sorted(nodes, key=lambda node: node["slot"]):
        if node["parent"] not in branches:
            raise ValueError(f"node {node['slot']} has the parent {node['parent']}, which is not in the tree")
        branches[node["slot"]] = branches[node["parent"]].add(_label(node, agents))
    return tree


def _label(node: Mapping[str, Any], agents: Sequence[str]) -> Text:
    verdict = str(node["verdict"])
    colour = _AGENT_STYLES[list(agents).index(node["agent"]) % len(_AGENT_STYLES)]
    label = Text(f"{node['slot']} ")
    label.append(str(node["agent"]), style=colour)
    label.append("  ")
    label.append(verdict, style=_VERDICT_STYLES.get(verdict.lower(), "yellow"))
    for name in ("reward", "shaped"):
        if node[name] is not None:
            label.append(f"  {name} {node[name]:.2f}")
    if node["hidden_pass"]:
        label.append("  hidden tests pass", style="green")
    return label


def render_summary(rows: Iterable[tuple[str, float | None, float | None]], title: str = "") -> Table:
    """A table of (name, before, after) with the change; None, for "not measured", is shown as a dash."""
    table = Table("", title=title or None)
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, before, after in rows:
        change = None if before is None or after is None else after - before
        table.add_row(Text(name), _cell(before), _cell(after), _cell(change, "+.3f"))
    return table


def _cell(value: float | None, spec: str = ".3f") -> str:
    return "-" if value is None else format(value, spec)


class Progress:
    """Two bars, the run's steps and the work of the current phase; log lines where stdout is no terminal.

        with Progress(steps=2) as progress:
            progress.phase("search", total=32)
            progress.advance()
            progress.finish_step("solve rate 0.25")

    Args:
      steps: steps of the run.
      done: steps that an earlier run did.
      console: where to draw; stdout by default.
      unit: what a step is called.
      seconds: where stdout is no terminal, the least time between two lines about one phase; four times that where
        nothing got done in between, so that a long wait can be told from a run that hangs.
    """

    def __init__(
        self,
        steps: int,
        *,
        done: int = 0,
        console: Console | None = None,
        unit: str = "step",
        seconds: float = 15.0,
    ):
        self._console, self._unit = console or Console(), unit
        self._steps, self._done, self._seconds = steps, done, seconds
        self._phase, self._total, self._count, self._note = "", 0, 0, ""
        self._phase_started = self._last_line = 0.0
        self._told = 0  # the count in the last line
        self._bars: Bars | None = None
        self._step_bar = self._phase_bar = TaskID(0)
        if self._console.is_terminal:
            self._bars = Bars(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
            )

    def phase(self, name: str, total: int) -> None:
        """Begins a phase of the current step, such as "search", of `total` pieces of work."""
        self._finish_phase()
        self._phase, self._total, self._count, self._note, self._told = name, total, 0, "", 0
        self._phase_started = self._last_line = time.monotonic()
        if self._bars is not None:
            self._phase_bar = self._bars.add_task(name, total=total, note="")

    def counter(self, name: str, total: int) -> Callable[[int, int], None]:
        """Begins a phase and returns what to call with (done, total) as its work gets done; the total may change."""
        self.phase(name, total)

        def count(done: int, total: int) -> None:
            if total != self._total:
                self._total = total
                if self._bars is not None:
                    self._bars.update(self._phase_bar, total=total)
            self.advance(done - self._count, self._note)

        return count

    def advance(self, count: int = 1, note: str = "") -> None:
        """Tells that `count` more pieces of the phase are done, or, with 0, that it goes on; `note` is shown beside the
        bar."""
        self._count += count
        self._note = note
        if self._bars is not None:
            self._bars.update(self._phase_bar, advance=count, note=note)
            return
        patience = self._seconds if self._count != self._told else 4 * self._seconds
        if self._count < self._total and time.monotonic() - self._last_line >= patience:
            self._last_line, self._told = time.monotonic(), self._count
            self._line()

    def finish_step(self, summary: str = "") -> None:
        """Ends the current step; `summary` is logged."""
        self._finish_phase()
        self._done += 1
        if self._bars is not None:
            self._bars.update(self._step_bar, completed=self._done)
        if summary:
            self.log(f"{self._unit} {self._done}/{self._steps}: {summary}")

    def log(self, message: str) -> None:
        """Prints a line, above the bars where there are any."""
        self._console.print(Text(message), soft_wrap=True)

    def _finish_phase(self) -> None:
        if not self._phase:
            return
        if self._bars is not None:
            self._bars.remove_task(self._phase_bar)
        else:
            self._line()
        self._phase = ""

    def _line(self) -> None:
        step = min(self._done + 1, self._steps)
        seconds = time.monotonic() - self._phase_started
        note = f", {self._note}" if self._note else ""
        self.log(f"{self._unit} {step}/{self._steps}: {self._phase} {self._count}/{self._total}, {seconds:.0f} s{note}")

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
            self._step_bar = self._bars.add_task(self._unit, total=self._steps, completed=self._done, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish_phase()
        if self._bars is not None:
            self._bars.stop()

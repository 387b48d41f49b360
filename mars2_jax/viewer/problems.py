"""What was found in a problem set, for a terminal."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from mars2_jax.tasks.audit import Finding

__all__ = ["print_findings", "print_inventory"]

_TITLES = {
    "bad_record": "records that cannot be read",
    "reference_fails": "references that fail",
    "no_reference": "problems without a reference (no fault)",
    "duplicate": "statements of the same words",
    "near_duplicate": "statements that are nearly the same",
    "overlap": "statements that share passages with the other set",
}
_SHOWN = 20


def print_inventory(console: Console, source: str, inventory: Mapping[str, Any]) -> None:
    """Prints counts, as `Inventory.as_json` gives them."""
    console.print(f"{source}: {inventory['problems']} problems", highlight=False, markup=False, soft_wrap=True)
    table = Table("", "", show_header=False)
    for key, title in (
        ("splits", "split"),
        ("difficulties", "difficulty"),
        ("kinds", "tests"),
        ("compare", "compared by"),
    ):
        table.add_row(title, ", ".join(f"{name} {count}" for name, count in inventory[key].items()))
    table.add_row("public, hidden tests", f"{inventory['public_tests']}, {inventory['hidden_tests']}")
    table.add_row("without public tests", str(inventory["without_public_tests"]))
    table.add_row("with a reference", str(inventory["references"]))
    for name, (least, most) in inventory["limits"].items():
        table.add_row(name, f"{least:g}" if least == most else f"{least:g} to {most:g}")
    if inventory["dates"]:
        table.add_row("dates", " to ".join(inventory["dates"]))
    console.print(table)


def print_findings(console: Console, findings: tuple[Finding, ...]) -> None:
    """Prints findings by kind, the first of each in full."""
    kinds: dict[str, list[Finding]] = collections.defaultdict(list)
    for finding in findings:
        kinds[finding.kind].append(finding)
    for kind, title in _TITLES.items():
        found = kinds.get(kind, [])
        if not found:
            continue
        console.print(f"{len(found)} {title}", highlight=False)
        for finding in found[: 0 if kind == "no_reference" else _SHOWN]:
            split = f" ({finding.split})" if finding.split else ""
            other = f" like {finding.other}" if finding.other else ""
            detail = f": {finding.detail}" if finding.detail else ""
            console.print(f"  {finding.problem}{split}{other}{detail}", highlight=False, markup=False, soft_wrap=True)
        if len(found) > _SHOWN and kind != "no_reference":
            console.print(f"  ... and {len(found) - _SHOWN} more", highlight=False)

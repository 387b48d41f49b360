"""The terminal's tree, table and progress, as text."""

import io

import pytest
from rich.console import Console

from mars2_jax.viewer.terminal import Progress, render_summary, render_tree


def node(slot, parent, depth, **fields):
    default = {"slot": slot, "parent": parent, "depth": depth, "agent": "coder", "verdict": "wrong", "reward": 0.0}
    return default | {"shaped": None, "hidden_pass": False} | fields


def text_of(renderable, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().rstrip("\n").split("\n")]


def test_tree_has_its_shape_and_its_facts():
    nodes = [
        node(3, 1, 2, agent="reviewer", verdict="pass", reward=1.0, shaped=1.25, hidden_pass=True),
        node(1, 0, 1, shaped=-0.5),
        node(2, 0, 1, verdict="infra", reward=None),
        node(4, 3, 3, verdict="timeout"),
    ]
    assert text_of(render_tree(nodes, ["coder", "reviewer"], title="starter/[7]")) == [
        "starter/[7]  (4 nodes, depth 3)",
        "├── 1 coder  wrong  reward 0.00  shaped -0.50",
        "│   └── 3 reviewer  pass  reward 1.00  shaped 1.25  hidden tests pass",
        "│       └── 4 coder  timeout  reward 0.00",
        "└── 2 coder  infra",
    ]


def test_tree_of_one_chain_of_many_nodes_and_of_none():
    chain = [node(slot, slot - 1, slot) for slot in range(1, 41)]
    assert len(text_of(render_tree(chain, ["coder"]), width=400)) == 41
    assert text_of(render_tree([], ["coder"])) == ["problem  (0 nodes, depth 0)"]


def test_tree_with_an_unknown_parent():
    with pytest.raises(ValueError, match="node 2 has the parent 9"):
        render_tree([node(2, 9, 1)], ["coder"])


def test_summary():
    lines = text_of(render_summary([("Pass@1", 0.25, 0.5), ("[x] solve rate", None, 1.0)], title="starter"))
    cells = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]
    assert ["", "before", "after", "change"] in cells
    assert ["Pass@1", "0.250", "0.500", "+0.250"] in cells
    assert ["[x] solve rate", "-", "1.000", "-"] in cells


def run(console, seconds):
    with Progress(2, console=console, seconds=seconds) as progress:
        for step in (1, 2):
            progress.phase("search", total=3)
            for i in range(3):
                progress.advance(note=f"[{i}]")
            progress.phase("update", total=1)
            progress.advance()
            progress.finish_step(f"solve rate 0.{step}")


def test_progress_without_a_terminal_is_plain_lines():
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    run(console, seconds=1000)
    assert console.file.getvalue().splitlines() == [
        "step 1/2: search 3/3, 0 s, [2]",
        "step 1/2: update 1/1, 0 s",
        "step 1/2: solve rate 0.1",
        "step 2/2: search 3/3, 0 s, [2]",
        "step 2/2: update 1/1, 0 s",
        "step 2/2: solve rate 0.2",
    ]
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    run(console, seconds=0)
    assert "step 1/2: search 1/3, 0 s, [0]" in console.file.getvalue().splitlines()


def test_progress_in_a_terminal_draws_bars_and_restores_the_cursor():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    run(console, seconds=0)
    written = console.file.getvalue()
    assert "2/2" in written
    assert "step 2/2: solve rate 0.2" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_progress_of_a_resumed_run_counts_on():
    console = Console(file=io.StringIO(), force_terminal=False)
    with Progress(5, done=3, console=console) as progress:
        progress.phase("search", total=1)
        progress.finish_step()
    assert console.file.getvalue() == "step 4/5: search 0/1, 0 s\n"


def test_a_wait_is_shown_and_a_total_may_shrink(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("mars2_jax.viewer.terminal.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with Progress(1, console=console, seconds=15) as progress:
        count = progress.counter("search", 8)
        for now[0], done, total in ((10, 1, 8), (20, 1, 8), (50, 1, 8), (81, 1, 8), (90, 5, 5)):
            count(done, total)
    assert console.file.getvalue().splitlines() == [
        "step 1/1: search 1/8, 20 s",
        "step 1/1: search 1/8, 81 s",
        "step 1/1: search 5/5, 90 s",
    ]

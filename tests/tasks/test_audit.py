"""The audit finds what was planted, and nothing else; files in public layouts grade with the real grader."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mars2_jax.errors import DataError
from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks import sources
from mars2_jax.tasks.audit import Audit, audit
from mars2_jax.tasks.build import build
from tests.tasks import public_layouts as public

LONG = "given a list of numbers that may be empty return the sum of those of them that are greater than zero and odd"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(isolation="bubblewrap" if shutil.which("bwrap") else "none", workers=2) as grader:
        yield grader


def reader(source: str) -> Callable[[Callable[[DataError], None]], Any]:
    return lambda bad: sources.entries(source, on_bad=bad)


def record(name: str, statement: str, reference: str | None, split: str = "train") -> dict[str, Any]:
    made = {
        "id": name,
        "statement": statement,
        "entry_point": "f",
        "split": split,
        "public": [{"args": [1], "expected": 2}],
        "hidden": [{"args": [5], "expected": 10}],
    }
    return made if reference is None else made | {"reference": reference}


def test_what_was_planted_is_found(grader: Grader, tmp_path: pathlib.Path) -> None:
    double = "def f(x):\n    return 2 * x\n"
    records = [
        record("right", "Return twice x.", double),
        record("wrong", "Return two times x.", "def f(x):\n    return x + 1\n"),
        record("none", "Return x plus x.", None),
        record("again", "Return TWICE  x!", double, "test"),
        record("long", LONG, double),
        record("near", LONG.replace("empty", "short"), double, "test"),
        record("wrong", "Its id is taken.", double),
        {"id": "bad", "statement": "No tests."},
    ]
    path = public.write_lines(tmp_path / "own.jsonl", records)
    other = public.write_lines(
        tmp_path / "other.jsonl", [record("theirs", f"Now, {LONG.upper()}, and print it.", double, "test")]
    )
    done: list[int] = []
    found = audit(
        reader(str(path)), grader, against=sources.entries(str(other)), near=0.5, progress=done.append, ngram=13
    )
    told = [(f.kind, f.problem, f.split, f.other) for f in found.findings]
    assert told == [
        ("duplicate", "again", "test", "right (train)"),
        ("bad_record", "", "", ""),
        ("bad_record", "", "", ""),
        ("reference_fails", "wrong", "train", ""),
        ("no_reference", "none", "train", ""),
        ("near_duplicate", "near", "test", "long (train)"),
        ("overlap", "long", "train", "theirs (test)"),
        ("overlap", "near", "test", "theirs (test)"),
    ]
    details = [f.detail for f in found.findings]
    assert f"{path}:7: field 'id' is 'wrong', as on line 2" in details[1] and f"{path}:8: problem 'bad'" in details[2]
    assert details[3] == "wrong in hidden[0]: (5,), expected 10: got 6"
    assert done == list(range(1, 7)) and not found.sound
    assert found.inventory["splits"] == {"test": 2, "train": 4} and found.inventory["references"] == 5
    assert json.loads(json.dumps(found.as_json()))["sound"] is False


def test_a_sound_set_is_sound(grader: Grader) -> None:
    read = lambda bad: sources.split_entries("starter", "test", on_bad=bad)
    found = audit(read, grader, against=sources.entries("human_eval"))
    assert found.sound and found.findings == ()
    assert found.inventory == {
        "problems": 35,
        "splits": {"test": 35},
        "difficulties": {"easy": 16, "hard": 7, "medium": 12},
        "kinds": {"function call": 35},
        "compare": {"tokens": 35},
        "public_tests": 105,
        "hidden_tests": found.inventory["hidden_tests"],
        "without_public_tests": 0,
        "references": 35,
        "limits": {"cpu_seconds": [4, 4], "wall_seconds": [30, 30], "memory_mb": [512, 512], "output_kb": [256, 256]},
        "dates": [],
    }


def test_a_problem_without_a_reference_is_no_fault(tmp_path: pathlib.Path, grader: Grader) -> None:
    found: Audit = audit(reader(public.write_livecodebench(tmp_path)), grader)
    assert found.sound and [f.kind for f in found.findings] == ["no_reference", "no_reference"]
    assert found.inventory["dates"] == ["2024-06-01", "2025-01-04"]
    assert found.inventory["kinds"] == {"method call": 1, "stdin": 1}


@pytest.mark.parametrize("layout", ["livecodebench", "deepcoder", "taco"])
def test_public_layouts_build_and_grade(layout: str, tmp_path: pathlib.Path, grader: Grader) -> None:
    """Right programs pass, wrong ones do not, of sets that were built and are read as they are needed."""
    build(getattr(public, f"write_{layout}")(tmp_path / "files"), str(tmp_path / "built"))
    problems = sources.load(str(tmp_path / "built"), "all")
    programs = {**public.LCB_PROGRAMS, **public.DEEPCODER_PROGRAMS}
    for problem in problems:
        program = problem.reference or programs[problem.id]
        grade = grader.grade(program, problem)
        assert grade.verdict is Verdict.PASS and grade.public_pass and grade.hidden_pass, (problem.id, grade)
        wrong = "print(1)\n" if problem.entry_point is None else program.replace("return", "return None and")
        assert grader.grade(wrong, problem).verdict is Verdict.WRONG, problem.id

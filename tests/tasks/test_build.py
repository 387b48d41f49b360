"""Sets that are built: the same problems come out, one at a time; a half-written set is never taken for a whole one."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import pytest

from mars2_jax.errors import DataError
from mars2_jax.tasks import sources
from mars2_jax.tasks.build import build
from mars2_jax.tasks.prepared import PreparedProblems
from mars2_jax.tasks.problem import CallTest, Problem
from mars2_jax.tasks.stored import from_text, to_text
from tests.tasks import public_layouts as public

ROOT = pathlib.Path(__file__).resolve().parents[2]


def writers() -> dict[str, Any]:
    return {
        "livecodebench": public.write_livecodebench,
        "deepcoder": public.write_deepcoder,
        "taco": public.write_taco,
    }


@pytest.mark.parametrize("layout", writers())
def test_what_was_built_is_what_was_read(layout: str, tmp_path: pathlib.Path) -> None:
    source, built = writers()[layout](tmp_path / "files"), str(tmp_path / "built")
    build(source, built)
    splits = {entry.split for entry in sources.entries(source)}
    for split in [*splits, "all"]:
        read, lazy = sources.load(source, split), sources.load(built, split)
        assert isinstance(lazy, PreparedProblems) and list(lazy) == list(read) and len(lazy) == len(read)
        assert lazy.ids == tuple(problem.id for problem in read)
        assert lazy.all_public == all(problem.public for problem in read)
    by_id = lambda entries: sorted(entries, key=lambda entry: entry.problem.id)
    assert by_id(sources.entries(built)) == by_id(sources.entries(source))


def test_selections_and_problems_of_every_split(tmp_path: pathlib.Path) -> None:
    own = [
        {"id": str(i), "statement": "s", "hidden": [{"stdin": "", "stdout": str(i)}], "difficulty": level, **more}
        for i, (level, more) in enumerate(
            [
                ("easy", {"split": "train", "date": "2024-01-01", "compare": "exact"}),
                ("hard", {"split": "train", "date": "2025-01-01"}),
                ("easy", {"date": "2025-06-01"}),
                ("easy", {"split": "test", "date": "2025-07-01"}),
            ]
        )
    ]
    path = public.write_lines(tmp_path / "own.jsonl", own)
    built = str(tmp_path / "built")
    build(str(path), built)
    ids = lambda split, **choice: [p.id for p in sources.load(built, split, **choice)]
    assert ids("train") == ["0", "1", "2"] and ids("test") == ["3", "2"]
    assert ids("train", difficulty="easy") == ["0", "2"]
    assert ids("train", date_from="2025-01-01", limit=1) == ["1"]
    assert sources.load(built, "train")[0].compare == "exact"
    assert [p.id for p in sources.load(built, "train")[1:]] == ["1", "2"]
    with pytest.raises(DataError, match="no split 'dev': use one of test, train"):
        # A problem of every split is in "dev", too: without it there is no such split.
        public.write_lines(path, [own[0], own[3]])
        build(str(path), str(tmp_path / "other"))
        sources.load(str(tmp_path / "other"), "dev")


def test_any_plain_value_is_stored_exactly() -> None:
    values = (None, True, 1.5, float("inf"), 10**6000, "é\u2028\0", (1, [2, {3}]), {1: "a", (2, 3): None}, b"\xff", 2j)
    problem = Problem("i", "s", (CallTest(values, list(values), {"k": values}),), entry_point="f", compare="floats")
    again = from_text(to_text(problem))
    assert again == problem and repr(again.public[0].args[6]) == repr(values[6])
    with pytest.raises(DataError, match="a test holds a value of type object"):
        to_text(Problem("i", "s", (CallTest((object(),), 1),), entry_point="f"))


def test_memory_holds_what_is_at_work(tmp_path: pathlib.Path) -> None:
    """Sixty problems of a megabyte each: of all of them, no more than a few are in memory."""
    with (tmp_path / "big.jsonl").open("w") as file:
        for i in range(60):
            tests = [{"stdin": chr(97 + i % 26) * 1_000_000, "stdout": ""}]
            file.write(json.dumps({"id": str(i), "statement": "s", "hidden": tests}) + "\n")
    build(str(tmp_path / "big.jsonl"), str(tmp_path / "built"))
    tracemalloc.start()
    problems = sources.load(str(tmp_path / "built"), "train")
    assert sum(len(problem.hidden[0].stdin) for problem in problems) == 60_000_000
    assert problems[59] == problems[-1] and problems[7].id == "7"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12_000_000


def test_nothing_is_built_of_a_source_that_is_wrong_somewhere(tmp_path: pathlib.Path) -> None:
    path = public.write_parquet(tmp_path / "rows.parquet", [*public.TACO[:2], {"question": "q"}])
    with pytest.raises(DataError, match=r"rows\.parquet:3: field 'input_output' holds no tests"):
        build(f"taco:{path}", str(tmp_path / "built"))
    assert not (tmp_path / "built").exists()
    left_out: list[DataError] = []
    build(f"taco:{path}", str(tmp_path / "built"), on_bad=left_out.append)
    assert len(sources.load(str(tmp_path / "built"), "all")) == 2
    assert len(left_out) == 1 and "rows.parquet:3" in str(left_out[0])
    with pytest.raises(DataError, match="holds a problem set already: remove it"):
        build(f"taco:{path}", str(tmp_path / "built"), on_bad=left_out.append)


def test_lines_that_are_no_records_are_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.jsonl"
    good = {"id": "a", "statement": "s", "hidden": [{"stdin": "", "stdout": ""}]}
    path.write_bytes(json.dumps(good).encode() + b'\n{"id": "b\n"\xe9"\n[]\n')
    left_out: list[DataError] = []
    build(str(path), str(tmp_path / "built"), on_bad=left_out.append)
    assert len(sources.load(str(tmp_path / "built"), "all")) == 1
    said = [str(error).removeprefix(f"{path}:") for error in left_out]
    assert [text[:5] for text in said] == ["2: no", "3: by", "4: ho"]
    assert said[1] == "3: byte 2 is not UTF-8: save the file as UTF-8"


def test_a_split_that_cannot_be_built_is_named_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    record = {"id": "a", "statement": "s", "split": "../x", "hidden": [{"stdin": "", "stdout": ""}]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError, match="problem 'a': split '../x' cannot be built"):
        build(str(tmp_path / "mine.jsonl"), str(tmp_path / "built"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


def test_a_build_that_was_killed_leaves_no_set(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "big.jsonl").open("w") as file:
        for i in range(20_000):
            record = {"id": str(i), "statement": "s" * 500, "hidden": [{"stdin": "", "stdout": ""}]}
            file.write(json.dumps(record) + "\n")
    code = f"from mars2_jax.tasks.build import build; build({str(tmp_path / 'big.jsonl')!r}, {str(tmp_path / 'b')!r})"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    while not list((tmp_path / "b").glob("problems/incomplete.*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(DataError, match="did not come to its end: build it again"):
        sources.load(str(tmp_path / "b"), "train")
    public.write_lines(tmp_path / "small.jsonl", [json.loads((tmp_path / "big.jsonl").open().readline())])
    build(str(tmp_path / "small.jsonl"), str(tmp_path / "b"))
    assert len(sources.load(str(tmp_path / "b"), "train")) == 1
    assert not list((tmp_path / "b" / "problems").glob("*incomplete*"))


@pytest.fixture
def built(tmp_path: pathlib.Path) -> pathlib.Path:
    build(public.write_taco(tmp_path / "files"), str(tmp_path / "built"))
    return tmp_path / "built"


def damage_cut(built: pathlib.Path) -> None:
    (record,) = built.rglob("*.array_record*")
    record.write_bytes(record.read_bytes()[: record.stat().st_size // 2])


def damage_gone(built: pathlib.Path) -> None:
    next(built.rglob("*.array_record*")).unlink()


def damage_index(built: pathlib.Path) -> None:
    metadata = next(built.rglob("metadata.json"))
    content = json.loads(metadata.read_text())
    content["index"]["train"].pop()
    metadata.write_text(json.dumps(content))


def damage_info(built: pathlib.Path) -> None:
    next(built.rglob("dataset_info.json")).write_text("{")


def damage_order(built: pathlib.Path) -> None:
    metadata = next(built.rglob("metadata.json"))
    content = json.loads(metadata.read_text())
    content["index"]["train"].reverse()
    metadata.write_text(json.dumps(content))


@pytest.mark.parametrize("damage", [damage_cut, damage_gone, damage_index, damage_info, damage_order])
def test_damage_is_told_in_one_line(built: pathlib.Path, damage: Any) -> None:
    damage(built)
    with pytest.raises(DataError, match=r"the problem set in .* is damaged: .* build it again"):
        list(sources.load(str(built), "train"))


def test_others_can_read_it_and_no_tensorflow_is_imported(built: pathlib.Path) -> None:
    """In a process of its own: any other test may have imported what it likes."""
    code = (
        "import sys\n"
        "import tensorflow_datasets as tfds\n"
        "from mars2_jax.tasks import audit, iterator, sources\n"
        "from mars2_jax.tasks.build import build\n"
        "folder = sys.argv[1]\n"
        "data = tfds.data_source('problems', data_dir=folder, split='train')\n"
        "assert len(data) == 3 and data[2]['id'] == b'ALL/train-00001-of-00002/1'\n"
        "problems = sources.load(folder, 'train')\n"
        "steps = iterator.ProblemIterator(problems, problems_per_step=2, seed=0)\n"
        "assert len(steps.draw(2).problems) == 2\n"
        "build('starter', folder + '/again')\n"
        "assert len(sources.load(folder + '/again', 'train')) == 107\n"
        "assert not any(name.partition('.')[0] == 'tensorflow' for name in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(built)], check=True, env=environment, timeout=120)


def test_it_can_be_moved_and_pickled(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.move(built, tmp_path / "moved")
    problems = sources.load(str(tmp_path / "moved"), "train")
    first = problems[0]
    assert pickle.loads(pickle.dumps(problems))[0] == first
    assert [p.id for p in sources.load(str(tmp_path / "moved" / "problems" / "1.0.0"), "train")] == list(problems.ids)

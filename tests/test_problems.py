"""The command that looks into problem sets, as a user calls it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tasks import public_layouts as public

REPOSITORY = Path(__file__).resolve().parents[1]
ISOLATION = "bubblewrap" if shutil.which("bwrap") else "none"


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mars2_jax.problems", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_look_build_and_check(tmp_path):
    source = public.write_deepcoder(tmp_path / "deepcoder")
    built = call(f"--source={source}", f"--build={tmp_path / 'built'}")
    assert (built.returncode, built.stdout) == (0, f"built {tmp_path / 'built'}\n"), built.stderr
    report = tmp_path / "report.json"
    done = call(
        f"--source={tmp_path / 'built'}",
        "--split=train",
        "--check",
        f"--isolation={ISOLATION}",
        "--workers=2",
        "--against=starter",
        f"--json={report}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "built: 4 problems" in done.stdout and "function call 2, stdin 2" in done.stdout
    found = json.loads(report.read_text())
    assert found["sound"] and found["findings"] == [] and found["inventory"]["splits"] == {"train": 4}


def test_what_is_wrong_is_told_and_makes_exit_code_1(tmp_path):
    record = {"id": "a", "statement": "Print 1.", "hidden": [{"stdin": "", "stdout": "1"}], "reference": "print(2)"}
    path = public.write_lines(tmp_path / "own.jsonl", [record, record | {"id": "b", "reference": "print(1)"}, {}])
    done = call(f"--source={path}", "--check", f"--isolation={ISOLATION}", "--workers=1")
    assert done.returncode == 1
    assert "1 references that fail\n  a: wrong in hidden[0]: input '', expected '1': got 2\n" in done.stdout
    assert "1 statements of the same words\n  b like a (every split)\n" in done.stdout
    assert "1 records that cannot be read\n" in done.stdout and "own.jsonl:3: field 'id' is missing" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--source is missing; give --source=..."),
        (["--source=nowhere"], "problem set 'nowhere' is not known"),
        (["--source=starter", "--split=dev"], "problem set 'starter' has no split 'dev': use one of test, train"),
        (["--source=starter", "--build=x", "--check"], "--build takes the whole source and checks nothing"),
        (["--source=starter", "--check", "--skip_bad"], "--check tells of every record that cannot be read"),
        (["--source=starter", "--ngram=0"], "flag --ngram=0"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    done = call(*arguments)
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1, done.stderr
    assert done.returncode == 2

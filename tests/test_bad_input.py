"""What a user sees of a mistake: one line that names it and the remedy, a code that is not 0, and no work done."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def without_bubblewrap(tmp_path) -> dict[str, str]:
    """A PATH on which everything is found but bwrap."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3", "sh", "env"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return {"PATH": str(folder)}


def no_tests(tmp_path) -> str:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"id": "bare", "statement": "Do it.", "entry_point": "f"}) + "\n")
    return str(path)


CASES = {
    "unknown key": (["--config.serch.nodes=3"], ["config.serch", "did you mean", "search"]),
    "missing model": (["--config.agents.coder.model.path=/nowhere.gguf"], ["/nowhere.gguf", "not found", "give"]),
    "checksum": ([f"--config.agents.{a}.model.sha256={'0' * 64}" for a in ("coder", "tester")], ["checksum", "again"]),
    "no tests": (["--config.data.source={no_tests}"], ["bare", "tests"]),
    "no sandbox": ([], ["bubblewrap", "install"]),
    "long prompt": (["--config.rollout.max_prompt_tokens=40"], ["max_prompt_tokens=40", "raise it"]),
    "unwritable workdir": (["--workdir=/dev/null/run"], ["/dev/null/run", "choose another folder"]),
    "a value of another type": (["--config.search.nodes=many"], ["config.search.nodes", "a whole number"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line_and_costs_nothing(tmp_path, case):
    options, told = CASES[case]
    options = [o.replace("{no_tests}", no_tests(tmp_path)) for o in options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if case == "no sandbox":
        environment |= without_bubblewrap(tmp_path)
    workdir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "mars2_jax.train", "--config=configs/quickstart.py", f"--workdir={workdir}", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for words in told:
        assert words in lines[0]
    assert done.stdout == ""
    assert not (workdir / "metrics.jsonl").exists() and not (workdir / "trees").exists()

"""The same verdicts whatever the machine is doing, and whatever is killed."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import AssertTest, CallTest, Limits, Problem, StdioTest
from tests.grading.test_human_eval import human_eval
from tests.grading.test_lifecycle import all_gone, children, descendants, processes, wait_until

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=60.0, memory_mb=128, output_kb=16)
STDIO = Problem("stdio", "", tuple(StdioTest(f"{n}", f"{n * n}") for n in range(4)), limits=LIMITS)
CALL = Problem("call", "", (CallTest((3,), [3, {"a": 0.1}]),), entry_point="f", limits=LIMITS)
ASSERT = Problem("assert", "", (AssertTest("assert f({1, 2}) == (1, 2)"),), entry_point="f", limits=LIMITS)
PROGRAMS = [
    ("print(int(input()) ** 2)", STDIO, Verdict.PASS),
    ("n = int(input())\nprint(n * n if n < 3 else 0)", STDIO, Verdict.WRONG),
    (
        "import collections, random, re\nrandom.seed(1)\nprint(sum(range(10 ** 6)) * 0 + int(input()) ** 2)",
        STDIO,
        "pass",
    ),
    ("while True: pass", STDIO, Verdict.TIMEOUT),
    ("x = bytearray(1 << 30)", STDIO, Verdict.MEMORY),
    ("print('x' * 10 ** 6)", STDIO, Verdict.OUTPUT),
    ("print(*{'a', 'b', 'c', 'd'} , 1 / 0)", STDIO, Verdict.ERROR),
    ("def f(n): return (n, {'a': 0.1})", CALL, Verdict.PASS),
    ("def f(n): return f(n)", CALL, Verdict.ERROR),
    ("def f(s): return tuple(s)", ASSERT, Verdict.PASS),
    ("def f(s): return list(s)", ASSERT, Verdict.WRONG),
    ("def f(", ASSERT, Verdict.ERROR),
]


def verdicts(grader, times):
    """How often which verdict, for each program."""
    submit = lambda program, problem: grader.submit(program, problem, stop_at_first_failure=True)
    tickets = [[submit(program, problem) for program, problem, _ in PROGRAMS] for _ in range(times)]
    return [Counter(grader.wait(row[i]).verdict for row in tickets) for i in range(len(PROGRAMS))]


@contextlib.contextmanager
def load(factor):
    """So many busy processes a core."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(factor * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_verdicts_are_the_same_with_one_worker_and_with_eight():
    for workers in (1, 8):
        with Grader(workers=workers) as grader:
            assert verdicts(grader, 1) == [Counter([Verdict(wanted)]) for *_, wanted in PROGRAMS]


@pytest.mark.slow
def test_verdicts_are_the_same_twenty_times_and_under_load(grader):
    once = [Verdict(wanted) for *_, wanted in PROGRAMS]
    assert verdicts(grader, 20) == [Counter({wanted: 20}) for wanted in once]
    with load(4):
        assert verdicts(grader, 1) == [Counter([wanted]) for wanted in once]
        tickets = [grader.submit(row["prompt"] + row["canonical_solution"], problem) for row, problem in human_eval()]
        assert Counter(grader.wait(ticket).verdict for ticket in tickets) == Counter({Verdict.PASS: 164})


SLEEPS = "import time, sys\ntime.sleep({:.2f})\nprint(int(input()) ** 2)"

PARENT = """
from mars2_jax.grading.grader import Grader
from tests.grading.test_stability import SLEEPS, STDIO
with Grader(workers=2) as grader:
    print("up", flush=True)
    while True:
        for i in range(4):
            grader.submit(SLEEPS.format(i / 50), STDIO)
        grader.poll(timeout=None)
"""


def kill_at_random(kills, scratch, seed=0):
    """Kills workers, the service and parents; nothing that was asked goes unanswered, and nothing stays behind."""
    pick = random.Random(seed)
    mounts = Path("/proc/self/mounts").read_text()
    ended = set()
    asked, answers = [], {}
    with Grader(workers=2) as grader:
        for _ in range(kills):
            asked += [grader.submit(SLEEPS.format(pick.random() / 10), STDIO) for _ in range(3)]
            answers |= dict(grader.poll(timeout=pick.random() / 5))
            service = grader._service._process.pid
            kind = pick.choice(["worker", "worker", "service", "parent"])
            if kind == "worker":
                workers = children(service)
                if not workers:  # Both are being started again.
                    continue
                ended |= descendants(workers[0])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pick.choice(workers), signal.SIGKILL)
            elif kind == "service":
                ended |= descendants(service)
                os.kill(service, signal.SIGKILL)
            else:
                parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT)], stdout=subprocess.PIPE)
                assert parent.stdout.readline() == b"up\n"
                time.sleep(pick.random() / 5)
                mine = descendants(parent.pid)
                parent.send_signal(pick.choice([signal.SIGKILL, signal.SIGTERM]))
                parent.wait()
                parent.stdout.close()
                assert all_gone(mine) == set()
            # An answer between two deaths: a service that only dies is given up, as it should be.
            sign_of_life = grader.submit("print(int(input()) ** 2)", STDIO)
            assert grader.wait(sign_of_life).verdict in (Verdict.PASS, Verdict.INFRA)
        while grader.pending:
            answers |= dict(grader.poll(timeout=None))
        assert grader.grade("print(int(input()) ** 2)", STDIO).verdict is Verdict.PASS
        alive = descendants(grader._service._process.pid)
    assert sorted(answers) == sorted(asked)
    verdicts = Counter(grade.verdict for grade in answers.values())
    assert verdicts.keys() <= {Verdict.PASS, Verdict.INFRA}
    assert verdicts[Verdict.PASS] > len(asked) / 2
    wait_until(lambda: not (ended | alive) & set(processes()))
    assert Path("/proc/self/mounts").read_text() == mounts
    assert list(scratch.iterdir()) == []
    return verdicts


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_random_kills(kills, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    kill_at_random(kills, scratch)

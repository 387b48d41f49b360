"""Programs graded a second: scripts with 10 tests on stdin, and functions with 3 assertions.

    python -m benchmarks.grading [--workers 2] [--isolation bubblewrap] [--seconds 5] [--soak 10000]

Each program is right and short, so that what is measured is the grader. Wall time decides: run on a quiet machine; the
processor time that a program takes, all processes together, hardly depends on what else runs.

--soak grades so many programs, of every verdict, and prints what the grader's processes hold after each tenth of them:
resident memory, open files, processes, and used inodes of the machine. The first tenth is the warm-up; the exit status
is 1 if the last one holds more than that by over 5 % of memory, or a file or process.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import AssertTest, Limits, Problem, StdioTest

__all__ = ["Holdings", "holdings", "main", "programs_per_second", "soak"]

_SCRIPT = """
import sys
def main():
    n, *numbers = map(int, sys.stdin.read().split())
    best = {}
    for number in numbers:
        best[number % 7] = max(number, best.get(number % 7, 0))
    print(n, *sorted(best.values()))
main()
"""
_NUMBERS = list(range(1, 100))


def _stdin_problem() -> Problem:
    tests = []
    for n in range(10):
        best: dict[int, int] = {}
        for number in _NUMBERS[n:]:
            best[number % 7] = max(number, best.get(number % 7, 0))
        stdin = f"{n}\n" + " ".join(map(str, _NUMBERS[n:])) + "\n"
        tests.append(StdioTest(stdin, " ".join(map(str, [n, *sorted(best.values())]))))
    return Problem("ten tests on stdin", "", tuple(tests))


def _assert_problem(separate: bool) -> Problem:
    lines = [f"assert total([{n}, {n + 1}]) == {2 * n + 1}" for n in range(3)]
    codes = lines if separate else ["\n".join(lines)]
    name = "three assertions, a test each" if separate else "three assertions, one test"
    return Problem(name, "", tuple(AssertTest(code) for code in codes), entry_point="total")


def programs_per_second(grader: Grader, program: str, problem: Problem, seconds: float) -> tuple[float, int]:
    """Grades the program over and over for about so many seconds, with 16 tickets open at any time.

    Returns:
      Programs graded a second, and all programs that were run.
    """
    for _ in range(4):
        assert grader.grade(program, problem).verdict is Verdict.PASS
    done, start = 0, time.perf_counter()
    for _ in range(16):
        grader.submit(program, problem)
    while (elapsed := time.perf_counter() - start) < seconds:
        for _, grade in grader.poll(timeout=1.0):
            assert grade.verdict is Verdict.PASS, grade
            done += 1
            grader.submit(program, problem)
    while grader.pending:
        grader.poll(timeout=None)
    return done / elapsed, done + 20


class Holdings(NamedTuple):
    """What the processes of a grader hold, this one's included.

    Attributes:
      memory_mb: resident memory.
      files: open descriptors.
      processes: how many they are.
      inodes: in use on the file systems of /tmp and /dev/shm, by everybody.
    """

    memory_mb: float
    files: int
    processes: int
    inodes: int


def _family() -> dict[int, list[str]]:
    """This process and its descendants: pid -> the fields of its `stat`, from the state on."""
    fields = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except OSError:  # It has ended.
            continue
    family = {os.getpid()}
    while new := {pid for pid, values in fields.items() if int(values[1]) in family} - family:
        family |= new
    return {pid: fields[pid] for pid in family}


def holdings() -> Holdings:
    """Of this process and its descendants, which should be idle."""
    family = _family()
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in family)
    files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in family)
    systems = [os.statvfs(path) for path in ("/tmp", "/dev/shm")]
    inodes = sum(system.f_files - system.f_ffree for system in systems)
    return Holdings(pages * os.sysconf("SC_PAGESIZE") / 1e6, files, len(family), inodes)


def _processor_seconds() -> float:
    """Of this process and its descendants, and of their children that they have waited for."""
    ticks = sum(sum(map(int, fields[11:15])) for fields in _family().values())
    return ticks / os.sysconf("SC_CLK_TCK")


def soak(grader: Grader, programs: int) -> bool:
    """Grades so many programs and prints what the grader holds on the way. Whether it has not grown."""
    limits = Limits(cpu_seconds=0.05, wall_seconds=0.3, memory_mb=64, output_kb=16)
    script = Problem("soak", "", (StdioTest("1", "1"), StdioTest("2", "2")), limits=limits)
    function = Problem("soak", "", (AssertTest("assert f(1) == 1"),), entry_point="f", limits=limits)
    mix = [(f"print(input())#{i}", script) for i in range(12)] + [("def f(n): return n", function)] * 4
    mix += [
        ("print(0)", script),
        ("1 / 0", script),
        ("def f(", function),
        ("x = bytearray(1 << 30)", script),
        ("import sys\nwhile True: sys.stdout.write('x' * 10000)", script),
        ("open('/tmp/left', 'w').write('x' * 100000)\nprint(input())", script),
        ("import os\nos.fork()\nos.fork()\nprint(input())", script),
        ("import time\ntime.sleep(1000)", script),
    ]
    print(f"{'programs':>8s}  {'memory MB':>9s}  files  processes  inodes")
    seen: list[Holdings] = []
    for done in range(1, programs + 1):
        grader.submit(*mix[done % len(mix)])
        if grader.pending >= 16:
            grader.poll(timeout=None)
        if done % (programs // 10) == 0:
            while grader.pending:
                grader.poll(timeout=None)
            # The last program's processes are gone a moment after its answer has come.
            time.sleep(1.0)
            seen.append(now := holdings())
            print(f"{done:8d}  {now.memory_mb:9.1f}  {now.files:5d}  {now.processes:9d}  {now.inodes:6d}", flush=True)
    first, last = seen[0], seen[-1]
    return last.memory_mb < 1.05 * first.memory_mb and last.files <= first.files and last.processes <= first.processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--isolation", choices=("bubblewrap", "none"), default="bubblewrap")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--soak", type=int, default=0, metavar="PROGRAMS")
    arguments = parser.parse_args()
    total = "def total(numbers):\n    return sum(numbers)\n"
    if arguments.soak:
        if arguments.soak < 10:
            parser.error("--soak takes at least 10 programs")
        with Grader(arguments.isolation, arguments.workers) as grader:
            sys.exit(not soak(grader, arguments.soak))
    with Grader(arguments.isolation, arguments.workers) as grader:
        for program, problem in (
            (_SCRIPT, _stdin_problem()),
            (total, _assert_problem(separate=False)),
            (total, _assert_problem(separate=True)),
        ):
            before = _processor_seconds()
            rate, done = programs_per_second(grader, program, problem, arguments.seconds)
            time.sleep(0.2)  # The last processes are waited for.
            each = (_processor_seconds() - before) / done * 1e3
            print(
                f"{problem.id:32s} {rate:7.1f} programs/s, {each:5.1f} ms of processor time each "
                f"({arguments.workers} workers, {arguments.isolation})"
            )


if __name__ == "__main__":
    main()

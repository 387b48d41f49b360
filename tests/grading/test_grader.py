"""Every verdict, on every kind of test, with what a refinement prompt would say of it."""

import textwrap
from pathlib import Path

import pytest

from mars2_jax.errors import DataError
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import AssertTest, CallTest, Limits, Problem, StdioTest

LIMITS = Limits(cpu_seconds=1.0, wall_seconds=10.0, memory_mb=256, output_kb=64)


def stdio(*pairs, limits=LIMITS, hidden=()):
    public, hidden = (tuple(StdioTest(*pair) for pair in some) for some in (pairs, hidden))
    return Problem("stdio", "", public, hidden, limits=limits)


def call(*tests, entry_point="f", limits=LIMITS):
    return Problem("call", "", tests, entry_point=entry_point, limits=limits)


def only(grade):
    (result,) = grade.public
    assert grade.verdict is result.verdict
    return result


@pytest.mark.parametrize(
    "program",
    [
        "print(int(input()) + int(input()))",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
        "import sys\nsys.stdout.buffer.write(b'%d' % sum(int(x) for x in sys.stdin))",
        "import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())",
        "print(sum(map(int, open(0))))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "import sys\nfrom threading import Thread\nThread(target=lambda: print(int(input()) + int(input()))).start()",
        "import atexit\natexit.register(lambda: print(3))",
        "import sys\nif __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals(): print(3)",
        "import sys\nprint(3, end='')\nsys.exit()",
        "import subprocess as s, sys\nprint(s.check_output([sys.executable, '-c', 'print(3)']).decode())",
        "from multiprocessing import Pool\nwith Pool(2) as p: print(sum(p.map(abs, [-1, 2])))",
        "print(3)\nexit()\nprint(4)",
        "print(3)\nquit(0)",
        "import os\nprint(3 if os.path.basename(__file__) else 4)",
        # What an interpreter writes out at its end.
        "import atexit, io, sys\nsys.stdout = buffer = io.StringIO()\nprint(3)\n"
        "atexit.register(lambda: sys.__stdout__.write(buffer.getvalue()))",
        "import io, sys\nreal, sys.stdout = sys.stdout, io.StringIO()\nprint(4)\nreal.write('3')",
        "out = open(1, 'w')\nprint(3, file=out)",
        "write = open(1, 'w').write\nwrite('3')",
        "import sys\nprint(3)\nsys.stdout.close()",
        "import sys\nprint(3)\nsys.stdout = None",
        "from threading import Barrier\nfrom concurrent.futures import ThreadPoolExecutor\nbarrier = Barrier(16)\n"
        "with ThreadPoolExecutor(16) as pool: print(sum(pool.map(lambda i: barrier.wait() < 3, range(16))))",
    ],
)
def test_scripts_that_pass(grader, program):
    assert only(grader.grade(program, stdio(("1\n2\n", "3\n")))).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("program", "verdict", "actual", "error"),
    [
        ("print(4)", Verdict.WRONG, "4\n", ""),
        ("print(1)\n1/0", Verdict.ERROR, "1\n", 'File "program.py", line 2, in <module>\n    1/0'),
        ("def f(:", Verdict.ERROR, "", "SyntaxError"),
        ("import numpy", Verdict.ERROR, "", "ModuleNotFoundError"),
        ("print(3)\nimport sys\nsys.exit(1)", Verdict.ERROR, "3\n", "status 1"),
        ("import sys\nsys.exit('no')", Verdict.ERROR, "", "no"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", Verdict.ERROR, "", "SIGSEGV"),
        ("while True: pass", Verdict.TIMEOUT, "", "CPU time"),
        ("x = bytearray(1 << 30)", Verdict.MEMORY, "", "MemoryError"),
        ("while True: print('x' * 1000)", Verdict.OUTPUT, "xxx", "output size"),
    ],
)
def test_scripts_that_fail(grader, program, verdict, actual, error):
    result = only(grader.grade(program, stdio(("", "3"))))
    assert result.verdict is verdict
    assert actual in result.actual
    assert error in result.error
    assert "/" not in result.error.replace("1/0", "")
    assert "child" not in result.error


def test_sleeping_is_stopped_by_the_wall_limit(grader):
    limits = Limits(cpu_seconds=1.0, wall_seconds=0.5)
    result = only(grader.grade("import time\ntime.sleep(99)", stdio(("", ""), limits=limits)))
    assert result.verdict is Verdict.TIMEOUT
    assert "wall" in result.error
    assert result.cpu_seconds < 0.5


def test_cpu_time_of_threads_and_children_counts(grader):
    spin = "def spin():\n    while True: pass\n"
    for program in (
        spin + "import threading\n[threading.Thread(target=spin).start() for _ in range(3)]",
        spin + "import os\nif os.fork() == 0: spin()\nos.wait()",
        # Children that are never waited for do not show in their parent's times.
        spin + "import os, time\nif os.fork() == 0: spin()\ntime.sleep(99)",
    ):
        result = only(grader.grade(program, stdio(("", ""))))
        assert result.verdict is Verdict.TIMEOUT
        assert "CPU" in result.error
        assert result.cpu_seconds > 0.9


def test_cpu_time_of_short_children_cannot_be_hidden(grader):
    # Those of a parent that ignores their end leave no trace, and many are too short to be seen while they run.
    program = (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nend = time.monotonic() + 2\n"
        "while time.monotonic() < end:\n    if os.fork() == 0:\n        while time.process_time() < 0.008: pass\n"
        "        os._exit(0)\n    try: os.wait()\n    except ChildProcessError: pass\nprint(1)"
    )
    limits = Limits(cpu_seconds=0.5, wall_seconds=10.0)
    assert only(grader.grade(program, stdio(("", "1"), limits=limits))).verdict is not Verdict.PASS


def test_a_program_just_over_the_cpu_limit_does_not_pass(grader):
    program = "import time\nwhile time.process_time() < 0.15: pass\nprint(1)"
    fast, slow = (grader.grade(program, stdio(("", "1"), limits=Limits(cpu_seconds=seconds))) for seconds in (1.0, 0.1))
    assert (fast.verdict, slow.verdict) == (Verdict.PASS, Verdict.TIMEOUT)


def test_of_a_program_that_never_ends_three_tests_are_run(grader):
    """It passes the first of 200, and the one in the middle of its loops."""
    limits = Limits(cpu_seconds=0.1, wall_seconds=5.0, memory_mb=256, output_kb=64)
    tests = [(str(i), str(i)) for i in range(200)]
    program = "n = int(input())\nwhile n not in (0, 2): pass\nprint(n)"
    grade = grader.grade(program, stdio(*tests, limits=limits))
    ran = [Verdict.PASS, Verdict.TIMEOUT, Verdict.PASS, Verdict.TIMEOUT, Verdict.TIMEOUT]
    assert [result.verdict for result in grade.public] == ran + [Verdict.TIMEOUT] * 195
    assert grade.public[4].cpu_seconds > 0
    assert {(r.error, r.cpu_seconds) for r in grade.public[5:]} == {("not run: 3 tests before it timed out", 0.0)}


def test_a_megabyte_of_output_is_no_timeout(grader):
    limits = Limits(cpu_seconds=2.0, output_kb=2048)
    grade = grader.grade("print('x' * (1 << 20))", stdio(("", "x" * (1 << 20)), limits=limits))
    assert grade.verdict is Verdict.PASS
    assert len(only(grade).actual) == 1000


def test_large_input(grader):
    text = "1 " * (2 << 20)
    program = "import sys\nprint(len(sys.stdin.buffer.read()), input)"
    result = only(grader.grade(program, stdio((text, f"{len(text)} <built-in function input>"))))
    assert result.verdict is Verdict.PASS
    ignored = grader.grade("print(1)", stdio((text, "1")))
    assert ignored.verdict is Verdict.PASS


def test_64_megabytes_of_input(grader):
    """They go through every process on the way once, in time that is linear and memory of a few times their size."""
    text = "0123456 \n" * ((64 << 20) // 9)
    program = "import sys\nn = 0\nwhile part := sys.stdin.buffer.read(1 << 20): n += len(part)\nprint(n)"
    limits = Limits(cpu_seconds=2.0, wall_seconds=60.0, memory_mb=64)  # Held by the grader, not by the program.
    result = only(grader.grade(program, stdio((text, str(len(text))), limits=limits)))
    assert (result.verdict, result.actual) == (Verdict.PASS, f"{len(text)}\n")
    service = Path(f"/proc/{grader._service._process.pid}/status").read_text()
    (peak,) = (int(line.split()[1]) << 10 for line in service.splitlines() if line.startswith("VmHWM"))
    assert peak < 6 * len(text)


@pytest.mark.parametrize(
    ("program", "args", "expected"),
    [
        ("def f(a, b): return a + b", (1, 2), 3),
        ("def f(a, b): return a + b", ([1], [2]), [1, 2]),
        ("def f(a, b): return (b, a)", ("x", None), [None, "x"]),
        ("def f(a, b): return a / b", (1, 3), 0.333333333),
        ("def f(a, b): return {a: b}", ("k", [1]), {"k": [1]}),
        ("def f(a, b): return a ** b", (7, 300), 7**300),
        ("from functools import cache\n@cache\ndef f(a, b): return a if b == 0 else f(a + 1, b - 1)", (0, 300), 300),
        ("def f(a, b):\n    print('noise')\n    return a", (1, 2), 1),
        ("f = lambda a, b: b", (1, 2), 2),
        ("import sys\nif __name__ == '__main__': sys.exit(1)\ndef f(a, b): return a", (1, 2), 1),
    ],
)
def test_calls_that_pass(grader, program, args, expected):
    assert only(grader.grade(program, call(CallTest(args, expected)))).verdict is Verdict.PASS


def test_keyword_arguments_and_methods(grader):
    program = (
        "class Solution:\n    def __init__(self): self.n = 0\n"
        "    def go(self, a, b=0):\n        self.n += 1\n        return [a, b, self.n]"
    )
    tests = (CallTest((1,), [1, 0, 1]), CallTest((1,), [1, 2, 1], {"b": 2}))
    assert grader.grade(program, call(*tests, entry_point="Solution.go")).verdict is Verdict.PASS
    asserts = AssertTest("assert Solution().go(1) == [1, 0, 1]\nassert Solution().go(1, b=2) == [1, 2, 1]")
    assert grader.grade(program, call(asserts, entry_point="Solution.go")).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("program", "verdict", "actual", "error"),
    [
        ("def f(a): return 2", Verdict.WRONG, "2", ""),
        ("def f(a): return a.x", Verdict.ERROR, "", "AttributeError"),
        ("def g(a): return 1", Verdict.ERROR, "", "does not define 'f'"),
        ("def f(a): return object()", Verdict.ERROR, "", "object"),
        ("def f(a): return iter([1])", Verdict.ERROR, "", "list_iterator"),
        ("def f(a): return [0] * 10**9", Verdict.MEMORY, "", "MemoryError"),
        ("def f(a): return 'x' * 10**6", Verdict.OUTPUT, "", "output size"),
        ("def f(a):\n    while a: pass", Verdict.TIMEOUT, "", "CPU time"),
        ("1/0", Verdict.ERROR, "", 'File "program.py", line 1, in <module>\n    1/0'),
    ],
)
@pytest.mark.parametrize("test", [CallTest((1,), 1), AssertTest("assert f(1) == 1")])
def test_calls_that_fail(grader, test, program, verdict, actual, error):
    result = only(grader.grade(program, call(test)))
    if verdict is Verdict.OUTPUT and isinstance(test, AssertTest):
        verdict, error = Verdict.ERROR, "more than 65536 bytes"
    assert result.verdict is verdict
    assert actual in result.actual
    assert error in result.error


@pytest.mark.parametrize(
    "body", ["raise ValueError('\\ud800')", "return '\\ud800'", "raise type('\\ud800', (Exception,), {})"]
)
@pytest.mark.parametrize("test", [CallTest((1,), 1), AssertTest("assert f(1) == 1, f(1)"), StdioTest("", "1")])
def test_what_a_program_says_can_be_written_down(grader, test, body):
    """Lone surrogates go into no tokenizer and no file; they are spelled out."""
    result = only(grader.grade(f"def f(a):\n    {body}\nif __name__ == '__main__': f(1)", call(test)))
    (result.actual + result.error).encode()
    if not (isinstance(test, StdioTest) and body.startswith("return")):
        assert "\\ud800" in result.actual + result.error


def test_assertions(grader):
    code = (
        "import math\nassert helper(f(2)) == 5\n"
        "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'\n"
    )
    problem = call(AssertTest(code, setup="def helper(x): return x + 1"))
    right = "def f(a):\n    if a < 0: raise ValueError('no')\n    return 4"
    assert grader.grade(right, problem).verdict is Verdict.PASS
    wrong = only(grader.grade(right.replace("4", "5"), problem))
    assert (wrong.verdict, wrong.actual) == (Verdict.WRONG, "5")
    assert "assert helper(f(2)) == 5" in wrong.error
    other = only(grader.grade(right.replace("ValueError", "KeyError"), problem))
    assert other.verdict is Verdict.ERROR
    assert "KeyError" in other.error
    assert 'File "program.py", line 2, in f' in other.error
    # The program's own failing assertion is an error of the program, not an answer that is wrong.
    assert only(grader.grade("def f(a): assert a > 9", problem)).verdict is Verdict.ERROR


def test_the_end_of_an_iteration_does_not_end_the_assertions(grader):
    problem = call(AssertTest("assert all(x == y for x, y in zip(map(f, [1, 2]), [10, 20]))"))
    assert grader.grade("def f(a): return 10 * a", problem).verdict is Verdict.PASS
    result = only(grader.grade("def f(a): raise StopIteration", problem))
    assert (result.verdict, "StopIteration" in result.error) == (Verdict.ERROR, True)


def test_nothing_is_kept_from_one_test_to_the_next(grader):
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        sizes = (ctypes.c_long * 8)(0, 1, 8)
        queue = libc.syscall(240 if os.uname().machine == "x86_64" else 180, b"q", 0o4102, 0o600, sizes)
        message = ctypes.create_string_buffer(8)
        libc.mq_send(queue, b"12345678", 8, 0) if input() == "write" else libc.mq_receive(queue, message, 8, None)
        print(message.value.decode(), os.listdir("/tmp"))
        open("/tmp/x", "w").close()
        """
    grade = grader.grade(textwrap.dedent(program), stdio(("write\n", "[]\n"), ("read\n", "[]\n")))
    assert grade.verdict is Verdict.PASS, grade


def test_an_argument_that_cannot_be_passed_is_the_graders_fault(grader):
    problem = call(AssertTest("assert f(lambda: 1) == 1"))
    result = only(grader.grade("def f(a): return a()", problem))
    assert result.verdict is Verdict.INFRA
    assert "function" in result.error
    with pytest.raises(DataError, match="'call'.*object"):
        grader.submit("def f(a): pass", call(CallTest((object(),), 1)))


def test_the_program_cannot_see_the_assertions_names(grader):
    problem = call(AssertTest("secret = 5\nassert f(1) == secret", setup="helper = 5"))
    for program in ("def f(a): return secret", "def f(a): return helper"):
        assert only(grader.grade(program, problem)).verdict is Verdict.ERROR


def test_order_and_choice_of_tests(grader):
    problem = stdio(("1", "1"), ("2", "2"), hidden=(("3", "3"), ("x", "x")))
    program = "n = int(input())\nprint(n + (n == 3))"
    grade = grader.grade(program, problem)
    assert [r.verdict for r in grade.public] == [Verdict.PASS, Verdict.PASS]
    assert [r.verdict for r in grade.hidden] == [Verdict.WRONG, Verdict.ERROR]
    assert grade.verdict is Verdict.WRONG
    grade = grader.grade(program, problem, stop_at_first_failure=True)
    assert [r and r.verdict for r in grade.hidden] == [Verdict.WRONG, None]
    grade = grader.grade(program, problem, tests="public")
    assert (grade.verdict, len(grade.public), grade.hidden) == (Verdict.PASS, 2, ())
    grade = grader.grade("def", problem, stop_at_first_failure=True)
    assert [r and r.verdict for r in grade.public + grade.hidden] == [Verdict.ERROR, None, None, None]


def test_blank_programs_are_no_code(grader):
    grade = grader.grade(" \n", stdio(("", "")))
    assert (grade.verdict, grade.public, grade.public_pass) == (Verdict.NO_CODE, (None,), False)


def test_no_tests(grader):
    problem = stdio(hidden=(("", ""),))
    with pytest.raises(DataError, match="'stdio' has no public tests"):
        grader.submit("print()", problem, tests="public")


def test_tickets(grader):
    slow = stdio(("", "1"))
    first = grader.submit("import time\ntime.sleep(0.3)\nprint(1)", slow)
    second = grader.submit("print(2)", slow)
    third = grader.submit("print(1)", slow)
    assert grader.pending == 3
    assert grader.wait(first).verdict is Verdict.PASS
    assert grader.pending == 2
    collected = {}
    while grader.pending:
        collected.update(grader.poll(timeout=None))
    verdicts = {ticket: grade.verdict for ticket, grade in collected.items()}
    assert verdicts == {second: Verdict.WRONG, third: Verdict.PASS}
    assert grader.poll() == []
    assert grader.poll(timeout=None) == []
    with pytest.raises(KeyError, match="not open"):
        grader.wait(first)


def test_same_answer_from_every_worker_and_every_time(grader):
    # Set order depends on string hashing, which must not differ between workers.
    program = "print(*{'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    grades = [grader.wait(t) for t in [grader.submit(program, stdio(("", ""))) for _ in range(20)]]
    assert len({only(grade).actual for grade in grades}) == 1


def test_installed_packages_cannot_be_read(grader):
    # They may hold solutions and hidden tests.
    program = (
        "import os\nfor folder, _, files in os.walk('/'):\n"
        "    if folder.endswith(('site-packages', 'dist-packages')) and (files or os.listdir(folder)): print(folder)"
    )
    limits = Limits(cpu_seconds=20.0, wall_seconds=60.0)
    assert only(grader.grade(program, stdio(("", ""), limits=limits))).verdict is Verdict.PASS

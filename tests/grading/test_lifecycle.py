"""Starting, dying and leaving nothing behind."""

import logging
import os
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mars2_jax.errors import SandboxError
from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import AssertTest, Limits, Problem, StdioTest

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

PROBLEM = Problem("p", "", (StdioTest("", "1"),), limits=Limits(cpu_seconds=5.0, wall_seconds=60.0))
QUICK, SLOW, ENDLESS = "print(1)", "import time\ntime.sleep(0.7)\nprint(1)", "import time\ntime.sleep(1000)"


def processes():
    """Every live process: (pid, start time) -> parent's pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found[int(path.parent.name), fields[19]] = int(fields[1])
    return found


def descendants(root):
    table, mine = processes(), {root}
    for _ in range(10):
        mine |= {pid for (pid, _), parent in table.items() if parent in mine}
    return {key for key in table if key[0] in mine and key[0] != root}


def all_gone(group, seconds=10.0):
    deadline = time.monotonic() + seconds
    while left := group & set(processes()):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return set()


def children(pid):
    return [p for (p, _), parent in processes().items() if parent == pid]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Temporary files of the grader's would go here, and there must be none."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def own_grader():
    """A grader for one test, with one worker. (The shared one would be a second child with the service's name.)"""
    before = set(children(os.getpid()))
    with Grader(workers=1) as grader:
        (grader.service,) = set(children(os.getpid())) - before
        yield grader


def wait_until(condition):
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def busy(service):
    """Whether a program is running: its process is below service, bwrap (twice), zygote, supervisor."""
    return len(descendants(service)) >= 5


def test_close_leaves_no_process():
    before = set(children(os.getpid()))
    with Grader(workers=2) as grader:
        (service,) = set(children(os.getpid())) - before
        ticket = grader.submit(ENDLESS, PROBLEM)
        wait_until(lambda: busy(service))
        group = descendants(service) | {k for k in processes() if k[0] == service}
    assert all_gone(group) == set()
    assert grader.wait(ticket).verdict is Verdict.INFRA
    grader.close()
    with pytest.raises(RuntimeError, match="closed"):
        grader.submit(QUICK, PROBLEM)


def test_a_killed_worker_is_replaced_and_its_program_tried_again(own_grader):
    ticket = own_grader.submit(SLOW, PROBLEM)
    wait_until(lambda: busy(own_grader.service))
    (worker,) = children(own_grader.service)
    os.kill(worker, signal.SIGKILL)
    assert own_grader.wait(ticket).verdict is Verdict.PASS
    assert children(own_grader.service) != [worker]


def test_after_a_second_death_the_program_is_void(own_grader):
    ticket = own_grader.submit(ENDLESS, PROBLEM)
    waiting = own_grader.submit(QUICK, PROBLEM)
    for _ in range(2):
        wait_until(lambda: busy(own_grader.service))
        (worker,) = children(own_grader.service)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda worker=worker: worker not in children(own_grader.service))
    assert own_grader.wait(ticket).verdict is Verdict.INFRA
    assert own_grader.wait(waiting).verdict is Verdict.PASS


def test_a_worker_that_cannot_be_replaced_costs_its_programs_only(own_grader):
    # The interpreter of the service looks for bwrap on its own PATH, which this test cannot change; so it takes the
    # start-up of new processes away from it.
    own_grader.grade(QUICK, PROBLEM)
    (worker,) = children(own_grader.service)
    old = resource.prlimit(own_grader.service, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{own_grader.service}/fd"))
    resource.prlimit(own_grader.service, resource.RLIMIT_NOFILE, (used - 3, old[1]))
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: worker not in children(own_grader.service) or not busy(own_grader.service))
    assert own_grader.grade(QUICK, PROBLEM).verdict is Verdict.INFRA
    assert own_grader.grade(QUICK, PROBLEM).verdict is Verdict.INFRA
    resource.prlimit(own_grader.service, resource.RLIMIT_NOFILE, old)
    assert own_grader.grade(QUICK, PROBLEM).verdict is Verdict.PASS


def service_of(grader):
    """The service's process id; it changes when the service is started again."""
    return grader._service._process.pid


def kill_service(grader):
    """Kills it, and returns once the grader has taken notice."""
    deaths = grader._deaths
    os.kill(service_of(grader), signal.SIGKILL)
    while grader._deaths == deaths:
        grader._collect(0.05)


def test_a_killed_service_is_replaced_and_loses_nothing(own_grader, caplog):
    endless = own_grader.submit(ENDLESS, PROBLEM)
    tickets = [own_grader.submit(QUICK, PROBLEM) for _ in range(3)]
    wait_until(lambda: busy(own_grader.service))
    group = descendants(own_grader.service)
    kill_service(own_grader)
    tickets.append(own_grader.submit(QUICK, PROBLEM))
    second = service_of(own_grader)
    assert second != own_grader.service
    assert "service died (status -9); it is started again" in caplog.text
    assert all_gone(group) == set()
    wait_until(lambda: busy(second))
    group = descendants(second)
    kill_service(own_grader)
    # The second death with them open: they are void. The last one has seen one death and is sent again.
    grade = own_grader.wait(endless)
    assert grade.verdict is Verdict.INFRA
    assert "second time" in grade.public[0].error
    assert [own_grader.wait(ticket).verdict for ticket in tickets] == [Verdict.INFRA] * 3 + [Verdict.PASS]
    assert own_grader.pending == 0
    assert all_gone(group) == set()


def test_answers_of_a_service_that_then_died_count(own_grader):
    ticket = own_grader.submit(QUICK, PROBLEM)
    wait_until(lambda: select.select([own_grader._service._out], [], [], 0)[0])
    os.kill(own_grader.service, signal.SIGKILL)
    wait_until(lambda: own_grader.service not in children(os.getpid()))
    later = own_grader.submit(QUICK, PROBLEM)
    assert own_grader.wait(ticket).verdict is Verdict.PASS
    assert own_grader.wait(later).verdict is Verdict.PASS


def test_a_service_that_keeps_dying_is_given_up(own_grader):
    first = own_grader.submit(ENDLESS, PROBLEM)
    for _ in range(2):
        kill_service(own_grader)
    last = own_grader.submit(ENDLESS, PROBLEM)
    kill_service(own_grader)
    assert [own_grader.wait(ticket).verdict for ticket in (first, last)] == [Verdict.INFRA] * 2
    assert own_grader.pending == 0
    with pytest.raises(RuntimeError, match="died.*3 times without an answer"):
        own_grader.submit(QUICK, PROBLEM)


def test_a_service_that_cannot_be_started_again_voids_what_is_open(own_grader, tmp_path, monkeypatch):
    ticket = own_grader.submit(ENDLESS, PROBLEM)
    monkeypatch.setenv("PATH", str(tmp_path))
    kill_service(own_grader)
    grade = own_grader.wait(ticket)
    assert grade.verdict is Verdict.INFRA
    assert "a new one does not start: bubblewrap is not installed" in grade.public[0].error
    with pytest.raises(RuntimeError, match="bubblewrap is not installed"):
        own_grader.submit(QUICK, PROBLEM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_that_is_told_to_stop_takes_everything_along(own_grader, number):
    own_grader.submit(ENDLESS, PROBLEM)
    wait_until(lambda: busy(own_grader.service))
    group = descendants(own_grader.service)
    os.kill(own_grader.service, number)
    assert all_gone(group) == set()


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_parent_that_dies_leaves_no_process(number, isolation):
    script = f"""
        import signal
        from mars2_jax.grading.grader import Grader
        from tests.grading.test_lifecycle import ENDLESS, PROBLEM
        # Ignored where the tests run in the background of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with Grader({isolation!r}, workers=2) as grader:
            for _ in range(2):
                grader.submit(ENDLESS, PROBLEM)
            grader.poll(timeout=None)
        """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.DEVNULL)
    wanted = {"bubblewrap": 11, "none": 7}[isolation]  # the service, two workers, a supervisor and program each
    wait_until(lambda: len(descendants(parent.pid)) >= wanted)
    group = descendants(parent.pid)
    parent.send_signal(number)
    parent.wait()
    assert all_gone(group) == set()


def test_grading_leaks_neither_descriptors_nor_processes(own_grader):
    def descriptors_when_idle():
        # What is left between programs: bubblewrap (twice) and the zygote.
        wait_until(lambda: len(descendants(own_grader.service)) == 3)
        return len(os.listdir(f"/proc/{own_grader.service}/fd"))

    own_grader.grade(QUICK, PROBLEM)
    before = descriptors_when_idle()
    limits = Limits(cpu_seconds=1.0, wall_seconds=0.05)
    asleep = Problem("p", "", (StdioTest("", ""),), limits=limits)
    for _ in range(20):
        assert own_grader.grade(ENDLESS, asleep).verdict is Verdict.TIMEOUT
        assert own_grader.grade(QUICK, PROBLEM).verdict is Verdict.PASS
    assert descriptors_when_idle() == before


def test_the_hosts_devices_stay_as_they_are(own_grader):
    """They are bound into the sandbox, where a program that owned one could change its mode for everybody."""
    before = os.stat("/dev/null")
    program = "import os\nprint(os.stat('/dev/null').st_uid == os.getuid())"
    assert own_grader.grade(program, Problem("p", "", (StdioTest("", "False"),))).verdict is Verdict.PASS
    function = Problem("p", "", (AssertTest("assert not f()"),), entry_point="f")
    program = "import os\ndef f(): return os.stat('/dev/null').st_uid == os.getuid()"
    assert own_grader.grade(program, function).verdict is Verdict.PASS
    after = os.stat("/dev/null")
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)


def test_without_bubblewrap_it_refuses_to_start(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap.*isolation=none") as caught:
        Grader()
    assert "\n" not in str(caught.value)


REAL = shutil.which("bwrap")
PACKAGE = Path(__file__).resolve().parents[2] / "mars2_jax"
VISIBLE = " ".join(f"--perms 0755 --dir {folder}" for folder in [*reversed(PACKAGE.parents)][1:])
HOLES = {
    "broken": ("echo no user namespaces >&2\nexit 1", "no user namespaces"),
    "network": (
        'kept=()\nfor a in "$@"; do [ "$a" = --unshare-net ] || kept+=("$a"); done\n' + f'exec {REAL} "${{kept[@]}}"',
        "the net namespace is the host's",
    ),
    "files": (f'exec {REAL} {VISIBLE} --ro-bind {PACKAGE} {PACKAGE} "$@"', "file"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_sandbox_with_a_hole_is_refused(tmp_path, monkeypatch, hole):
    body, message = HOLES[hole]
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/bash\n{body}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = set(children(os.getpid()))
    with pytest.raises(SandboxError, match=message):
        Grader(workers=1)
    assert set(children(os.getpid())) == before


def test_unprotected_grading_warns_every_time(caplog):
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING), Grader("none", workers=1) as grader:
            assert "UNPROTECTED" in caplog.text
            assert grader.grade(QUICK, PROBLEM).verdict is Verdict.PASS
            assert grader.grade("print(2)", PROBLEM).verdict is Verdict.WRONG
            spawn = "import os\nif os.fork() == 0:\n    os.setsid()\n    __import__('time').sleep(1000)\nprint(1)"
            assert grader.grade(spawn, PROBLEM).verdict is Verdict.PASS
            assert not any("sleep" in command_line(pid) for pid, _ in descendants(os.getpid()))
    with pytest.raises(ValueError, match="isolation 'docker'"):
        Grader("docker")


def test_the_service_imports_no_jax():
    code = (
        "import sys, mars2_jax.grading.service, mars2_jax.grading.grader\n"
        "print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_an_unprivileged_user_can_grade():
    python = Path("/usr/bin/python3")
    recent = "import sys; print(sys.version_info >= (3, 11))"
    version = subprocess.run([python, "-c", recent], capture_output=True, text=True)
    root = Path(__file__).resolve().parents[2]
    if version.stdout.strip() != "True" or not all(p.stat().st_mode & stat.S_IXOTH for p in [root, *root.parents]):
        pytest.skip("no interpreter, or no copy of the package, that other users may read")
    script = """
        from mars2_jax.grading.grader import Grader
        from tests.grading.exploits import EXPLOITS, HONEST, PROBLEMS
        kinds = ("attack", "trace", "memory", "forge", "daemon", "fork", "kill")
        chosen = [e for e in EXPLOITS if e[0].startswith(kinds)]
        with Grader(workers=1) as grader:
            for name, kind, program in chosen:
                grade = grader.grade(program, PROBLEMS[kind], stop_at_first_failure=True)
                assert grade.verdict.value not in ("pass", "infra"), (name, grade)
                assert grader.grade(HONEST[kind], PROBLEMS[kind]).verdict.value == "pass", name
        print("graded", len(chosen))
        """
    ran = subprocess.run(
        [python, "-B", "-c", textwrap.dedent(script)],
        env={"PYTHONPATH": str(root), "PATH": os.environ["PATH"]},
        cwd="/",
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
    )
    assert ran.stdout.startswith("graded"), ran.stderr[-2000:]

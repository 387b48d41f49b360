"""The filter forbids what it names and nothing that ordinary Python needs."""

import errno
import os
import struct
import subprocess
import sys
import textwrap

import pytest

from mars2_jax.grading import seccomp
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks.problem import Limits, Problem, StdioTest

pytestmark = pytest.mark.skipif(not seccomp.available(), reason="no seccomp filters here")

LIMITS = Limits(cpu_seconds=5.0, wall_seconds=30.0)


def run(program, expected="ok"):
    return Problem("p", "", (StdioTest("", expected),), limits=LIMITS), textwrap.dedent(program)


ORDINARY = {
    "threads": """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            print("ok" if sum(pool.map(abs, range(-9, 0))) == 45 else "no")
        """,
    "processes": """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        if __name__ == "__main__":
            queue = multiprocessing.Queue()
            child = multiprocessing.Process(target=queue.put, args=(5,))
            child.start()
            assert queue.get() == 5
            child.join()
            with multiprocessing.Manager() as manager, ProcessPoolExecutor(2) as pool:
                shared = manager.list(list(pool.map(abs, [-1, 2])))
                print("ok" if list(shared) == [1, 2] else "no")
        """,
    "shared_memory": """
        from multiprocessing import Array
        from multiprocessing.shared_memory import SharedMemory
        block = SharedMemory(create=True, size=1000)
        block.buf[0] = 7
        block.close(); block.unlink()
        print("ok" if Array("i", 3)[:] == [0, 0, 0] else "no")
        """,
    "subprocess": """
        import os, subprocess, sys
        assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
        print("ok" if os.waitpid(pid, 0)[1] == 0 else "no")
        """,
    "asyncio": """
        import asyncio, sys
        async def main():
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=-1)
            said, _ = await child.communicate()
            await asyncio.gather(asyncio.sleep(0.01), asyncio.to_thread(len, ""))
            return said
        print("ok" if asyncio.run(main()) == b"1\\n" else "no")
        """,
    "ctypes_and_mmap": """
        import ctypes, mmap
        area = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE)
        area[:2] = b"ok"
        print(ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(area)), 2).decode())
        """,
    "local_sockets": """
        import os, selectors, signal, socket
        a, b = socket.socketpair()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("/tmp/s"); server.listen()
            with socket.socket(socket.AF_UNIX) as client: client.connect("/tmp/s")
        watch = selectors.DefaultSelector()
        watch.register(b, selectors.EVENT_READ)
        a.send(b"ok")
        print(b.recv(2).decode() if watch.select(1) else "no")
        """,
    "limits_and_clocks": """
        import os, resource, tempfile, time, signal
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        signal.setitimer(signal.ITIMER_REAL, 9)
        with tempfile.TemporaryFile() as file: file.write(os.urandom(9))
        time.clock_gettime(time.CLOCK_MONOTONIC); os.sched_getaffinity(0); os.nice(1); os.getrandom(3)
        print("ok")
        """,
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_python_works(grader, name):
    problem, program = run(ORDINARY[name])
    grade = grader.grade(program, problem)
    assert grade.verdict is Verdict.PASS, grade


def test_every_call_on_the_list_is_forbidden(grader):
    # In the program's process and in its children's.
    problem, program = run(
        """
        import os, sys
        from mars2_jax.grading import seccomp
        for _ in range(2):
            print(*seccomp.unfiltered(), "ok" if not os.path.exists("/tmp/x") else "", flush=True)
            if os.fork(): os.wait(); break
        """,
        "ok ok",
    )
    assert grader.grade(program, problem).verdict is Verdict.PASS
    assert "seccomp" in grader.layers


def test_what_python_can_say_of_them(grader):
    problem, program = run("""
        import ctypes, errno, mmap, os, resource, signal, socket
        libc = ctypes.CDLL(None, use_errno=True)
        def forbidden(call, *arguments):
            try:
                call(*arguments)
            except PermissionError:
                return True
            return False
        assert forbidden(os.memfd_create, "m")
        assert forbidden(socket.socket)
        assert forbidden(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)
        assert forbidden(resource.prlimit, os.getppid(), resource.RLIMIT_NOFILE, (9, 9))
        assert forbidden(mmap.mmap, -1, 1 << 20)
        assert forbidden(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
        assert forbidden(socket.socketpair()[0].setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
        with open("/dev/zero", "rb+", 0) as zero:
            assert zero.read(2) == bytes(2)
            try:
                assert not mmap.mmap(zero.fileno(), 1 << 20)
            except OSError as error:
                assert error.errno == errno.ENODEV
        for call in (libc.unshare, libc.setns, libc.ptrace, libc.chroot):
            assert call(0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM
        assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS  # clone3
        print("ok")
        """)
    grade = grader.grade(program, problem)
    assert grade.verdict is Verdict.PASS, grade


def test_without_the_filter_the_same_attempts_succeed():
    """A control: what `unfiltered` tries is there to be forbidden."""
    code = "from mars2_jax.grading import seccomp; print(*seccomp.unfiltered())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"ptrace", "memfd_create", "socket", "shmget"} <= set(said)


def test_installing_it_lasts():
    code = """
        import ctypes, os
        from mars2_jax.grading import seccomp
        ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
        seccomp.install(seccomp.prepare())
        print(seccomp.unfiltered(), [l.split()[1] for l in open("/proc/self/status") if l.startswith("Seccomp:")])
        """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[] ['2']\n"


@pytest.mark.parametrize("machine", ["riscv64", "i686"])
def test_other_machines_have_none(monkeypatch, machine):
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "h", "6", "v", machine)))
    assert not seccomp.available()
    assert seccomp.prepare() is None


ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def verdict(program, architecture, number, *arguments):
    """What the kernel makes of a call: an interpreter of the instructions that the filter has."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    lines = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, true, false, operand = lines[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            at += true if holds[code] else false


@pytest.mark.parametrize(
    ("machine", "architecture", "read", "clone", "clone3", "socket", "prlimit", "unshare"),
    [("x86_64", 0xC000003E, 0, 56, 435, 41, 302, 272), ("aarch64", 0xC00000B7, 63, 220, 435, 198, 261, 97)],
)
def test_the_filter_of_each_machine(machine, architecture, read, clone, clone3, socket, prlimit, unshare):
    program = seccomp._program(machine)
    call = lambda *arguments: verdict(program, architecture, *arguments)
    column = seccomp._MACHINES[machine][0]
    numbers = {numbers[column] for numbers in seccomp._FORBIDDEN.values()} - {None}
    assert unshare in numbers
    special = {clone, clone3, socket, socket + 12 if column == 0 else socket + 1, prlimit}
    for number in range(600):
        if number not in special:
            assert call(number) == (EPERM if number in numbers else ALLOW), number
    assert call(read, 2**64 - 1) == ALLOW
    assert call(clone, 0x01200011) == call(clone, 0x003D0F00) == ALLOW  # fork and thread
    for bit in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert call(clone, bit | 17) == EPERM
    assert call(clone3) == ENOSYS
    for family in special - {clone, clone3, prlimit}:
        assert [call(family, domain) for domain in (1, 2, 10, 16, 17)] == [ALLOW] + [EPERM] * 4
    assert [call(prlimit, pid) for pid in (0, 1, 1234)] == [ALLOW, EPERM, EPERM]
    sigaction, setsockopt, mmap = ((13, 54, 9), (134, 208, 222))[column]
    asked = [(17, 0), (17, 5), (17, 1 << 32), (2, 5)]
    assert [call(sigaction, *pair) for pair in asked] == [ALLOW, EPERM, EPERM, ALLOW]
    assert [call(setsockopt, 3, 1, option) for option in (7, 32, 2)] == [EPERM, EPERM, ALLOW]
    assert [call(mmap, 0, 1, 3, flags) for flags in (0x21, 0x23, 0x22, 0x01)] == [EPERM, EPERM, ALLOW, ALLOW]
    # The calls of another architecture, and on x86-64 those of its x32.
    assert verdict(program, 0x40000003, read) == EPERM
    assert call(0x40000000 + read) == (EPERM if column == 0 else ALLOW)

"""What the sandbox asks of Linux: namespaces, limits, processes. Standard library only."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import resource
import signal

__all__ = [
    "Usage",
    "adopt_orphans",
    "die_with_parent",
    "forget_privileges",
    "fresh_mounts",
    "hide_memory",
    "kill_descendants",
    "limits",
    "mapped",
    "may_change_namespace",
    "new_process_namespace",
    "one_heap",
    "refresh_scratch",
    "resident",
    "usage",
]

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("capset", "mount", "prctl", "setns", "umount2", "unshare"):
    getattr(_libc, _name)  # Looked up and kept once, not in every fork.
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_MNT_DETACH = 2
_M_ARENA_MAX = -8
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
# Version 3 of the interface, this process; then effective, permitted and inheritable sets, twice 32 bits: all empty.
_CAPABILITY_HEADER, _NO_CAPABILITIES = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()

_SCRATCH = ("/tmp", "/dev/shm")
_SCRATCH_MB = 64
_MAX_PROCESSES = 64
_MAX_FILES = 64
_STACK_MB = 64
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def one_heap() -> None:
    """Has all threads of this process and of its forks allocate from one heap. glibc would reserve 64 MB of address
    space for each thread, and a handful of them would reach a program's limit of memory."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


def may_change_namespace(own: int) -> bool:
    """Whether `new_process_namespace` can be called again and again. Not in a user namespace below the one that this
    process's namespace belongs to."""
    try:
        _call("setns", own, _CLONE_NEWPID)
    except PermissionError:
        return False
    return True


def new_process_namespace(own: int | None) -> None:
    """The next child is process 1 of a new process namespace.

    Args:
      own: this process's namespace, opened, which is put back first: another one for children can be asked for only
        then. None in a process that calls this once.
    """
    if own is not None:
        _call("setns", own, _CLONE_NEWPID)
    _call("unshare", _CLONE_NEWPID)


def fresh_mounts() -> None:
    """Mounts and SysV objects of this process's own, with an empty /tmp and /dev/shm, and a /proc that shows this
    process namespace alone, of which the caller is process 1."""
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWIPC)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    for path in _SCRATCH:
        _mount_scratch(path)


def _mount_scratch(path: str) -> None:
    options = f"size={_SCRATCH_MB}m,nr_inodes=4096,mode=1777".encode()
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def refresh_scratch() -> None:
    """Drops what a test left in the scratch folders, so that every test starts from empty ones."""
    for path in _SCRATCH:
        if os.listdir(path):
            _call("umount2", path.encode(), _MNT_DETACH)
            _mount_scratch(path)


def hide_memory() -> None:
    """No process without privileges may trace this one or open its files under /proc."""
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def adopt_orphans() -> None:
    """Orphans among this process's descendants become its children, as they do under process 1."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def forget_privileges(uid: int | None, *, hidden: bool) -> None:
    """Gives up every capability for good, and takes `uid` where the caller is root.

    Args:
      uid: the user to become; None keeps the user (all that an unprivileged caller can do).
      hidden: keep the memory and the open files from processes of the same user.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _call("capset", _CAPABILITY_HEADER, _NO_CAPABILITIES)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_DUMPABLE, 0 if hidden else 1, 0, 0, 0)


def mapped() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * _PAGE


def limits(cpu_seconds: float, memory: int, *, processes: bool) -> list[tuple[int, tuple[int, int]]]:
    """Arguments of `resource.setrlimit` for a process of the sandbox.

    CPU time in whole seconds, rounded up: the finer limit is kept from outside by `usage`, this one is the backstop.
    `memory` is the address space in bytes. `processes` limits their number too; it counts all of the user's, so it is
    only for a user that runs nothing else.
    """
    seconds = math.ceil(cpu_seconds) + 1
    # Recursion through C (a cached function, a sort key) needs more stack than the usual 8 MB.
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = _STACK_MB << 20
    found = [
        (resource.RLIMIT_CPU, (seconds, seconds + 1)),
        (resource.RLIMIT_AS, (memory, memory)),
        (resource.RLIMIT_FSIZE, (_SCRATCH_MB << 20, _SCRATCH_MB << 20)),
        (resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES)),
        (resource.RLIMIT_CORE, (0, 0)),
        (resource.RLIMIT_STACK, (stack if hard == resource.RLIM_INFINITY else min(stack, hard), hard)),
    ]
    return [*found, (resource.RLIMIT_NPROC, (_MAX_PROCESSES, _MAX_PROCESSES))] if processes else found


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


@dataclasses.dataclass(frozen=True)
class Usage:
    """CPU seconds of a process (`own`) and of the children it has waited for (`waited`); resident bytes."""

    own: float
    waited: float
    resident: int


def usage() -> dict[int, Usage]:
    """Every live descendant of this process."""
    found, parents = {}, {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # It has ended since the folder was listed.
            continue
        pid, times = int(name), [int(field) / _TICK for field in fields[11:15]]
        parents[pid] = int(fields[1])
        found[pid] = Usage(times[0] + times[1], times[2] + times[3], int(fields[21]) * _PAGE)
    mine, known = {os.getpid()}, {}
    grown = True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in mine and pid not in mine:
                mine.add(pid)
                known[pid] = found[pid]
                grown = True
    return known


def kill_descendants() -> dict[int, tuple[int, float]]:
    """Kills and reaps every descendant. Returns the wait status and the CPU seconds of each one that was reaped.

    Process 1 of a namespace has them killed by one system call that no fork can outrun. Elsewhere (isolation
    "none") the tree is walked until nothing is left.
    """
    reaped: dict[int, tuple[int, float]] = {}
    while True:
        try:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                _kill_all()
                pid, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            return reaped
        reaped[pid] = (status, used.ru_utime + used.ru_stime)


def _kill_all() -> None:
    everything = [-1] if os.getpid() == 1 else usage()
    for pid in everything:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

"""A seccomp filter for the processes of a program: system calls that no solution needs fail with EPERM.

The namespaces already keep programs from the host's files, network and processes. The filter is a second wall behind
them: most ways out of a sandbox are defects of the kernel in calls like these. And it closes what the namespaces leave
open: memory that no limit counts (memfd, System V objects, anonymous memory that is shared and need not stay mapped
where it was filled, large socket buffers), message queues, which would outlive a
test, limits of other processes of the same user (prlimit), new user namespaces, in which a program would have every
capability, and another disposition of SIGCHLD: the processor time of children that nobody waits for would be lost.

There is no Landlock layer, since it would add nothing: the mount namespace holds no path that a program may not read
and, but for its own scratch folders, none that it may write; abstract sockets and signals, which newer versions of
Landlock can scope, end at the borders of the network and process namespaces.

Standard library only. Linux on x86-64 and aarch64; elsewhere, and where the kernel has no filters, there is none.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import sys

__all__ = ["available", "install", "prepare", "unfiltered"]

# Name -> number on x86-64 and on aarch64 (None: there is no such call).
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    # Mounts and namespaces. (The plain mount and umount2 are the supervisor's, which has the filter, too; they need
    # capabilities, which a program neither has nor can get.)
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # Large and often defective parts of the kernel.
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Its queues are taken from a stock that the whole machine shares.
    "io_setup": (206, 0),
    # Files by handle, past the mount namespace.
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # Memory that neither a process's limits nor the scratch folders' sizes count.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # The machine itself.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _PRLIMIT = (56, 220), (435, 435), (41, 198), (53, 199), (302, 261)
_SIGACTION, _SETSOCKOPT, _MMAP = (13, 134), (54, 208), (9, 222)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the numbers above, and the kernel's name (AUDIT_ARCH) for the machine."""
_X32 = 0x40000000
"""Numbers from here on are the same calls once more, on x86-64."""

_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. (NEWTIME is not among clone's flags.)"""
_AF_UNIX, _AF_INET = 1, 2
_SO_SNDBUF, _SO_SNDBUFFORCE = 7, 32
_SHARED_ANONYMOUS = 0x21
"""MAP_SHARED (a bit of MAP_SHARED_VALIDATE, too) and MAP_ANONYMOUS."""

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Offsets in the kernel's `struct seccomp_data`; of arguments the lower half, which is all that an int has.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
_FOURTH_ARGUMENT = 40

_libc = ctypes.CDLL(None, use_errno=True)


def available() -> bool:
    """Whether this machine has the filter."""
    if os.uname().machine not in _MACHINES or sys.maxsize < 1 << 32 or sys.byteorder != "little":
        return False
    # A kernel that knows filters complains of the address, another one of the mode.
    ctypes.set_errno(0)
    return _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0) == -1 and ctypes.get_errno() == errno.EFAULT


def prepare() -> ctypes.Array[ctypes.c_char] | None:
    """The filter for `install`, or None where there is none."""
    return ctypes.create_string_buffer(_program(os.uname().machine)) if available() else None


def install(program: ctypes.Array[ctypes.c_char]) -> None:
    """Filters the calls of this process and of all that it starts, for good. Needs `no_new_privs`."""

    class Header(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    # The buffer has a zero byte at its end.
    header = Header((len(program) - 1) // 8, ctypes.addressof(program))
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(header), 0, 0) == -1:
        raise OSError(ctypes.get_errno(), "the seccomp filter cannot be installed")


def _program(machine: str) -> bytes:
    column, architecture = _MACHINES[machine]
    lines: list[tuple[int, int, str, str]] = []  # code, operand, where to jump if true, and if false ("" goes on)
    labels: dict[str, int] = {}

    def emit(code: int, operand: int, true: str = "", false: str = "") -> None:
        lines.append((code, operand, true, false))

    def label(name: str) -> None:
        labels[name] = len(lines)

    emit(_LOAD, _ARCHITECTURE)
    emit(_JUMP_EQUAL, architecture, "", "forbid")
    emit(_LOAD, _NUMBER)
    if column == 0:
        emit(_JUMP_AT_LEAST, _X32, "forbid")
    for numbers in _FORBIDDEN.values():
        if (number := numbers[column]) is not None:
            emit(_JUMP_EQUAL, number, "forbid")
    emit(_JUMP_EQUAL, _CLONE[column], "clone")
    # Its flags are in memory, where a filter cannot see them; C libraries fall back to clone.
    emit(_JUMP_EQUAL, _CLONE3[column], "unknown")
    emit(_JUMP_EQUAL, _SOCKET[column], "socket")
    emit(_JUMP_EQUAL, _SOCKETPAIR[column], "socket")
    emit(_JUMP_EQUAL, _SIGACTION[column], "signal")
    emit(_JUMP_EQUAL, _SETSOCKOPT[column], "option")
    emit(_JUMP_EQUAL, _MMAP[column], "map")
    emit(_JUMP_EQUAL, _PRLIMIT[column], "limit", "allow")
    label("clone")
    emit(_LOAD, _FIRST_ARGUMENT)
    emit(_JUMP_ANY_BIT, _NEW_NAMESPACES, "forbid", "allow")
    label("socket")
    emit(_LOAD, _FIRST_ARGUMENT)
    emit(_JUMP_EQUAL, _AF_UNIX, "allow", "forbid")
    label("signal")
    emit(_LOAD, _FIRST_ARGUMENT)
    emit(_JUMP_EQUAL, signal.SIGCHLD, "", "allow")
    for half in (0, 4):  # A null pointer only asks.
        emit(_LOAD, _SECOND_ARGUMENT + half)
        emit(_JUMP_EQUAL, 0, "", "forbid")
    emit(_JUMP_EQUAL, 0, "allow", "allow")
    label("map")
    emit(_LOAD, _FOURTH_ARGUMENT)
    emit(_AND, _SHARED_ANONYMOUS)
    emit(_JUMP_EQUAL, _SHARED_ANONYMOUS, "forbid", "allow")
    label("option")
    emit(_LOAD, _THIRD_ARGUMENT)
    emit(_JUMP_EQUAL, _SO_SNDBUF, "forbid")
    emit(_JUMP_EQUAL, _SO_SNDBUFFORCE, "forbid", "allow")
    label("limit")
    emit(_LOAD, _FIRST_ARGUMENT)
    emit(_JUMP_EQUAL, 0, "allow", "forbid")  # 0 is the caller itself.
    label("unknown")
    emit(_RETURN, _ERRNO | errno.ENOSYS)
    label("forbid")
    emit(_RETURN, _ERRNO | errno.EPERM)
    label("allow")
    emit(_RETURN, _ALLOW)
    packed = b""
    for here, (code, operand, true, false) in enumerate(lines):
        steps = [labels[name] - here - 1 if name else 0 for name in (true, false)]
        packed += struct.pack("=HBBI", code, *steps, operand)
    return packed


def unfiltered() -> list[str]:
    """The calls that should be forbidden and are not, found by making each of them in a way that changes nothing, even
    for root: every address, descriptor and flag is -1, which none of them takes (but msgget, as a flag)."""
    column, _ = _MACHINES[os.uname().machine]
    flags = {"msgget": 0}
    attempts = [(name, numbers[column], (-1, flags.get(name, -1), -1, -1, -1)) for name, numbers in _FORBIDDEN.items()]
    attempts += [("socket", _SOCKET[column], (_AF_INET, 1, 0, 0, 0)), ("prlimit", _PRLIMIT[column], (1, 0, 0, 0, 0))]
    attempts += [("rt_sigaction", _SIGACTION[column], (signal.SIGCHLD, -1, 0, 8, 0))]
    attempts += [("mmap", _MMAP[column], (0, 0, 0, _SHARED_ANONYMOUS, -1))]
    attempts += [("setsockopt", _SETSOCKOPT[column], (-1, 1, _SO_SNDBUF, 0, 0))]
    attempts += [("clone", _CLONE[column], (0x10000000 | signal.SIGCHLD, 0, 0, 0, 0))]
    found = []
    for name, number, arguments in attempts:
        if number is None:
            continue
        ctypes.set_errno(0)
        result = _libc.syscall(number, *map(ctypes.c_long, arguments))
        if name == "clone" and result == 0:
            os._exit(0)  # The child.
        if result != -1 or ctypes.get_errno() != errno.EPERM:
            found.append(name)
    return found

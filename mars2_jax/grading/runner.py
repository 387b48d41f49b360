"""The worker's side inside the sandbox: a zygote that forks one supervisor a program, which forks one process a test.

Standard library only. Run by `sandbox.command`. Frames (see values.py) come in on descriptor 0 and go out on 1::

    service                                     supervisor
    {"program", "entry_point", "limits", "compile"}   ->
                                           <-   with "compile": {"compiled": true} or {"compiled": false, ..report}
    {"kind": "stdio", "bytes"}, the stdin  ->   (as it is, of so many bytes)
                                           <-   report
    {"kind": "call", "call"}               ->
                                           <-   report
    {"kind": "assert"}, {"setup", "code"}  ->   (the second frame is read by the assertion process)
                                           <-   report
    {"kind": "end"}                        ->

A report is `{"end", "status", "cpu", "stdout", "stderr", "value", "outcome"}`: what stopped the test ("exit", "cpu",
"wall", "memory", "output"), the wait status of the program, CPU seconds, and what came out of the pipes. Bytes of the
standard output that are not UTF-8 are surrogates there.

The zygote never reads a frame, so no program finds another one's text in its memory. The supervisor reads inputs,
never expected outputs or assertions. Under bubblewrap the supervisor is process 1 of a namespace of its own, so
nothing that a program starts can outlive its test; it is root (of the sandbox) where the programs are nobody, or
else hides its memory from them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import os
import resource
import select
import stat
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from mars2_jax.grading import child, seccomp, system
from mars2_jax.grading.pipes import Pipes, Sink, drain, feed
from mars2_jax.grading.values import dumps, read_exactly, read_frame, write_frame

__all__ = ["main"]

Filter = ctypes.Array[ctypes.c_char] | None
"""What `seccomp.prepare` returns; None where programs run without a filter."""

_POLL_SECONDS = 0.05
_STDERR_TAIL = 16 << 10
_STDERR_CAP = 8 << 20
_COMPILED_CAP = 64 << 20


class _Supervisor:
    """Serves one program: compiles it, then runs it once a test until the service says that it is enough."""

    def __init__(self, job: dict[str, Any], isolated: bool, uid: int | None) -> None:
        self._isolated = isolated
        # Programs and assertions run as two users where the supervisor may choose.
        self._uid = uid
        self._source: str = job["program"]
        self._entry_point: str = job["entry_point"] or ""
        limits = job["limits"]
        self._cpu: float = limits["cpu_seconds"]
        self._wall: float = limits["wall_seconds"]
        self._memory_mb: int = limits["memory_mb"]
        self._output_cap: int = limits["output_kb"] << 10
        self._compile: bool = job["compile"]
        self._null = os.open(os.devnull, os.O_RDWR)
        self._mapped = system.mapped()
        self._code: bytes | None = None

    def serve(self) -> None:
        if self._compile and not self._compiled():
            return
        kinds = {"stdio": self._start_script, "call": self._start_call, "assert": self._start_assertions}
        while (test := read_frame(0)) is not None and test["kind"] != "end":
            start = kinds[test["kind"]]
            write_frame(1, self._run(lambda pipes, start=start, test=test: start(pipes, test)))  # type: ignore[misc]

    def _compiled(self) -> bool:
        """Compiles once for all tests. A program with one test does so in that test's process."""
        code = Sink(_COMPILED_CAP)
        report = self._run(lambda pipes: self._start_compiler(pipes, code))
        if report["end"] != "exit" or report["status"] != 0:
            write_frame(1, {"compiled": False, **report})
            return False
        self._code = bytes(code.data)
        write_frame(1, {"compiled": True})
        return True

    def _start_compiler(self, pipes: Pipes, code: Sink) -> _Test:
        stderr = Sink(_STDERR_CAP, _STDERR_TAIL)
        fds = [self._null, self._null, pipes.output(stderr), pipes.output(code)]
        main = self._fork(fds, lambda: child.compile_program(self._source, 3))
        return _Test(main, main, stderr=stderr)

    def _start_script(self, pipes: Pipes, test: dict[str, Any]) -> _Test:
        stdout, stderr = Sink(self._output_cap), Sink(_STDERR_CAP, _STDERR_TAIL)
        stdin = read_exactly(0, test["bytes"])
        if stdin is None:
            raise BrokenPipeError("the service is gone")
        fds = [pipes.input(stdin), pipes.output(stdout), pipes.output(stderr)]
        main = self._fork(fds, lambda: child.script(self._code, self._source), held=2 * len(stdin))
        return _Test(main, main, stdout=stdout, stderr=stderr)

    def _start_call(self, pipes: Pipes, test: dict[str, Any]) -> _Test:
        stdout, stderr = Sink(self._output_cap), Sink(_STDERR_CAP, _STDERR_TAIL)
        value = Sink(self._output_cap + 4)
        call = dumps(test["call"])
        framed = len(call).to_bytes(4, "big") + call
        fds = [self._null, pipes.output(stdout), pipes.output(stderr), pipes.input(framed), pipes.output(value)]
        call_function = lambda: child.function(self._code, self._source, self._entry_point)
        main = self._fork(fds, call_function, held=2 * len(framed))
        return _Test(main, main, stdout=stdout, stderr=stderr, value=value)

    def _start_assertions(self, pipes: Pipes, test: dict[str, Any]) -> _Test:
        stdout, stderr = Sink(self._output_cap), Sink(_STDERR_CAP, _STDERR_TAIL)
        outcome = Sink(1 << 20)
        calls, results = pipes.between(), pipes.between()
        outcome_end = pipes.output(outcome)
        (outcome_reader,) = (fd for fd, sink in pipes.sinks.items() if sink is outcome)
        fds = [self._null, self._null, self._null, results[0], calls[1], outcome_end, 0]
        judge = self._fork(fds, lambda: child.assertions(self._entry_point, self._output_cap), trusted=True)
        select.select([outcome_reader], [], [])
        os.read(outcome_reader, 1)  # It has read its code: from here on a fork of this process cannot.
        fds = [self._null, pipes.output(stdout), pipes.output(stderr), calls[0], results[1]]
        program = self._fork(fds, lambda: child.function(self._code, self._source, self._entry_point))
        return _Test(program, judge, stdout=stdout, stderr=stderr, outcome=outcome)

    def _fork(self, fds: list[int], body: Callable[[], int], *, trusted: bool = False, held: int = 0) -> int:
        """Forks a process that has these descriptors and no others. `held`: bytes of this process's that are no use to
        the other and do not count as its memory."""
        # The assertion process is trusted; its limit only ends a test that never ends by itself.
        seconds = self._wall if trusted else self._cpu
        limits = system.limits(seconds, self._mapped + (self._memory_mb << 20) + held, processes=self._isolated)
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            # No number of the new layout may be overwritten before it has been copied.
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64 + len(fds)) for fd in fds]
            for number, fd in enumerate(high):
                os.dup2(fd, number)
            os.closerange(len(fds), 1 << 16)
            os.setsid()
            uid = self._uid
            if uid is not None:
                uid += trusted
                if not trusted:
                    for number in range(3):
                        # So that /dev/stdin can be opened. The null device is the host's, and must stay its own.
                        if stat.S_ISFIFO(os.fstat(number).st_mode):
                            os.fchown(number, uid, uid)
            for kind, pair in limits:
                resource.setrlimit(kind, pair)
            system.forget_privileges(uid, hidden=trusted)
            os.chdir("/tmp")
            status = body()
        except BaseException:  # noqa: BLE001 -- a fork must never return into its parent's code
            os.write(2, traceback.format_exc()[-4000:].encode("utf-8", "backslashreplace"))
        finally:
            os._exit(status)

    def _run(self, start: Callable[[Pipes], _Test]) -> dict[str, Any]:
        """Starts the processes of a test, sees them to their end, and leaves nothing of them behind."""
        pipes = Pipes()
        test = None
        try:
            test = start(pipes)
            pipes.close_theirs()
            end, seen = self._watch(pipes, test)
        finally:
            reaped = system.kill_descendants()
        for fd, sink in pipes.sinks.items():
            if not drain(fd, sink) and end == "exit":
                end = "output"
        pipes.close()
        if self._isolated:
            system.refresh_scratch()
        cpu = sum(seconds for pid, (_, seconds) in reaped.items() if pid == test.program or pid != test.main)
        cpu = max(cpu, seen)
        if end == "exit" and cpu > self._cpu:
            end = "cpu"
        return {"end": end, "status": reaped[test.program][0], "cpu": cpu, **test.texts()}

    def _watch(self, pipes: Pipes, test: _Test) -> tuple[str, float]:
        """Feeds and drains the pipes until the main process ends or a limit is passed.

        Returns what ended the test, and the largest CPU time that was seen while it ran.
        """
        poller = select.poll()
        exited = os.pidfd_open(test.main)
        poller.register(exited, select.POLLIN)
        poller.register(1, 0)  # Reports POLLERR once the service is gone.
        for fd in pipes.sinks:
            poller.register(fd, select.POLLIN)
        for fd in pipes.feeds:
            poller.register(fd, select.POLLOUT)
        deadline = time.monotonic() + self._wall
        look = time.monotonic() + _POLL_SECONDS
        own: dict[int, float] = {}
        seen, base = 0.0, system.resident()  # Forks begin with what this process has.
        try:
            while True:
                for fd, event in poller.poll(max(0.0, look - time.monotonic()) * 1000):
                    if fd == exited:
                        return "exit", seen
                    if fd == 1:
                        system.kill_descendants()
                        os._exit(0)
                    if fd in pipes.feeds:
                        if event & select.POLLERR or not feed(fd, pipes.feeds):
                            poller.unregister(fd)
                            pipes.close_ours(fd)
                    elif event & select.POLLIN:
                        if not drain(fd, pipes.sinks[fd]):
                            return "output", seen
                    else:
                        poller.unregister(fd)
                now = time.monotonic()
                if now < look:
                    continue
                look = now + _POLL_SECONDS
                running = system.usage()
                if test.main != test.program:
                    running.pop(test.main, None)
                for pid, used in running.items():
                    own[pid] = max(own.get(pid, 0.0), used.own)
                # Children that were waited for show in their parent; those that were not, in what was seen of them.
                seen = max(seen, sum(own.values()), sum(used.own + used.waited for used in running.values()))
                if seen > self._cpu:
                    return "cpu", seen
                if sum(max(0, used.resident - base) for used in running.values()) > self._memory_mb << 20:
                    return "memory", seen
                if now > deadline:
                    return "wall", seen
        finally:
            os.close(exited)


@dataclasses.dataclass
class _Test:
    """The processes of a running test (`main` ends it) and where their output goes."""

    program: int
    main: int
    stderr: Sink
    stdout: Sink | None = None
    value: Sink | None = None
    outcome: Sink | None = None

    def texts(self) -> dict[str, str | None]:
        sinks = {"stdout": self.stdout, "stderr": self.stderr, "value": self.value, "outcome": self.outcome}
        texts: dict[str, str | None] = {}
        for name, sink in sinks.items():
            # The length in front of a frame is of no use here, and is not text.
            start = 4 if name in ("value", "outcome") else 0
            errors = "surrogateescape" if name == "stdout" else "replace"
            texts[name] = None if sink is None else sink.data[start:].decode("utf-8", errors)
        return texts


def _supervise(isolated: bool, uid: int | None, filter_: Filter) -> int:
    """Serves one program. Returns the exit status."""
    system.hide_memory()
    limits = _own_limits()
    try:
        if isolated:
            system.fresh_mounts()
            if filter_ is not None:
                # Here and not in each fork, which it would make slower by a third.
                seccomp.install(filter_)
        else:
            system.adopt_orphans()
        job = read_frame(0)
        if job is not None:
            _Supervisor(job, isolated, uid).serve()
    except BrokenPipeError:
        system.kill_descendants()
    except Exception as error:  # noqa: BLE001 -- reported to the service
        system.kill_descendants()
        # A program that runs as the same user may lower this process's limits. That is its fault, not the grader's.
        tampered = _own_limits() != limits
        write_frame(1, {"fault": f"{type(error).__name__}: {error}", "tampered": tampered})
        return 1
    return 0


def _own_limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]


def _in_new_namespace(uid: int | None, filter_: Filter) -> int:
    """Supervises from a second fork, for a zygote that can enter a new process namespace only once."""
    system.new_process_namespace(None)
    pid = os.fork()
    if pid == 0:
        os._exit(_supervise(True, uid, filter_))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def main(isolation: str, uid: int) -> None:
    """The zygote: forks a supervisor for each program that arrives, until its input ends."""
    isolated = isolation == "bubblewrap"
    if not isolated:
        system.die_with_parent()
    child.preload()
    system.one_heap()
    filter_ = seccomp.prepare() if isolated else None
    own_uid = uid if isolated and os.geteuid() == 0 else None
    own_processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    direct = not isolated or system.may_change_namespace(own_processes)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    while any(event & select.POLLIN for _, event in poller.poll()):
        if direct and isolated:
            system.new_process_namespace(own_processes)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _in_new_namespace(own_uid, filter_) if not direct else _supervise(isolated, own_uid, filter_)
            except Exception as error:  # noqa: BLE001 -- reported to the service
                write_frame(1, {"fault": f"{type(error).__name__}: {error}", "tampered": False})
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            # A supervisor can be reached by a program of its own user only.
            write_frame(1, {"died": os.waitstatus_to_exitcode(status), "tampered": own_uid is None})
            sys.exit(1)

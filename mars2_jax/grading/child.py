"""The two kinds of process that a test runs in, inside the sandbox. Standard library only.

The *program's* process is untrusted. It is given a test's input and nothing else: what it writes is taken as its
answer, never as a verdict. The *assertion* process runs a test's own code (HumanEval's `check`, MBPP's asserts)
and reaches the program's function through a pair of pipes; it alone holds the pipe for the outcome.

Each function here runs in a fork whose descriptors have been laid out by the runner (see its numbers below), and
its return value is the exit status.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import gc
import importlib
import io
import linecache
import marshal
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from mars2_jax.grading.values import NotCarried, TooDeep, decode, encode, read_frame, write_frame

__all__ = ["CALLS_IN", "CALLS_OUT", "FRAMES", "OUTCOME", "assertions", "compile_program", "function", "script"]

# Descriptors of the program's process, beside 0, 1, 2: calls come in, results go out.
CALLS_IN, CALLS_OUT = 3, 4
# Descriptors of the assertion process, which has the other ends of the same pipes at 3 and 4.
OUTCOME, FRAMES = 5, 6

_PROGRAM, _TEST = "program.py", "test.py"

# Loaded before the first fork, so that no program pays for their import.
_PRELOADED = (
    "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math operator "
    "random re statistics string typing"
)


def preload() -> None:
    """Imports what most programs use, and puts what exists now out of the garbage collector's sight."""
    for name in _PRELOADED.split():
        importlib.import_module(name)
    # The interpreter runs without `site`, which makes these.
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    sys.set_int_max_str_digits(0)
    gc.collect()
    gc.freeze()


def compile_program(source: str, output: int) -> int:
    """Compiles in a process of its own, since the compiler can be made to crash, and writes the code to `output`."""
    try:
        code = marshal.dumps(compile(source, _PROGRAM, "exec", dont_inherit=True))
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
        _write_all(2, "".join(traceback.format_exception_only(type(error), error)))
        return 1
    left = memoryview(code)
    while left:
        left = left[os.write(output, left) :]
    return 0


def script(code: bytes | None, source: str) -> int:
    """Runs a program as `__main__`, with real pipes as its standard streams. `code` None: compiles it first."""
    return _as_program(code, source, "__main__", lambda module: None)


def function(code: bytes | None, source: str, entry_point: str) -> int:
    """Runs a program as a module, then answers calls of its entry point until the caller hangs up.

    A reply is `{"value": form}`, `{"raise": [type, message, traceback]}` or `{"not_carried": what}`.
    """

    def serve(module: types.ModuleType) -> None:
        call = _resolve(module, entry_point)
        while (request := read_frame(CALLS_IN)) is not None:
            args, kwargs = decode(request)
            try:
                reply = {"value": encode(call(*args, **kwargs))}
            except NotCarried as error:
                reply = {"not_carried": str(error)}
            except BaseException as error:  # noqa: BLE001 -- whatever it is, it is the caller's to handle
                reply = {"raise": [type(error).__name__, _message(error), _traceback_text(error, _PROGRAM)]}
            write_frame(CALLS_OUT, reply)

    return _as_program(code, source, "program", serve)


def _as_program(code: bytes | None, source: str, name: str, then: Callable[[types.ModuleType], None]) -> int:
    # The interpreter's own stdin, stdout and stderr are at hand: nothing has been read or written through them, and
    # their descriptors lead to this test's pipes by now.
    sys.argv = [_PROGRAM]
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__file__"] = _PROGRAM
    sys.modules[name] = module
    _keep_source(_PROGRAM, source)
    status = 0
    try:
        compiled = compile(source, _PROGRAM, "exec", dont_inherit=True) if code is None else marshal.loads(code)
        exec(compiled, module.__dict__)
        then(module)
    except SystemExit as leaving:
        status = _exit_status(leaving)
    except BaseException as error:  # noqa: BLE001 -- told as an interpreter would
        _write_all(2, _traceback_text(error, _PROGRAM))
        status = 1
    # What an interpreter does at its end, without the time that tearing down all modules takes.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if sys.stdout is not None and not _closed(sys.stdout):
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 -- the same
        _write_all(2, _traceback_text(error, _PROGRAM))
        status = status or 1
    _flush_others(module)
    return status


def _closed(file: Any) -> bool:
    try:
        return bool(file.closed)
    except Exception:  # noqa: BLE001 -- a program may put anything in the place of a stream
        return False


def _flush_others(module: types.ModuleType) -> None:
    """Writes out the files that an interpreter closes at its end: the stream behind a `sys.stdout` that was replaced,
    and what the program opened (`out = open(1, "w")`, `write = out.write`)."""
    for thing in [sys.__stdout__, *module.__dict__.values()]:
        file = thing.__self__ if type(thing) in (types.MethodType, types.BuiltinMethodType) else thing
        try:
            if isinstance(file, io.IOBase) and not file.closed:
                file.flush()
        except BaseException:  # noqa: BLE001 -- an interpreter ignores it, too
            pass


def _exit_status(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    _write_all(2, f"{leaving.code}\n")
    return 1


def _resolve(module: types.ModuleType, entry_point: str) -> Callable[..., Any]:
    """`name`, or `Class.method` on a fresh instance for each call."""
    owner, _, method = entry_point.rpartition(".")
    if not hasattr(module, owner or method):
        raise NameError(f"the program does not define {owner or method!r}")
    found = getattr(module, owner or method)
    if not owner:
        return found
    return lambda *args, **kwargs: getattr(found(), method)(*args, **kwargs)


class ProgramError(Exception):
    """Stands in the assertion process for an exception of the program that has no builtin type, or for its end."""


class _Program:
    """The program's function as the assertions see it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.last: Any = None
        self.failure: BaseException | None = None
        self.failure_type = ""
        self.failure_text = ""
        self.uncarried_argument = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            request = encode((args, kwargs))
        except NotCarried as error:
            # The types of arguments are the test's choice; their depth may be that of an earlier result.
            self.uncarried_argument = not isinstance(error, TooDeep)
            raise
        try:
            write_frame(CALLS_OUT, request)
            reply = read_frame(CALLS_IN, self._limit)
        except BrokenPipeError:
            reply = None
        except NotCarried as error:
            reply = {"not_carried": str(error)}
        if not isinstance(reply, dict):
            raise self._failed(ProgramError("the program ended before it returned"), "end", "")
        if "value" in reply:
            try:
                self.last = decode(reply["value"])
            except NotCarried as error:
                raise self._failed(ProgramError(f"it returned {error}"), "not_carried", "") from None
            return self.last
        if "not_carried" in reply:
            raise self._failed(ProgramError(f"it returned {reply['not_carried']}"), "not_carried", "")
        try:
            name, message, text = (str(part) for part in reply["raise"])
        except (KeyError, TypeError, ValueError):
            raise self._failed(ProgramError("the program sent a malformed reply"), "not_carried", "") from None
        raise self._failed(_builtin_error(name, message), name, text)

    def _failed(self, error: BaseException, kind: str, text: str) -> BaseException:
        self.failure, self.failure_type = error, kind
        self.failure_text = text or f"{error}\n"
        return error


def _builtin_error(name: str, message: str) -> Exception:
    """An exception of the builtin type of that name, so that tests may catch it.

    Not of those that end a loop without a word: `all(map(answer, inputs))` would be true.
    """
    kind = getattr(builtins, name, None)
    silent = (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, silent):
        try:
            return kind(message)
        except TypeError:  # UnicodeDecodeError and its like take other arguments.
            pass
    return ProgramError(f"{name}: {message}")


def assertions(entry_point: str, limit: int) -> int:
    """Reads a test's code from `FRAMES`, runs it, and writes the outcome to `OUTCOME`.

    First a byte says that the code has been read: only then may the program's process be forked, from a parent that
    has never seen the code.
    """
    test = read_frame(FRAMES)
    os.write(OUTCOME, b"R")
    os.close(FRAMES)
    if test is None:
        return 1
    program = _Program(limit)
    owner, _, method = entry_point.rpartition(".")
    bound: Any = type(owner, (), {method: staticmethod(program)}) if owner else program
    namespace: dict[str, Any] = {"__name__": "test", "__builtins__": builtins}
    outcome = {"outcome": "pass", "kind": "", "error": ""}
    try:
        exec(compile(test["setup"], "setup.py", "exec", dont_inherit=True), namespace)
        namespace[owner or method] = bound
        _keep_source(_TEST, test["code"])
        exec(compile(test["code"], _TEST, "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 -- every exception is an outcome
        if error is program.failure:
            outcome = {"outcome": "error", "kind": program.failure_type, "error": program.failure_text}
        else:
            kind = "infra" if program.uncarried_argument else "error"
            kind = "wrong" if isinstance(error, AssertionError) else kind
            outcome = {"outcome": kind, "kind": type(error).__name__, "error": _traceback_text(error, _TEST)}
    sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
    try:
        outcome["actual"] = repr(program.last)[:2000]
    except (ValueError, RecursionError):
        outcome["actual"] = f"({type(program.last).__name__} too long to show)"
    write_frame(OUTCOME, outcome)
    return 0


def _keep_source(name: str, source: str) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:  # noqa: BLE001 -- the program's own __str__
        return ""


def _traceback_text(error: BaseException, first_file: str) -> str:
    """The traceback from its first frame in `first_file` on: the grader's own frames are of no interest."""
    position = error.__traceback__
    while position is not None and position.tb_frame.f_code.co_filename != first_file:
        position = position.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, position))
    except BaseException as second:  # noqa: BLE001 -- a __str__ that raises, no memory left, ...
        text = f"{type(error).__name__} (no traceback: {type(second).__name__})\n"
    return text[-8000:]


def _write_all(fd: int, text: str) -> None:
    left = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError:  # The program has closed its standard error: there is nowhere to say it.
        pass

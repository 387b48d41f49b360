"""Custom checkers: Python functions that say whether an answer is right, where several are.

A checker is a function `(test_input, expected, actual) -> bool` of plain values. Of a test on standard input, all three
are texts; of a call, they are `(args, kwargs)`, the expected value and the one that was returned. The config names the
functions that may be used (`grading.checkers`), and a problem one of these names: data alone never chooses code.

Checkers are trusted. They run on the service's side of the sandbox, each worker's in a process of their own
(`python -m mars2_jax.grading.checkers name=module:function ...`), so that one that does not end can be stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mars2_jax.errors import ConfigError
from mars2_jax.grading import system
from mars2_jax.grading.compare import COMPARATORS
from mars2_jax.grading.values import NotCarried, decode, encode, read_frame, write_frame

__all__ = ["CheckerFailed", "Checkers", "main", "parse_checkers"]

_SECONDS = 30.0
"""For one answer, and for the import of all modules."""

_SPEC = re.compile(r"([A-Za-z_][\w.-]*)=([A-Za-z_][\w.]*):([A-Za-z_]\w*)", re.ASCII)


class CheckerFailed(Exception):
    """A checker raised, did not end, or returned something else than a bool: that is no fault of the program's."""


def parse_checkers(specs: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Name -> (module, function) of each "name=module:function".

    Raises:
      ConfigError: one is malformed, takes the name of a built-in comparator, or a name comes twice.
    """
    found: dict[str, tuple[str, str]] = {}
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ConfigError(f"config.grading.checkers has {spec!r}; each must be 'name=module:function'")
        name, module, function = match.groups()
        if name in COMPARATORS:
            raise ConfigError(f"config.grading.checkers has {spec!r}, but {name!r} is built in: choose another name")
        if name in found:
            raise ConfigError(f"config.grading.checkers names {name!r} twice: leave one")
        found[name] = module, function
    return found


class Checkers:
    """A process that answers for one worker. Not for several threads.

    Args:
      specs: "name=module:function" of each checker; modules are found where the service's interpreter finds them.

    Raises:
      ConfigError: from the constructor, where a function cannot be imported.
    """

    def __init__(self, specs: Sequence[str]) -> None:
        self._specs = list(specs)
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mars2_jax.grading.checkers", *self._specs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        hello = self._receive()
        if hello is None:
            self.close()
            raise ConfigError(
                f"config.grading.checkers {self._specs}: the process that imports them ended, or took more than "
                f"{_SECONDS:g} seconds"
            )
        if "refused" in hello:
            self.close()
            raise ConfigError(hello["refused"])

    def close(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process = None

    def __call__(self, name: str, test_input: Any, expected: Any, actual: Any) -> bool:
        """What the checker says.

        Raises:
          CheckerFailed: it says nothing; the message names it and its exception.
        """
        try:
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            write_frame(self._process.stdin.fileno(), [name, *map(encode, (test_input, expected, actual))])
            answer = self._receive()
        except (OSError, ConfigError) as error:
            self.close()
            raise CheckerFailed(f"checker {name!r}: {error}") from error
        if answer is None:
            self.close()
            raise CheckerFailed(f"checker {name!r} ended its process, or took more than {_SECONDS:g} seconds")
        if "raised" in answer:
            raise CheckerFailed(f"checker {name!r} raised {answer['raised']}")
        return bool(answer["same"])

    def _receive(self) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        fd = self._process.stdout.fileno()
        if not select.select([fd], [], [], _SECONDS)[0]:
            return None
        frame = read_frame(fd)
        return frame if isinstance(frame, dict) else None


def _load(specs: Sequence[str]) -> dict[str, Callable[[Any, Any, Any], Any]]:
    found = {}
    for name, (module, function) in parse_checkers(specs).items():
        try:
            found[name] = getattr(importlib.import_module(module), function)
        except Exception as error:
            said = " ".join(str(error).split())
            raise ConfigError(
                f"config.grading.checkers: {name}={module}:{function} cannot be imported "
                f"({type(error).__name__}: {said}): put the module on PYTHONPATH, or correct the name"
            ) from error
        if not callable(found[name]):
            raise ConfigError(f"config.grading.checkers: {name}={module}:{function} is not a function")
    return found


def _answer(checkers: dict[str, Callable[[Any, Any, Any], Any]], request: Any) -> dict[str, Any]:
    name, *values = request
    try:
        said = checkers[name](*map(decode, values))
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- whatever it is, it is told
        return {"raised": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    if not isinstance(said, bool):
        return {"raised": f"nothing, but returned {type(said).__name__} and not bool"}
    return {"same": said}


def main() -> None:
    """Answers frames `[name, input, expected, actual]` with `{"same": bool}` or `{"raised": text}`."""
    system.die_with_parent()
    # What a checker prints must not come among the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        checkers = _load(sys.argv[1:])
    except ConfigError as error:
        write_frame(answers, {"refused": str(error)})
        return
    write_frame(answers, {"ready": True})
    try:
        while (request := read_frame(0)) is not None:
            write_frame(answers, _answer(checkers, request))
    except (BrokenPipeError, NotCarried):
        pass


if __name__ == "__main__":
    main()

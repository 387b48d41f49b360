"""What the commands share: the flags `--config` and `--workdir`, and errors of the user told in one line.

A command is

    _CONFIG = command.define_config()
    _WORKDIR = command.define_workdir()

    def main() -> None:
        config = command.load(_CONFIG)
        ...

    if __name__ == "__main__":
        command.run(main)
"""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, FrozenConfigDict, config_flags

from mars2_jax import validation
from mars2_jax.errors import ConfigError, UserError, in_one_line

__all__ = ["define_config", "define_hosts", "define_step", "define_workdir", "load", "run"]

_OVERRIDE = re.compile(r"--?config\.([^=]*)(=.*)?", re.DOTALL)
_FILE = re.compile(r"--?config=([^:]*)(:.*)?", re.DOTALL)


class _FolderParser(flags.ArgumentParser):
    """`--workdir=~/run` reaches us as it is written: shells expand ~ at the beginning of a word only."""

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)


def define_config() -> flags.FlagHolder[Any]:
    """Defines `--config=FILE[:VARIANT]`, whose values `--config.a.b=VALUE` overrides. To be read by `load`."""
    return config_flags.DEFINE_config_file(
        "config",
        help_string="Config file, such as configs/quickstart.py, or FILE:VARIANT where the file has variants.",
        lock_config=True,
    )


def define_workdir(required: bool = True) -> flags.FlagHolder[str | None]:
    """Defines `--workdir=DIR`, the run's directory."""
    holder: flags.FlagHolder[str | None] = flags.DEFINE(
        _FolderParser(), "workdir", None, "Directory of the run: checkpoints, metrics, trees.", required=required
    )
    flags.register_validator("workdir", lambda value: value is None or value.strip(), message="name a folder")
    return holder


class _StepParser(flags.ArgumentParser):
    def parse(self, argument: str | int) -> str | int:
        if argument == "best":
            return "best"
        if not str(argument).isascii() or not str(argument).isdigit() or int(argument) < 1:
            raise ValueError("give the number of a training step, or best")
        return int(argument)


def define_step() -> flags.FlagHolder[Any]:
    """Defines `--step=N`, or `--step=best`: which checkpoint of the run; None is the newest."""
    return flags.DEFINE(
        _StepParser(),
        "step",
        None,
        "After which training step, or best: by the run's config.training.best_metric. The newest by default.",
    )


def define_hosts() -> dict[str, flags.FlagHolder[Any]]:
    """Defines the flags of several processes that run one command, see `parallel.hosts.Coordinates`. They are no keys
    of the config: they tell of machines, and the same run may go on on others.

    Returns:
      The flags by the name of the attribute that each is for; `distributed` is "auto" or "off".
    """
    return dict(
        distributed=flags.DEFINE_enum(
            "distributed",
            "auto",
            ["auto", "off"],
            "Several processes that train as one: auto joins those of the three flags below, or else of the cluster "
            "that JAX detects (Cloud TPU, SLURM, Open MPI, Kubernetes); off trains in this process alone.",
        ),
        address=flags.DEFINE_string(
            "coordinator_address", None, "host:port at which process 0 listens, the same in all processes."
        ),
        count=flags.DEFINE_integer("num_processes", None, "Number of processes, the same in all."),
        index=flags.DEFINE_integer("process_id", None, "Which of them this is, from 0."),
        timeout=flags.DEFINE_integer(
            "join_timeout", 300, "Seconds to wait until all processes are there.", lower_bound=1
        ),
        patience=flags.DEFINE_integer(
            "lost_after",
            30,
            "Seconds without a sign of life after which a process is taken for gone and the others end.",
            lower_bound=5,
        ),
    )


def load(flag: flags.FlagHolder[Any]) -> FrozenConfigDict:
    """The validated config, which nobody can change any more.

    Raises:
      ConfigError: no config was given, or it is not one that can be honoured.
    """
    config = flag.value
    if config is None:
        raise ConfigError("--config is missing; give a config file, such as --config=configs/quickstart.py")
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"get_config() of the config file must return a ConfigDict, returned {type(config).__name__}")
    validation.validate(config)
    return FrozenConfigDict(config)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Parses the flags and runs a command. What it returns is the exit code; None is 0. A `UserError` becomes one line
    on stderr and its exit code.

    All else that is raised is a defect of the program and keeps its traceback.
    """
    # Orbax logs every detail at INFO, which --verbosity=0 shows; transformers warns that PyTorch is missing.
    logging.set_verbosity(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.unraisablehook = _keep_interrupts
    try:
        app.run(lambda _: main(), flags_parser=_parse)
    except UserError as error:
        print(in_one_line(error), file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        # The shell's convention for a program that was interrupted.
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _keep_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
    """Sends an interrupt again that came where Python cannot raise it: JAX runs code of its own in every garbage
    collection, and a Ctrl-C then would be lost."""
    if unraisable.exc_type is KeyboardInterrupt:
        # A moment later: here it would be dropped, too.
        main = threading.main_thread().ident
        again = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))  # type: ignore[arg-type]
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)


def _parse(argv: Sequence[str]) -> list[str]:
    """Parses like absl, but says what is wrong with `--config...` in the terms of the config."""
    config_file = None
    # Also in the form of two arguments, "--config FILE".
    for argument, following in zip(argv[1:], [*argv[2:], ""], strict=False):
        if override := _OVERRIDE.fullmatch(argument):
            if not re.fullmatch(r"\w+(\.\w+)*", override[1]):
                raise ConfigError(f"{argument!r} is no override: write --config.key.of.the.config=VALUE")
            _check_override(override[1], override[2])
        if file := _FILE.fullmatch(f"{argument}={following}" if argument in ("--config", "-config") else argument):
            if config_file is not None:
                raise ConfigError("--config is given twice: give one config file")
            config_file = Path(file[1])
            if not config_file.is_file():
                raise ConfigError(f"the config file {config_file} does not exist")
    try:
        remaining = flags.FLAGS(argv)
    except Exception as error:
        if (message := _explain(error, config_file)) is None:
            raise
        raise ConfigError(message) from error
    if len(remaining) > 1:
        raise ConfigError(f"unexpected argument {remaining[1]!r}; options are written --name=value")
    return list(remaining)


def _check_override(key: str, value: str | None) -> None:
    """Sees that the key exists and that a tuple is written as one: parsed by the flag, a slip there names no key."""
    default = validation.check_key(key)
    if isinstance(default, tuple) and value is not None:
        try:
            written = ast.literal_eval(value.removeprefix("="))
        except (ValueError, SyntaxError):
            written = None
        if not isinstance(written, tuple | list):
            raise ConfigError(
                f"config.{key} is a tuple of strings: write it as in Python, with a comma also after a single one: "
                f"""--config.{key}='("a",)'"""
            )


def _explain(error: BaseException, config_file: Path | None) -> str | None:
    """What to tell the user about an exception of flag parsing; None where it is no fault of theirs."""
    if config_file is not None and (message := _config_file_error(error, config_file)) is not None:
        return message
    if config_file is not None and isinstance(error, AttributeError) and "get_config" in str(error):
        return f"the config file {config_file} defines no function get_config()"
    if isinstance(error, flags.IllegalFlagValueError):
        if match := re.match(r"flag --config\.([^=]+)=(.*?): ", str(error), re.DOTALL):
            kind = validation.describe_type(validation.check_key(match[1]))
            return f"config.{match[1]} must be {kind}, is {match[2]!r}"
        if match := re.match(r"flag --(\w+)=None: ", str(error)):
            return f"--{match[1]} is missing; give --{match[1]}=..."
    if isinstance(error, flags.UnrecognizedFlagError) and error.flagname.startswith("config."):
        return f"--{error.flagname} needs a config to change; give --config=FILE too"
    if isinstance(error, flags.Error):
        return str(error)
    # Every key was checked to exist; what is left is the name of an agent that this config does not have.
    in_config_dict = traceback.extract_tb(error.__traceback__)[-1].filename.endswith("config_dict.py")
    told = str(error)  # quoted once more where ml_collections adds the nearest name
    if isinstance(error, KeyError | AttributeError) and in_config_dict and (name := re.search(r"'(\w+)\\?'", told)):
        near = re.search(r'Did you mean "(\w+)"', told)
        return f"config.agents.{name[1]} is not an agent of this config" + (
            f"; did you mean {near[1]}?" if near else ""
        )
    return None


def _config_file_error(error: BaseException, config_file: Path) -> str | None:
    """Where in the config file an exception, or what caused it, was raised; None if elsewhere."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TypeError) and "get_config() takes 0 positional arguments" in str(cause):
            return f"{config_file} has no variants: leave out what follows the colon"
        if isinstance(cause, SyntaxError):
            return f"{cause.filename}, line {cause.lineno}: {cause.msg}"
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if Path(frame.filename).resolve() == config_file.resolve():
                return f"{config_file}, line {frame.lineno}: {type(cause).__name__}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return None

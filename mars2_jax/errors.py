"""Errors that a user can act on.

A command prints the message of a `UserError` on one line and exits with its code; every other exception is a defect of
the program and keeps its traceback.
"""

__all__ = [
    "ConfigError",
    "DataError",
    "EndpointError",
    "GraderError",
    "ModelError",
    "PeerError",
    "PlanError",
    "PromptTooLong",
    "SandboxError",
    "StorageError",
    "UserError",
    "in_one_line",
]


class UserError(Exception):
    """Something that the user can put right. The message names the thing and the remedy, on one line.

    Attributes:
      code: exit code of a command that ends with it. 2 says that the same command would fail again.
    """

    code = 2


class ConfigError(UserError):
    """A key or a value of the configuration that this program cannot honour."""


class ModelError(UserError):
    """A checkpoint that is missing, damaged, or of an architecture that is not supported."""


class DataError(UserError):
    """A problem set that is missing or malformed (a problem without tests, a duplicate id, ...)."""


class EndpointError(UserError):
    """A server that cannot be reached, refuses a request, or answers with something else than was asked for."""


class SandboxError(UserError):
    """No sandbox could be set up, and running programs without one was not asked for."""


class GraderError(UserError, RuntimeError):
    """The grading service is gone in the middle of a run, or fails on every program. A new one may work."""

    code = 75  # as of `PeerError`


class StorageError(UserError):
    """A file of the run that cannot be written: the disk is full, or it may not be."""


class PeerError(UserError):
    """Processes of the run that are not there, or gone. Where all are started again, they may be: launchers do so."""

    code = 75  # EX_TEMPFAIL of sysexits.h


class PlanError(UserError):
    """A run that cannot be planned: no TPU compiler, or a topology that does not exist."""


class PromptTooLong(UserError):
    """A prompt that does not fit the engine's cache."""


def in_one_line(error: UserError) -> str:
    """What a command prints of it."""
    return f"error: {' '.join(str(error).split())}"

"""Errors that a user can act on.

A command prints the message of a `UserError` on one line and exits with code 2; every other exception is a
defect of the program and keeps its traceback.
"""

__all__ = [
    "ConfigError",
    "DataError",
    "EndpointError",
    "GraderError",
    "ModelError",
    "PlanError",
    "PromptTooLong",
    "SandboxError",
    "StorageError",
    "UserError",
    "in_one_line",
]


class UserError(Exception):
    """Something that the user can put right. The message names the thing and the remedy, on one line."""


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
    """The grading service is gone in the middle of a run, or fails on every program."""


class StorageError(UserError):
    """A file of the run that cannot be written: the disk is full, or it may not be."""


class PlanError(UserError):
    """A run that cannot be planned: no TPU compiler, or a topology that does not exist."""


class PromptTooLong(UserError):
    """A prompt that does not fit the engine's cache."""


def in_one_line(error: UserError) -> str:
    """What a command prints of it."""
    return f"error: {' '.join(str(error).split())}"

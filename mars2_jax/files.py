"""Writing files that a killed program never leaves half written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mars2_jax.errors import StorageError

__all__ = ["replacing", "storage", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replaces the content of `path` by `text` (UTF-8), creating its directory: readers see the old or the new file.

    The temporary file has a fixed name beside it, so that what a killed program leaves is overwritten by the next
    write.

    Raises:
      StorageError: the disk is full, or the directory cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends; when it fails, `path` stays as it was.

    Raises:
      StorageError: as `write_atomically`.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def storage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Tells an `OSError` inside as a `StorageError` about `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{path} cannot be written ({reason}): free space or rights, then start again") from error

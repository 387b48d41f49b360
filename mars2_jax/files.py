"""Writing files that a killed program never leaves half written."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replaces the content of `path` by `text` (UTF-8), creating its directory: readers see the old or the new file.

    The temporary file has a fixed name beside it, so that what a killed program leaves is overwritten by the next
    write.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

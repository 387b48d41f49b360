"""Which code made a checkpoint."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import jax

import mars2_jax

__all__ = ["code_version"]


def code_version() -> dict[str, str]:
    """Versions of this program and of JAX; of a git checkout the commit, too, with "+" where files differ from it."""
    return {"mars2_jax": mars2_jax.__version__, "commit": _commit(), "jax": jax.__version__}


@functools.cache  # Of the code that this process has loaded, whatever becomes of the checkout.
def _commit() -> str:
    root = Path(mars2_jax.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):  # no git here, or a checkout of another user's
        return ""


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

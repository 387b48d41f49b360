"""Fixtures that several folders of tests use."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Compiles with few optimizations: for tests of logic, which compile for many shapes and compute little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

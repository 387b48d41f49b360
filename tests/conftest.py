"""Fixtures that several folders of tests use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Compiles with few optimizations, in processes that the tests start, too: for tests of logic, which compile for
    many shapes and compute little."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "True"
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    del os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]

import shutil

import pytest

from mars2_jax.grading.grader import Grader


@pytest.fixture(scope="session")
def grader():
    """A grader with two sandboxed workers."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with Grader(workers=2) as grader:
        yield grader

"""setup.py and the locks agree, and the locks would install the same anywhere."""

import ast
import importlib.metadata
import re
import runpy
from pathlib import Path

import pytest
import setuptools

import mars2_jax

REPOSITORY = Path(__file__).resolve().parents[1]
LOCKS = sorted((REPOSITORY / "launch").glob("*.lock"))


def canonical(requirement):
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def pins(lock):
    """Name -> the versions pinned, one for each set of environment markers."""
    result = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\\n]+)", lock.read_text(), re.MULTILINE):
        result.setdefault(canonical(name), []).append(version)
    return result


@pytest.fixture(scope="module")
def metadata():
    """What setup.py hands to setuptools."""
    caught = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", caught.update)
        runpy.run_path(str(REPOSITORY / "setup.py"))
    return caught


def test_version_is_read_without_importing(metadata):
    assert metadata["version"] == mars2_jax.__version__
    imported = {
        alias.name
        for statement in ast.walk(ast.parse((REPOSITORY / "setup.py").read_text()))
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names
    }
    assert not any("mars2_jax" in name for name in imported)


def test_all_packages_are_shipped(metadata):
    folders = {path.parent for path in (REPOSITORY / "mars2_jax").rglob("__init__.py")}
    assert set(metadata["packages"]) == {".".join(folder.relative_to(REPOSITORY).parts) for folder in folders}


def test_what_setup_asks_for_is_in_a_lock(metadata):
    extras = metadata["extras_require"]
    main, parity = pins(REPOSITORY / "launch/requirements.lock"), pins(REPOSITORY / "launch/requirements-parity.lock")
    for requirement in metadata["install_requires"] + extras["quickstart"] + extras["endpoint"] + extras["dev"]:
        assert canonical(requirement) in main, requirement
        if "==" in requirement:
            assert main[canonical(requirement)] == [requirement.partition("==")[2]]
    assert parity["torch"] == [extras["parity"][0].partition("==")[2]]
    assert not main.keys() & parity.keys()


def test_the_tpu_compiler_is_the_one_that_jax_asks_for():
    (asked,) = re.findall(r"^libtpu==([\d.]+)\*", "\n".join(importlib.metadata.requires("jax")), re.MULTILINE)
    assert any(version.startswith(asked) for version in pins(REPOSITORY / "launch/requirements-tpu.lock")["libtpu"])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_locks_pin_everything_and_name_no_place(lock):
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    requirements = [line for line in lines if not line.startswith(" ")]
    assert len(requirements) == sum(len(versions) for versions in pins(lock).values()) > 0
    assert not re.search(r"://|^\s*-|@", "\n".join(requirements))
    if lock.name != "requirements-parity.lock":
        joined = "\n".join(lines).replace("\\\n", " ")
        assert all("--hash=sha256:" in line for line in joined.splitlines())

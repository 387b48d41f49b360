"""What a user sees who makes a mistake: one line, exit code 2."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

COMMAND = """
from mars2_jax import command
from mars2_jax.errors import DataError

_CONFIG = command.define_config()
_WORKDIR = command.define_workdir()

def main():
    config = command.load(_CONFIG)
    if config.data.source == "user":
        raise DataError("two\\nlines")
    if config.data.source == "interrupt":
        import signal
        # Ignored where the tests run in the background of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if config.seed:
            import gc
            # As JAX has one: what a callback of the collector raises, Python drops.
            gc.callbacks.append(lambda phase, info: gc.callbacks.clear() or signal.raise_signal(signal.SIGINT))
            gc.collect()
            import time
            time.sleep(10)
            raise RuntimeError("the interrupt was lost")
        signal.raise_signal(signal.SIGINT)
    if config.data.source == "defect":
        raise RuntimeError("a defect")
    try:
        config.seed = 3
    except AttributeError:
        print("nodes", config.search.nodes, "seed", config.seed, "role", config.agents.coder.role, _WORKDIR.value)

if __name__ == "__main__":
    command.run(main)
"""

CONFIG = """
from mars2_jax.config import agent_config, default_config

def get_config(variant=""):
    config = default_config()
    config.agents.coder = agent_config()
    config.agents.coder.model.path = "model.gguf"
    if variant == "wide":
        config.search.nodes = 60
    if variant == "wrong_type":
        config.search.nodes = "many"
    if variant == "new_key":
        config.search.nods = 3
    if variant == "no_config":
        return 3
    return config
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    (folder / "command.py").write_text(COMMAND)
    (folder / "config.py").write_text(CONFIG)
    (folder / "plain.py").write_text(CONFIG.replace('variant=""', "").replace("variant ==", '"" =='))
    (folder / "no_function.py").write_text("x = 1\n")
    (folder / "broken.py").write_text("def get_config(:\n")
    return folder


def call(files, *arguments, workdir=True):
    arguments = ["--workdir=run", *arguments] if workdir else arguments
    return subprocess.run(
        [sys.executable, "command.py", *arguments],
        cwd=files,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_values_from_file_variant_and_command_line(files):
    done = call(files, "--config=config.py:wide", "--config.seed=7", "--config.agents.coder.role=You code.")
    assert done.stdout == "nodes 60 seed 7 role You code. run\n"
    assert done.returncode == 0
    assert call(files, "--config", "config.py", "--config.search.nodes", "3").stdout.startswith("nodes 3 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=config.py", "--config.serch.nodes=3"], "config.serch does not exist; did you mean config.search?"),
        (
            ["--config=config.py", "--config.search.nods=3"],
            "config.search.nods does not exist; did you mean config.search.nodes?",
        ),
        (["--config=config.py", "--config.search.nodes=1.5"], "config.search.nodes must be a whole number, is '1.5'"),
        (
            ["--config=config.py", "--config.training.evaluate=maybe"],
            "config.training.evaluate must be True or False, is 'maybe'",
        ),
        (["--config=config.py", "--config.search=3"], "config.search must be a group of keys, is '3'"),
        (["--config=config.py", "--config.search.nodes=0"], "config.search.nodes is 0; it must be at least 1"),
        (
            ["--config=config.py", "--config.agents.codr.role=x"],
            "config.agents.codr is not an agent of this config; did you mean coder?",
        ),
        (
            ["--config=config.py", "--config.agents.codr.model.path=x"],
            "config.agents.codr is not an agent of this config; did you mean coder?",
        ),
        (
            ["--config=config.py", "--config.agents.critic.role=x"],
            "config.agents.critic is not an agent of this config",
        ),
        (["--config=config.py", "--cnfig=3"], "Unknown command line flag 'cnfig'. Did you mean: config ?"),
        (["--config=config.py", "extra"], "unexpected argument 'extra'; options are written --name=value"),
        (["--config=config.py", "--config.data.source=user"], "two lines"),
        (["--config=nowhere.py"], "the config file nowhere.py does not exist"),
        (["--config=no_function.py"], "the config file no_function.py defines no function get_config()"),
        (["--config=plain.py:variant"], "plain.py has no variants: leave out what follows the colon"),
        (["--config=config.py", "--config=plain.py"], "--config is given twice"),
        (["--config=config.py", "--config.=3"], "'--config.=3' is no override"),
        (["--config=config.py", "--config.agents.co-der.role=x"], "'--config.agents.co-der.role=x' is no override"),
        (["--config=config.py", "--config.rollout.stop=a,b"], "config.rollout.stop is a tuple of strings: write it"),
        (["--config=config.py", "--workdir="], "flag --workdir=: name a folder"),
        (["--config.search.nodes=3"], "--config.search.nodes needs a config to change; give --config=FILE too"),
        ([], "--config is missing; give a config file, such as --config=configs/quickstart.py"),
        (["--config=broken.py"], "broken.py, line 1: invalid syntax"),
        (["--config=config.py:wrong_type"], "config.py, line 11: TypeError: Could not override field 'nodes'"),
        (["--config=config.py:new_key"], "config.search.nods does not exist; did you mean config.search.nodes?"),
        (["--config=config.py:no_config"], "get_config() of the config file must return a ConfigDict, returned int"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(files, arguments, message):
    done = call(files, *arguments)
    assert done.stderr.startswith(f"error: {message}"), textwrap.shorten(done.stderr, 2000)
    assert done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (2, "")


def test_the_home_folder_in_workdir(files):
    done = call(files, "--config=config.py", "--workdir=~/run", workdir=False)
    assert done.stdout.endswith(f" {Path.home() / 'run'}\n")


def test_missing_workdir(files):
    done = call(files, "--config=config.py", workdir=False)
    assert done.stderr == "error: --workdir is missing; give --workdir=...\n"
    assert done.returncode == 2


def test_an_interrupted_command_says_so_in_one_line(files):
    done = call(files, "--config=config.py", "--config.data.source=interrupt")
    assert (done.stderr, done.returncode) == ("interrupted\n", 130)


def test_an_interrupt_in_the_middle_of_a_garbage_collection_is_not_lost(files):
    done = call(files, "--config=config.py", "--config.data.source=interrupt", "--config.seed=1")
    assert (done.stdout, done.stderr, done.returncode) == ("", "interrupted\n", 130)


def test_a_defect_keeps_its_traceback(files):
    done = call(files, "--config=config.py", "--config.data.source=defect")
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("RuntimeError: a defect\n")
    assert done.returncode == 1


def test_the_shared_module_does_not_import_jax(files):
    code = "import sys, mars2_jax.command; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})

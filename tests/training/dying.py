"""A command that kills itself with SIGKILL at a moment of its work:

    python -m tests.training.dying PHASE STEPS COUNT MODULE [arguments of the command]

It dies at event number COUNT (from 0) of the phase, once it has asked for STEPS checkpoints:

- `search`: a chunk of decoding is under way.
- `grading`: a program is with the grader.
- `update`: an update is under way; the old weights are gone.
- `saving`: a checkpoint is being written: COUNT 0 as soon as the arrays are copied, 1 a moment later, 2 when all is
  written and only the seal is missing.

Outside of `saving`, the checkpoints asked for are on disk by then, so that it is known where the next run goes on. Its
last line is `dying in PHASE`.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from ml_collections import ConfigDict

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Moment(NamedTuple):
    """When to die."""

    phase: str
    steps: int = 0
    count: int = 0


class Death:
    """Waits for its moment."""

    def __init__(self, moment: Moment):
        self.moment = moment
        self.saves = self.events = 0
        self.checkpointer: Any = None

    def come(self) -> None:
        """Dies: buffers, and whatever Python would do at its end, are lost."""
        os.write(1, f"\ndying in {self.moment.phase}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def event(self, phase: str) -> None:
        """Something of a phase has begun."""
        if phase != self.moment.phase or self.saves < self.moment.steps:
            return
        self.events += 1
        if self.events > self.moment.count:
            if self.checkpointer is not None:
                self.checkpointer.wait()
            self.come()

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Makes every call of a function an event."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.event(phase)
            return result

        setattr(owner, name, call)

    def watch_saving(self, checkpointer: Any, seal: Any) -> None:
        """Dies within a save; `seal` is the class whose `finalize` ends it."""
        save, finalize = checkpointer.save, seal.finalize
        here = lambda: self.moment.phase == "saving" and self.saves == self.moment.steps + 1

        def call(this: Any, *args: Any, **kwargs: Any) -> None:
            self.checkpointer = this
            this.wait()  # or the checkpoint before, on a slow machine, would be taken for this one
            self.saves += 1
            save(this, *args, **kwargs)
            if here() and self.moment.count < 2:
                time.sleep(0.02 * self.moment.count)
                self.come()

        def end(this: Any, directory: Any) -> None:
            if here():
                self.come()
            finalize(this, directory)

        checkpointer.save, seal.finalize = call, end


def write_config(config: ConfigDict, path: pathlib.Path) -> pathlib.Path:
    """A config file that a command takes."""
    path.write_text(
        f"from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({config.to_dict()!r})\n"
    )
    return path


def start(module: str, config: pathlib.Path, workdir: pathlib.Path, moment: Moment | None = None, *flags: str) -> str:
    """Runs a command to its end, or to its death at a moment; returns what it printed.

    There is no deadline but the test's own: a loaded machine is no failure.
    """
    how = [module] if moment is None else ["tests.training.dying", *map(str, moment), module]
    done = subprocess.run(
        [sys.executable, "-m", *how, f"--config={config}", f"--workdir={workdir}", *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (0 if moment is None else -signal.SIGKILL), (moment, done.stdout, done.stderr)
    assert moment is None or done.stdout.endswith(f"dying in {moment.phase}\n")
    return done.stdout


def main(arguments: list[str]) -> None:
    """Runs the command of the arguments."""
    # Imported here: the tests that start this have no need of it.
    from mars2_jax.grading.grader import Grader
    from mars2_jax.learning.update import Learner
    from mars2_jax.rollout.engine import Engine
    from mars2_jax.training import sft
    from mars2_jax.training.checkpoint import Checkpointer
    from mars2_jax.training.checkpoint_items import SealHandler

    phase, steps, count, module, *rest = arguments
    death = Death(Moment(phase, int(steps), int(count)))
    watched: list[tuple[Any, str, str]] = [
        (Engine, "dispatch", "search"),
        (Grader, "submit", "grading"),
        (Learner, "update", "update"),
        (sft, "fit", "update"),
    ]
    for owner, name, what in watched:
        death.watch(owner, name, what)
    death.watch_saving(Checkpointer, SealHandler)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])

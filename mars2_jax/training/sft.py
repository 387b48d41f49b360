"""Supervised fine-tuning of agents, one after the other: the cold start before they train together.

Each agent has a folder `<workdir>/<agent>` like that of a training run: config, metrics, checkpoints; and its examples,
as they were when it began. A run is a function of its config and these; a resumed one ends bit-identical.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console

from mars2_jax.config import as_json, write_config
from mars2_jax.errors import ConfigError
from mars2_jax.learning.supervised import PairBatch, fit, make_pair_batch, mean_loss
from mars2_jax.learning.update import Learner, TrainState
from mars2_jax.models.lora import Lora, fresh_adapters
from mars2_jax.parallel.mesh import make_mesh, param_shardings, rows
from mars2_jax.roster import is_served, weight_owner, weight_owners
from mars2_jax.tasks.order import problems_for_step
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.examples import ExampleSets, make_examples
from mars2_jax.training.keys import adapter_key
from mars2_jax.training.metrics import MetricsWriter
from mars2_jax.training.pairs import PairSources, grade_parents
from mars2_jax.training.policy import ModelFile, longest_sample
from mars2_jax.training.provenance import code_version
from mars2_jax.training.resuming import check_code, check_resumable
from mars2_jax.training.setup import check_rows, check_space, claim
from mars2_jax.training.stopping import Stopped, StopRequest, stop_on_sigterm
from mars2_jax.viewer.terminal import Progress, render_summary

__all__ = ["fine_tune"]

_HELD_OUT = "sft/held_out_loss"
_EXAMPLES = "examples.npz"

_READ = (
    "seed",
    "mesh",
    "data",
    "prompts",
    "rollout.max_prompt_tokens",
    "rollout.max_new_tokens",
    "grading.checkers",
    "grading.time_factor",
    "grading.time_floor",
    "learning.micro_batch_size",
    "learning.pack_tokens",
    "learning.remat",
    "learning.scan_unroll",
    "sft.sources",
    "sft.authors",
    "sft.held_out",
    "sft.epochs",
    "sft.batch_size",
    "sft.learning_rate",
    "sft.warmup_updates",
    "sft.schedule",
    "sft.final_learning_rate",
)
"""Keys that a result hangs on, beside those of the agent: a resumed run may not change them."""


def fine_tune(config: FrozenConfigDict, workdir: str, agent: str | None = None, console: Console | None = None) -> None:
    """Fine-tunes agents on the pairs of `config.sft`, or goes on where a run in `workdir` stopped.

    SIGTERM ends it after the update that is under way: the state is saved, and the function returns.

    Args:
      config: a valid config.
      workdir: the run's folder.
      agent: the one to fine-tune; None: one after the other, all that learn.
      console: where to print.

    Raises:
      UserError: something that the user can put right; raised before any work starts.
    """
    console = console or Console()
    names = _chosen(config, agent)
    _check_batch(config)
    _check_offload(config, names)
    root = pathlib.Path(workdir)
    if (root / "checkpoints").exists():
        raise ConfigError(f"--workdir={workdir} holds a training run: choose another")
    pairs = PairSources(config)
    begun = {name for name in names if _has_checkpoint(root / name)}
    made_from = {name: _made_from(config, pairs) for name in names if name not in begun}
    # Of a run that was stopped before the agent's first checkpoint.
    made = {name for name, word in made_from.items() if ExampleSets.made_from(root / name / _EXAMPLES) == word}
    # The grader before anything of JAX: its processes must not be started from one in which JAX's threads run.
    grades = grade_parents(config, pairs, console) if made_from.keys() - made else {}
    mesh = make_mesh(config.mesh)
    check_rows(config, mesh)
    runs = []
    for name in names:
        file = ModelFile(config.agents[name].model, longest_sample(config), mesh, key=f"agents.{name}.model")
        if name in begun | made:
            sets = ExampleSets.load(root / name / _EXAMPLES)
        else:
            sets, line = make_examples(config, name, file.tokenizer, pairs, grades)
            told = "".join(f"; {count} {reason}" for reason, count in sorted(pairs.skipped.items()))
            console.print(line + told, highlight=False, markup=False, soft_wrap=True)
        runs.append(_FineTuning(config, name, file, sets, mesh, root / name, console))
    with stop_on_sigterm() as stop, claim(workdir), jax.set_mesh(mesh), contextlib.ExitStack() as stack:
        for run in runs:
            run.open(stack)
        for run in runs:
            if run.name in made_from.keys() - made:
                run.sets.save(root / run.name / _EXAMPLES, made_from[run.name])
        losses = {}
        try:
            with Progress(len(runs), console=console, unit="agent") as progress:
                for run in runs:
                    losses[run.name] = run(progress, stop)
        except Stopped:
            console.print("stopped on request: the same command goes on", highlight=False)
            return
    if config.sft.held_out:
        console.print("loss on held-out pairs, nats a token", highlight=False)
        console.print(render_summary((name, loss.get("before"), loss.get("after")) for name, loss in losses.items()))
    console.print(
        f"python -m mars2_jax.convert --config=... --workdir={workdir} --agent={names[0]} --out=... writes a model",
        highlight=False,
        soft_wrap=True,
    )


def _chosen(config: FrozenConfigDict, agent: str | None) -> list[str]:
    owners = weight_owners(config.agents)
    if agent is None:
        names = [name for name, owner in owners.items() if owner.trainable]
        if not names:
            raise ConfigError("no agent is trainable: set config.agents.<name>.trainable=True for at least one")
        return names
    if agent not in config.agents:
        raise ConfigError(f"--agent={agent} is not an agent of this config; it has {', '.join(config.agents)}")
    if is_served(config.agents[agent]):
        raise ConfigError(f"--agent={agent} is served by an endpoint: it has no weights to fine-tune")
    if (owner := weight_owner(config.agents, agent)) != agent:
        raise ConfigError(f"--agent={agent} has the weights of {owner!r}: fine-tune --agent={owner}")
    if not config.agents[agent].trainable:
        raise ConfigError(f"--agent={agent} never learns: set config.agents.{agent}.trainable=True")
    return [agent]


def _check_offload(config: FrozenConfigDict, names: list[str]) -> None:
    for name in names:
        if (offload := config.agents[name].optimizer.offload) != "none":
            raise ConfigError(
                f"config.agents.{name}.optimizer.offload is {offload!r}, which fine-tuning does not do: set 'none'"
            )


def _check_batch(config: FrozenConfigDict) -> None:
    if config.sft.batch_size % config.learning.micro_batch_size:
        raise ConfigError(
            f"config.sft.batch_size is {config.sft.batch_size}; it must be a multiple of "
            f"config.learning.micro_batch_size, which is {config.learning.micro_batch_size}"
        )


def _has_checkpoint(folder: pathlib.Path) -> bool:
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())


def _made_from(config: FrozenConfigDict, pairs: PairSources) -> str:
    """Equal where examples would be equal: of equal pairs, under equal configs, by equal code."""
    told = [_only(as_json(config), (*_READ, "agents")), code_version(), pairs.digest]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


class _FineTuning:
    """The run of one agent."""

    def __init__(
        self,
        config: FrozenConfigDict,
        name: str,
        file: ModelFile,
        sets: ExampleSets,
        mesh: Mesh,
        folder: pathlib.Path,
        console: Console,
    ):
        self.name, self.sets = name, sets
        self._config, self._file, self._mesh = config, file, mesh
        self._folder, self._console = folder, console
        self._fingerprint = sets.fingerprint()
        self._longest = longest_sample(config)
        # Every pair is learned `epochs` times and no more: the last batch may be a short one.
        self._total = len(sets.learned) * config.sft.epochs
        self._updates = -(-self._total // config.sft.batch_size)
        self._lora = Lora.from_config(config.agents[name].model.lora)
        self._learner = Learner.create(
            file.abstract(self._lora),
            learning=config.learning,
            optimizer=_optimizer(config, name, self._updates),
            temperature=1.0,
            budget=config.rollout.max_new_tokens,
        )

    def open(self, stack: contextlib.ExitStack) -> None:
        """Opens its checkpoints, which `stack` will close, and sees that the run may go on from the newest."""
        keep, every = self._config.training.keep, self._config.sft.checkpoint_every
        self._checkpointer = stack.enter_context(Checkpointer(self._folder, keep=keep, every=every))
        self._saved: int | None = None
        self._meta: dict[str, Any] = {}
        if (latest := self._checkpointer.latest()) is not None:
            self._saved, self._meta = latest
            self._check_resumable(self._meta)

    def __call__(self, progress: Progress, stop: StopRequest) -> dict[str, float | None]:
        """Makes the updates that are left; returns the held-out losses `before` and `after`. Raises `Stopped`."""
        stop.check()
        if self._saved is not None and self._saved >= self._updates:
            progress.finish_step(f"{self.name} has made its {self._saved} updates")
            return self._meta["losses"]
        self._console.print(f"loading {self._file.path} for {self.name}", highlight=False, soft_wrap=True)
        state, base = self._start()
        if self._saved is not None:
            self._console.print(f"{self.name}: resuming after update {self._saved}", highlight=False)
            state = self._restore(state)
        check_space(self._folder, sum(x.nbytes for x in jax.tree.leaves(state)))
        write_config(self._config, self._folder)
        with MetricsWriter(self._folder, self._saved) as metrics:
            losses = self._train(state, base, metrics, progress, stop)
        self._checkpointer.wait()
        last = losses.get("after")
        progress.finish_step(f"{self.name}, {self._updates} updates" + (f", held-out loss {last:.3f}" if last else ""))
        return losses

    def _restore(self, like: TrainState) -> TrainState:
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        saved = self._checkpointer.restore({self.name: target}, step=self._saved)
        assert saved is not None  # `open` saw it
        return saved.state[self.name]

    def _check_resumable(self, meta: Mapping[str, Any]) -> None:
        parts = (*_READ, f"agents.{self.name}")
        old, new = (_only(config, parts) for config in (meta["config"], as_json(self._config)))
        for line in check_resumable(old, new, self._config.training.may_change, always=()):
            self._console.print(line, highlight=False, soft_wrap=True)
        if meta["examples"] != self._fingerprint:
            raise ConfigError(
                f"{self._folder / _EXAMPLES} is not what the run was started with: choose another --workdir"
            )
        check_code(meta.get("code", {}))

    def _start(self) -> tuple[TrainState, nnx.State | None]:
        """The state before the first update, and the weights under its adapters where there are any."""
        file = self._file
        if self._lora is None:
            return self._learner.init(file.read(jnp.float32)), None
        adapters = nnx.state(file.abstract(self._lora), nnx.LoRAParam)
        key = adapter_key(self._config.seed, self.name)
        fresh = fresh_adapters(adapters, key, param_shardings(self._mesh, adapters))
        return self._learner.init(fresh), file.read(file.dtype)

    def _train(
        self,
        state: TrainState,
        base: nnx.State | None,
        metrics: MetricsWriter,
        progress: Progress,
        stop: StopRequest,
    ) -> dict[str, float | None]:
        config, updates, step = self._config.sft, self._updates, self._saved or 0
        losses: dict[str, float | None] = dict(self._meta.get("losses", {}))
        if not step and len(self.sets.held_out):
            loss = self._measure(state, base)
            metrics.write(0, {_HELD_OUT: loss})
            losses["before"] = _finite(loss)
        progress.phase(f"{self.name}, updates", updates)
        progress.advance(step)
        batch = self._batch(step)
        while step < updates:
            started = time.perf_counter()
            state, computed = fit(self._learner, state, batch, base)
            step += 1
            last = step == updates
            if not last:
                # While the devices work.
                batch = self._batch(step)
            values = {f"sft/{name}": float(value) for name, value in jax.device_get(computed).items()}
            values["time/update_seconds"] = time.perf_counter() - started
            due = last or (config.evaluate_every and step % config.evaluate_every == 0)
            if due and len(self.sets.held_out):
                values[_HELD_OUT] = self._measure(state, base)
                if last:
                    losses["after"] = _finite(values[_HELD_OUT])
            metrics.write(step, values)
            stopping = stop.requested
            if last or stopping or self._checkpointer.due(step):
                meta = {
                    "config": as_json(self._config),
                    "examples": self._fingerprint,
                    "losses": losses,
                    "code": code_version(),
                    "unit": "update",
                }
                self._checkpointer.save(step, {self.name: state}, meta)
            progress.advance(note=f"loss {values['sft/loss']:.3f}")
            if stopping and not last:
                raise Stopped
        return losses

    def _batch(self, step: int) -> PairBatch:
        """That of the update after `step` of them."""
        learning, learned = self._config.learning, self.sets.learned
        size = self._config.sft.batch_size
        order = problems_for_step(len(learned), step, min(size, self._total), seed=self._config.seed)
        chosen = learned.take(order[: self._total - step * size])
        batch = make_pair_batch(
            chosen.prompts,
            chosen.responses,
            micro_batch_size=learning.micro_batch_size,
            longest=self._longest,
            pack_tokens=learning.pack_tokens,
            share_prompts=self._learner.share_prompts,
            room=min(size, self._total),
        )
        if self._mesh.size > 1:
            batch = dataclasses.replace(batch, rows=jax.device_put(batch.rows, rows(self._mesh, leading=1)))
        return batch

    def _measure(self, state: TrainState, base: nnx.State | None) -> float:
        held = self.sets.held_out
        return mean_loss(self._learner, state.params, held.prompts, held.responses, base, longest=self._longest)


def _optimizer(config: FrozenConfigDict, name: str, updates: int) -> ConfigDict:
    """The agent's optimizer at the rate that fine-tuning asks for."""
    sft = config.sft
    if sft.warmup_updates >= updates:
        raise ConfigError(
            f"config.sft.warmup_updates is {sft.warmup_updates}, but agent {name!r} makes {updates} updates: lower it, "
            "or raise config.sft.epochs"
        )
    optimizer = ConfigDict(config.agents[name].optimizer.to_dict())
    optimizer.update(
        learning_rate=sft.learning_rate,
        warmup_updates=sft.warmup_updates,
        schedule=sft.schedule,
        decay_updates=0 if sft.schedule == "constant" else updates - sft.warmup_updates,
        final_learning_rate=sft.final_learning_rate,
    )
    return optimizer


def _only(config: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The part of a config under these keys; what it does not have is left out."""
    part: dict[str, Any] = {}
    for key in keys:
        *groups, last = key.split(".")
        source, target = config, part
        for group in groups:
            source = source.get(group, {})
            target = target.setdefault(group, {})
        if last in source:
            target[last] = source[last]
    return part


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None

"""Training: search, learn, save, and again. A run is a function of its config; a resumed one ends bit-identical."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pathlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import FrozenConfigDict
from rich.console import Console

from mars2_jax.config import as_json, write_config
from mars2_jax.errors import ConfigError, DataError
from mars2_jax.learning.batch import TreeArrays
from mars2_jax.parallel.exchange import agree_on, any_process, leads
from mars2_jax.parallel.hosts import Coordinates, joined
from mars2_jax.rollout.programs import compilations
from mars2_jax.roster import weight_owner
from mars2_jax.search.explore import Suspended
from mars2_jax.tasks.curriculum import Curriculum
from mars2_jax.tasks.iterator import ProblemIterator
from mars2_jax.tasks.problem import Problem
from mars2_jax.training.agent import Agent
from mars2_jax.training.buffer import Buffer, TreeKey
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.evaluation import evaluate, searchable
from mars2_jax.training.metrics import MetricsWriter
from mars2_jax.training.pending import PendingSearch
from mars2_jax.training.provenance import code_version
from mars2_jax.training.records import Node, most_telling, pass_rate, search_metrics, tree_rows, written_by
from mars2_jax.training.resuming import check_code, check_resumable
from mars2_jax.training.searching import SuspendedStep, search_step
from mars2_jax.training.setup import (
    Setup,
    calibrated,
    check_space,
    check_trainable,
    claim,
    eval_problems,
    start_grader,
    train_problems,
)
from mars2_jax.training.stopping import Stopped, StopRequest, stop_on_sigterm
from mars2_jax.training.trees import read_trees, trees_path, write_trees
from mars2_jax.viewer.terminal import Progress, render_summary, render_tree

__all__ = ["Trainer", "train"]


def train(
    config: FrozenConfigDict,
    workdir: str,
    console: Console | None = None,
    coordinates: Coordinates = Coordinates(detect=False),  # noqa: B008 - frozen
) -> bool:
    """Trains a team from its config, or goes on where a run in `workdir` stopped.

    Several processes (`coordinates`) train as one: each searches and grades its share of every step's problems on its
    own devices, the updates run on the devices of all, and process 0 writes the files. What they learn is what one
    process with all the devices learns.

    SIGTERM ends it early and in good order: a search under way is suspended and goes on in the next run, an evaluation
    is given up, an update phase is finished; then the state is saved, and the function returns. Of several processes
    it is enough that one gets it.

    Returns:
      Whether the run is done; False where it was stopped before.

    Raises:
      UserError: something that the user can put right; raised before any work starts.
    """
    console = console or Console()
    check_trainable(config)
    problems = train_problems(config)
    judges = eval_problems(config) if config.training.evaluate else []
    # Not a list: a set that was built may be larger than memory.
    searched = itertools.chain(problems, judges if searchable(config, judges) else [])
    training = config.training
    # The grader first: its processes must not be started from one in which JAX's threads run, and Orbax wakes them.
    with (
        stop_on_sigterm() as stop,
        start_grader(config) as grader,
        joined(coordinates, stop) as hosts,
        claim(workdir) as folder,
        Checkpointer(
            folder,
            keep=training.keep,
            every=training.checkpoint_every,
            keep_best=training.keep_best,
            best_metric=training.best_metric,
        ) as checkpointer,
        hosts.together(),
    ):
        if not leads():
            console = Console(file=open(os.devnull, "w"))  # noqa: SIM115 - as long as the process lives
        agree_on("the config", json.dumps(as_json(config), sort_keys=True))
        agree_on("the code", json.dumps(code_version()))
        pending = PendingSearch(folder)
        if (latest := checkpointer.latest()) is not None:
            step, meta = latest
            changes = check_resumable(meta["config"], as_json(config), training.may_change)
            for line in changes:
                console.print(line, highlight=False, soft_wrap=True)
            check_code(meta.get("code", {}))
            if step > config.training.steps:
                raise ConfigError(
                    f"config.training.steps is {config.training.steps}, but the run in {workdir} has made {step}: "
                    "raise it, or choose another --workdir"
                )
            # A suspended search goes on as it began, and only where the newest checkpoint is the one it began from.
            pending.forget(lambda other: bool(changes) or other != step + 1)
        else:
            pending.forget(lambda _: True)
        setup = Setup.check(config, searched=searched, answered=judges)
        problems = calibrated(config, problems, grader, console)
        judges = calibrated(config, judges, grader, console)
        with jax.set_mesh(setup.mesh):
            done = Trainer(setup, problems, judges, grader, checkpointer, pending, folder, console, stop).run()
    return done


class Trainer:
    """One run. Made by `train`; the pieces it is given are open and checked.

    Metrics `agent/<name>/...` count nodes, tokens and rewards of every member of the team, and `truncated`, the share
    of its responses that the budget cut off. Those with weights have the rest: `tokens_per_second` of all that their
    engine decoded in the step, and, where they learn, losses, updates and the buffer, of nodes by all that play with
    their weights.
    """

    def __init__(
        self,
        setup: Setup,
        problems: Sequence[Problem],
        judges: Sequence[Problem],
        grader: Any,
        checkpointer: Checkpointer,
        pending: PendingSearch,
        workdir: pathlib.Path,
        console: Console,
        stop: StopRequest,
    ):
        self.config, self.mesh = setup.config, setup.mesh
        self.judges, self.grader = judges, grader
        self.checkpointer, self.pending, self.workdir = checkpointer, pending, workdir
        self.console, self.stop = console, stop
        self.problem_iterator = ProblemIterator(
            problems,
            problems_per_step=self.config.data.problems_per_step,
            seed=self.config.seed,
            curriculum=Curriculum.from_config(self.config.data),
        )
        agree_on("the problem set", json.dumps(self.problem_iterator.get_state()))
        self.evaluations: dict[str, dict[str, float]] = {}
        # Metrics of the step just finished, its evaluation included.
        self.values: dict[str, Any] = {}
        # Whether the metric that the best checkpoints go by was ever measured.
        self._best_exists = False
        console.print(f"loading {', '.join(setup.files)}", highlight=False)
        self.team = setup.team()
        self.learners = [agent for agent in self.team if isinstance(agent, Agent) and agent.state is not None]
        # The step of the newest checkpoint, None where there is none, and the last step that was made.
        self.saved = self._restore()
        self.step = self.saved or 0
        self.suspended = pending.of(self.step + 1)

    def run(self) -> bool:
        """Trains to the last step, evaluating before and after, and prints what came of it; ends early on request, and
        then returns False."""
        steps = self.config.training.steps
        if self.step < steps:
            # A finished run is only shown again: that takes no room.
            check_space(self.workdir, sum(x.nbytes for x in jax.tree.leaves([a.checkpoint() for a in self.learners])))
        if leads():
            write_config(self.config, self.workdir)
        if self.saved is not None:
            self.console.print(f"resuming after step {self.step}", highlight=False)
        with (
            MetricsWriter(self.workdir, self.saved) if leads() else contextlib.nullcontext() as metrics,
            Progress(steps, done=self.step, console=self.console) as progress,
        ):
            try:
                self._train(progress, metrics)
                stopped = False
            except Stopped:
                stopped = True
        self.checkpointer.wait()
        self._forget_pending()
        if stopped:
            self.console.print(f"stopped on request after step {self.step}: the same command goes on", highlight=False)
            return False
        if leads():
            self._report()
        return True

    def _train(self, progress: Progress, metrics: MetricsWriter | None) -> None:
        """The steps that are left, and the evaluations around them. Raises `Stopped` on request, all being saved."""
        steps, every = self.config.training.steps, self.config.training.evaluate_every
        if self.judges and not self.step and "before" not in self.evaluations:
            self._evaluate("before", progress, metrics)
            self._check_best_metric()
        while self.step < steps:
            summary = self._train_step(progress, metrics)
            last = self.step == steps
            try:
                if self.judges and (last or (every and self.step % every == 0)):
                    self._evaluate("after" if last else "", progress, metrics)
            except Stopped:
                self._save()
                raise
            # The request may have come to one process, and come to the others while they are here.
            stopping = any_process(self.stop.requested)
            if last or stopping or self.checkpointer.due(self.step):
                self._save()
            self._check_best_metric()
            progress.finish_step(summary)
            if stopping and not last:
                raise Stopped
        if self.judges and "after" not in self.evaluations:
            # A run that was stopped there, or is evaluated in another way than before: the checkpoint stays.
            self._evaluate("after", progress, metrics)

    def _train_step(self, progress: Progress, metrics: MetricsWriter | None) -> str:
        config, step = self.config, self.step + 1
        before = self.problem_iterator.get_state()
        suspended, self.suspended = self.suspended, []
        try:
            found = search_step(
                step,
                config,
                self.team,
                {agent.name: voices for agent, voices in self._voices() if agent.state is not None},
                self.problem_iterator,
                self.grader,
                saved=suspended,
                suspend=lambda: self.stop.requested,
                progress=progress,
            )
        except SuspendedStep as search:
            self.problem_iterator.set_state(before)
            if self.saved != self.step:
                self._save()
            self.pending.keep(step, search.rounds)
            raise Stopped from None
        # A save that failed is told before more work is put on top of it.
        self.checkpointer.check()
        exploration, trees = found.exploration, found.trees
        values = search_metrics(exploration)
        if config.data.dynamic_filtering:
            values |= {"search/trees": len(trees), "search/trees_dropped": found.dropped, "search/rounds": found.rounds}
        values |= self.problem_iterator.observe(found.indices, [pass_rate(tree) for tree in trees.values()])
        started = time.perf_counter()
        used: dict[TreeKey, tuple[np.ndarray, np.ndarray]] = {}
        for index, member in enumerate(self.team):
            written = written_by(exploration, {index}, step)
            prefix = f"agent/{member.name}"
            values |= {f"{prefix}/nodes": len(written), f"{prefix}/tokens": _tokens(written)}
            if written:
                values[f"{prefix}/reward_mean"] = float(np.mean([trees[key].reward[slot] for key, slot, _ in written]))
                values[f"{prefix}/truncated"] = float(np.mean([c.finish == "length" for _, _, c in written]))
        advance = progress.counter("learn", len(self.learners))
        for agent, voices in self._voices():
            prefix = f"agent/{agent.name}"
            if (rate := found.tokens_per_second(voices)) is not None:
                values[f"{prefix}/tokens_per_second"] = rate
            if agent.state is not None:
                masked = agent.remember(found.learned[agent.name], trees)
                if config.learning.overlong_mask:
                    values[f"{prefix}/masked_overlong"] = masked
                update = self._update(agent, voices, trees, used)
                values |= {f"{prefix}/{name}": value for name, value in update.items()}
                values |= {f"{prefix}/updates": int(agent.state.step), f"{prefix}/buffer": len(agent.buffer)}
                advance(self.learners.index(agent) + 1, len(self.learners))
        values["time/update_seconds"] = time.perf_counter() - started
        values["rollout/compilations"] = compilations()
        if metrics is not None:
            write_trees(self.workdir, step, tree_rows(exploration, [a.name for a in self.team], step, used))
            metrics.write(step, values)
        self.step, self.values = step, values
        reward, solved = values.get("search/reward_mean", 0.0), values.get("search/solve_rate", 0.0)
        learned = any(values.get(f"agent/{agent.name}/loss") is not None for agent in self.learners)
        return f"reward {reward:.2f}, solved {solved:.0%} of trees" + ("" if learned else ", no agent learned")

    def _voices(self) -> list[tuple[Agent, set[int]]]:
        """The agents with weights, and the numbers in the forest of those that play with them."""
        owners = [weight_owner(self.config.agents, member.name) for member in self.team]
        return [
            (agent, {index for index, owner in enumerate(owners) if owner == agent.name})
            for agent in self.team
            if isinstance(agent, Agent)
        ]

    def _update(
        self,
        agent: Agent,
        voices: set[int],
        trees: Mapping[TreeKey, TreeArrays],
        used: dict[TreeKey, tuple[np.ndarray, np.ndarray]],
    ) -> dict[str, float]:
        """All updates that the agent's buffer allows; the means of their metrics. Puts into `used` what they took for
        the rewards and advantages of this step's trees: for a node, in the end, the agent that wrote it."""
        collected: dict[str, list[float]] = defaultdict(list)
        dropped = agent.drop_stale()
        while len(agent.buffer) >= self.config.learning.train_batch_size:
            update, keys, advantages = agent.update(self.mesh)
            for i, key in enumerate(keys):
                if key in trees:
                    mine = np.isin(trees[key].agent, list(voices))
                    # The batch may hold trees of more nodes than this step's.
                    new = tuple(np.asarray(x[i])[: len(mine)] for x in (advantages.shaped, advantages.advantage))
                    shaped, advantage = (np.where(mine, a, b) for a, b in zip(new, used.get(key, new), strict=True))
                    used[key] = shaped, advantage
            for name, value in update.items():
                collected[name].append(value)
            dropped += agent.drop_stale()
        if collected:
            agent.hand_over()
        # Of the nodes of this step, not of those that were updated from: counted by the caller.
        for name in ("nodes", "tokens", "reward_mean"):
            collected.pop(name, None)
        values = {name: float(np.mean(v)) for name, v in collected.items()}
        if values.get("skipped"):
            self.console.print(
                f"{agent.name}: gradients of step {self.step + 1} are not finite ({values['skipped']:.0%} of its "
                "updates): they were not used; a lower learning rate may help",
                highlight=False,
                soft_wrap=True,
            )
        if self.config.learning.max_staleness:
            values["dropped_stale"] = float(dropped)
        return values

    def _evaluate(self, when: str, progress: Progress, metrics: MetricsWriter | None) -> None:
        """Scores the team now; `when` is "before" or "after" for what is shown at the end."""
        try:
            suspend = lambda: self.stop.requested
            scores = evaluate(self.config, self.team, self.judges, self.grader, progress, suspend=suspend)
        except Suspended:
            raise Stopped from None
        if when:
            self.evaluations[when] = scores
        if metrics is not None:
            metrics.write(self.step, scores)
        self.values = self.values | scores

    def _check_best_metric(self) -> None:
        """Sees that the metric exists, as soon as one of its kind was measured: an evaluation's, or a step's own."""
        best = self.config.training.best_metric
        measured = [name for name in self.values if name.startswith("eval/") == best.startswith("eval/")]
        self._best_exists |= best in measured
        if best and measured and not self._best_exists and not self._rested(best):
            raise ConfigError(
                f"config.training.best_metric is {best!r}, which step {self.step} did not measure: take one of "
                f"{', '.join(sorted(measured))}"
            )

    def _rested(self, metric: str) -> bool:
        """Whether it is a metric of an agent that wrote nothing in this step, or learned nothing: it may come yet."""
        learners = {agent.name for agent in self.learners}
        for name in (member.name for member in self.team):
            if metric.startswith(f"agent/{name}/"):
                always = {f"agent/{name}/reward_mean"} | ({f"agent/{name}/loss"} if name in learners else set())
                return not always <= self.values.keys()
        return False

    def _save(self) -> None:
        self.checkpointer.wait()
        self._forget_pending()
        host = {
            f"{agent.name}/{name}": array for agent in self.learners for name, array in agent.buffer.to_arrays().items()
        }
        # No agent's name has a dot.
        host |= {f"data.pass_rates/{name}": array for name, array in self.problem_iterator.get_arrays().items()}
        meta = {
            "config": as_json(self.config),
            "evaluations": self.evaluations,
            "problems": self.problem_iterator.get_state(),
            "code": code_version(),
        }
        state = {name: tree for agent in self.learners for name, tree in agent.checkpoint().items()}
        self.checkpointer.save(self.step, state, meta, host, score=self.values.get(self.config.training.best_metric))
        self.saved = self.step

    def _forget_pending(self) -> None:
        """Removes the searches that the newest checkpoint, which is on disk, holds the results of."""
        self.pending.forget(lambda step: self.saved is not None and step <= self.saved)

    def _restore(self) -> int | None:
        """Takes up the newest whole checkpoint; returns its step, None where there is none yet."""
        target = {name: tree for agent in self.learners for name, tree in agent.abstract_checkpoint().items()}
        saved = self.checkpointer.restore(target)
        if saved is None:
            return None
        kept = lambda name: {n.removeprefix(f"{name}/"): a for n, a in saved.host.items() if n.startswith(f"{name}/")}
        for agent in self.learners:
            agent.restore(saved.state)
            if left_out := agent.take_up(Buffer.from_arrays(kept(agent.name))):
                self.console.print(
                    f"{left_out} nodes that wait for {agent.name}'s next update do not fit what changed in the config: "
                    "left out",
                    highlight=False,
                    soft_wrap=True,
                )
        # Checkpoints of earlier versions hold no state of the iterator: it has made a step for each of the run's.
        self.problem_iterator.set_state(saved.meta.get("problems", {"step": saved.step}), kept("data.pass_rates"))
        if saved.meta["config"]["eval"] == as_json(self.config)["eval"]:
            self.evaluations = dict(saved.meta["evaluations"])
        if saved.step < self.config.training.steps:
            self.evaluations.pop("after", None)
        return saved.step

    def _report(self) -> None:
        before, after = self.evaluations.get("before", {}), self.evaluations.get("after", {})
        if after:
            rows = [(name.split("/", 2)[2], before.get(name), after.get(name)) for name in after]
            self.console.print(f"{self.config.eval.source}, {len(self.judges)} held-out problems", highlight=False)
            self.console.print(render_summary(rows))
        best = most_telling(self._trees())
        if best is not None:
            title = f"step {best['step']}, problem {best['problem']}"
            self.console.print(render_tree(best["nodes"], [a.name for a in self.team], title))

    def _trees(self) -> Iterator[Mapping[str, Any]]:
        """The trees in the files of all steps; a file that is gone or damaged is no reason to fail after all work."""
        for step in range(1, self.step + 1):
            path = trees_path(self.workdir, step)
            try:
                yield from read_trees(path) if path.exists() else ()
            except DataError as error:
                logging.getLogger(__name__).warning("showing no tree of step %d: %s", step, error)


def _tokens(written: Sequence[Node]) -> int:
    return sum(len(completion.tokens) for _, _, completion in written)

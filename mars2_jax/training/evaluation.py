"""The evaluation of a team, before and after training or on its own: scores by metric name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Literal

import jax
from ml_collections import FrozenConfigDict
from rich.console import Console
from rich.table import Table

from mars2_jax.config import as_json
from mars2_jax.errors import ConfigError, DataError
from mars2_jax.evaluation.evaluate import evaluate_agent, evaluate_team
from mars2_jax.parallel.exchange import share
from mars2_jax.roster import is_served
from mars2_jax.search.explore import Grader
from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.sources import source_name
from mars2_jax.training.agent import Agent, Member, reset_engines
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.endpoint import EndpointAgent
from mars2_jax.training.keys import evaluation_key
from mars2_jax.training.setup import (
    Setup,
    all_public,
    calibrated,
    eval_problems,
    evaluation_sampling,
    start_grader,
    training_sampling,
)
from mars2_jax.viewer.terminal import Progress

__all__ = ["evaluate", "run_evaluation", "searchable"]


def searchable(config: FrozenConfigDict, problems: Sequence[Problem]) -> bool:
    """Whether a test-time search is asked for and can be guided: all problems have public tests."""
    return config.eval.search_nodes > 0 and all_public(problems)


def evaluate(
    config: FrozenConfigDict,
    team: Sequence[Member],
    problems: Sequence[Problem],
    grader: Grader,
    progress: Progress,
    *,
    suspend: Callable[[], bool] | None = None,
    tell: Callable[[str, float], None] | None = None,
) -> dict[str, float]:
    """Scores of every agent and of the team.

    The key is the same whenever it is called, so that before and after differ by the weights alone.

    Args:
      suspend: asked again and again; when it says True, the evaluation ends with `search.explore.Suspended`.
      tell: called with the name and the score of each agent as soon as it is known: what comes after may fail.

    Returns:
      `eval/<set>/<agent>/pass@1` of each agent, and `eval/<set>/pass@1_mcts` and `eval/<set>/pass@n` of the team's
      search, where it is searchable. The set is the source's name; of a file, without folder and ending.
    """
    key = evaluation_key(config.seed)
    prefix = f"eval/{source_name(config.eval.source)}"
    scores: dict[str, float] = {}

    reset_engines(team)
    names = [f"{prefix}/{member.name}/pass@1" for member in team]
    # Those that are served elsewhere first: a model or an address that is wrong shows at their first request.
    for index, agent in sorted(enumerate(team), key=lambda member: not isinstance(member[1], EndpointAgent)):
        advance = progress.counter(f"evaluate {agent.name}", len(share(len(problems))))
        writer = agent.writer(evaluation_sampling(config), single=True)
        result = evaluate_agent(
            problems,
            writer,
            grader,
            config.search,
            key=jax.random.fold_in(key, index),
            progress=advance,
            suspend=suspend,
        )
        scores[names[index]] = result.values["pass@1"]
        if tell is not None:
            tell(names[index], scores[names[index]])
    scores = {name: scores[name] for name in names}
    if searchable(config, problems):
        nodes = config.eval.search_nodes
        advance = progress.counter("evaluate the team's search", len(share(len(problems))) * nodes)
        writers = [agent.writer(training_sampling(config)) for agent in team]
        result = evaluate_team(
            problems,
            writers,
            grader,
            config.search,
            nodes=nodes,
            key=jax.random.fold_in(key, len(team)),
            progress=advance,
            suspend=suspend,
        )
        scores |= {f"{prefix}/{name}": value for name, value in result.values.items()}
    return scores


def run_evaluation(
    config: FrozenConfigDict,
    workdir: str | None,
    console: Console | None = None,
    *,
    step: int | Literal["best"] | None = None,
) -> dict[str, float]:
    """Evaluates the checkpoint of a run, or the models as they come, and prints the scores.

    Args:
      config: the config; of a run's, only the sections `eval` and those that do not touch training may differ.
      workdir: the run whose checkpoint is evaluated; None evaluates the models that the config names.
      step: the checkpoint of this step, or the "best" by `config.training.best_metric`; None is the newest.

    Raises:
      UserError: something that the user can put right; raised before any work starts.
    """
    console = console or Console()
    if step is not None and workdir is None:
        raise ConfigError(f"--step={step} needs the run's --workdir")
    problems = eval_problems(config)
    if workdir is not None and not os.path.isdir(os.path.join(workdir, "checkpoints")):
        raise DataError(f"no checkpoints in {workdir}: give the workdir of a training run, or none")
    with contextlib.ExitStack() as stack:
        # The grader first, as in training: Orbax wakes JAX.
        grader = stack.enter_context(start_grader(config))
        checkpointer, chosen = None, None
        if workdir is not None:
            best_metric = config.training.best_metric
            checkpointer = stack.enter_context(Checkpointer(workdir, best_metric=best_metric, read_only=True))
            chosen = checkpointer.best() if step == "best" else step
            if step == "best":
                console.print(f"the best checkpoint is that of step {chosen}", highlight=False)
            _check_made_by(config, checkpointer, workdir, chosen)
        searched = problems if searchable(config, problems) else []
        setup = Setup.check(config, searched=searched, answered=problems, learn=False)
        problems = calibrated(config, problems, grader, console)
        if setup.files:
            console.print(f"loading {', '.join(setup.files)}", highlight=False)
        stack.enter_context(jax.set_mesh(setup.mesh))
        team = setup.team(learn=False)
        for member in team:
            if isinstance(member, EndpointAgent):
                stack.enter_context(member)
        made = _load_checkpoint(team, checkpointer, chosen) if checkpointer is not None else 0
        with Progress(1, console=console) as progress:
            scores = evaluate(
                config,
                team,
                problems,
                grader,
                progress,
                tell=lambda name, score: console.print(f"{_short(name)}: {score:.3f}", highlight=False),
            )
    for member in team:
        if isinstance(member, EndpointAgent):
            console.print(f"{member.name}: {member.endpoint.usage()}", highlight=False)
    if config.eval.search_nodes and not searchable(config, problems):
        console.print("no Pass@1(MCTS): these problems have no public tests to guide a search", highlight=False)
    console.print(f"{config.eval.source}, {len(problems)} problems, after {made} training steps", highlight=False)
    table = Table("")
    table.add_column("score", justify="right")
    for name, value in scores.items():
        table.add_row(_short(name), f"{value:.3f}")
    console.print(table)
    return scores


def _short(name: str) -> str:
    """A score's name without `eval` and the problem set."""
    return name.split("/", 2)[2]


def _check_made_by(config: FrozenConfigDict, checkpointer: Checkpointer, workdir: str, step: int | None) -> None:
    """Sees that the run's checkpoint of a step, or the newest, holds the agents that the config names. Those that are
    served elsewhere need not have been there: a trained team may be tried with them."""
    latest = checkpointer.latest(step)
    if latest is None:
        raise DataError(f"no checkpoint in {workdir} yet: wait for the first training step to end")
    _, meta = latest
    for name, agent in as_json(config)["agents"].items():
        if is_served(config.agents[name]):
            continue
        for part in ("model", "share_weights_with", "role", "enable_thinking", "trainable"):
            if meta["config"]["agents"].get(name, {}).get(part) != agent[part]:
                raise ConfigError(
                    f"config.agents.{name}.{part} differs from that of the run in {workdir}: evaluate a checkpoint "
                    "with the config that made it"
                )


def _load_checkpoint(team: Sequence[Member], checkpointer: Checkpointer, step: int | None = None) -> int:
    learners = [agent for agent in team if isinstance(agent, Agent) and agent.config.trainable]
    # The weights alone: optimizer states are twice their size, and nothing learns here.
    if not learners:  # nothing of it is needed, and Orbax reads no empty tree
        latest = checkpointer.latest(step)
        assert latest is not None  # likewise
        return latest[0]
    target = {a.name: {"params": a.abstract_state().params} for a in learners}
    saved = checkpointer.restore(target, step=step, partial=True)
    assert saved is not None  # `_check_made_by` saw it
    for agent in learners:
        agent.set_params(saved.state[agent.name]["params"])
    return saved.step

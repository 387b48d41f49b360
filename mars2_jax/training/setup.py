"""Everything that a run needs and that can fail early, checked before anything slow or costly begins."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence

from jax.sharding import Mesh
from ml_collections import FrozenConfigDict
from rich.console import Console
from rich.progress import Progress as Bars

from mars2_jax.errors import ConfigError, DataError, StorageError
from mars2_jax.grading.calibrate import calibrate, with_cpu_limit
from mars2_jax.grading.grader import Grader, check_comparators
from mars2_jax.learning.optimizer import HOST_MEMORY
from mars2_jax.parallel.exchange import leads
from mars2_jax.parallel.hosts import check_shared
from mars2_jax.parallel.mesh import make_mesh, platform, row_shards
from mars2_jax.rollout.endpoint import check_endpoint
from mars2_jax.rollout.types import SamplingParams
from mars2_jax.roster import is_served, weight_owner, weight_owners
from mars2_jax.tasks.prepared import PreparedProblems
from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.sources import load
from mars2_jax.training.agent import Member, build_team, make_prompter
from mars2_jax.training.policy import ModelFile, open_models

__all__ = [
    "Setup",
    "all_public",
    "calibrated",
    "check_rows",
    "check_space",
    "check_trainable",
    "claim",
    "eval_problems",
    "evaluation_sampling",
    "load_problems",
    "start_grader",
    "train_problems",
    "training_sampling",
]

_COLDEST = 1e-3
"""Lowest temperature of training."""


def train_problems(config: FrozenConfigDict) -> Sequence[Problem]:
    """The training problems.

    Raises:
      DataError: none are left, one has no public tests where those alone pay, or one asks for an unknown comparator.
    """
    problems = load_problems(config.data)
    check_comparators(problems, config.grading.checkers)
    if config.grading.reward_tests == "public" and not all_public(problems):
        for problem in problems:
            if not problem.public:
                raise DataError(
                    f"problem {problem.id!r} has no public tests, which config.grading.reward_tests='public' pays for: "
                    "set it to 'all'"
                )
    return problems


def eval_problems(config: FrozenConfigDict) -> Sequence[Problem]:
    """The problems that judge.

    Raises:
      DataError: none are left, or one asks for an unknown comparator.
    """
    problems = load_problems(config.eval)
    check_comparators(problems, config.grading.checkers)
    return problems


def all_public(problems: Sequence[Problem]) -> bool:
    """Whether every problem has public tests. Of a set that was built, none is read for it."""
    if isinstance(problems, PreparedProblems):
        return problems.all_public
    return all(problem.public for problem in problems)


def load_problems(section: FrozenConfigDict) -> Sequence[Problem]:
    """The problems that a section of the config, `data` or `eval`, chooses. Raises DataError."""
    return load(
        section.source,
        section.split,
        difficulty=section.difficulty,
        limit=section.limit,
        date_from=section.date_from,
        date_to=section.date_to,
        public_tests=section.public_tests,
    )


def start_grader(config: FrozenConfigDict) -> Grader:
    """The grading service; raises SandboxError where programs cannot be run safely, ConfigError where a checker cannot
    be imported."""
    grading = config.grading
    return Grader(grading.isolation, grading.workers, checkers=grading.checkers, cache=grading.cache)


def calibrated(
    config: FrozenConfigDict, problems: Sequence[Problem], grader: Grader, console: Console
) -> Sequence[Problem]:
    """The problems with the CPU limits that `config.grading.time_factor` asks for; prints what came of it."""
    grading = config.grading
    if not grading.time_factor or not problems:
        return problems
    with Bars(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("timing the reference solutions", total=len(problems))
        advance = lambda done, total: bars.update(bar, completed=done, total=total)
        found = calibrate(problems, grader, factor=grading.time_factor, floor=grading.time_floor, progress=advance)
    console.print(found.report(), highlight=False, markup=False)
    if isinstance(problems, PreparedProblems):
        return problems.with_cpu_limits(found.cpu_seconds)
    return [with_cpu_limit(problem, found.cpu_seconds.get(problem.id)) for problem in problems]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Models and mesh of a run. Made by `check`, which is cheap; `team` then loads the weights."""

    config: FrozenConfigDict
    files: dict[str, ModelFile]
    mesh: Mesh

    @classmethod
    def check(
        cls,
        config: FrozenConfigDict,
        *,
        searched: Iterable[Problem] = (),
        answered: Iterable[Problem] = (),
        learn: bool = True,
    ) -> Setup:
        """Opens the models, sees that every problem fits every agent's prompt, and that every endpoint answers.

        Args:
          config: the run's config.
          searched: problems that trees are grown for.
          answered: problems of an evaluation's single answers.
          learn: whether agents will be updated.

        Raises:
          ModelError, ConfigError, PromptTooLong, EndpointError: what is wrong, by name.
        """
        mesh = make_mesh(config.mesh)
        if learn:
            check_rows(config, mesh)
            check_offload(config, mesh)
        files = open_models(config, mesh)
        for name, agent in config.agents.items():
            if is_served(agent):
                check_endpoint(name, agent.endpoint)
        for problems, single in ((searched, False), (answered, True)):
            prompters = [
                make_prompter(
                    name,
                    config,
                    files[config.agents[weight_owner(config.agents, name)].model.path].tokenizer,
                    single=single,
                )
                for name, agent in config.agents.items()
                if not is_served(agent)
            ]
            # Each problem once for all: of a set that was built, it is read and decoded.
            for problem in problems:
                for prompter in prompters:
                    prompter.attempt(problem)
        return cls(config, files, mesh)

    def team(self, *, learn: bool = True) -> list[Member]:
        """Loads the weights; see `build_team`."""
        return build_team(self.config, self.files, learn=learn)


def check_rows(config: FrozenConfigDict, mesh: Mesh) -> None:
    """Whether the rows of a micro-batch can be split over the mesh.

    Raises:
      ConfigError: names the key.
    """
    shards = row_shards(mesh)
    if config.learning.micro_batch_size % shards:
        raise ConfigError(
            f"config.learning.micro_batch_size is {config.learning.micro_batch_size}; it must be a multiple of "
            f"the mesh's data x fsdp = {shards}"
        )


def check_offload(config: FrozenConfigDict, mesh: Mesh) -> None:
    """Whether what is to lie in host memory can lie there.

    Raises:
      ConfigError: names the key.
    """
    memories = {memory.kind for memory in mesh.local_devices[0].addressable_memories()}
    for name, agent in weight_owners(config.agents).items():
        if agent.optimizer.offload != "none" and HOST_MEMORY not in memories:
            raise ConfigError(
                f"config.agents.{name}.optimizer.offload is {agent.optimizer.offload!r}, but {platform(mesh)} devices "
                f"here have no {HOST_MEMORY} memory (they have {', '.join(sorted(memories))}): set it to 'none'"
            )


def training_sampling(config: FrozenConfigDict) -> SamplingParams:
    """How responses are drawn in training and in test-time search."""
    r = config.rollout
    return SamplingParams(r.temperature, r.top_k, r.top_p, r.min_p, r.max_new_tokens, tuple(r.stop))


def evaluation_sampling(config: FrozenConfigDict) -> SamplingParams:
    """How the single answers behind Pass@1 are drawn: at the evaluation's temperature, unfiltered."""
    budget = config.eval.max_new_tokens or config.rollout.max_new_tokens
    return SamplingParams(temperature=config.eval.temperature, max_new_tokens=budget, stop=tuple(config.rollout.stop))


def check_trainable(config: FrozenConfigDict) -> None:
    """What training asks of a config and evaluation does not.

    Raises:
      ConfigError: names the key.
    """
    for name, agent in config.agents.items():
        if is_served(agent):
            raise ConfigError(
                f"agent {name!r} is not trainable: config.agents.{name}.endpoint.base_url says that it is served "
                "elsewhere; leave it out of training, it can be evaluated"
            )
    if not any(agent.trainable for agent in weight_owners(config.agents).values()):
        raise ConfigError("no agent is trainable: set config.agents.<name>.trainable=True for at least one")
    rollout = config.rollout
    if rollout.temperature == 0:
        raise ConfigError("config.rollout.temperature is 0; training needs it above 0: greedy text has no ratio")
    if rollout.temperature < _COLDEST:
        raise ConfigError(
            f"config.rollout.temperature is {rollout.temperature}; training needs at least {_COLDEST}: the update "
            "divides by it, and text that is as good as greedy has no ratio"
        )
    if rollout.top_k or rollout.top_p < 1 or rollout.min_p:
        raise ConfigError(
            "config.rollout.top_k, top_p and min_p must be off (0, 1, 0) in training: the update takes probabilities "
            "of the unfiltered model, and the ratio to filtered ones would be wrong"
        )


def check_space(workdir: pathlib.Path, size: int) -> None:
    """Sees that the disk has room for one more checkpoint of `size` bytes.

    Raises:
      StorageError: it has not.
    """
    free = shutil.disk_usage(workdir).free
    if free < size:
        raise StorageError(
            f"{workdir} has {free / 1e9:.1f} GB free and a checkpoint takes {size / 1e9:.1f} GB: free space, or choose "
            "another --workdir"
        )


@contextlib.contextmanager
def claim(workdir: str) -> Iterator[pathlib.Path]:
    """Makes a run's folder and holds it, so that no second run writes to it at the same time.

    Of several processes the first does so; the others see that it is theirs, too.

    Raises:
      ConfigError: the folder cannot be made, written or locked, another run holds it, or it is not shared.
    """
    path = pathlib.Path(workdir)
    if not leads():
        check_shared(path)
        yield path
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = open(path / ".lock", "w")  # noqa: SIM115 - held open as long as the run lives
    except OSError as e:
        raise ConfigError(f"--workdir={workdir} cannot be written ({e.strerror}): choose another folder") from e
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(f"another run is at work in --workdir={workdir}: wait for it or choose another") from e
        except OSError as e:
            raise ConfigError(
                f"--workdir={workdir} cannot be locked ({e.strerror}), and two runs would overwrite each other: mount "
                "its file system with locks (Lustre: -o flock; NFS: with lockd), or choose another folder"
            ) from e
        check_shared(path)
        yield path

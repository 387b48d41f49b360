"""Everything that a run needs and that can fail early, checked before anything slow or costly begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from mars2_jax.errors import ConfigError, DataError
from mars2_jax.grading.grader import Grader
from mars2_jax.parallel.mesh import make_mesh
from mars2_jax.rollout.types import SamplingParams
from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.sources import load
from mars2_jax.training.agent import Agent, ModelFile, build_team, make_prompter, open_models

__all__ = ["Setup", "eval_problems", "evaluation_sampling", "start_grader", "train_problems", "training_sampling"]


def train_problems(config: FrozenConfigDict) -> list[Problem]:
    """The training problems.

    Raises:
      DataError: none are left, or one has no public tests where those alone pay.
    """
    data = config.data
    problems = load(data.source, data.split, difficulty=data.difficulty, limit=data.limit)
    if config.grading.reward_tests == "public":
        for problem in problems:
            if not problem.public:
                raise DataError(
                    f"problem {problem.id!r} has no public tests, which config.grading.reward_tests='public' pays for: "
                    "set it to 'all'"
                )
    return problems


def eval_problems(config: FrozenConfigDict) -> list[Problem]:
    """The problems that judge."""
    data = config.eval
    return load(data.source, data.split, difficulty=data.difficulty, limit=data.limit)


def start_grader(config: FrozenConfigDict) -> Grader:
    """The grading service; raises SandboxError where programs cannot be run safely."""
    return Grader(isolation=config.grading.isolation, workers=config.grading.workers)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Models and mesh of a run. Made by `check`, which is cheap; `team` then loads the weights."""

    config: FrozenConfigDict
    files: dict[str, ModelFile]
    mesh: Mesh

    @classmethod
    def check(cls, config: FrozenConfigDict, problems: Sequence[Problem]) -> Setup:
        """Opens the models and sees that every problem fits every agent's prompt.

        Raises:
          ModelError, ConfigError, PromptTooLong: what is wrong, by name.
        """
        files = open_models(config)
        mesh = make_mesh(config.mesh)
        row_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        if config.learning.micro_batch_size % row_shards:
            raise ConfigError(
                f"config.learning.micro_batch_size is {config.learning.micro_batch_size}; it must be a multiple of "
                f"the mesh's data x fsdp = {row_shards}"
            )
        for name, agent in config.agents.items():
            prompter = make_prompter(name, config, files[agent.model.path].tokenizer)
            for problem in problems:
                prompter.attempt(problem)
        return cls(config, files, mesh)

    def team(self, *, learn: bool = True) -> list[Agent]:
        """Loads the weights; see `build_team`."""
        return build_team(self.config, self.files, self.mesh, learn=learn)


def training_sampling(config: FrozenConfigDict) -> SamplingParams:
    """How responses are drawn in training and in test-time search."""
    r = config.rollout
    return SamplingParams(r.temperature, r.top_k, r.top_p, r.min_p, r.max_new_tokens, tuple(r.stop))


def evaluation_sampling(config: FrozenConfigDict) -> SamplingParams:
    """How the single answers behind Pass@1 are drawn: at the evaluation's temperature, unfiltered."""
    rollout = config.rollout
    return SamplingParams(
        temperature=config.eval.temperature, max_new_tokens=rollout.max_new_tokens, stop=tuple(rollout.stop)
    )

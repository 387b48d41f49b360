"""The pairs that `config.sft.sources` names, and what the grader says of the programs that they refine."""

from __future__ import annotations

import collections
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import FrozenConfigDict
from rich.console import Console

from mars2_jax.errors import DataError
from mars2_jax.grading.grader import check_comparators
from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.tasks.pairs import Pair, record_pairs, reference_pairs
from mars2_jax.tasks.prepared import PreparedProblems
from mars2_jax.tasks.problem import Problem
from mars2_jax.training.setup import calibrated, load_problems, start_grader
from mars2_jax.training.trees import read_trees

__all__ = ["Grades", "PairSources", "grade_parents", "tree_pairs"]

Grades = Mapping[tuple[str, str], Grade]
"""What the grader says, by problem and program."""

_AT_A_TIME = 64
"""Programs that are with the grader."""


class PairSources:
    """All pairs, read anew whenever they are iterated over: no more than one is in memory.

    Args:
      config: the run's config.

    Attributes:
      skipped: why pairs were left out, and how many, of the newest iteration that came to its end.
    """

    def __init__(self, config: FrozenConfigDict):
        self._config = config
        self.skipped: collections.Counter[str] = collections.Counter()

    def __iter__(self) -> Iterator[Pair]:
        """Raises DataError for what cannot be read."""
        skipped: collections.Counter[str] = collections.Counter()
        skip = lambda reason: skipped.update([reason])
        for source in self._config.sft.sources:
            kind, _, path = source.partition(":")
            if kind == "references":
                yield from reference_pairs(self._problems, skip)
            elif kind == "pairs":
                yield from record_pairs(path, self.find)
            else:
                yield from tree_pairs(path, self.find, skip, by_author=self._config.sft.authors == "itself")
        self.skipped = skipped

    @functools.cached_property
    def refined(self) -> Mapping[tuple[str, str], Problem]:
        """The programs that pairs refine and the grader can say something of, by problem and program."""
        return self._survey[1]

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal pairs about equal problems."""
        return self._survey[0]

    @functools.cached_property
    def _survey(self) -> tuple[str, dict[tuple[str, str], Problem]]:
        digest, refined = hashlib.sha256(), {}
        for pair in self:
            # By value: what is pickled also tells which parts are one object.
            digest.update(repr(pair).encode(errors="surrogatepass"))
            if pair.problem is not None and pair.problem.public and (pair.parent or "").strip():
                refined[pair.problem.id, pair.parent or ""] = pair.problem
        return digest.hexdigest(), refined

    def find(self, name: str) -> Problem | None:
        """The problem of `config.data` with this id; None where there is none."""
        place = self._places.get(name)
        return None if place is None else self._problems[place]

    @functools.cached_property
    def _problems(self) -> Sequence[Problem]:
        return load_problems(self._config.data)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        problems = self._problems
        names = problems.ids if isinstance(problems, PreparedProblems) else [problem.id for problem in problems]
        return {name: place for place, name in enumerate(names)}


def tree_pairs(
    path: str, find: Callable[[str], Problem | None], skip: Callable[[str], None], *, by_author: bool = False
) -> Iterator[Pair]:
    """The answers of a run that passed all tests: at the root first attempts, elsewhere refinements of their parents.

    Args:
      path: the run's workdir, or one file of its trees.
      find: the problem of an id; None where there is none.
      skip: is told of an answer that an earlier node gave to the same question.
      by_author: only of one that the same agent gave.

    Raises:
      DataError: names file, line and what is wrong.
    """
    root = pathlib.Path(path).expanduser()
    files = [root] if root.is_file() else sorted((root / "trees").glob("step_*.jsonl"))
    if not files:
        raise DataError(f"no trees in {root}: give the workdir of a training run, or a file trees/step_*.jsonl")
    known: set[tuple[str, str | None, str, str]] = set()
    for file in files:
        for number, tree in enumerate(read_trees(file), start=1):
            place = f"{file}:{number}"
            problem = find(tree["problem"])
            if problem is None:
                raise DataError(
                    f"{place}: problem {tree['problem']!r} is not in config.data: set it to the problems of that run"
                )
            for pair in _passing(tree, problem, place):
                answer = (problem.id, pair.parent, pair.response, pair.author if by_author else "")
                if answer in known:
                    skip("answers that stood in the trees before")
                else:
                    known.add(answer)
                    yield pair


def _passing(tree: Mapping[str, Any], problem: Problem, place: str) -> Iterator[Pair]:
    programs: dict[int, str | None] = {0: None}
    for node in tree["nodes"]:
        if node["parent"] not in programs:
            raise DataError(f"{place}: node {node['slot']} stands before its parent: it is no file that a run wrote")
        programs[node["slot"]] = node["program"]
        if node["verdict"] == Verdict.PASS.value:
            where = f"{place}, node {node['slot']}"
            yield Pair(where, node["response"], problem, programs[node["parent"]], author=node["agent"])


def grade_parents(config: FrozenConfigDict, pairs: PairSources, console: Console) -> Grades:
    """What the grader says of every program that a pair refines, on the public tests, under the limits of training.

    The grader is started where there is such a program.

    Raises:
      DataError, SandboxError, ConfigError: what cannot be read, or not be run.
    """
    if not pairs.refined:
        return {}
    named = {problem.id: problem for problem in pairs.refined.values()}
    check_comparators(named.values(), config.grading.checkers)
    grades: dict[tuple[str, str], Grade] = {}
    running: collections.deque[tuple[tuple[str, str], int]] = collections.deque()
    with start_grader(config) as grader:
        problems = {p.id: p for p in calibrated(config, list(named.values()), grader, console)}

        def take() -> None:
            key, ticket = running.popleft()
            grades[key] = grader.wait(ticket)

        for key in pairs.refined:
            name, program = key
            running.append((key, grader.submit(program, problems[name], tests="public")))
            if len(running) == _AT_A_TIME:
                take()
        while running:
            take()
    return grades

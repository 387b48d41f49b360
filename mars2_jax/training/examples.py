"""Pairs as an agent reads them: tokens of its prompt, tokens of the answer; some of them held out."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import pathlib
import zipfile
from collections.abc import Iterable, Sequence

import numpy as np
from ml_collections import FrozenConfigDict

from mars2_jax.errors import ConfigError, DataError, PromptTooLong
from mars2_jax.files import replacing
from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.models.tokenizer import ChatTokenizer
from mars2_jax.search.writer import Attempt, Draft
from mars2_jax.tasks.pairs import Pair
from mars2_jax.training.agent import make_prompter
from mars2_jax.training.pairs import Grades

__all__ = ["ExampleSets", "Examples", "make_examples"]


@dataclasses.dataclass(frozen=True)
class Examples:
    """Token ids, one entry for each pair.

    Attributes:
      prompts: int32[P] each.
      responses: int32[R] each, with the token that ends a turn.
    """

    prompts: Sequence[np.ndarray] = ()
    responses: Sequence[np.ndarray] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, indices: Iterable[int]) -> Examples:
        """Those of these numbers, in their order."""
        indices = list(indices)
        return Examples([self.prompts[i] for i in indices], [self.responses[i] for i in indices])

    @property
    def tokens(self) -> int:
        """Of all responses."""
        return sum(map(len, self.responses))


@dataclasses.dataclass(frozen=True)
class ExampleSets:
    """What an agent learns from, and what it is measured by."""

    learned: Examples
    held_out: Examples

    def fingerprint(self) -> str:
        """Equal for equal sets."""
        digest = hashlib.sha256()
        for array in self._arrays().values():
            digest.update(np.int64(array.size).tobytes() + array.tobytes())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str], made_from: str = "") -> None:
        """Writes both to a file, all or nothing, with a word for what they were made from. Raises StorageError."""
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, made_from=np.asarray(made_from), **self._arrays())

    @staticmethod
    def made_from(path: str | os.PathLike[str]) -> str:
        """The word that `save` was given; "" where there is none, or no such file that can be read."""
        try:
            with np.load(pathlib.Path(path), allow_pickle=False) as arrays:
                return str(arrays["made_from"])
        except _UNREADABLE:
            return ""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ExampleSets:
        """Those that `save` wrote. Raises DataError where the file is missing or damaged."""
        try:
            with np.load(pathlib.Path(path), allow_pickle=False) as arrays:
                parts = {name: arrays[name] for name in arrays.files}
            sets = [Examples(*(_split(parts, f"{name}/{part}") for part in _PARTS)) for name in _SETS]
        except _UNREADABLE as error:
            raise DataError(f"{path} cannot be read ({error}): start the run over in another --workdir") from error
        return cls(*sets)

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {}
        for name in _SETS:
            for part in _PARTS:
                ragged = getattr(getattr(self, name), part)
                arrays[f"{name}/{part}"] = np.concatenate([*ragged, np.zeros(0, np.int32)]).astype(np.int32)
                arrays[f"{name}/{part}/lengths"] = np.asarray([len(x) for x in ragged], np.int64)
        return arrays


_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
_SETS, _PARTS = ("learned", "held_out"), ("prompts", "responses")


def _split(arrays: dict[str, np.ndarray], name: str) -> list[np.ndarray]:
    lengths = arrays[f"{name}/lengths"]
    return np.split(arrays[name], np.cumsum(lengths)[:-1]) if len(lengths) else []


def make_examples(
    config: FrozenConfigDict, agent: str, tokenizer: ChatTokenizer, pairs: Iterable[Pair], grades: Grades
) -> tuple[ExampleSets, str]:
    """The examples of all pairs for the weights of an agent, in the order of the pairs.

    Prompts are those that it would get in training: `training.writer.Prompter` makes them. Where other agents play with
    its weights, a pair about a problem is there under the role of each.

    Args:
      config: the run's config.
      agent: name of an agent with weights of its own.
      tokenizer: its model's.
      pairs: what to learn.
      grades: of the programs that pairs refine.

    Returns:
      The sets, and a line about them for a person.

    Raises:
      DataError: nothing is left to learn from, or an answer holds a token that ends a turn.
      ConfigError: nothing can be held out.
    """
    maker = _Maker(config, agent, tokenizer, grades)
    prompts, responses, subjects = [], [], []
    refinements = 0
    for pair in pairs:
        for prompt, response in maker.examples(pair):
            prompts.append(prompt)
            responses.append(response)
            subjects.append(pair.subject)
            refinements += pair.parent is not None
    left_out = "".join(f"; left out: {count} {reason}" for reason, count in sorted(maker.left_out.items()))
    if not prompts:
        raise DataError(f"config.sft.sources hold nothing that agent {agent!r} could learn from{left_out}")
    every, held = Examples(prompts, responses), _held_out(subjects, config)
    sets = ExampleSets(
        every.take(i for i, name in enumerate(subjects) if name not in held),
        every.take(i for i, name in enumerate(subjects) if name in held),
    )
    line = (
        f"{agent}: {len(sets.learned)} pairs of {sets.learned.tokens} tokens to learn, {len(sets.held_out)} held out, "
        f"{refinements} of all are refinements{left_out}"
    )
    return sets, line


class _Maker:
    def __init__(self, config: FrozenConfigDict, agent: str, tokenizer: ChatTokenizer, grades: Grades):
        agents = config.agents
        self._voices = [name for name in agents if name == agent or agents[name].share_weights_with == agent]
        self._prompters = {name: make_prompter(name, config, tokenizer) for name in self._voices}
        thinking = agents[agent].enable_thinking
        self._chat = tokenizer.with_thinking(thinking, f"agents.{agent}.enable_thinking")
        self._role, self._own = agents[agent].role, config.sft.authors == "itself"
        self._tokenizer, self._end, self._grades = tokenizer, tokenizer.end_of_turn(), grades
        self._longest = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
        self.left_out: collections.Counter[str] = collections.Counter()

    def examples(self, pair: Pair) -> list[tuple[np.ndarray, np.ndarray]]:
        """Prompts and the response; none where the pair is left out."""
        longest_prompt, longest_response = self._longest
        answer = self._tokenizer.encode(pair.response)
        if any(int(token) in self._tokenizer.stop_ids for token in answer):
            if pair.author:  # a model wrote it, and spelled the token
                return self._leave_out("answers that hold a token that ends a turn")
            raise DataError(f"{pair.place}: the answer holds a token that ends a turn: take it out, one is added")
        response = np.append(answer, self._end).astype(np.int32)
        if len(response) > longest_response:
            return self._leave_out(f"answers above config.rollout.max_new_tokens={longest_response}")
        found = [(prompt, response) for prompt in self._prompts(pair)]
        if any(len(prompt) > longest_prompt for prompt, _ in found):
            return self._leave_out(f"prompts above config.rollout.max_prompt_tokens={longest_prompt}")
        return found

    def _leave_out(self, reason: str) -> list[tuple[np.ndarray, np.ndarray]]:
        self.left_out[reason] += 1
        return []

    def _prompts(self, pair: Pair) -> list[np.ndarray]:
        problem = pair.problem
        if problem is None:
            role = [{"role": "system", "content": self._role}] if pair.with_role and self._role else []
            return [self._chat.encode_chat([*role, *pair.messages])]
        voices = [name for name in self._voices if not (self._own and pair.author) or name == pair.author]
        if not voices:
            self.left_out["answers of other agents"] += 1
        previous = None
        if pair.parent is not None:
            # Where there is no program, or no public test, the prompt says nothing of a grade.
            told = pair.parent.strip() and problem.public
            grade = self._grades[problem.id, pair.parent] if told else Grade(Verdict.WRONG)
            if grade.verdict is Verdict.INFRA:
                self.left_out["refinements of programs that the grader failed on"] += 1
                return []
            previous = Attempt(1, 0, 0, 1, Draft(0, "", pair.parent, None), grade)
        try:
            prompters = [self._prompters[name] for name in voices]
            return [p.attempt(problem) if previous is None else p.refinement(problem, previous) for p in prompters]
        except PromptTooLong:
            self.left_out[f"prompts above config.rollout.max_prompt_tokens={self._longest[0]}"] += 1
            return []


def _held_out(subjects: Sequence[str], config: FrozenConfigDict) -> frozenset[str]:
    """The subjects of which nothing is learned: the share that the config asks for, by a hash of seed and name."""
    share = config.sft.held_out
    names = sorted(set(subjects), key=lambda name: hashlib.sha256(f"{config.seed}/{name}".encode()).digest())
    if share and len(names) < 2:
        raise ConfigError(
            f"config.sft.held_out is {share}, but all pairs are about one problem: set it to 0, which holds none out"
        )
    count = min(max(1, round(share * len(names))), len(names) - 1) if share else 0
    return frozenset(names[:count])

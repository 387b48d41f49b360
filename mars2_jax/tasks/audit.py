"""Checks a problem set: are its references right, is a problem in it twice, is it in another set, too?"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from mars2_jax.errors import DataError
from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.tasks.inventory import Inventory
from mars2_jax.tasks.layouts import Entry
from mars2_jax.tasks.overlap import digest, near_pairs, ngrams, shared_passages, words_of
from mars2_jax.tasks.problem import CallTest, Problem, StdioTest

__all__ = ["Audit", "Finding", "Grader", "audit"]

_NEAR_WORDS = 5
"""Words of an n-gram by which near duplicates are found."""

_WINDOW = 64
"""Programs that the grader holds at a time: enough for any number of cores, and little memory."""

_MAX_CHARS = 300


class Grader(Protocol):
    """What is asked of the grader."""

    def submit(self, program: str, problem: Problem, *, stop_at_first_failure: bool = ...) -> int: ...
    def wait(self, ticket: int) -> Grade: ...


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about one problem.

    Attributes:
      kind: "bad_record", "reference_fails", "duplicate" (the same words), "near_duplicate", "overlap" (passages in
        common with the other set), and "no_reference", which is told and no fault.
      problem: its id; "" for a record that none could be made of.
      split: its split.
      other: the id, with the split in brackets, of the problem that it is like.
      detail: what else there is to say.
    """

    kind: str
    problem: str
    split: str = ""
    other: str = ""
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind != "no_reference"


@dataclasses.dataclass(frozen=True)
class Audit:
    """What is in a set, and what was found."""

    inventory: dict[str, Any]
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        return not any(finding.is_fault for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "sound": self.sound,
            "inventory": self.inventory,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


def audit(
    read: Callable[[Callable[[DataError], None]], Iterable[Entry]],
    grader: Grader | None,
    *,
    duplicates: bool = True,
    against: Iterable[Entry] = (),
    ngram: int = 13,
    near: float = 0.8,
    progress: Callable[[int], None] = lambda done: None,
) -> Audit:
    """Checks a problem set. Entries are read one by one and not kept.

    Args:
      read: gives the entries; called with what takes the errors of bad records.
      grader: grades the references; None leaves that out.
      duplicates: look for statements that are there twice.
      against: entries of another set, with which no passage may be shared.
      ngram: words of such a passage.
      near: Jaccard index of 5-grams of words from which two statements count as nearly the same; above 1 finds none.
      progress: called with the number of problems done.
    """
    inventory, findings = Inventory(), list[Finding]()
    names, long_names = list[tuple[str, str]](), list[tuple[str, str]]()
    same: dict[str, tuple[str, str]] = {}
    near_grams, long_grams = list[np.ndarray](), list[np.ndarray]()
    theirs, their_grams = list[tuple[str, str]](), list[np.ndarray]()
    for entry in against:
        theirs.append((entry.problem.id, entry.split))
        their_grams.append(ngrams(words_of(entry.problem.statement), ngram))

    def take(entry: Entry) -> None:
        inventory.add(entry)
        name, words = (entry.problem.id, entry.split), words_of(entry.problem.statement)
        if duplicates and (first := same.setdefault(digest(words), name)) is not name:
            findings.append(Finding("duplicate", *name, _named(first)))
        elif duplicates and near <= 1:
            names.append(name)
            near_grams.append(ngrams(words, _NEAR_WORDS))
        if theirs:
            long_grams.append(ngrams(words, ngram))
            long_names.append(name)

    bad = lambda error: findings.append(Finding("bad_record", "", detail=str(error)))
    for done, finding in enumerate(_graded(map(_each(take), read(bad)), grader), start=1):
        if finding is not None:
            findings.append(finding)
        progress(done)
    for number, other, index in near_pairs(near_grams, near):
        detail = f"{index:.0%} of the {_NEAR_WORDS}-grams of words"
        findings.append(Finding("near_duplicate", *names[number], _named(names[other]), detail))
    for number, other, share in shared_passages(long_grams, their_grams):
        detail = f"{share:.0%} of the {ngram}-grams of words"
        findings.append(Finding("overlap", *long_names[number], _named(theirs[other]), detail))
    return Audit(inventory.as_json(), tuple(findings))


def _each(take: Callable[[Entry], None]) -> Callable[[Entry], Entry]:
    def passed(entry: Entry) -> Entry:
        take(entry)
        return entry

    return passed


def _named(name: tuple[str, str]) -> str:
    return f"{name[0]} ({name[1] or 'every split'})"


def _graded(entries: Iterable[Entry], grader: Grader | None) -> Iterator[Finding | None]:
    """What is wrong with the reference of each entry, in their order, several at work at a time."""
    waiting: collections.deque[tuple[Entry, int | None]] = collections.deque()
    for entry in entries:
        program = entry.problem.reference
        ticket = None
        if grader is not None and program is not None:
            try:
                ticket = grader.submit(program, entry.problem, stop_at_first_failure=True)
            except DataError as error:
                yield Finding("reference_fails", entry.problem.id, entry.split, detail=str(error))
                continue
        waiting.append((entry, ticket))
        if len(waiting) == _WINDOW:
            yield _finding(*waiting.popleft(), grader)
    while waiting:
        yield _finding(*waiting.popleft(), grader)


def _finding(entry: Entry, ticket: int | None, grader: Grader | None) -> Finding | None:
    problem = entry.problem
    if grader is None:
        return None
    if ticket is None:
        return Finding("no_reference", problem.id, entry.split)
    grade = grader.wait(ticket)
    if grade.verdict is Verdict.PASS:
        return None
    return Finding("reference_fails", problem.id, entry.split, detail=_failure(problem, grade))


def _failure(problem: Problem, grade: Grade) -> str:
    """The verdict and the first test that failed."""
    results = grade.public + grade.hidden
    failed = next((i for i, r in enumerate(results) if r is not None and r.verdict is not Verdict.PASS), None)
    if failed is None:
        return grade.verdict.value
    result, public = results[failed], failed < len(grade.public)
    assert isinstance(result, TestResult)
    place = f"public[{failed}]" if public else f"hidden[{failed - len(grade.public)}]"
    said = result.error.strip().rpartition("\n")[2] or f"got {result.actual.strip()}"
    return f"{result.verdict.value} in {place}: {_shown(problem, failed)}: {_short(said)}"


def _shown(problem: Problem, number: int) -> str:
    test = problem.tests[number]
    if isinstance(test, StdioTest):
        return _short(f"input {test.stdin!r}, expected {test.stdout!r}")
    try:
        text = f"{test.args!r}, expected {test.expected!r}" if isinstance(test, CallTest) else test.code[:80]
    except ValueError:  # integers that Python does not write out
        text = "a call with an integer of thousands of digits"
    return _short(text)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."

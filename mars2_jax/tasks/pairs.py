"""Pairs to learn from: what a model is asked, and the answer it should give.

A record is a line of a .jsonl or .jsonl.gz file, an element of a .json list, or a row of a .parquet file. It is about a
problem, whose prompt is then made as in training:

| field | type | |
|---|---|---|
| `problem` | string | id of a problem of `config.data` |
| `statement` | string | in place of it the problem itself, with `entry_point`, `starter` and `public` where it has them, as in this project's layout (`mars2_jax.tasks.layouts.own`) |
| `program` | string | the program to answer with, in a fenced block; or |
| `response` | string | the whole answer |
| `parent` | object | `{"program": string}`: an earlier program, which the answer refines ("" where an earlier answer held none). What the prompt tells of it is what the grader says of it now |

or it is a chat:

| field | type | |
|---|---|---|
| `messages` | list | `{"role": "system", "user" or "assistant", "content": string}`; the last one, the assistant's, is the answer |
| `prompt` | string or list | in place of it what is asked: text of the user, put after the agent's role, or messages as they stand |
| `response` or `completion` | string or list | and the answer: text, or a list of one message of the assistant |

The token that ends a turn is added to every answer, and nothing but the answer is learned.
"""  # noqa: E501 - a table

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.extract import extract_program
from mars2_jax.tasks.layouts.entry import Origin
from mars2_jax.tasks.layouts.fields import check_plain, text_of
from mars2_jax.tasks.layouts.own import own_problem
from mars2_jax.tasks.problem import Problem
from mars2_jax.tasks.prompts import Message
from mars2_jax.tasks.records import find_files, read_records
from mars2_jax.tasks.syntax import parse

__all__ = ["Pair", "answer_with", "record_pairs", "reference_pairs"]

_STATED = ("statement", "entry_point", "starter", "public")
_ABOUT = ("problem", *_STATED, "program", "response", "parent")
_CHAT = ("messages", "prompt", "response", "completion")
_ROLES = ("system", "user", "assistant")

Find = Callable[[str], Problem | None]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A question and the answer to learn.

    Attributes:
      place: where it stands, for messages.
      response: the answer.
      problem: what is asked; None of a chat.
      parent: the program that the answer refines, "" for an answer without one; None where it is a first attempt.
      messages: of a chat, what is asked.
      with_role: of a chat, whether the agent's role goes before the messages.
      author: the agent that wrote the answer; "" where it is not known.
    """

    place: str
    response: str
    problem: Problem | None = None
    parent: str | None = None
    messages: tuple[Message, ...] = ()
    with_role: bool = False
    author: str = ""

    @property
    def subject(self) -> str:
        """Equal for pairs that ask for the same, wherever they stand: several answers to one question, and refinements
        of them."""
        if self.problem is None:
            return "\0".join(text for message in self.messages for text in (message["role"], message["content"]))
        return f"{self.problem.statement}\0{self.problem.starter}"


def answer_with(program: str, problem: Problem) -> str | None:
    """The answer that holds a program, in the fenced block that prompts ask for; None where `extract_program` would
    read another program out of it (or none: it is no Python)."""
    program = program.replace("\r\n", "\n").strip("\n").rstrip()
    answer = f"```python\n{program}\n```"
    written, read = parse(program), parse(extract_program(answer, problem))
    if written is None or read is None or not written.body:
        return None
    # The extractor may have put imports of the starter in front.
    found = {ast.dump(statement) for statement in read.body}
    return answer if all(ast.dump(statement) in found for statement in written.body) else None


def reference_pairs(problems: Iterable[Problem], skip: Callable[[str], None]) -> Iterator[Pair]:
    """First attempts that give the reference solution.

    Args:
      problems: of which to take the references.
      skip: is told why a problem is left out, one phrase for each reason.
    """
    for problem in problems:
        if problem.reference is None:
            skip("problems without a reference")
        elif (answer := answer_with(problem.reference, problem)) is None:
            skip("references that no fenced block gives back")
        else:
            yield Pair(f"problem {problem.id!r}", answer, problem)


def record_pairs(path: str, find: Find) -> Iterator[Pair]:
    """The pairs in a file, or in the files of a folder.

    Args:
      path: of it; "~" is the home folder.
      find: the problem of an id; None where there is none.

    Raises:
      DataError: names file, line, field and remedy.
    """
    for file in find_files(pathlib.Path(os.path.expanduser(path))):
        for number, record in read_records(file, strict=True):
            place = f"{file.path}:{number}"
            try:
                yield _pair(record, place, find)
            except DataError as error:
                raise DataError(f"{place}: {error}") from None


def _pair(record: Mapping[str, Any], place: str, find: Find) -> Pair:
    # Of Parquet, whose rows have every column.
    record = {name: value for name, value in record.items() if value is not None}
    check_plain(record)
    about = "problem" in record or "statement" in record
    if not about and not ("messages" in record or "prompt" in record):
        raise DataError("no field says what is asked: add 'problem' or 'statement', or 'messages' or 'prompt'")
    kind, known = ("about a problem", _ABOUT) if about else ("of a chat", _CHAT)
    for name in record:
        if name not in known:
            raise DataError(f"field {name!r} is unknown in a record {kind}: remove it, or use {', '.join(known)}")
    return _about_problem(record, place, find) if about else _chat(record, place)


def _about_problem(record: Mapping[str, Any], place: str, find: Find) -> Pair:
    _one_of(record, ("problem", "statement"))
    _one_of(record, ("program", "response"))
    if "problem" in record:
        for name in _STATED:
            if name in record:
                raise DataError(f"field {name!r} does not go with 'problem', which has it: remove one of them")
        name = text_of(record, "problem")
        problem = find(name)
        if problem is None:
            raise DataError(f"field 'problem' is {name!r}, which config.data does not hold: name one of its problems")
    else:
        stated = {name: record[name] for name in _STATED if name in record}
        # A problem has a test; nobody runs this one.
        unused = {"hidden": [{"stdin": "", "stdout": ""}]}
        problem = own_problem({"id": place, **stated, **unused}, Origin("pairs")).problem
    if "response" in record:
        answer: str | None = text_of(record, "response")
    else:
        answer = answer_with(text_of(record, "program"), problem)
    if answer is None:
        raise DataError("field 'program' is no Python that can be read back out of a fenced block: correct it")
    return Pair(place, answer, problem, _parent(record))


def _parent(record: Mapping[str, Any]) -> str | None:
    if "parent" not in record:
        return None
    parent = record["parent"]
    if not isinstance(parent, Mapping) or parent.keys() != {"program"} or not isinstance(parent["program"], str):
        raise DataError("field 'parent' must be {\"program\": string}: the grader says the rest")
    return parent["program"]


def _chat(record: Mapping[str, Any], place: str) -> Pair:
    _one_of(record, ("messages", "prompt"))
    if "messages" in record:
        for name in ("response", "completion"):
            if name in record:
                raise DataError(f"field {name!r} does not go with 'messages', whose last is the answer: remove it")
        messages = _messages(record["messages"], "messages")
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError("field 'messages' must end with a question and the assistant's answer to it")
        return Pair(place, _answer(messages[-1], "messages"), messages=messages[:-1])
    field = _one_of(record, ("response", "completion"))
    if isinstance(record[field], str):
        response = text_of(record, field)
    else:
        said = _messages(record[field], field)
        if len(said) != 1 or said[0]["role"] != "assistant":
            raise DataError(f"field {field!r} must be a string, or a list of one message of the assistant")
        response = _answer(said[0], field)
    if isinstance(record["prompt"], str):
        asked: Message = {"role": "user", "content": text_of(record, "prompt")}
        return Pair(place, response, messages=(asked,), with_role=True)
    messages = _messages(record["prompt"], "prompt")
    if messages[-1]["role"] == "assistant":
        raise DataError("field 'prompt' must not end with an answer: move it to 'response'")
    return Pair(place, response, messages=messages)


def _messages(value: Any, field: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"field {field!r} must be a list of messages that is not empty")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise DataError(f"field '{field}[{i}]' must be an object of 'role' and 'content', and nothing else")
        if message["role"] not in _ROLES:
            raise DataError(f"field '{field}[{i}].role' is {message['role']!r}: use one of {', '.join(_ROLES)}")
        if not isinstance(message["content"], str):
            raise DataError(f"field '{field}[{i}].content' must be a string")
        messages.append({"role": message["role"], "content": message["content"]})
    return tuple(messages)


def _answer(message: Message, field: str) -> str:
    if not message["content"].strip():
        raise DataError(f"field {field!r} has an empty answer: write one, or leave the record out")
    return message["content"]


def _one_of(record: Mapping[str, Any], names: tuple[str, str]) -> str:
    """The one of two fields that is there."""
    first, second = (name in record for name in names)
    if first == second:
        which = "both" if first else "neither"
        raise DataError(f"there is {which} of the fields {names[0]!r} and {names[1]!r}: give one of them")
    return names[0] if first else names[1]

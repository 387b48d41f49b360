"""Records to pairs, and what is said of records that are wrong."""

import gzip
import json
import pathlib

import pytest

from mars2_jax.errors import DataError
from mars2_jax.tasks.extract import extract_program
from mars2_jax.tasks.pairs import Pair, answer_with, record_pairs, reference_pairs
from mars2_jax.tasks.problem import CallTest, Problem
from mars2_jax.tasks.sources import load

DOUBLE = Problem("double", "Return 2 * x.", (CallTest((2,), 4),), (CallTest((3,), 6),), entry_point="f")
CODE = "def f(x):\n    return 2 * x"
FENCED = f"```python\n{CODE}\n```"
USER, SYSTEM = {"role": "user", "content": "Hi."}, {"role": "system", "content": "Be short."}
SAID = {"role": "assistant", "content": "Yes."}


def find(name: str) -> Problem | None:
    return DOUBLE if name == "double" else None


def write(path: pathlib.Path, *records) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def only(path: pathlib.Path, record) -> Pair:
    (pair,) = record_pairs(write(path, record), find)
    return pair


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"problem": "double", "program": CODE + "\n"}, dict(problem=DOUBLE, response=FENCED)),
        ({"problem": "double", "response": "Twice.\n" + FENCED}, dict(problem=DOUBLE, response="Twice.\n" + FENCED)),
        (
            {"problem": "double", "program": CODE, "parent": {"program": "def f(x): pass"}},
            dict(problem=DOUBLE, response=FENCED, parent="def f(x): pass"),
        ),
        ({"problem": "double", "program": CODE, "parent": {"program": ""}}, dict(response=FENCED, parent="")),
        ({"messages": [SYSTEM, USER, SAID]}, dict(messages=(SYSTEM, USER), response="Yes.", problem=None)),
        ({"messages": [USER, SAID, USER, SAID]}, dict(messages=(USER, SAID, USER), response="Yes.")),
        ({"prompt": "Hi.", "completion": "Yes."}, dict(messages=(USER,), response="Yes.", with_role=True)),
        ({"prompt": [SYSTEM, USER], "response": "Yes."}, dict(messages=(SYSTEM, USER), response="Yes.")),
        ({"prompt": [USER], "completion": [SAID]}, dict(messages=(USER,), response="Yes.", with_role=False)),
        # As Parquet has it: every row has every column.
        ({"prompt": "Hi.", "response": "Yes.", "messages": None}, dict(messages=(USER,), response="Yes.")),
    ],
)
def test_every_kind_of_record(tmp_path, record, expected):
    pair = only(tmp_path / "pairs.jsonl", record)
    for name, value in expected.items():
        assert getattr(pair, name) == value, name
    assert pair.place == f"{tmp_path / 'pairs.jsonl'}:1" and pair.author == ""
    # What is asked, wherever it stands.
    assert pair.subject == only(tmp_path / "elsewhere.jsonl", record).subject
    assert ("problem" in record) == (DOUBLE.statement in pair.subject)


def test_a_problem_that_the_record_states(tmp_path):
    stated = {"statement": "Return 2 * x.", "entry_point": "f", "public": [{"args": [2], "expected": 4}]}
    pair = only(tmp_path / "pairs.jsonl", {**stated, "program": CODE})
    assert pair.problem.statement == "Return 2 * x." and pair.problem.public == DOUBLE.public
    assert pair.problem.entry_point == "f" and pair.response == FENCED
    plain = only(tmp_path / "plain.jsonl", {"statement": "Print 3.", "program": "print(3)"})
    assert plain.problem.public == () and plain.problem.entry_point is None


def test_a_folder_of_files(tmp_path):
    write(tmp_path / "a.jsonl", {"prompt": "Hi.", "response": "1"}, "", {"prompt": "Hi.", "response": "2"})
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "Hi.", "response": "3"}) + "\n")
    (tmp_path / "c.json").write_text(json.dumps([{"prompt": "Hi.", "response": "4"}]))
    assert [pair.response for pair in record_pairs(str(tmp_path), find)] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "holds a list: write one object a line"),
        ({"text": "x"}, "no field says what is asked: add 'problem' or 'statement', or 'messages' or 'prompt'"),
        ({"problem": "double", "program": CODE, "score": 1}, "field 'score' is unknown in a record about a problem"),
        ({"prompt": "a", "response": "b", "program": CODE}, "field 'program' is unknown in a record of a chat"),
        ({"problem": "triple", "program": CODE}, "field 'problem' is 'triple', which config.data does not hold"),
        ({"problem": 3, "program": CODE}, "field 'problem' must be a string"),
        ({"problem": "double"}, "there is neither of the fields 'program' and 'response': give one"),
        ({"problem": "double", "program": CODE, "response": "x"}, "there is both of the fields 'program' and"),
        ({"problem": "double", "statement": "x", "program": CODE}, "there is both of the fields 'problem' and"),
        ({"problem": "double", "starter": "x", "program": CODE}, "field 'starter' does not go with 'problem'"),
        ({"problem": "double", "program": "def f(x) return"}, "field 'program' is no Python that can be read back"),
        ({"problem": "double", "response": " "}, "field 'response' must be a string that is not empty"),
        ({"problem": "double", "program": CODE, "parent": "x"}, "field 'parent' must be {\"program\": string}"),
        ({"problem": "double", "program": CODE, "parent": {"program": 3}}, "field 'parent' must be"),
        ({"statement": "x", "program": "print(1)", "public": [{"args": [1]}]}, r"field 'public\[0\]' is no test"),
        ({"messages": []}, "field 'messages' must be a list of messages that is not empty"),
        ({"messages": [USER]}, "field 'messages' must end with a question and the assistant's answer"),
        ({"messages": [SAID]}, "field 'messages' must end with a question and the assistant's answer"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "field 'messages' has an empty answer"),
        ({"messages": [USER, SAID], "response": "x"}, "field 'response' does not go with 'messages'"),
        ({"messages": [USER, SAID], "prompt": "x"}, "there is both of the fields 'messages' and 'prompt'"),
        ({"messages": [{"role": "human", "content": "x"}, SAID]}, r"'messages\[0\].role' is 'human': use one of"),
        ({"messages": [{"role": "user", "content": [1]}, SAID]}, r"'messages\[0\].content' must be a string"),
        ({"messages": [{"from": "user"}, SAID]}, r"'messages\[0\]' must be an object of 'role' and 'content'"),
        ({"prompt": "Hi."}, "there is neither of the fields 'response' and 'completion'"),
        ({"prompt": [SAID], "response": "x"}, "field 'prompt' must not end with an answer"),
        ({"prompt": "x", "completion": [USER]}, "field 'completion' must be a string, or a list of one message"),
    ],
)
def test_a_record_that_is_wrong_is_told_with_file_line_field_and_remedy(tmp_path, record, message):
    path = write(tmp_path / "pairs.jsonl", {"prompt": "Hi.", "response": "1"}, record)
    with pytest.raises(DataError, match=message) as caught:
        list(record_pairs(path, find))
    assert str(caught.value).startswith(f"{path}:2: ") and "\n" not in str(caught.value)


def test_references_that_cannot_be_answers_are_counted():
    from dataclasses import replace

    skipped = []
    problems = [
        replace(DOUBLE, reference=CODE),
        DOUBLE,
        replace(DOUBLE, reference="print 3"),
        # A fence in it would end the block.
        replace(DOUBLE, reference='def f(x):\n    """\n```\n"""\n    return 2 * x'),
    ]
    (pair,) = reference_pairs(problems, skipped.append)
    assert pair.response == FENCED and pair.parent is None
    assert skipped == ["problems without a reference", *["references that no fenced block gives back"] * 2]


@pytest.mark.parametrize("source", ["starter", "human_eval"])
def test_the_extractor_reads_back_every_reference_that_ships(source):
    problems = load(source, "all")
    skipped = []
    pairs = list(reference_pairs(problems, skipped.append))
    assert len(pairs) == len(problems) and not skipped
    for pair in pairs:
        assert pair.problem.reference.strip() in extract_program(pair.response, pair.problem)


def test_a_program_may_need_the_starters_imports():
    starter = "from math import floor\n\ndef f(x):\n"
    problem = Problem("p", "Round down.", (CallTest((2.5,), 2),), entry_point="f", starter=starter)
    answer = answer_with("def f(x):\n    return floor(x)\n", problem)
    assert answer == "```python\ndef f(x):\n    return floor(x)\n```"
    assert extract_program(answer, problem).startswith("from math import floor")

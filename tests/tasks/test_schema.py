"""The JSON schema of this project's layout says what `own_problem` does."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts import LAYOUTS, Origin
from tests.tasks.test_sources import BAD_RECORDS, GOOD

jsonschema = pytest.importorskip("jsonschema")

BEYOND_A_SCHEMA = ("surrogate", "nested deeper", "parsed", "no statement")
"""What no schema can see: whether text is Python, half a character, or nested without end."""


@pytest.fixture(scope="module")
def schema() -> Any:
    text = resources.files("mars2_jax.tasks").joinpath("data/problem.schema.json").read_text("utf-8")
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    return jsonschema.Draft202012Validator(json.loads(text))


def reads(record: dict[str, Any]) -> bool:
    try:
        LAYOUTS["own"](record, Origin("test"))
    except DataError:
        return False
    return True


def test_all_starter_problems_are_valid(schema: Any) -> None:
    lines = resources.files("mars2_jax.tasks").joinpath("data/starter.jsonl").read_text("utf-8").splitlines()
    for line in lines:
        schema.validate(json.loads(line))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"date": "2025-01-31", "compare": "unordered"},
        {"split": ..., "difficulty": ..., "reference": ..., "starter": ...},
        {"public": ..., "limits": {"cpu_seconds": 0.5, "memory_mb": 64, "wall_seconds": 7200, "output_kb": 1}},
        {"hidden": ..., "entry_point": "Solution.méthode"},
        {"hidden": [], "public": [{"args": [], "expected": None}, {"expected": {"a": [1, None, True]}}]},
        {"public": [{"code": "assert double(1) == 2", "setup": ""}]},
        {"public": ..., "hidden": [{"stdin": "", "stdout": ""}], "entry_point": ...},
    ],
)
def test_both_take_good_records(schema: Any, change: dict[str, Any]) -> None:
    record = {name: value for name, value in (GOOD | change).items() if value is not ...}
    assert reads(record)
    schema.validate(record)


@pytest.mark.parametrize(("change", "parts"), BAD_RECORDS)
def test_both_refuse_bad_records(schema: Any, change: dict[str, Any], parts: list[str]) -> None:
    record = {name: value for name, value in (GOOD | change).items() if value is not ...}
    assert not reads(record)
    beyond = any(word in part for part in parts for word in BEYOND_A_SCHEMA)
    assert schema.is_valid(record) == beyond, list(schema.iter_errors(record))


def test_schema_and_layout_know_the_same_fields(schema: Any) -> None:
    from mars2_jax.tasks.layouts import own

    assert set(schema.schema["properties"]) == set(own._FIELDS)
    limits = schema.schema["properties"]["limits"]["properties"]
    assert {name: rule["maximum"] for name, rule in limits.items()} == vars(own._MOST)

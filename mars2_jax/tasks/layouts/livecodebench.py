"""LiveCodeBench's code generation (Jain et al. 2024, arXiv 2403.07974), releases 1 to 6, full and lite.

| field | |
|---|---|
| `question_id`, `question_content` | strings |
| `starter_code` | the signature to complete, or "" for programs that read stdin |
| `difficulty` | "easy", "medium" or "hard" |
| `contest_date` | time of the contest, for `data.date_from` and `data.date_to` |
| `public_test_cases` | JSON: a list of `{"input", "output", "testtype": "stdin" or "functional"}` |
| `private_test_cases` | the same, or packed: base64 of zlib of a pickle of that JSON |
| `metadata` | JSON: `func_name` names the function of functional tests |

The input of a functional test is a JSON value a line, one for each argument, its output one JSON value. Public tests
are public, private ones hidden. A pickle can run code when it is loaded; here the one string in it is read out and
nothing is loaded.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from collections.abc import Mapping
from typing import Any

from mars2_jax.errors import DataError
from mars2_jax.tasks.layouts.entry import Entry, Origin
from mars2_jax.tasks.layouts.fields import (
    check_entry_point,
    check_plain,
    day_of,
    difficulty_of,
    limits_for,
    optional_text,
    parse_json,
    text_of,
    without_carriage_returns,
)
from mars2_jax.tasks.layouts.functions import entry_point_of, with_typing
from mars2_jax.tasks.problem import CallTest, Limits, Problem, StdioTest, Test

__all__ = ["livecodebench_problem", "livecodebench_tests"]

LIMITS = Limits(cpu_seconds=6.0, memory_mb=1024)
"""Six seconds a test are LiveCodeBench's own."""

_MOST_BYTES = 1 << 30
"""Of the tests of one problem, unpacked."""

_STRING_OPCODES = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_OTHER_OPCODES = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def livecodebench_problem(record: Mapping[str, Any], origin: Origin) -> Entry:
    """An entry from a record of LiveCodeBench.

    Raises:
      DataError: naming the field and the remedy.
    """
    metadata = parse_json(record.get("metadata") or {}, "metadata")
    if not isinstance(metadata, dict):
        raise DataError("field 'metadata' must be a JSON object")
    name = metadata.get("func_name")
    public = livecodebench_tests(parse_json(record.get("public_test_cases"), "public_test_cases"), "public_test_cases")
    private = _private(record.get("private_test_cases"))
    hidden = livecodebench_tests(private, "private_test_cases")
    if not public + hidden:
        raise DataError("fields 'public_test_cases' and 'private_test_cases' hold no tests: leave the record out")
    calls = [isinstance(test, CallTest) for test in public + hidden]
    if any(calls) != all(calls):
        raise DataError("the tests are of both kinds, stdin and functional: is the file damaged?")
    starter = optional_text(record, "starter_code")
    entry_point = None
    if any(calls):
        if not isinstance(name, str):
            raise DataError("field 'metadata' names no 'func_name', which functional tests need: is the file damaged?")
        entry_point = entry_point_of(check_entry_point(name, "metadata"), starter)
    problem = Problem(
        id=text_of(record, "question_id"),
        statement=text_of(record, "question_content"),
        public=public,
        hidden=hidden,
        entry_point=entry_point,
        starter=with_typing(starter),
        limits=limits_for(public + hidden, LIMITS),
        source=origin.source,
        difficulty=difficulty_of(record.get("difficulty"), {"easy": "easy", "medium": "medium", "hard": "hard"}),
    )
    return Entry(problem, split="test", date=day_of(record.get("contest_date"), "contest_date"))


def livecodebench_tests(tests: Any, field: str) -> tuple[Test, ...]:
    """Tests from a list of `{"input", "output", "testtype"}`. DeepCoder-Preview has them, too."""
    if not isinstance(tests, list):
        raise DataError(f"field {field!r} must be a JSON list of tests")
    return tuple(_test(test, f"{field}[{i}]") for i, test in enumerate(tests))


def _test(test: Any, where: str) -> Test:
    if not isinstance(test, dict) or not all(isinstance(test.get(name), str) for name in ("input", "output")):
        raise DataError(f"field '{where}' must be an object with strings 'input' and 'output'")
    check_plain(test)
    kind = test.get("testtype", "stdin")
    if kind in ("stdin", "stdin_stdout"):
        return StdioTest(without_carriage_returns(test["input"]), without_carriage_returns(test["output"]))
    if kind != "functional":
        raise DataError(f"field '{where}.testtype' is {kind!r}: it must be 'stdin' or 'functional'")
    lines = [line for line in without_carriage_returns(test["input"]).split("\n") if line.strip()]
    args = [parse_json(line, f"{where}.input") for line in lines]
    expected = parse_json(test["output"], f"{where}.output")
    check_plain([args, expected])
    return CallTest(args=tuple(args), expected=expected)


def _private(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("[", "{"):  # no base64 has a bracket
        return parse_json(value, "private_test_cases")
    try:
        packed = base64.b64decode(value, validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, _MOST_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise DataError(f"field 'private_test_cases' is neither JSON nor packed JSON ({error})") from None
    if unpacker.unconsumed_tail:
        raise DataError(f"field 'private_test_cases' unpacks to more than {_MOST_BYTES} bytes: leave the record out")
    if not unpacker.eof:
        raise DataError("field 'private_test_cases' is cut off: is the file whole?")
    return parse_json(_pickled_string(data), "private_test_cases")


def _pickled_string(data: bytes) -> str:
    """The string of a pickle that holds nothing else. No instruction of the pickle is carried out."""
    strings: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _STRING_OPCODES:
                strings.append(str(argument))
            elif opcode.name not in _OTHER_OPCODES:
                raise DataError(
                    f"field 'private_test_cases' holds a pickle of more than a string (opcode {opcode.name}), which "
                    "could run code: do not trust this file"
                )
    except (ValueError, UnicodeError) as error:
        raise DataError(f"field 'private_test_cases' holds a damaged pickle ({error}): is the file whole?") from None
    if len(strings) != 1:
        raise DataError(f"field 'private_test_cases' holds a pickle of {len(strings)} strings: it must be one")
    return strings[0]

"""Every public layout: what a record means, and what is said of one that means nothing."""

from __future__ import annotations

import base64
import json
import pathlib
import pickle
import shutil
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from mars2_jax.errors import DataError
from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Verdict
from mars2_jax.tasks import sources
from mars2_jax.tasks.layouts import LAYOUTS, Origin
from mars2_jax.tasks.layouts.differential import literal
from mars2_jax.tasks.layouts.functions import annotated_depth, with_imports, with_typing
from mars2_jax.tasks.problem import AssertTest, CallTest, Problem, StdioTest
from tests.tasks import public_layouts as public


def problem_of(layout: str, record: dict[str, Any], public_tests: int = 2) -> Problem:
    return LAYOUTS[layout](record, Origin("set", "file/1", public_tests)).problem


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(isolation="bubblewrap" if shutil.which("bwrap") else "none", workers=2) as grader:
        yield grader


def test_livecodebench(tmp_path: pathlib.Path) -> None:
    functional, stdin = sources.load(public.write_livecodebench(tmp_path / "lcb"), "test")
    assert (stdin.id, stdin.difficulty, stdin.entry_point, stdin.source) == ("abc001_a", "easy", None, "lcb")
    assert stdin.public == (StdioTest("2\n", "4\n"),)
    assert stdin.hidden == (StdioTest("-7\n", "-14\n"), StdioTest("0", "0"))
    assert stdin.limits.cpu_seconds == 6
    assert (functional.id, functional.entry_point) == ("3000", "Solution.longerThan")
    assert functional.starter.startswith("from typing import List\n\n\nclass Solution:")
    assert functional.public == (CallTest((["ab", "c"], 1), ["ab"]),)
    assert functional.hidden == (CallTest(([], 0), []), CallTest((["x\ny", ""], 2), ["x\ny"]))


def test_dates_choose(tmp_path: pathlib.Path) -> None:
    source = public.write_livecodebench(tmp_path)
    load = lambda **dates: [p.id for p in sources.load(source, "test", **dates)]
    assert load(date_from="2025-01-04", date_to="2025-01-04") == ["abc001_a"]
    assert load(date_from="2025-01-01") == ["abc001_a"]
    assert load(date_to="2024-12-31") == ["3000"]
    assert load(date_from="2024-06-01", date_to="2025-01-04") == ["3000", "abc001_a"]
    with pytest.raises(DataError, match="has no problem from 2025-02-01 to the end"):
        load(date_from="2025-02-01")
    with pytest.raises(DataError, match="date_from is 2025-01-02 and date_to is 2025-01-01: no day lies between"):
        load(date_from="2025-01-02", date_to="2025-01-01")
    with pytest.raises(DataError, match="'date_from' is 'January': write a date as 2025-01-31"):
        load(date_from="January")
    with pytest.raises(DataError, match=r"problem 'starter/\w+' has no date to choose it by"):
        sources.load("starter", "train", date_to="2025-01-01")


class _Bomb:
    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_no_pickle_is_ever_loaded(tmp_path: pathlib.Path) -> None:
    """A file that would run code when it is unpickled is refused, and the code does not run."""
    for content in (_Bomb(tmp_path / "ran"), ["[]"], b"[]", {"a": 1}):
        value = base64.b64encode(zlib.compress(pickle.dumps(content))).decode()
        with pytest.raises(DataError, match="'private_test_cases' holds a pickle of more than a string"):
            problem_of("livecodebench", {**public.LCB_STDIN, "private_test_cases": value})
    assert not (tmp_path / "ran").exists()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):  # protocols 0 to 5 write strings in different ways
        text = json.dumps(public.stdin_tests([("é", "日本")]), ensure_ascii=False)
        value = base64.b64encode(zlib.compress(pickle.dumps(text, protocol))).decode()
        problem = problem_of("livecodebench", {**public.LCB_STDIN, "private_test_cases": value})
        assert problem.hidden == (StdioTest("é", "日本"),)


def test_deepcoder(tmp_path: pathlib.Path) -> None:
    source = public.write_deepcoder(tmp_path / "deepcoder")
    problems = {p.id: p for p in sources.load(source, "all")}
    assert list(problems) == [
        "codeforces/test-00000-of-00001/1",
        "lcbv5/test-00000-of-00001/1",
        "primeintellect/train-00000-of-00001/1",
        "primeintellect/train-00000-of-00001/2",
        "taco/train-00000-of-00001/1",
        "taco/train-00000-of-00001/2",
    ]
    assert [p.id for p in sources.load(source, "test")] == list(problems)[:2]
    assert [p.id for p in sources.load(source, "train")] == list(problems)[2:]
    with pytest.raises(DataError, match="has no split 'validation': use one of test, train"):
        sources.load(source, "validation")
    codeforces, lcb, words, counts, sums, evens = problems.values()
    assert (codeforces.public, codeforces.hidden) == ((StdioTest("4", "YES"),), (StdioTest("3", "NO"),))
    assert lcb.entry_point == "Solution.larger" and lcb.tests == (CallTest((1, 2), 2), CallTest((5, -5), 5))
    assert words.hidden == (StdioTest("x\n", "x"),) and words.reference == "print(input()[::-1])"
    # JSON's keys are strings; the function's are numbers.
    assert counts.entry_point == "count" and counts.public == (CallTest(([7, 7, 8],), {7: 2, 8: 1}),)
    assert counts.reference is not None and counts.reference.startswith("from collections import Counter\n")
    assert len(sums.public) == 2 and sums.hidden == (StdioTest("-5 5\n", "0\n"),)
    assert sums.reference == "print(sum(map(int, input().split())))\n"  # the first is Python 2, the second was fenced
    assert [t.expected for t in evens.tests if isinstance(t, CallTest)] == [[2], [4], []]


def test_taco_and_apps(tmp_path: pathlib.Path) -> None:
    largest, rest, even = sources.load(public.write_taco(tmp_path / "taco"), "train")
    assert [p.id for p in (largest, rest, even)] == [
        "ALL/train-00000-of-00002/1",
        "ALL/train-00000-of-00002/2",
        "ALL/train-00001-of-00002/1",
    ]
    assert [p.difficulty for p in (largest, rest, even)] == ["hard", "easy", ""]
    assert largest.tests == (StdioTest("2\n1\n5\n", "5\n"), StdioTest("1\n-3", "-3"), StdioTest("1\n0\n", "0\n"))
    assert largest.reference == "print(max(int(input()) for _ in range(int(input()))))"
    assert rest.entry_point == "Solution.rest" and rest.tests == (CallTest(([1, 2],), [2]), CallTest(([3, 4],), [4]))
    assert even.entry_point == "is_even" and even.tests == (CallTest((2,), True), CallTest((3,), False))

    apps = {**public.TACO[0], "problem_id": 17, "difficulty": "interview", "solutions": ""}
    problem = problem_of("apps", apps, public_tests=0)
    assert (problem.id, problem.difficulty, problem.reference) == ("set/17", "medium", None)
    assert problem.public == () and len(problem.hidden) == 3


@pytest.mark.parametrize(
    ("outputs", "starter", "expected"),
    [
        ([[1], [2]], "", [1, 2]),  # nothing is said: wrapped
        ([[1], [2, 3]], "", [[1], [2, 3]]),  # not all have one item
        ([1, [2]], "", [1, [2]]),
        ([[None], [0]], "", [None, 0]),
        ([None, None], "", [None, None]),
        ([[1], [2]], "def f(x) -> int:\n", [1, 2]),
        ([[1], [2]], "def f(x) -> List[int]:\n", [[1], [2]]),
        ([[[1]], [[2]]], "def f(x) -> List[int]:\n", [[1], [2]]),
        ([[[1]], [[2]]], "def f(x) -> List[List[int]]:\n", [[[1]], [[2]]]),
        ([[[1]], [[]]], "def f(x) -> Optional[list[int]]:\n", [[1], []]),
        ([[[1]], [[2]]], "def f(x) -> list:\n", [[1], [2]]),
        ([[1], [2]], 'def f(x) -> "list[int]":\n', [[1], [2]]),
    ],
)
def test_outputs_that_may_be_wrapped(outputs: list[Any], starter: str, expected: list[Any]) -> None:
    tests = {"fn_name": "f", "inputs": [[i] for i in range(len(outputs))], "outputs": outputs}
    record = {"question": "q", "input_output": json.dumps(tests), "starter_code": starter}
    assert [t.expected for t in problem_of("taco", record).tests if isinstance(t, CallTest)] == expected


def test_public_tests_are_the_first_but_one_stays_hidden() -> None:
    for wanted, public_count in ((0, 0), (1, 1), (2, 2), (3, 2), (99, 2)):
        problem = problem_of("taco", public.TACO[0], wanted)
        assert (len(problem.public), len(problem.hidden)) == (public_count, 3 - public_count)


def test_integers_of_any_length_and_nan() -> None:
    long = "7" * 5000
    tests = f'{{"fn_name": "f", "inputs": [[{long}], [-{long}], [NaN]], "outputs": [[1], [2], [Infinity]]}}'
    first, second, third = problem_of("taco", {"question": "q", "input_output": tests}, 0).hidden
    assert isinstance(first, CallTest) and isinstance(second, CallTest) and isinstance(third, CallTest)
    assert first.args[0] == 7 * (10**5000 - 1) // 9 == -second.args[0]
    assert third.args[0] != third.args[0] and third.expected == float("inf")


def test_limits_have_room_for_the_largest_output() -> None:
    record = {"question": "q", "input_output": json.dumps({"inputs": ["1"], "outputs": ["x" * 3_000_000]})}
    assert problem_of("taco", record).limits.output_kb > 5000
    record = {"question": "q", "input_output": json.dumps({"inputs": ["x" * (64 << 20)], "outputs": ["1"]})}
    assert problem_of("taco", record).limits.memory_mb > 1400


def test_mbpp() -> None:
    entry = LAYOUTS["mbpp"](public.MBPP, Origin("mbpp"))
    assert (entry.split, entry.problem.id, entry.problem.entry_point) == ("test", "MBPP/11", "add")
    assert [len(entry.problem.public), len(entry.problem.hidden)] == [2, 1]
    assert entry.problem.public[0] == AssertTest("assert add(1, 2) == 3", "")
    entry = LAYOUTS["mbpp"](public.MBPP_SANITIZED, Origin("mbpp"))
    assert (entry.split, entry.problem.entry_point) == ("train", "around")
    assert entry.problem.hidden == (AssertTest("assert around(0) == 0", "import math\n"),)
    sized = {**public.MBPP, "code": "import sys, re\ndef size(x):\n    return sys.getsizeof(x)\n"}
    sized["test_list"] = ["assert size(()) == sys.getsizeof(())"]
    assert problem_of("mbpp", sized).hidden[0] == AssertTest(sized["test_list"][0], "import sys, re\n")
    entry = LAYOUTS["mbpp"](public.MBPP_MXEVAL, Origin("mbpp"))
    assert (entry.split, entry.problem.public, entry.problem.starter) == ("train", (), public.MBPP_MXEVAL["prompt"])
    # A solution that is no Python is for the audit to tell: the tests are as good as others.
    broken = LAYOUTS["mbpp"]({**public.MBPP_MXEVAL, "canonical_solution": "   return"}, Origin("mbpp")).problem
    assert broken.tests == entry.problem.tests and broken.reference == public.MBPP_MXEVAL["prompt"] + "   return"
    entry = LAYOUTS["mbpp"](public.MBPP_PLUS, Origin("mbpp"))
    assert entry.split == "test" and entry.problem.statement.startswith("Write a function to find the shared")
    assert [LAYOUTS["mbpp"]({**public.MBPP, "task_id": n}, Origin("")).split for n in (10, 511, 601)] == [
        "prompt",
        "validation",
        "train",
    ]


WRONG = {
    "Mbpp/737": "def check_str(s):\n    return None\n",
    "HumanEval/0": "def root(x):\n    return x / 2\n",
    "MBPP/11": "def add(a, b):\n    return a - b\n",
    "MBPP/602": "def around(r):\n    return 6 * r\n",
    "MBPP/601": "def third(items):\n    return items[0]\n",
    "Mbpp/2": "def similar_elements(a, b):\n    return a\n",
}


@pytest.mark.parametrize(
    ("layout", "record", "also_right"),
    [
        ("human_eval", public.HUMAN_EVAL_PLUS, "def root(x):\n    return x**0.5\n"),
        ("human_eval", public.HUMAN_EVAL_PLUS_HUB, "def root(x):\n    return x**0.5 + 1e-9\n"),
        ("mbpp", public.MBPP, "add = lambda a, b: b + a\n"),
        ("mbpp", public.MBPP_SANITIZED, "def around(r):\n    return r * 6.2831853\n"),
        ("mbpp", public.MBPP_MXEVAL, "def third(items):\n    return items[-1]\n"),
        ("mbpp", public.MBPP_PLUS, "def similar_elements(a, b):\n    return [x for x in b if x in a]\n"),
        ("mbpp", public.MBPP_PLUS_MATCH, "def check_str(s):\n    return s[:1] in 'aeiouAEIOU'\n"),
        ("mbpp", public.MBPP_PLUS_HUB, "def around(r):\n    return r * 6.283185307\n"),
    ],
    ids=[
        "plus",
        "plus of the hub",
        "original",
        "sanitized",
        "mxeval",
        "mbpp plus",
        "mbpp plus, match",
        "mbpp plus of the hub",
    ],
)
def test_assertions_tell_right_from_wrong(grader: Grader, layout: str, record: dict[str, Any], also_right: str) -> None:
    problem = problem_of(layout, record)
    assert problem.reference is not None
    for program, right in ((problem.reference, True), (also_right, True), (WRONG[problem.id], False)):
        grade = grader.grade(program, problem)
        assert grade.verdict is (Verdict.PASS if right else Verdict.WRONG), (program, grade)


def without(record: dict[str, Any], *fields: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in fields} | changes


LCB, TACO, DEEP = public.LCB_STDIN, public.TACO[0], public.DEEPCODER["taco/train-00000-of-00001"][0]
PRIME = public.DEEPCODER["primeintellect/train-00000-of-00001"][1]
FUNCTIONAL = public.LCB_FUNCTIONAL
PLUS = public.HUMAN_EVAL_PLUS


def io(inputs: Any, outputs: Any, **more: Any) -> str:
    return json.dumps({"inputs": inputs, "outputs": outputs, **more})


@pytest.mark.parametrize(
    ("layout", "record", "parts"),
    [
        ("livecodebench", without(LCB, "question_id"), ["'question_id' is missing", "add it"]),
        ("livecodebench", without(LCB, question_content=" "), ["'question_content'", "not empty"]),
        ("livecodebench", without(LCB, "public_test_cases"), ["'public_test_cases'", "JSON list"]),
        ("livecodebench", without(LCB, public_test_cases="[{"), ["'public_test_cases' holds no JSON", "whole"]),
        ("livecodebench", without(LCB, public_test_cases='[{"input": 1, "output": ""}]'), ["cases[0]'", "strings"]),
        ("livecodebench", without(LCB, private_test_cases="AAAA"), ["'private_test_cases'", "neither JSON nor"]),
        ("livecodebench", without(LCB, private_test_cases="%"), ["'private_test_cases'", "neither JSON nor"]),
        (
            "livecodebench",
            without(LCB, private_test_cases=base64.b64encode(zlib.compress(b"x" * 99)[:-9]).decode()),
            ["'private_test_cases'", "whole"],
        ),
        ("livecodebench", without(LCB, public_test_cases="[]", private_test_cases="[]"), ["no tests", "leave the"]),
        ("livecodebench", without(LCB, contest_date="soon"), ["'contest_date' is 'soon'", "2025-01-31"]),
        ("livecodebench", without(FUNCTIONAL, metadata="{}"), ["'metadata' names no 'func_name'"]),
        ("livecodebench", without(FUNCTIONAL, metadata='{"func_name": "a b"}'), ["'metadata' is 'a b'"]),
        ("livecodebench", without(FUNCTIONAL, private_test_cases=LCB["private_test_cases"]), ["both kinds"]),
        (
            "livecodebench",
            without(FUNCTIONAL, public_test_cases=json.dumps(public.functional_tests([("[1", "1")]))),
            ["'public_test_cases[0].input' holds no JSON"],
        ),
        (
            "livecodebench",
            without(LCB, public_test_cases=json.dumps([{"input": "", "output": "", "testtype": "telepathy"}])),
            ["testtype' is 'telepathy'"],
        ),
        ("deepcoder", without(DEEP, "problem"), ["'problem' is missing"]),
        ("deepcoder", without(DEEP, "tests"), ["'tests'", "JSON list or object"]),
        ("deepcoder", without(DEEP, tests="[]"), ["'tests' holds no tests", "leave the record out"]),
        ("deepcoder", without(DEEP, tests=io([], [])), ["'tests' holds no tests"]),
        ("deepcoder", without(DEEP, tests=io(["1"], [])), ["1 inputs and 0 outputs"]),
        ("deepcoder", without(DEEP, tests=io(["1"], [None])), ["'tests.outputs[0]'", "NoneType"]),
        ("deepcoder", without(DEEP, tests='[{"input": "1"}]'), ["'tests[0]'", "'output'"]),
        ("deepcoder", without(DEEP, tests='[{"type": "x", "input": "", "output": ""}]'), ["tests of type 'x'"]),
        ("deepcoder", without(PRIME, tests=PRIME["tests"].replace('"count"', "null")), ["does not name one function"]),
        ("deepcoder", without(DEEP, solutions=[1]), ["'solutions'", "list of programs"]),
        ("taco", without(TACO, "question"), ["'question' is missing"]),
        ("taco", without(TACO, input_output=""), ["'input_output' holds no JSON"]),
        ("taco", without(TACO, input_output="{}"), ["'input_output'", "lists of inputs and outputs"]),
        ("taco", without(TACO, "input_output"), ["'input_output' holds no tests"]),
        ("taco", without(TACO, input_output=io(["N = 1"], ["4"], fn_name="f")), ["inputs[0]'", "arguments"]),
        ("taco", without(TACO, input_output=io([[1]], [1], fn_name="3f")), ["'input_output.fn_name' is '3f'"]),
        ("taco", without(TACO, input_output=io(["\ud800"], ["1"])), ["surrogate"]),
        ("taco", without(TACO, starter_code=3), ["'starter_code' must be a string"]),
        ("human_eval", without(PLUS, "prompt"), ["'prompt' is missing"]),
        ("human_eval", without(PLUS, canonical_solution="    )"), ["does not define 'root'"]),
        ("human_eval", without(PLUS, base_input=[1], plus_input=[]), ["'base_input'", "lists of arguments"]),
        ("human_eval", without(PLUS, base_input=[], plus_input=[]), ["hold no inputs"]),
        ("human_eval", without(PLUS, atol="0"), ["'atol' must be a number"]),
        ("human_eval", without(PLUS, "base_input", "plus_input", test="x = 1"), ["no function check"]),
        ("human_eval", without(PLUS, "base_input", "plus_input", test="def check(:"), ["'test' is no Python"]),
        ("human_eval", without(PLUS, "base_input", "plus_input", test="import numpy"), ["needs NumPy"]),
        ("mbpp", without(public.MBPP, task_id="eleven"), ["'task_id' is 'eleven'", "MBPP/11"]),
        ("mbpp", without(public.MBPP, test_list=[]), ["call no function"]),
        ("mbpp", without(public.MBPP, test_list=["assert add(1 =="]), ["no Python that can be parsed"]),
        ("mbpp", without(public.MBPP, test_list=["assert sub(1)"]), ["call no function that 'code' defines"]),
        ("mbpp", without(public.MBPP, test_list="assert"), ["'test_list' must be a list"]),
        ("mbpp", without(public.MBPP, "code"), ["'code' is missing"]),
        ("mbpp", without(public.MBPP_PLUS, canonical_solution="x = 1"), ["does not define 'similar_elements'"]),
        ("mbpp", without(public.MBPP_PLUS, base_input=[[1, 2]]), ["not those of MBPP+"]),
    ],
)
def test_a_malformed_record_names_field_and_remedy(layout: str, record: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        problem_of(layout, record)
    message = str(caught.value)
    assert all(part in message for part in parts) and "\n" not in message, message


def test_file_and_line_are_named(tmp_path: pathlib.Path) -> None:
    path = public.write_lines(tmp_path / "test.jsonl", [public.LCB_STDIN, {}, {"question_id": "x"}])
    with pytest.raises(DataError, match=r"test\.jsonl:2: field 'public_test_cases'"):
        sources.load(f"livecodebench:{path}", "test")
    path = public.write_parquet(tmp_path / "rows.parquet", [public.TACO[0], {"question": "q"}])
    with pytest.raises(DataError, match=r"rows\.parquet:2: field 'input_output' holds no tests"):
        sources.load(f"taco:{path}", "all")
    bad: list[DataError] = []
    kept = list(sources.entries(f"taco:{path}", on_bad=bad.append))
    assert len(kept) == 1 and [str(error).startswith(f"{path}:2: ") for error in bad] == [True]


def test_files_of_every_kind_and_folders(tmp_path: pathlib.Path) -> None:
    import gzip

    records = [without(public.LCB_STDIN, question_id=str(i)) for i in range(12)]
    for number, record in enumerate(records[:10], start=1):
        public.write_lines(tmp_path / f"test{number}.jsonl", [record])
    with gzip.open(tmp_path / "test11.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(records[10]) + "\n\n")
    (tmp_path / "test12.json").write_text(json.dumps([records[11]]))
    (tmp_path / "README.md").write_text("not a record")
    (tmp_path / ".cache").mkdir()
    public.write_lines(tmp_path / ".cache" / "test99.jsonl", [records[0]])
    problems = sources.load(f"livecodebench:{tmp_path}", "test")
    assert [p.id for p in problems] == [str(i) for i in range(12)]  # test2 before test10
    (tmp_path / "by_name.json").write_text(json.dumps({"a": without(records[0], question_id="a")}))
    assert [p.id for p in sources.load(f"livecodebench:{tmp_path / 'by_name.json'}", "test")] == ["a"]
    public.write_lines(tmp_path / "more.jsonl", [records[3]])
    with pytest.raises(DataError, match=r"test4\.jsonl:1: field 'id' is '3', as at .*more\.jsonl:1"):
        sources.load(f"livecodebench:{tmp_path}", "test")


def test_imports_that_graders_of_the_data_sets_add() -> None:
    assert with_typing("class Solution:\n    def f(self, a: List[int]) -> Optional[int]:\n        ").startswith(
        "from typing import List, Optional\n"
    )
    assert with_typing("def f(a: list[int]):\n") == "def f(a: list[int]):\n"
    program = "def f(a):\n    return heapq.nlargest(2, a) + [gcd(4, 2)]\n"
    assert with_imports(program) == f"import heapq\nfrom math import gcd\n\n\n{program}"
    for whole in ("from math import *\nprint(gcd(2, 4))\n", "gcd = 3\nprint(gcd)\n", "print 3\n", ""):
        assert with_imports(whole) == whole
    assert annotated_depth("def f() -> Dict[str, int]:\n", "f") is None


def test_literals_come_back() -> None:
    for value in (None, True, -3, 10**5000, "a'\n", [1, (2,), ()], {1: {2, 3}, "k": set()}, 1.5, 2j, b"x"):
        assert eval(literal(value), {}) == value
    with pytest.raises(DataError, match="holds a range"):
        literal(range(3))


def test_leetcode() -> None:
    try:
        problems = sources.load("leetcode", "train")
    except DataError as error:
        pytest.skip(str(error))
    assert len(problems) == 995 and all(p.public and p.hidden for p in problems)
    assert sum(len(p.tests) for p in problems) == 18_902
    first = problems[0]
    assert first.entry_point == "Solution.add_binary" and first.public[0] == CallTest(("11", "1"), "100")
    assert "Example 1:" in first.statement and first.starter.endswith("def add_binary(self, a: str, b: str) -> str:\n")

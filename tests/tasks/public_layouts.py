"""Records in exactly the layouts of public data sets; the problems are this project's own."""

from __future__ import annotations

import base64
import json
import pathlib
import pickle
import zlib
from typing import Any


def packed(tests: list[dict[str, Any]]) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode("ascii")


def stdin_tests(cases: list[tuple[str, str]], **more: Any) -> list[dict[str, Any]]:
    return [{"input": read, "output": printed, "testtype": "stdin", **more} for read, printed in cases]


def functional_tests(cases: list[tuple[str, str]], **more: Any) -> list[dict[str, Any]]:
    return [{"input": read, "output": printed, "testtype": "functional", **more} for read, printed in cases]


LCB_STDIN = {
    "question_title": "Twice",
    "question_content": "Read a whole number and print it doubled.",
    "platform": "atcoder",
    "question_id": "abc001_a",
    "contest_id": "abc001",
    "contest_date": "2025-01-04T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps(stdin_tests([("2\n", "4\n")])),
    "private_test_cases": packed(stdin_tests([("-7\r\n", "-14\r\n"), ("0", "0")])),
    "metadata": "{}",
}
LCB_FUNCTIONAL = {
    "question_title": "Longer than",
    "question_content": "Return the words that are longer than k.",
    "platform": "leetcode",
    "question_id": "3000",
    "contest_id": "biweekly-contest-1",
    "contest_date": "2024-06-01T00:00:00",
    "starter_code": "class Solution:\n    def longerThan(self, words: List[str], k: int) -> List[str]:\n        ",
    "difficulty": "medium",
    "public_test_cases": json.dumps(functional_tests([('["ab", "c"]\n1', '["ab"]')])),
    "private_test_cases": json.dumps(functional_tests([("[]\n0", "[]"), ('["x\\ny", ""]\n2', '["x\\ny"]')])),
    "metadata": json.dumps({"func_name": "longerThan"}),
}
LCB_PROGRAMS = {
    "abc001_a": "import sys\nprint(2 * int(sys.stdin.buffer.read()))\n",
    "3000": "class Solution:\n    def longerThan(self, words, k):\n        return [w for w in words if len(w) > k]\n",
}

DEEPCODER = {
    # File below the folder -> records.
    "taco/train-00000-of-00001": [
        {
            "problem": "Read two numbers on a line and print their sum.",
            "tests": json.dumps({"inputs": ["1 2\n", "3 4\n", "-5 5\n"], "outputs": ["3\n", "7\n", "0\n"]}),
            "solutions": ["print sum([1])", "```python\nprint(sum(map(int, input().split())))\n```"],
        },
        {
            "problem": "Return the numbers of a list that are even.",
            "tests": json.dumps(
                {"fn_name": "evens", "inputs": [[[1, 2]], [[4]], [[]]], "outputs": [[[2]], [[4]], [[]]]}
            ),
            "solutions": ["def evens(numbers):\n    return [n for n in numbers if n % 2 == 0]\n"],
        },
    ],
    "primeintellect/train-00000-of-00001": [
        {
            "problem": "Print the word that you read backwards.",
            "tests": json.dumps(
                [
                    {"type": "stdin_stdout", "input": "abc\n", "output": "cba\n", "fn_name": None},
                    {"type": "stdin_stdout", "input": ["x", ""], "output": ["x"], "fn_name": None},
                ]
            ),
            "solutions": ["print(input()[::-1])"],
        },
        {
            "problem": "Return how often each number occurs, as a dictionary.",
            "tests": json.dumps(
                [
                    {"type": "function_call", "input": [[7, 7, 8]], "output": [{"7": 2, "8": 1}], "fn_name": "count"},
                    {"type": "function_call", "input": [[]], "output": [{}], "fn_name": "count"},
                ]
            ),
            "solutions": ["def count(numbers):\n    return dict(Counter(numbers))\n"],
        },
    ],
    "lcbv5/test-00000-of-00001": [
        {
            "problem": "Return the larger of two numbers.",
            "starter_code": "class Solution:\n    def larger(self, a: int, b: int) -> int:\n        ",
            "tests": json.dumps(functional_tests([("1\n2", "2"), ("5\n-5", "5")], metadata={"func_name": "larger"})),
            "metadata": {"func_name": "larger"},
        }
    ],
    "codeforces/test-00000-of-00001": [
        {
            "problem": "Print YES if the number that you read is even, else NO.",
            "tests": json.dumps([{"input": "4", "output": "YES"}, {"input": "3", "output": "NO"}]),
        }
    ],
}
DEEPCODER_PROGRAMS = {
    "lcbv5/test-00000-of-00001/1": "class Solution:\n    def larger(self, a, b):\n        return max(a, b)\n",
    "codeforces/test-00000-of-00001/1": "print('NO' if int(input()) % 2 else 'YES')\n",
}

TACO = [
    {
        "question": "Read n, then n numbers, one a line, and print the largest.",
        "solutions": json.dumps(["n = int(raw_input())", "print(max(int(input()) for _ in range(int(input()))))"]),
        "starter_code": "",
        "input_output": json.dumps({"inputs": ["2\n1\n5\n", ["1", "-3"], "1\n0\n"], "outputs": ["5\n", ["-3"], "0\n"]}),
        "difficulty": "MEDIUM_HARD",
        "raw_tags": "['math']",
        "name": None,
        "source": "codeforces",
        "tags": "['Mathematics']",
        "skill_types": "[]",
        "url": "https://example.org/1",
        "Expected Auxiliary Space": None,
        "time_limit": "2 seconds",
        "date": "2019-12-31",
        "picture_num": "0",
        "memory_limit": "256 megabytes",
        "Expected Time Complexity": None,
    },
    {
        "question": "Return the list without its first item.",
        "solutions": json.dumps(["class Solution:\n    def rest(self, items):\n        return items[1:]\n"]),
        "starter_code": "class Solution:\n    def rest(self, items: List[int]) -> List[int]:\n        ",
        # Every output has one item, and is what the function returns, not a list around it.
        "input_output": json.dumps({"fn_name": "rest", "inputs": [[[1, 2]], [[3, 4]]], "outputs": [[2], [4]]}),
        "difficulty": "EASY",
        "source": "leetcode",
    },
    {
        "question": "Return whether a number is even.",
        "solutions": json.dumps(["def is_even(n):\n    return not n % 2\n"]),
        "starter_code": "def is_even(n):\n\t",
        "input_output": json.dumps({"fn_name": "is_even", "inputs": [[2], [3]], "outputs": [[True], [False]]}),
        "difficulty": "UNKNOWN_DIFFICULTY",
        "source": "codewars",
    },
]

HUMAN_EVAL_PLUS = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\n\ndef root(x: float) -> float:\n    """Return the square root of x."""\n',
    "entry_point": "root",
    "canonical_solution": "    return math.sqrt(x)\n",
    "contract": "\n    assert x >= 0\n",
    "base_input": [[4.0], [2.0]],
    "plus_input": [[0.0], [10**30], [1e-9]],
    "atol": 0,
}
HUMAN_EVAL_PLUS_HUB = {
    **{key: HUMAN_EVAL_PLUS[key] for key in ("task_id", "prompt", "entry_point", "canonical_solution")},
    "test": (
        "\n\nimport numpy as np\n\ndef assertion(out, exp, atol):\n    assert np.allclose(out, exp, atol=atol)\n\n\n"
        "def check(candidate):\n    inputs = [[4.0], [2.0], [inf]]\n    results = [2.0, 1.4142135623730951, inf]\n"
        "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assertion(candidate(*inp), exp, 0)\n"
    ),
}

MBPP = {
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "task_id": 11,
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"],
    "challenge_test_list": [],
}
MBPP_SANITIZED = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 602,
    "prompt": "Write a function to find the circumference of a circle.",
    "code": "import math\ndef around(r):\n    return 2 * math.pi * r",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(around(1), 6.283185, rel_tol=1e-4)", "assert around(0) == 0"],
}
MBPP_MXEVAL = {
    "task_id": "MBPP/601",
    "prompt": '\n\ndef third(items):\n\t"""\n\tReturn the third item.\n\t>>> third([1, 2, 3])\n\t3\n\t"""\n',
    "canonical_solution": "\treturn items[2]",
    "entry_point": "third",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2, 3]) == 3\n",
}
MBPP_PLUS = {
    "task_id": "Mbpp/2",
    "prompt": '"""\nWrite a function to find the shared elements from the given two lists.\nassert set(similar_elements'
    '((1, 2), (2, 3))) == {2}\n"""\n',
    "entry_point": "similar_elements",
    "canonical_solution": "\ndef similar_elements(a, b):\n  assert type(a) is tuple\n  return tuple(set(a) & set(b))\n",
    "base_input": [[[3, 4, 5], [5, 7, 4]]],
    "plus_input": [[[], []], [[1, 1], [1]]],
    "atol": 0,
    "contract": "",
}
MBPP_PLUS_MATCH = {
    "task_id": "Mbpp/737",
    "prompt": '"""\nWrite a function to check whether the string starts with a vowel or not using regex.\n"""\n',
    "entry_point": "check_str",
    "canonical_solution": '\nimport re\ndef check_str(s):\n  return re.search("^[aeiouAEIOU]", s)\n',
    "base_input": [["annie"], ["dawood"]],
    "plus_input": {},
    "atol": 0,
    "contract": "",
}
MBPP_PLUS_HUB = {
    **MBPP_SANITIZED,
    "test": (
        "import numpy as np\n\ninputs = [[1], [2.5]]\nresults = [6.283185307179586, 15.707963267948966]\n"
        "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assert np.allclose(around(*inp), exp)\n"
    ),
}


def write_lines(path: pathlib.Path, records: list[dict[str, Any]]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def write_parquet(path: pathlib.Path, records: list[dict[str, Any]]) -> pathlib.Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def write_livecodebench(folder: pathlib.Path) -> str:
    """Two releases, as the data set's repository holds them."""
    write_lines(folder / "test.jsonl", [LCB_FUNCTIONAL])
    write_lines(folder / "test2.jsonl", [LCB_STDIN])
    return f"livecodebench:{folder}"


def write_deepcoder(folder: pathlib.Path) -> str:
    for place, records in DEEPCODER.items():
        write_parquet(folder / f"{place}.parquet", records)
    return f"deepcoder:{folder}"


def write_taco(folder: pathlib.Path) -> str:
    write_parquet(folder / "ALL" / "train-00000-of-00002.parquet", TACO[:2])
    write_parquet(folder / "ALL" / "train-00001-of-00002.parquet", TACO[2:])
    return f"taco:{folder}"

"""Every rule of program extraction by example, and as a whole on HumanEval."""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars2_jax.tasks import sources
from mars2_jax.tasks.extract import extract_program
from mars2_jax.tasks.problem import CallTest, Problem, StdioTest
from mars2_jax.tasks.syntax import parse

DOUBLE = Problem(
    id="double",
    statement="Return n multiplied by 2.",
    public=(CallTest((2,), 4),),
    entry_point="double",
    starter="def double(n: int) -> int:\n",
)
HELPED = Problem(
    id="helped",
    statement="Return the doubled numbers.",
    public=(CallTest(([1],), [2]),),
    entry_point="double_all",
    starter=(
        "import math\nfrom typing import List\n\n\n"
        "def twice(n):\n    return math.prod((2, n))\n\n\n"
        'def double_all(ns: List[int]) -> List[int]:\n    """Doubles all."""\n'
    ),
)
METHOD = Problem(
    id="method",
    statement="Return n multiplied by 2.",
    public=(CallTest((2,), 4),),
    entry_point="Solution.double",
    starter="class Solution:\n    def double(self, n: int) -> int:\n",
)
SCRIPT = Problem(id="script", statement="Print twice the number.", public=(StdioTest("2", "4"),))

GOOD = "def double(n):\n    return n * 2\n"
ODD = 'x = "A\f\u2028\x1c"\n'
BAD = "def double(n):\n    return n\n"


def fenced(code: str, tag: str = "python") -> str:
    return f"```{tag}\n{code}```\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        pytest.param(f"Sure:\n{fenced(GOOD)}It works.", GOOD, id="a fenced block"),
        pytest.param(fenced(GOOD, ""), GOOD, id="a block without a tag"),
        pytest.param(fenced(GOOD, "py"), GOOD, id="another name of the language"),
        pytest.param(f"{fenced(BAD)}No, better:\n{fenced(GOOD)}", GOOD, id="the last of several"),
        pytest.param(fenced(GOOD) + "Use it:\n" + fenced("print(double(3))\n"), GOOD, id="the one with the function"),
        pytest.param(fenced(GOOD) + "Broken:\n" + fenced("def double(n:\n"), GOOD, id="the last that parses"),
        pytest.param(fenced(GOOD) + fenced("def double(n): pass\n", "text"), GOOD, id="not in another language"),
        pytest.param(fenced(GOOD) + fenced(BAD, ""), GOOD, id="a tag beats no tag"),
        pytest.param(f"```python\n{GOOD}", GOOD, id="a fence that is never closed"),
        pytest.param(f"```python\n{GOOD}\nprint(double(", f"{GOOD}\n", id="the end is cut off"),
        pytest.param("```python\ndef double(n):\n    return (n *", "", id="half a function is none"),
        pytest.param(fenced(f"{GOOD}>>> double(2)\n4\n"), GOOD, id="an interpreter session after it"),
        pytest.param(f"1. Like this:\n{textwrap.indent(fenced(GOOD), '   ')}", GOOD, id="a fence in a list"),
        pytest.param(fenced(GOOD).replace("\n", "\r\n"), GOOD, id="windows line ends"),
        pytest.param(f"<think>{fenced(BAD)}</think>\n{fenced(GOOD)}", GOOD, id="thoughts are dropped"),
        pytest.param(f"{fenced(BAD)}</think>\n{fenced(GOOD)}", GOOD, id="thoughts opened in the prompt"),
        pytest.param(f"<think>{fenced(GOOD)}", "", id="thoughts without an end"),
        pytest.param(GOOD, GOOD, id="only code"),
        pytest.param(f"Here it is:\n\n{GOOD}\nThis multiplies by 2.", GOOD, id="code between prose"),
        pytest.param(f"{GOOD}Explanation\n", GOOD, id="prose that parses"),
        pytest.param(f"{GOOD}Note: done\n", GOOD, id="prose that parses as an annotation"),
        pytest.param(f"{BAD}\nor better\n\n{GOOD}", GOOD, id="the last unfenced code"),
        pytest.param(f"{GOOD}```\nThat is all.", GOOD, id="the opening fence stood in the prompt"),
        pytest.param(f"import math\n\n{GOOD}", f"import math\n\n{GOOD}", id="unfenced code with imports"),
        pytest.param(f"{ODD}{GOOD}Fine", f"{ODD}{GOOD}", id="characters that end lines elsewhere"),
        pytest.param("double = lambda n: n * 2", "double = lambda n: n * 2", id="an assigned function"),
        pytest.param("    return n * 2\n", f"{DOUBLE.starter}    return n * 2\n", id="a body"),
        pytest.param("return n * 2\n", f"{DOUBLE.starter}    return n * 2\n", id="a body without indentation"),
        pytest.param(fenced("return n * 2\n"), f"{DOUBLE.starter}    return n * 2\n", id="a fenced body"),
        pytest.param(
            "m = n * 2\n    return m\n", f"{DOUBLE.starter}    m = n * 2\n    return m\n", id="a body, stripped"
        ),
        pytest.param(
            "    return n * 2\n\n\nIt multiplies.", f"{DOUBLE.starter}    return n * 2\n\n\n", id="a body and prose"
        ),
        pytest.param(
            fenced("class Solution:\n    def double(self, n):\n        return n * 2\n"),
            "class Solution:\n    def double(self, n):\n        return n * 2\n\n\ndouble = Solution().double\n",
            id="a class where a function was asked for",
        ),
        pytest.param(
            fenced("def twice(n):\n    return 2 * n\n"), "def twice(n):\n    return 2 * n\n", id="another name"
        ),
        pytest.param(fenced("print(4)\n"), "print(4)\n", id="code that lacks the function"),
        pytest.param("I cannot do this.", "", id="no code"),
        pytest.param("Sure", "", id="one word"),
        pytest.param("", "", id="nothing"),
        pytest.param(fenced("4\n", ""), "", id="sample output"),
        pytest.param("```python\n```", "", id="an empty block"),
        pytest.param("x\0y " + "(" * 500, "", id="rubbish"),
    ],
)
def test_function(text: str, program: str) -> None:
    assert extract_program(text, DOUBLE) == program
    assert program == "" or parse(program) is not None


def test_imports_and_helpers_of_the_starter_are_added_where_needed(passes: Callable[..., bool]) -> None:
    bare = "def double_all(ns: List[int]) -> List[int]:\n    return [twice(n) for n in ns]\n"
    program = extract_program(fenced(bare), HELPED)
    assert program.startswith("import math\nfrom typing import List\ndef twice(n):")
    assert program.endswith(bare) and passes(program, HELPED)

    plain = "def double_all(ns):\n    return [2 * n for n in ns]\n"
    assert extract_program(fenced(plain), HELPED) == plain
    own = "def twice(n):\n    return n + n\n\n\ndef double_all(ns):\n    return [twice(n) for n in ns]\n"
    assert extract_program(fenced(own), HELPED) == own
    future = "from __future__ import annotations\n" + bare
    assert passes(extract_program(fenced(future), HELPED), HELPED)


def test_methods(passes: Callable[..., bool]) -> None:
    whole = "class Solution:\n    def double(self, n):\n        return n * 2\n"
    assert extract_program(fenced(whole), METHOD) == whole
    for body in ("        return n * 2\n", "return n * 2\n"):
        assert passes(extract_program(body, METHOD), METHOD)
    assert extract_program(fenced(whole) + fenced("print(1)\n"), METHOD) == whole
    # A plain function, or a method without its class, will do.
    for header in ("def double(n):", "def double(self, n):"):
        program = extract_program(fenced(f"{header}\n    return n * 2\n"), METHOD)
        assert "class Solution:\n    double = " in program and passes(program, METHOD)
    other = "class Solution:\n    def halve(self, n):\n        return n / 2\n\n\ndef double(n):\n    return n * 2\n"
    assert extract_program(fenced(other), METHOD) == other


def test_scripts() -> None:
    script = "n = int(input())\nprint(2 * n)\n"
    assert extract_program(fenced(script) + "It prints\n" + fenced("4\n", ""), SCRIPT) == script
    assert extract_program("Read and print:\n\nimport sys\nprint(1)\n", SCRIPT) == "import sys\nprint(1)\n"
    assert extract_program(script, SCRIPT) == script
    assert extract_program(f"For example:\n\n{script}\nThat is all.", SCRIPT).strip() == script.strip()
    assert extract_program("It cannot be done.", SCRIPT) == ""


FRAGMENTS = [
    *("```python\n", "```\n", "def double(n):\n", "    return n\n", "import a\n", "class B:\n", "<think>", "</think>"),
    *("x = (1\n", '"""', "It is so.\n", "  \n", "return 3\n", "@d\n", "\t", "é\0", "from now on\n", "\ud800\n"),
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join))
def test_what_comes_out_always_parses(text: str) -> None:
    for problem in (DOUBLE, HELPED, METHOD, SCRIPT):
        program = extract_program(text, problem)
        assert program == "" or parse(program) is not None


def test_long_degenerate_answers_are_quick() -> None:
    start = time.process_time()
    for line in (
        "import the thing that is needed\n",
        "def double(n):\n",
        "```python\n",
        "x = (\n",
        "print('a')\n",
        "if so\n",
    ):
        extract_program(line * 4_000, DOUBLE)
    assert time.process_time() - start < 20


STYLES = {
    "whole": lambda problem, body: fenced(problem.reference),
    "body": lambda problem, body: body,
    "stripped body": lambda problem, body: body.strip(),
    "dedented body": lambda problem, body: textwrap.dedent(body),
    "body and more": lambda problem, body: body + "\n\nHere is how it works.\n",
    "unfenced": lambda problem, body: f"Sure!\n\n{problem.reference}\nThis solves it.",
}


@pytest.mark.parametrize("style", STYLES)
def test_human_eval_solutions_survive(style: str, passes: Callable[..., bool]) -> None:
    problems = sources.load("human_eval", "test")
    for problem in random.Random(0).sample(problems, 60) if style != "body" else problems:
        assert problem.reference is not None
        body = problem.reference.removeprefix(problem.starter)
        program = extract_program(STYLES[style](problem, body), problem)
        assert passes(program, problem), (problem.id, program)


def test_human_eval_functions_get_their_imports(passes: Callable[..., bool]) -> None:
    """Chat models leave the prompt's imports and helpers out."""
    for problem in sources.load("human_eval", "test"):
        assert problem.reference is not None and problem.entry_point is not None
        alone = problem.reference[problem.reference.index(f"def {problem.entry_point}(") :]
        assert passes(extract_program(fenced(alone + "\n"), problem), problem), problem.id

"""An agent behind an endpoint, in a team with one that is here, against a real server on this machine."""

import io
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console

from mars2_jax.config import agent_config, as_json
from mars2_jax.errors import ConfigError, EndpointError
from mars2_jax.grading import verdict as grading
from mars2_jax.grading.verdict import Grade, Verdict
from mars2_jax.rollout.endpoint import Endpoint
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Completion, SamplingParams
from mars2_jax.search.writer import Attempt, Draft
from mars2_jax.tasks.problem import CallTest, Problem
from mars2_jax.tasks.prompts import attempt_messages, refinement_messages
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.endpoint import EndpointWriter
from mars2_jax.training.evaluation import run_evaluation
from mars2_jax.training.export import export_agent
from mars2_jax.training.setup import Setup
from mars2_jax.validation import validate
from tests.rollout.chat_server import Answer, failed, said, serving
from tests.training.dying import ROOT
from tests.training.test_trainer import run
from tests.training.tiny_team import ANSWERS, tiny_config, write_model

pytest.importorskip("openai", reason="needs the extra endpoint")

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("endpoint")


def team(folder, url) -> ConfigDict:
    """ann, who is here, and eve, who is served."""
    config = tiny_config(folder)
    del config.agents["bob"]
    # Few shapes: most of the time goes into compiling. Every prompt has between 128 and 250 tokens.
    config.agents.ann.role = "Think before you answer. " * 3
    config.agents.ann.model.path = write_model(folder / "one_layer", layers=1)
    config.rollout.update(slots=2, max_prompt_tokens=250)
    config.eval.update(limit=3, search_nodes=6)
    config.agents.eve = agent_config()
    config.agents.eve.role = "You are eve."
    config.agents.eve.endpoint.update(base_url=url, model="m", max_retries=0)
    return config


def solver(asked, number) -> Answer:
    """Knows the answer to every problem of `tiny_team`, and takes its time."""
    text = asked.body["messages"][-1]["content"]
    wanted = re.search(r"Return (.*)\.", text)[1]
    assert wanted in ANSWERS.values()
    answer = said(f"Sure!\n```python\ndef f(x):\n    return {wanted}\n```", tokens=20)
    answer.seconds = 0.01 * (number % 3)
    return answer


def evaluate(config, console=None) -> dict[str, float]:
    validate(config)
    return run_evaluation(FrozenConfigDict(config), None, console or Console(file=io.StringIO(), width=120))


def test_a_team_of_both_is_evaluated(folder):
    out = io.StringIO()
    with serving(solver) as server:
        config = team(folder, server.url)
        scores = evaluate(config, Console(file=out, width=200))
    assert [name.split("/")[2] for name in scores] == ["ann", "eve", "pass@1_mcts", "pass@n"]
    assert scores["eval/problems/eve/pass@1"] == 1
    assert scores["eval/problems/ann/pass@1"] < 1
    assert scores["eval/problems/pass@n"] == 1
    assert len(server.listed) == 1
    first, rest = server.asked[:3], server.asked[3:]
    assert {a.body["temperature"] for a in first} == {0.0}
    assert {a.body["temperature"] for a in rest} == {1.0} and len({a.body["seed"] for a in rest}) == len(rest) > 2
    for asked in server.asked:
        assert asked.body["messages"][0] == {"role": "system", "content": "You are eve."}
        assert asked.body["max_tokens"] == 4 and asked.body["stop"] == ["```\n"]
    assert any("A previous program" in a.body["messages"][1]["content"] for a in rest)
    assert f"eve: {len(server.asked)} requests" in out.getvalue()
    assert f"{20 * len(server.asked)} completion tokens at {server.url}" in out.getvalue()


PROBLEM = Problem(
    id="p", statement="Return x.", public=(CallTest((1,), 1),), hidden=(CallTest((2,), 2),), entry_point="f"
)
FAILED = grading.TestResult(Verdict.WRONG, actual="0")
WRONG = Grade(Verdict.WRONG, (FAILED,), (FAILED,))


def writer(endpoint) -> EndpointWriter:
    return EndpointWriter("eve", endpoint, SamplingParams(max_new_tokens=9), role="Hi.", feedback="detailed")


def settings(url, **changes):
    config = agent_config().endpoint
    config.update(base_url=url, model="m", max_retries=0, **changes)
    return config


def drained(writer) -> list[Draft]:
    drafts = []
    deadline = time.monotonic() + 20
    while writer.pending:
        assert time.monotonic() < deadline
        drafts += writer.step()
    return drafts


def test_messages_are_those_of_a_local_agent_and_shorter_ones_where_they_are_too_long():
    attempt = Attempt(1, 0, 0, 1, Draft(1, "", "def f(x):\n    return 0", None, 5), WRONG)
    full = refinement_messages(PROBLEM, "Hi.", attempt.draft.program, WRONG, feedback="detailed")
    plain = attempt_messages(PROBLEM, "Hi.")
    key = np.asarray([2**32 - 1, 5], np.uint32)
    with serving(said("```python\ndef f(x):\n    return x\n```")) as server, Endpoint("eve", settings(server.url)) as e:
        w = writer(e)
        w.submit(3, PROBLEM, None, key)
        (draft,) = drained(w)
        assert (draft.ticket, draft.program, draft.completion, draft.tokens) == (
            3,
            "def f(x):\n    return x\n",
            None,
            7,
        )
        w.submit(4, PROBLEM, attempt, key)
        drained(w)
        assert [a.body["messages"] for a in server.asked] == [plain, full]
        assert server.asked[0].body["seed"] == server.asked[1].body["seed"] == (2**32 - 1 ^ 5) % 2**31
    refusing = lambda asked, _: (
        said("x") if asked.body["messages"] == plain else failed(400, "maximum context length is 9")
    )
    with serving(refusing) as server, Endpoint("eve", settings(server.url)) as e:
        w = writer(e)
        w.submit(4, PROBLEM, attempt, key)
        assert drained(w)[0].text == "x"
        assert server.asked[0].body["messages"] == full and len(server.asked) == 7


def test_steps_are_short_and_tickets_in_order():
    wait = lambda asked, number: Answer(said("x").body, seconds=0.3)
    with serving(wait) as server, Endpoint("eve", settings(server.url)) as endpoint:
        w = writer(endpoint)
        for ticket in (5, 3, 4):
            w.submit(ticket, PROBLEM, None, np.asarray([0, ticket], np.uint32))
        with pytest.raises(ValueError, match="ticket 3 is open"):
            w.submit(3, PROBLEM, None, np.zeros(2, np.uint32))
        assert w.pending == 3
        cpu, started, longest, steps, drafts = time.process_time(), time.monotonic(), 0.0, 0, []
        while w.pending:
            begun = time.monotonic()
            new = w.step()
            assert [d.ticket for d in new] == sorted(d.ticket for d in new)
            drafts += new
            longest, steps = max(longest, time.monotonic() - begun), steps + 1
        assert sorted(d.ticket for d in drafts) == [3, 4, 5]
        # It neither waits for an answer nor spins: a step takes 20 ms.
        assert longest < 0.2 and 3 <= steps < 40
        assert time.process_time() - cpu < 0.7 * (time.monotonic() - started) + 0.2


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (said("", finish="length"), "an answer is empty (finish_reason 'length').*must hold hidden thoughts too"),
        (said(None, finish="content_filter"), "an answer is empty (finish_reason 'content_filter')"),
    ],
)
def test_empty_answers_are_answers_without_a_program_and_told_once(answer, told, caplog):
    with serving(answer) as server, Endpoint("eve", settings(server.url)) as endpoint:
        w = writer(endpoint)
        for ticket in range(3):
            w.submit(ticket, PROBLEM, None, np.asarray([0, ticket], np.uint32))
        assert [d.program for d in drained(w)] == [""] * 3
    (record,) = [r for r in caplog.records if r.name.startswith("mars2_jax")]
    assert re.search(told.replace("(", r"\(").replace(")", r"\)"), record.getMessage())


def test_suspended_it_gives_up_what_is_under_way():
    with serving(said("x"), Answer({}, seconds=60)) as server, Endpoint("eve", settings(server.url)) as endpoint:
        w = writer(endpoint)
        key = np.zeros(2, np.uint32)
        w.submit(1, PROBLEM, None, key)
        assert len(drained(w)) == 1
        for ticket in (2, 3):
            w.submit(ticket, PROBLEM, None, key)
        w.dispatch()
        assert w.step() == []
        assert w.suspend() == {2: None, 3: None}
        assert w.pending == 0 and w.step() == []
        with pytest.raises(ValueError, match="ticket 4 has half a response"):
            w.submit(4, PROBLEM, None, key, Completion(4, key, key, key, key, "abort"))


def test_a_failure_in_a_search_is_raised_at_once():
    answers = said("x"), failed(404, "The model `m` does not exist."), Answer({}, seconds=60)
    with serving(*answers) as server:
        started = time.monotonic()
        with (
            pytest.raises(EndpointError, match="agent 'eve'.*knows no model 'm'"),
            Endpoint("eve", settings(server.url, concurrency=1)) as endpoint,
        ):
            w = writer(endpoint)
            for ticket in range(5):
                w.submit(ticket, PROBLEM, None, np.asarray([0, ticket], np.uint32))
            drained(w)
        assert time.monotonic() - started < 10


def test_a_wrong_model_shows_before_any_agent_here_has_worked(folder, monkeypatch):
    monkeypatch.setattr(Engine, "step", lambda self: pytest.fail("ann has worked"))
    with (
        serving(failed(404, "The model `m` does not exist.")) as server,
        pytest.raises(EndpointError, match="agent 'eve'.*knows no model 'm'"),
    ):
        evaluate(team(folder, server.url))


def test_what_was_scored_before_a_failure_is_told(folder):
    out = io.StringIO()
    fails_later = lambda asked, number: solver(asked, number) if number <= 3 else failed(401, "Gone.")
    with serving(fails_later) as server, pytest.raises(EndpointError, match="agent 'eve'"):
        evaluate(team(folder, server.url), Console(file=out, width=120))
    assert "eve/pass@1: 1.000\n" in out.getvalue() and "ann/pass@1: 0." in out.getvalue()


def test_it_is_not_trained_nor_exported(folder, tmp_path):
    config = team(folder, "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="agent 'eve' is not trainable: config.agents.eve.endpoint.base_url"):
        run(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="agent 'eve' is served by an endpoint: there are no weights"):
        export_agent(FrozenConfigDict(config), str(tmp_path), "eve", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_trained_team_is_tried_with_it(folder, tmp_path):
    config = team(folder, "http://127.0.0.1:9/v1")
    del config.agents["eve"]
    config = FrozenConfigDict(config)
    (ann,) = Setup.check(config).team()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"ann": ann.state}, {"config": as_json(config)})
    with serving(solver) as server:
        config = team(folder, server.url)
        config.eval.search_nodes = 0
        scores = run_evaluation(FrozenConfigDict(config), str(tmp_path), Console(file=io.StringIO()))
        assert scores["eval/problems/eve/pass@1"] == 1 and len(scores) == 2
        # And without any of those that learned.
        del config.agents["ann"]
        scores = run_evaluation(FrozenConfigDict(config), str(tmp_path), Console(file=io.StringIO()))
    assert scores == {"eval/problems/eve/pass@1": 1}


def test_the_command_tells_a_failure_in_one_line(folder, tmp_path):
    """In the middle of its work, with other requests under way: it ends at once, without a traceback, with the key
    nowhere."""
    answers = said("x"), failed(401, "Bad key s3cr3tkey."), Answer({}, seconds=600)
    with serving(*answers) as server:
        config = team(folder, server.url)
        config.agents.eve.endpoint.update(api_key_env="A_KEY", concurrency=4)
        del config.agents["ann"]
        config.search.strategy = "rs2"
        file = tmp_path / "config.py"
        file.write_text(
            f"from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({config.to_dict()!r})\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "mars2_jax.evaluate", f"--config={file}"],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "A_KEY": "s3cr3tkey"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: agent 'eve': ") and "refuses the key in $A_KEY (status 401: Bad key ***.)" in line
    assert "s3cr3tkey" not in done.stdout + done.stderr
    assert [a.headers["Authorization"] for a in server.asked[:2]] == ["Bearer s3cr3tkey"] * 2

"""Chat completions from real HTTP servers on this machine, friendly and not."""

import dataclasses
import logging
import socket
import threading
import time

import pytest

from mars2_jax.config import agent_config
from mars2_jax.errors import ConfigError, EndpointError, PromptTooLong
from mars2_jax.rollout.endpoint import Endpoint, check_endpoint
from mars2_jax.rollout.types import SamplingParams
from tests.rollout.chat_server import Answer, failed, said, serving

pytest.importorskip("openai", reason="needs the extra endpoint")

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, max_new_tokens=32, stop=("END",))
SECRET = "sk-a-secret"


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    """No proxy on the way to this machine, and nothing in the environment that the package would read."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_CUSTOM_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("A_KEY", SECRET)
    # The pauses before a request is sent again, a hundredth as long.
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.005, raising=False)


def settings(url, **changes):
    config = agent_config().endpoint
    config.update(base_url=url, model="m", **changes)
    return config


def ask(server, *candidates, sampling=SAMPLING, seed=5, **changes):
    with Endpoint("eve", settings(server.url, **changes)) as endpoint:
        return endpoint.ask(candidates or [HELLO], sampling, seed).result(timeout=20)


def test_a_request_is_what_the_api_asks_for():
    with serving(said("Hi.")) as server:
        reply = ask(server, api_key_env="A_KEY")
    assert (reply.text, reply.tokens, reply.finish) == ("Hi.", 7, "stop")
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["Authorization"] == f"Bearer {SECRET}"
    assert asked.body == dict(
        model="m", messages=HELLO, temperature=0.5, top_p=0.9, max_tokens=32, stop=["END"], seed=5
    )


def test_what_is_off_is_not_sent_nor_is_what_nobody_asked_for(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "mine")
    with serving(said("Hi.")) as server:
        ask(server, sampling=SamplingParams(temperature=0.0), token_limit="max_completion_tokens")
    (asked,) = server.asked
    assert asked.body == dict(model="m", messages=HELLO, temperature=0.0, max_completion_tokens=256, seed=5)
    assert "mine" not in str(asked.headers) and "Authorization" not in asked.headers


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (said("half", finish="length", tokens=32), ("half", 32, "length")),
        (said(None, finish="content_filter"), ("", 7, "content_filter")),
        (said("", tokens=None), ("", 0, "stop")),
        (said("odd", finish=None), ("odd", 7, "stop")),
    ],
)
def test_answers_that_end_otherwise(answer, expected):
    with serving(answer) as server:
        reply = ask(server)
    assert (reply.text, reply.tokens, reply.finish) == expected


@pytest.mark.parametrize(
    "trouble",
    [
        failed(500, "oops"),
        failed(503, "loading"),
        failed(429, "slow down"),
        Answer("<html>bad gateway</html>", 502, {"Content-Type": "text/html"}),
        Answer(drop=True),
    ],
    ids=["500", "503", "429", "502", "dropped"],
)
def test_what_passes_is_sent_again(trouble):
    with serving(trouble, trouble, said("Hi.")) as server:
        assert ask(server, max_retries=2).text == "Hi."
    assert len(server.asked) == 3
    assert server.asked[0].body == server.asked[2].body


def test_the_pause_that_the_server_asks_for():
    with serving(failed(429, "slow down", **{"Retry-After": "0.4"}), said("Hi.")) as server:
        assert ask(server).text == "Hi."
    first, second = server.asked
    assert 0.4 <= second.at - first.at < 5


@pytest.mark.parametrize(
    ("answer", "times", "message"),
    [
        (failed(401, f"Wrong key: {SECRET}."), 1, r"refuses the key in \$A_KEY .status 401: Wrong key: \*\*\*"),
        (failed(403, "Not yours."), 1, r"refuses the key in \$A_KEY .status 403: Not yours.*endpoint.api_key_env"),
        (failed(404, "The model `m` does not exist."), 1, "knows no model 'm'.*does not exist.*endpoint.model"),
        (failed(400, "Invalid 'stop': array too long."), 1, r"\(status 400: Invalid 'stop'.*config.rollout and"),
        (failed(429, "quota"), 3, r"takes no more requests after 3 tries \(status 429: quota.*endpoint.concurrency"),
        (failed(500, "oops"), 3, r"fails after 3 tries \(status 500: oops"),
        (Answer("{not json"), 1, "no chat completion .*base_url is right"),
        (Answer("<html>Welcome</html>", headers={"Content-Type": "text/html"}), 1, "no chat completion .<html>Welcome"),
        (Answer({"choices": []}), 1, "no chat completion"),
        (Answer({"choices": 5}), 1, "no chat completion"),
        (Answer([1, 2]), 1, "no chat completion"),
        (Answer(None), 1, "no chat completion"),
        (Answer({"choices": [{"message": {"content": 5}}]}), 1, "no chat completion"),
        (Answer({"error": {"message": "busy"}}), 1, r'no chat completion .{"error":{"message":"busy"}}\)'),
        (Answer(drop=True), 3, "/v1 broke off after 3 tries .*without sending a response.*: see what its log says"),
        (Answer(blanks=True), 3, "no answer from .* in 0.2 s after 3 tries: raise .*endpoint.timeout"),
        (Answer({}, seconds=5), 3, "no answer from .* in 0.2 s after 3 tries: raise .*endpoint.timeout"),
    ],
)  # fmt: skip
def test_failures_are_told_in_one_line(answer, times, message):
    timeout = 0.2 if answer.seconds or answer.blanks else 20.0
    with serving(answer) as server, pytest.raises(EndpointError, match=message) as caught:
        ask(server, api_key_env="A_KEY", max_retries=2, timeout=timeout)
    assert len(server.asked) == times
    told = str(caught.value)
    assert told.startswith("agent 'eve': ") and server.url in told
    assert "\n" not in told and len(told) < 700 and SECRET not in told


def test_an_unreachable_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EndpointError, match=f"agent 'eve': no connection to {url} .*endpoint.base_url right, and up"):
        check_endpoint("eve", settings(url))


TOO_LONG = [
    failed(400, "You asked for 99 of 64 tokens.", "context_length_exceeded"),
    failed(400, "This model's maximum context length is 64 tokens. However, you requested 99."),
    failed(400, "the request exceeds the available context size, try increasing it"),
    failed(422, "Input validation error: the prompt is too long"),
    failed(400, "The input (99 tokens) is longer than the model's context length (64 tokens)."),
]  # fmt: skip


@pytest.mark.parametrize("refusal", TOO_LONG)
def test_of_prompts_the_first_that_fits(refusal):
    prompts = [[{"role": "user", "content": "x" * length}] for length in (300, 200, 100)]
    fits = lambda asked, _: said("Hi.") if len(asked.body["messages"][0]["content"]) <= 200 else refusal
    with serving(fits) as server:
        assert ask(server, *prompts).text == "Hi."
    assert [len(a.body["messages"][0]["content"]) for a in server.asked] == [300, 200]
    with serving(refusal) as server, pytest.raises(PromptTooLong, match="'eve'.*too long for 'm'.*max_new_tokens"):
        ask(server, *prompts)
    assert len(server.asked) == 3


def test_so_many_at_a_time_and_each_gets_its_own():
    slow = lambda asked, _: dataclasses.replace(said(asked.body["messages"][0]["content"]), seconds=0.05)
    with serving(slow) as server, Endpoint("eve", settings(server.url, concurrency=3)) as endpoint:
        futures = [endpoint.ask([[{"role": "user", "content": f"n{i}"}]], SAMPLING, i) for i in range(12)]
        assert [future.result(timeout=20).text for future in futures] == [f"n{i}" for i in range(12)]
        assert "12 requests, 132 prompt and 84 completion tokens" in endpoint.usage()
    assert server.most == 3


@pytest.mark.parametrize("answer", [Answer({}, seconds=60), failed(429, "later", **{"Retry-After": "60"})])
def test_leaving_gives_up_what_is_under_way(answer):
    before = threading.active_count()
    with serving(answer) as server:
        started = time.monotonic()
        with Endpoint("eve", settings(server.url, concurrency=2)) as endpoint:
            futures = [endpoint.ask([HELLO], SAMPLING, i) for i in range(5)]
            while len(server.asked) < 2:
                assert time.monotonic() - started < 10
                time.sleep(0.01)
        assert time.monotonic() - started < 5
        assert all(future.cancelled() for future in futures)
        assert len(server.asked) == 2
    assert threading.active_count() <= before + 2  # daemons of the server may still wake up


@pytest.mark.parametrize(
    "models", [failed(404, "no such thing"), Answer("{"), Answer({"data": 5}), failed(500, "oops")]
)
def test_a_server_without_a_list_of_models_passes(models, caplog):
    with serving(said("Hi."), models=models) as server:
        check_endpoint("eve", settings(server.url))
    assert not server.asked and server.listed
    assert not [r for r in caplog.records if r.name.startswith("mars2_jax")]


def test_a_model_that_is_not_listed_is_told(caplog):
    with serving(said("Hi.")) as server, caplog.at_level(logging.WARNING):
        check_endpoint("eve", settings(server.url))
        assert not [r for r in caplog.records if r.name.startswith("mars2_jax")]
        config = settings(server.url)
        config.model = "mm"
        check_endpoint("eve", config)
    assert "config.agents.eve.endpoint.model is 'mm', which" in caplog.text and "nearest there: m" in caplog.text


def test_a_refused_key_is_told_before_anything_is_asked():
    with (
        serving(said("Hi."), models=failed(401, "no")) as server,
        pytest.raises(EndpointError, match="'eve'.*refuses requests without a key .*endpoint.api_key_env"),
    ):
        check_endpoint("eve", settings(server.url))
    assert not server.asked


def test_a_key_that_is_not_set(monkeypatch):
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match="eve.endpoint.api_key_env names A_KEY, which is not set: export A_KEY"):
        Endpoint("eve", settings("http://127.0.0.1:9/v1", api_key_env="A_KEY"))


@pytest.mark.parametrize("key", ["sk-one\nsk-two", "sk-\u2026"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(monkeypatch, key):
    monkeypatch.setenv("A_KEY", key)
    with pytest.raises(ConfigError, match="eve.endpoint.api_key_env names A_KEY, which holds more than a key") as error:
        Endpoint("eve", settings("http://127.0.0.1:9/v1", api_key_env="A_KEY"))
    assert "sk-" not in str(error.value)


@pytest.mark.parametrize(
    "url, variables",
    [
        ("http://999.1.1.1:9/v1", {}),
        ("http://localhost\u200b:9/v1", {}),
        ("http://localhost:9/v1\n", {}),
        ("http://localhost:9/v1", dict(ALL_PROXY="foo://127.0.0.1:9")),
        ("https://localhost:9/v1", dict(SSL_CERT_FILE="/nowhere.pem")),
    ],
)
def test_no_client_for_an_address_or_in_an_environment_is_one_line(monkeypatch, url, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="'eve': no client can be made for .*: see config.agents.eve.endpoint.base"):
        check_endpoint("eve", settings(url))


def test_without_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"eve.endpoint needs the package openai: pip install 'mars2_jax\[endpoint\]'"
    ):
        Endpoint("eve", settings("http://127.0.0.1:9/v1"))

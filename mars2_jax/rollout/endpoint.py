"""Chat completions from a server that speaks the OpenAI API: messages in, text out, many at a time.

The transport is the `openai` package (extra `endpoint`): it sends again what is worth it, after pauses that grow or
that the server asks for, and its errors say what went wrong. Its asyncio client runs in one thread, where a call can be
given up at any moment, also while it pauses or waits for an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from mars2_jax.errors import ConfigError, EndpointError, PromptTooLong
from mars2_jax.rollout.types import SamplingParams

if TYPE_CHECKING:
    import openai

__all__ = ["Endpoint", "Reply", "check_endpoint"]

Messages = Sequence[Mapping[str, str]]
"""`{"role": "system" | "user", "content": text}`, in order."""

_LONGEST_CONNECT = 10.0
"""Seconds to wait for a connection, or for the list of models, however long an answer may take."""

# How servers say that a prompt passes the model's context, with status 400, 413 or 422: in words such as these, or by
# the code "context_length_exceeded".
_TOO_LONG = re.compile(
    r"context.{0,10}(length|size|window)|(prompt|input|messages?)\b.{0,60}(too long|longer than)|too many tokens",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a server answered.

    Attributes:
      text: the answer; "" where there is none, as when a filter withheld it or the budget went into hidden thoughts.
      tokens: its length by the server's count, hidden thoughts included; 0 where it does not count.
      finish: why it ended, in the server's words: "stop", "length", "content_filter", ...
    """

    text: str
    tokens: int
    finish: str


class Endpoint:
    """A connection to one model of one server, for an agent. A context manager; leaving it gives up what is under way.

    Args:
      agent: the agent's name, for messages.
      config: its section `endpoint` of the config.

    Attributes:
      requests, prompt_tokens, completion_tokens: what was asked and what the server counted, so far.

    Raises:
      ConfigError: the package `openai` is not installed, the variable that should hold the key is not set or holds
        what cannot be sent, or (on entering) there can be no client for the address or in this environment.
    """

    def __init__(self, agent: str, config: ConfigDict):
        self._key = f"config.agents.{agent}.endpoint"
        if importlib.util.find_spec("openai") is None:
            raise ConfigError(f"{self._key} needs the package openai: pip install 'mars2_jax[endpoint]'")
        self._agent, self._config = agent, config
        self._secret = ""
        if variable := config.api_key_env:
            self._secret = os.environ.get(variable, "").strip()
            if not self._secret:
                raise ConfigError(
                    f"{self._key}.api_key_env names {variable}, which is not set: export {variable}, or set '' for a "
                    "server that asks for no key"
                )
            if not (self._secret.isascii() and self._secret.isprintable()):
                # Not shown, and refused here: what cannot be sent would be told with it.
                raise ConfigError(
                    f"{self._key}.api_key_env names {variable}, which holds more than a key: characters that are not "
                    "ASCII, or several lines"
                )
        self._stack = contextlib.ExitStack()
        self._open: set[Future] = set()
        self.requests = self.prompt_tokens = self.completion_tokens = 0

    def __enter__(self) -> Endpoint:
        # Imported late: the package is an extra, and takes a second.
        import anyio
        import openai
        from anyio.from_thread import start_blocking_portal

        # No more of the environment is sent than was asked for: neither another key than the one that is named, nor the
        # organization and the project that are meant for OpenAI's own servers.
        unsent = ["OpenAI-Organization", "OpenAI-Project", *([] if self._secret else ["Authorization"])]
        self._headers: Any = {name: openai.Omit() for name in unsent}
        try:
            self._client = openai.AsyncOpenAI(
                base_url=self._config.base_url,
                api_key=self._secret or "none",
                timeout=openai.Timeout(self._config.timeout, connect=min(self._config.timeout, _LONGEST_CONNECT)),
                max_retries=self._config.max_retries,
                http_client=_patient_client(),
            )
        except Exception as error:  # of several packages, for addresses, proxies and certificates
            raise ConfigError(
                f"agent {self._agent!r}: no client can be made for {self._config.base_url!r} "
                f"({self._shown(str(error))}): see {self._key}.base_url, and the proxies (ALL_PROXY, HTTP_PROXY, ...) "
                "and certificates (SSL_CERT_FILE, ...) of the environment"
            ) from error
        self._limit = anyio.CapacityLimiter(self._config.concurrency)
        self._portal = self._stack.enter_context(start_blocking_portal(name=f"endpoint of {self._agent}"))
        self._stack.callback(self._portal.call, self._client.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in list(self._open):
            future.cancel()
        self._stack.close()

    def check(self) -> None:
        """Asks for the server's list of models, which costs no tokens. A model that it does not name is told as a
        warning only: servers know models by more names than they list, and some have no list.

        Raises:
          EndpointError: no connection, or the key is refused.
        """
        names = self._portal.call(self._list_models)
        model = self._config.model
        if names and model not in names:
            near = difflib.get_close_matches(model, names, n=3, cutoff=0.0)
            logging.getLogger(__name__).warning(
                "%s.model is %r, which %s does not list; nearest there: %s",
                *(self._key, model, self._config.base_url, ", ".join(near)),
            )

    def usage(self) -> str:
        """What was asked of the server and what it counted, in words."""
        tokens = f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} completion tokens"
        return f"{self.requests:,} requests, {tokens} at {self._config.base_url}"

    async def _list_models(self) -> list[str]:
        import openai

        patience = min(self._config.timeout, _LONGEST_CONNECT)
        client = self._client.with_options(max_retries=min(self._config.max_retries, 1), timeout=patience)
        try:
            page = await client.models.list(extra_headers=self._headers)
            return [str(model.id) for model in page.data]
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise self._explain(error) from error
        except openai.APIConnectionError as error:
            if _is_unanswered(error):
                return []
            raise self._explain(error) from error
        except (openai.OpenAIError, ValueError, TypeError, AttributeError):
            # No such list, or none in the form of OpenAI's.
            return []

    def ask(self, candidates: Iterable[Messages], sampling: SamplingParams, seed: int) -> Future[Reply]:
        """Asks for an answer to the first of `candidates` that fits the model's context.

        The result raises

          EndpointError: no answer, after all that is worth sending again was sent again.
          PromptTooLong: none of the candidates fits.
        """
        future = self._portal.start_task_soon(self._ask, list(candidates), sampling, seed)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    async def _ask(self, candidates: Sequence[Messages], sampling: SamplingParams, seed: int) -> Reply:
        import openai

        arguments: dict[str, Any] = dict(model=self._config.model, temperature=sampling.temperature, seed=seed)
        arguments["extra_headers"] = self._headers
        arguments[self._config.token_limit] = sampling.max_new_tokens
        # What is off is left out: not every model has it.
        if sampling.top_p < 1:
            arguments["top_p"] = sampling.top_p
        if sampling.stop:
            arguments["stop"] = list(sampling.stop)
        refusal: openai.APIStatusError | None = None
        async with self._limit:
            for messages in candidates:
                self.requests += 1
                try:
                    return self._reply(await self._client.chat.completions.create(messages=list(messages), **arguments))
                except openai.APIStatusError as error:
                    if not _says_too_long(error):
                        raise self._explain(error) from error
                    refusal = error
                except (openai.OpenAIError, ValueError) as error:
                    raise self._explain(error) from error
        assert refusal is not None
        raise PromptTooLong(
            f"agent {self._agent!r}: {self._config.base_url} says that the prompt is too long for "
            f"{self._config.model!r} ({self._told(refusal)}): lower config.rollout.max_new_tokens, which may count "
            "towards its context, raise its context, or leave the problem out"
        ) from refusal

    def _reply(self, completion: Any) -> Reply:
        """Reads an answer, of which nothing but its being JSON, if that, was checked."""
        choices = getattr(completion, "choices", None)
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = getattr(choice, "message", None)
        text = getattr(message, "content", None)
        if message is None or not isinstance(text, str | None):
            raise self._is_no_completion(_as_sent(completion))
        usage = getattr(completion, "usage", None)
        count = lambda name: value if isinstance(value := getattr(usage, name, None), int) else 0
        self.prompt_tokens += count("prompt_tokens")
        self.completion_tokens += count("completion_tokens")
        return Reply(text or "", count("completion_tokens"), str(getattr(choice, "finish_reason", None) or "stop"))

    def _explain(self, error: Exception) -> EndpointError:
        """An error of the package in one line that names the agent, the endpoint and a remedy."""
        import openai

        who, url = f"agent {self._agent!r}", self._config.base_url
        times = f"after {self._config.max_retries + 1} tries" if self._config.max_retries else "at the only try"
        match error:
            case openai.APIConnectionError() if _is_unanswered(error):
                said = f"no answer from {url} in {self._config.timeout:g} s {times}: raise {self._key}.timeout"
            case openai.APIConnectionError() if _is_broken_off(error):
                said = f"{url} broke off {times} ({self._shown(_root(error))}): see what its log says"
            case openai.APIConnectionError():
                said = f"no connection to {url} ({self._shown(_root(error))}): is {self._key}.base_url right, and up?"
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                what = f"the key in ${self._config.api_key_env}" if self._secret else "requests without a key"
                said = (
                    f"{url} refuses {what} ({self._told(error)}): let {self._key}.api_key_env name the variable that "
                    "holds one that it takes"
                )
            case openai.NotFoundError():
                said = (
                    f"{url} knows no model {self._config.model!r}, or has no chat completions ({self._told(error)}): "
                    f"see {self._key}.model, and base_url, which mostly ends in /v1"
                )
            case openai.RateLimitError():
                said = (
                    f"{url} takes no more requests {times} ({self._told(error)}): wait, or lower "
                    f"{self._key}.concurrency"
                )
            case openai.InternalServerError():
                said = f"{url} fails {times} ({self._told(error)}): see what its log says"
            case openai.APIStatusError():
                said = (
                    f"{url} refuses the request ({self._told(error)}): change what is asked for, "
                    f"{self._key}.token_limit or the sampling in config.rollout and config.eval"
                )
            case _:
                return self._is_no_completion(str(error))
        return EndpointError(f"{who}: {said}")

    def _is_no_completion(self, what: str) -> EndpointError:
        return EndpointError(
            f"agent {self._agent!r}: {self._config.base_url} answered with something that is no chat completion "
            f"({self._shown(what)}): see whether {self._key}.base_url is right"
        )

    def _told(self, error: openai.APIStatusError) -> str:
        """The server's own words."""
        body = error.body
        said = body.get("message", body) if isinstance(body, Mapping) else body
        return f"status {error.status_code}: {self._shown(str(said or 'no more was said'))}"

    def _shown(self, text: str, limit: int = 300) -> str:
        """Text of a server as a part of a line; some repeat the key that they refuse."""
        line = " ".join(text.split())
        if self._secret:
            line = line.replace(self._secret, "***")
        return line if len(line) <= limit else f"{line[:limit]}..."


def check_endpoint(agent: str, config: ConfigDict) -> None:
    """Sees that an agent's endpoint can be reached and takes its key; see `Endpoint` and `Endpoint.check`."""
    with Endpoint(agent, config) as endpoint:
        endpoint.check()


def _says_too_long(error: openai.APIStatusError) -> bool:
    return error.status_code in (400, 413, 422) and _TOO_LONG.search(f"{error.code} {error.message}") is not None


def _is_unanswered(error: openai.APIConnectionError) -> bool:
    """Whether there was a connection, but no answer in time. The package tells both alike."""
    import openai

    return isinstance(error, openai.APITimeoutError) and "Connect" not in type(error.__cause__).__name__


def _is_broken_off(error: openai.APIConnectionError) -> bool:
    """Whether there was a connection, but the server closed it before its answer was whole."""
    return type(error.__cause__).__name__ in ("ReadError", "WriteError", "RemoteProtocolError")


def _as_sent(completion: Any) -> str:
    """An answer that is no completion as the server wrote it: the package's own words for it list all that it lacks."""
    return (
        completion.model_dump_json(exclude_unset=True, warnings=False)
        if hasattr(completion, "model_dump_json")
        else str(completion)
    )


def _patient_client() -> Any:
    """The package's own HTTP client, but a try as a whole takes no longer than the timeout. Otherwise that bounds the
    time between two bytes, and some servers send blanks while a request waits in their queue."""
    import anyio
    import openai

    base: Any = openai.DefaultAsyncHttpxClient
    # That of httpx or httpx2, whichever this version of the package is built on: it sends again after no other.
    late = next(sys.modules[c.__module__] for c in base.__mro__ if hasattr(sys.modules[c.__module__], "ReadTimeout"))

    class Client(base):
        async def send(self, request: Any, **options: Any) -> Any:
            try:
                with anyio.fail_after(request.extensions["timeout"]["read"]):
                    return await super().send(request, **options)
            except TimeoutError as error:
                raise late.ReadTimeout("the answer is not whole", request=request) from error

    return Client()


def _root(error: BaseException) -> str:
    """The innermost cause: the package says no more than "Connection error"."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__

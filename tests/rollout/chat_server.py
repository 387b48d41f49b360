"""An HTTP server on this machine that answers as a test's script says, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from email.message import Message
from typing import Any


@dataclasses.dataclass
class Answer:
    """A status with a body (an object becomes JSON, a string goes as it is), after a pause; or, dropped, nothing."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    drop: bool = False
    blanks: bool = False
    """Before the body, which never comes: a blank now and then, as some servers send while a request waits."""


def said(text: str | None, finish: str = "stop", tokens: int | None = 7) -> Answer:
    """A chat completion."""
    body = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}],
    }
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 11, "completion_tokens": tokens, "total_tokens": 11 + tokens}
    return Answer(body)


def failed(status: int, message: str, code: str | None = None, **headers: str) -> Answer:
    """An error in OpenAI's form."""
    return Answer({"error": {"message": message, "type": "t", "code": code, "param": None}}, status, headers)


MODELS = Answer({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "o"}]})


@dataclasses.dataclass
class Asked:
    """One request as it came."""

    path: str
    headers: Message
    body: Any
    at: float


class ChatServer:
    """Answers POST /v1/chat/completions by `chat`, GET /v1/models by `models`.

    Attributes:
      url: what goes into `base_url`.
      asked: the chat requests so far.
      listed: the requests for the list of models.
      most: most chat requests that were under way at a time.
    """

    def __init__(self, chat: Callable[[Asked, int], Answer], models: Answer):
        self.asked: list[Asked] = []
        self.listed: list[Asked] = []
        self.most = self._now = 0
        lock, closing, outer = threading.Lock(), threading.Event(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.listed.append(Asked(self.path, self.headers, None, time.monotonic()))
                self.reply(models)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked = Asked(self.path, self.headers, body, time.monotonic())
                with lock:
                    outer.asked.append(asked)
                    number = len(outer.asked)
                    outer._now += 1
                    outer.most = max(outer.most, outer._now)
                answer = chat(asked, number)
                closing.wait(answer.seconds)
                with lock:
                    outer._now -= 1
                self.reply(answer)

            def reply(self, answer: Answer):
                if answer.drop:
                    self.close_connection = True
                    return
                if answer.blanks:
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.close_connection = True
                    with contextlib.suppress(OSError):  # the client has gone
                        while not closing.wait(0.05):
                            self.wfile.write(b" ")
                    return
                text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
                data = text.encode()
                with contextlib.suppress(OSError):  # the client has gone
                    self.send_response(answer.status)
                    for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._closing = closing
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def serving(*answers: Answer | Callable[[Asked, int], Answer], models: Answer = MODELS) -> Iterator[ChatServer]:
    """A server that gives these answers one after the other, and the last one for ever; or what a function says of a
    request and its number, from 1."""

    def chat(asked: Asked, number: int) -> Answer:
        answer = answers[min(number, len(answers)) - 1]
        return answer if isinstance(answer, Answer) else answer(asked, number)

    server = ChatServer(chat, models)
    try:
        yield server
    finally:
        server.close()

"""An endpoint of the OpenAI API on 127.0.0.1 that answers like the echo engine, or misbehaves as a test wants."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from batchinfer.core.records import Call
from batchinfer.engines.echo import answer, stream_of, texts_of
from batchinfer.engines.engine_config import EngineConfig
from web_server import HttpServer, plain

Reply = Callable[["Handler"], None]
"""What becomes of one request."""


def reply(status: int, body: Any = "", kind: str = "application/json", **headers: str) -> Reply:
    """A whole answer. A body that is no text is written as JSON; in a header's name, `_` stands for `-`."""
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    return plain(status, data, content_type=kind, **headers)


def refusal(
    status: int, message: str = "no", *, code: Any = None, param: str | None = None, **headers: str
) -> Reply:
    """An error as the API writes it."""
    error = {"message": message, "type": "some_error", "param": param, "code": code}
    return reply(status, {"error": error}, **headers)


def raw(data: bytes) -> Reply:
    """These bytes and then the end of the connection."""

    def send(handler: Handler) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return send


def half_a_body(handler: Handler) -> None:
    """Announce more bytes than are sent."""
    raw(b'HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n{"choices": [')(handler)


def slow_bytes(handler: Handler) -> None:
    """Send a byte now and then, for ever."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 50000\r\n\r\n")
    with contextlib.suppress(OSError):
        while not handler.server.endpoint.is_closed:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
    handler.close_connection = True


def send_stream(handler: Handler, found: Any) -> None:
    """An answer in parts."""
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("connection", "close")
    handler.end_headers()
    handler.close_connection = True
    for part in [*stream_of(found), b"[DONE]"]:
        handler.wfile.write(b"data: " + part + b"\n\n")
        handler.wfile.flush()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        endpoint = self.server.endpoint
        endpoint.paths.append(self.path)
        names = endpoint.models
        if self.path != "/v1/models" or names is None:
            refusal(404, "no such page")(self)
        elif callable(names):
            names(self)
        else:
            reply(200, {"object": "list", "data": [{"id": name} for name in names]})(self)

    def do_POST(self) -> None:
        endpoint = self.server.endpoint
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if endpoint.is_closed:
            self.close_connection = True
            return
        endpoint.note(self.path, body, dict(self.headers))
        with endpoint.busy():
            text = endpoint.text_of(body)
            chosen = endpoint.rule(text, body)
            if isinstance(chosen, list):
                number = endpoint.seen[text]
                endpoint.seen[text] += 1
                chosen = chosen[number] if number < len(chosen) else None
            with contextlib.suppress(OSError):
                found = endpoint.answer(self.path, body)
                if chosen is None and body.get("stream"):
                    send_stream(self, found)
                else:
                    (chosen or reply(found.status, found.body.decode()))(self)


class FakeEndpoint:
    """A running endpoint. `rule` says what becomes of a request, by its prompt's text and its body.

    A rule returns None for an ordinary answer, a reply, or a list of replies for the first requests with this text.
    """

    def __init__(self) -> None:
        self.models: Any = ["echo-model"]
        self.rule: Callable[[str, dict[str, Any]], Any] = lambda _text, _body: None
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.seen: Counter[str] = Counter()
        self.delay_seconds = 0.0
        self.most_at_once = self._at_once = 0
        self.is_closed = False
        self._lock = threading.Lock()
        self.config = EngineConfig(
            engine="echo", model="echo-model", server_args=["--max-model-len", "512"]
        )
        self._server = HttpServer(Handler, endpoint=self)
        self.url = f"{self._server.url}/v1"

    def close(self) -> None:
        self.is_closed = True
        self._server.close()

    def note(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        with self._lock:
            self.paths.append(path)
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in headers.items()})

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1

    @property
    def texts(self) -> list[str]:
        """Prompts of the requests so far."""
        return list(map(self.text_of, self.bodies))

    @staticmethod
    def text_of(body: dict[str, Any]) -> str:
        names = [name for name in ("messages", "prompt", "input") if name in body]
        return " ".join(texts_of(body[names[0]] if names else "-"))

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """What an endpoint that works answers: a `core.records.Reply`."""
        return answer(Call(key=("", 0), path=path, body=json.dumps(body).encode()), self.config)


@contextlib.contextmanager
def fake_endpoint(**attributes: Any) -> Iterator[FakeEndpoint]:
    """A running endpoint with these attributes."""
    endpoint = FakeEndpoint()
    for name, value in attributes.items():
        setattr(endpoint, name, value)
    try:
        yield endpoint
    finally:
        endpoint.close()

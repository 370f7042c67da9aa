"""A web server on 127.0.0.1 whose answers a test writes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebServer:
    """Answers by path. `seen` lists the paths that were asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_closed = threading.Event()
        self.answers: dict[str, Callable[[Any], None]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.seen.append(self.path)
                with contextlib.suppress(OSError):
                    outer.answers.get(self.path, plain(404, b"no"))(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.is_closed.set()
        self._server.shutdown()
        self._server.server_close()


def plain(status: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    def send(handler: Any) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return send


def in_turn(*answers: Callable[[Any], None]) -> Callable[[Any], None]:
    left = list(answers)

    def send(handler: Any) -> None:
        left.pop(0)(handler)

    return send

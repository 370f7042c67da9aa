"""Servers on 127.0.0.1: whose answers a test writes, and programs that say where they listen."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class HttpServer(ThreadingHTTPServer):
    """A server on 127.0.0.1 that answers from now on until `close`, with a handler that tests write."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[BaseHTTPRequestHandler], **attributes: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        vars(self).update(attributes)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def handle_error(self, *_: Any) -> None:
        pass  # clients that go away

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class Handler(BaseHTTPRequestHandler):
    """Writes whole answers, and nothing on the terminal."""

    def log_message(self, *_: Any) -> None:
        pass

    def reply(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class LoopThread:
    """An event loop on a thread of its own, for servers that are coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self, *servers: asyncio.Server) -> None:
        """End these servers, all that still runs there, and the thread."""
        self.run(self._end(servers))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, servers: Sequence[asyncio.Server]) -> None:
        for server in servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # connections close in the next turn


class WebServer:
    """Answers by path. `seen` lists the paths that were asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_closed = threading.Event()
        self.answers: dict[str, Callable[[Any], None]] = {}
        outer = self

        class Written(Handler):
            def do_GET(self) -> None:
                outer.seen.append(self.path)
                with contextlib.suppress(OSError):
                    outer.answers.get(self.path, plain(404, b"no"))(self)

        self._server = HttpServer(Written)
        self.url = self._server.url

    def close(self) -> None:
        self.is_closed.set()
        self._server.close()


def plain(status: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    """An answer; in a header's name, `_` stands for `-`."""
    named = {name.replace("_", "-").title(): value for name, value in headers.items()}
    return lambda handler: handler.reply(status, body, named)


def in_turn(*answers: Callable[[Any], None]) -> Callable[[Any], None]:
    left = list(answers)

    def send(handler: Any) -> None:
        left.pop(0)(handler)

    return send


@contextlib.contextmanager
def announced(command: list[str], log: Path, pattern: bytes) -> Iterator[str]:
    """Start a server, and yield the URL that it writes into the file `log`, as this pattern's group."""
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent)
    try:
        for _ in range(1200):
            found = re.search(pattern, log.read_bytes())
            if found or server.poll() is not None:
                break
            time.sleep(0.05)
        assert found, f"{command} did not start:\n{log.read_text()}"
        yield found[1].decode()
    finally:
        server.kill()
        server.wait()

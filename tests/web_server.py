"""Servers on 127.0.0.1: whose answers a test writes, and programs that say where they listen."""

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""What becomes of one request."""


def reply(status: int, body: Any = "", kind: str = "application/json", **headers: str) -> Answer:
    """A whole answer. A body that is neither text nor bytes is written as JSON; `_` in a header's name is `-`."""
    data = body if isinstance(body, str | bytes) else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def send(_: web.Request) -> web.Response:
        return web.Response(status=status, body=data, content_type=kind, headers=named)

    return send


def raw(data: bytes) -> Answer:
    """These bytes and then the end of the connection."""

    async def send(request: web.Request) -> web.Response:
        request.transport.write(data)
        request.transport.close()
        return web.Response()

    return send


def endless(piece: bytes, pause_seconds: float = 0.0) -> Answer:
    """These bytes again and again, for ever."""

    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(piece)
                await asyncio.sleep(pause_seconds)
        return response

    return send


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
        if not self._loop.is_closed():
            self.run(self._end(servers))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self, servers: Sequence[asyncio.Server]) -> None:
        # A server that is closed before it has taken all that it accepted leaks connections (CPython's issue 109564).
        for sock in itertools.chain.from_iterable(server.sockets for server in servers):
            self._loop.remove_reader(sock)
        for _ in range(3):  # the handler of what was accepted last begins in the third turn
            await asyncio.sleep(0)
        for server in servers:
            server.close()
        for transport in list(self._loop._transports.values()):
            transport.abort()  # closing would wait for clients that read no more
        for task in (others := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def listen(answer: Answer, place: str = "0") -> web.AppRunner:
    """Answer from now on at a port of 127.0.0.1, any by default, or at the path of a unix socket."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, keepalive_timeout=3600, shutdown_timeout=0)
    await runner.setup()
    is_port = place.isdigit()
    assert is_port or not Path(place).exists(), "vLLM's server takes no place where a file is"  # noqa: ASYNC240
    site = web.TCPSite(runner, "127.0.0.1", int(place)) if is_port else web.UnixSite(runner, place)
    await site.start()
    return runner


class HttpServer:
    """A server on 127.0.0.1 that answers from now on until `close`."""

    def __init__(self, answer: Answer) -> None:
        self._thread = LoopThread()
        self._runner: web.AppRunner = self._thread.run(listen(answer))
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def close(self) -> None:
        self._thread.close(*(site._server for site in self._runner.sites))


class WebServer(HttpServer):
    """Answers by path, with a list one after the other. `seen` lists the paths that were asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.answers: dict[str, Answer | list[Answer]] = {}
        super().__init__(self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.raw_path)
        found = self.answers.get(request.raw_path, reply(404))
        return await (found.pop(0) if isinstance(found, list) else found)(request)


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

"""The echo engine as a server, for any that a worker starts: ``python echo_server.py CONFIG PLACE [KILL] [HANG]``.

CONFIG is an `EngineConfig` as JSON; PLACE is the path of a unix socket, or a port of 127.0.0.1. Two further arguments
are marks: a call that holds the first kills this process by SIGKILL, and one that holds the second makes it answer
nothing any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from aiohttp import web

from batchinfer.core import codec
from batchinfer.core.records import Call, Reply
from batchinfer.engines.echo import DEFAULT_MAX_NUM_SEQS, answer, latency_of, stream_of
from batchinfer.engines.engine_config import EngineConfig

_MOST_BYTES = 1 << 30


class EchoServer:
    """Answers requests by the echo engine."""

    def __init__(self, config: EngineConfig, kill: str = "", hang: str = "") -> None:
        self.config = config
        self.kill, self.hang = kill.encode(), hang.encode()
        self._slots = asyncio.Semaphore(config.typed_number("max_num_seqs") or DEFAULT_MAX_NUM_SEQS)
        self._hangs = asyncio.Event()

    def app(self) -> web.Application:
        """Return the application, with the paths of vLLM's server."""
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._answer)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        del request
        names = [*self.config.served_names, *self.config.loras]
        length = self.config.typed_number("max_model_len")
        listed = [{"id": name, "object": "model", "max_model_len": length} for name in names]
        return web.json_response({"object": "list", "data": listed})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.headers.get("Content-Type", "application/json")
        body = await request.read()
        call = Call(key=("", 0), path=request.path, body=body, content_type=kind)
        if self.kill and self.kill in body:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.hang and self.hang in body:
            self._hangs.set()
        async with self._slots:
            await asyncio.sleep(latency_of(call, self.config))
            if self._hangs.is_set():
                await asyncio.Event().wait()
        reply = answer(call, self.config)
        if reply.status == 200 and b'"stream":true' in body.replace(b" ", b""):
            return await self._stream(request, reply)
        return web.Response(status=reply.status, body=reply.body, content_type="application/json")

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in stream_of(reply):
            await response.write(b"data: " + data + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def serve(config: EngineConfig, place: str, *marks: str) -> None:
    """Load for as long as the options say, and then answer until a signal ends the process."""
    await asyncio.sleep(config.echo_load_seconds)
    runner = web.AppRunner(EchoServer(config, *marks).app(), keepalive_timeout=3600)
    await runner.setup()
    if place.isdigit():
        await web.TCPSite(runner, "127.0.0.1", int(place)).start()
    else:
        await web.UnixSite(runner, place).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(codec.json_decoder(EngineConfig).decode(sys.argv[1]), *sys.argv[2:]))

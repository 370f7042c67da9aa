"""The echo engine as a server that misbehaves as a test wants: in this process, or for any that a worker starts.

``python echo_server.py CONFIG PLACE [KILL] [HANG]``: CONFIG is an `EngineConfig` as JSON; PLACE is the path of a unix
socket, or a port of 127.0.0.1. Two further arguments are marks: a prompt that holds the first kills this process by
SIGKILL, and one that holds the second makes it answer nothing any more.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from aiohttp import web

from batchinfer.core import codec
from batchinfer.core.records import Call, Reply
from batchinfer.engines.echo import DEFAULT_MAX_NUM_SEQS, answer, latency_of, stream_of, texts_of
from batchinfer.engines.engine_config import EngineConfig
from web_server import Answer, HttpServer, listen, reply

ENDPOINT = EngineConfig(engine="echo", model="echo-model", server_args=["--max-model-len", "512"])


def refusal(
    status: int, message: str = "no", *, code: Any = None, param: str | None = None, **headers: str
) -> Answer:
    """An error as the API writes it."""
    error = {"message": message, "type": "some_error", "param": param, "code": code}
    return reply(status, {"error": error}, **headers)


class EchoServer:
    """Answers requests by the echo engine, on the paths of vLLM's server.

    `rule` says what becomes of a request, by its prompt's text and its body: None for an ordinary answer, an outcome,
    or a list of outcomes for the first requests with this text.
    """

    def __init__(self, config: EngineConfig = ENDPOINT) -> None:
        self.config = config
        self.models: list[str] | Answer | None = [*config.served_names, *config.loras]
        self.rule: Callable[[str, dict[str, Any]], Any] | None = None
        self.calls: list[Call] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.seen: Counter[str] = Counter()
        self.delay_seconds = 0.0
        self.is_hung = False
        self._slots = asyncio.Semaphore(config.typed_number("max_num_seqs") or DEFAULT_MAX_NUM_SEQS)

    def answer(self, call: Call) -> Reply:
        """What a server that works answers."""
        return answer(call, self.config)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Bodies of the requests so far."""
        return [json.loads(call.body) for call in self.calls]

    @property
    def texts(self) -> list[str]:
        """Prompts of the requests so far."""
        return list(map(self._text_of, self.bodies))

    @staticmethod
    def _text_of(body: dict[str, Any]) -> str:
        names = [name for name in ("messages", "prompt", "input") if name in body]
        return " ".join(texts_of(body[names[0]] if names else "-"))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if request.method == "GET":
            return await self._look(request)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        kind = request.headers.get("Content-Type", "application/json")
        data = await request.read()
        call = Call(key=("", 0), path=request.path, body=data, content_type=kind)
        self.calls.append(call)
        outcome = self._outcome_of(call) if self.rule else None
        async with self._slots:
            await asyncio.sleep(latency_of(call, self.config) + self.delay_seconds)
            if self.is_hung:
                await asyncio.sleep(3600)
        if outcome is not None:
            return await outcome(request)
        found = self.answer(call)
        if found.status == 200 and b'"stream":true' in call.body.replace(b" ", b""):
            return await self._stream(request, found)
        return web.Response(status=found.status, body=found.body, content_type="application/json")

    async def _look(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path != "/v1/models" or self.models is None:
            return await refusal(404, "no such page")(request)
        if callable(self.models):
            return await self.models(request)
        length = self.config.typed_number("max_model_len")
        listed = [{"id": name, "max_model_len": length} for name in self.models]
        return web.json_response({"object": "list", "data": listed})

    def _outcome_of(self, call: Call) -> Answer | None:
        text = self._text_of(body := json.loads(call.body))
        chosen = self.rule(text, body)
        if not isinstance(chosen, list):
            return chosen
        number = self.seen[text]
        self.seen[text] += 1
        return chosen[number] if number < len(chosen) else None

    async def _stream(self, request: web.Request, found: Reply) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in [*stream_of(found), b"[DONE]"]:
            await response.write(b"data: " + data + b"\n\n")
        await response.write_eof()
        return response


class FakeEndpoint(EchoServer, HttpServer):
    """A server on 127.0.0.1 that answers from now on until `close`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.models = [self.config.model]
        vars(self).update(attributes)
        HttpServer.__init__(self, self.handle)
        self.url += "/v1"


def fake_endpoint(**attributes: Any) -> AbstractContextManager[FakeEndpoint]:
    """A running endpoint with these attributes."""
    return contextlib.closing(FakeEndpoint(**attributes))


async def serve(config: EngineConfig, place: str, kill: str = "", hang: str = "") -> None:
    """Answer until a signal ends the process."""
    server = EchoServer(config)

    def rule(text: str, _: dict[str, Any]) -> None:
        if kill and kill in text:
            os.kill(os.getpid(), signal.SIGKILL)
        server.is_hung |= bool(hang and hang in text)

    server.rule = rule if kill or hang else None
    await listen(server.handle, place)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(codec.json_decoder(EngineConfig).decode(sys.argv[1]), *sys.argv[2:]))

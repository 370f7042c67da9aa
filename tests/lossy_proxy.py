"""A TCP proxy for tests that spoils requests to an HTTP server: it answers 503, falls silent, or cuts connections."""

import asyncio
import contextlib
import dataclasses
import random
import re
from urllib.parse import urlsplit

from web_server import LoopThread

FAULTS = {
    "lost": "The server acts on the request; the connection is closed without a byte of the reply.",
    "503": "The server never sees the request; the reply is 503.",
    "deaf": "Nothing of the request is read after its first bytes; the connection stays open.",
    "silent": "The server acts on the request; no byte of the reply comes; the connection stays open.",
    "half": "The server acts on the request; half of the reply comes; the connection stays open.",
    "cut": "The server acts on the request; half of the reply comes, then the connection is closed.",
}
_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_REFUSAL = (
    b"HTTP/1.1 %%s Refused\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *([0-9]+)")
_SIZE = 1 << 16
_Reader, _Writer = asyncio.StreamReader, asyncio.StreamWriter


@dataclasses.dataclass
class Rule:
    """The requests to spoil: the next `times` whose first line starts with and contains these bytes.

    `fault` is one of `FAULTS`, or another status than 503.
    """

    fault: str
    starts_with: bytes
    contains: bytes
    times: int = 1


class Proxy:
    """A TCP proxy on 127.0.0.1 that can spoil the next requests of a kind, in one of the ways of `FAULTS`.

    Args:
        endpoint: URL of the server behind it.
    """

    def __init__(self, endpoint: str) -> None:
        server = urlsplit(endpoint)
        self._target = (server.hostname, server.port)
        self._random = random.Random(server.port)
        self.rules: list[Rule] = []
        self.num_lost = 0
        """Number of requests whose replies were lost by `loss_rate`."""
        self.loss_rate = 0.0
        """Share of PUT requests whose reply is lost, beside those of `rules`."""
        self._thread = LoopThread()
        self._server = self._thread.run(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._thread.close(self._server)

    def _fault_for(self, data: bytes) -> str:
        """Return how to spoil the request that begins with `data`; "" if not at all, or if it begins none."""
        line = data.split(b"\r\n", 1)[0]
        if not re.match(rb"[A-Z]+ \S+ HTTP/", line):
            return ""
        for rule in self.rules:
            if rule.times and line.startswith(rule.starts_with) and rule.contains in line:
                rule.times -= 1
                return rule.fault
        is_lost = line.startswith(b"PUT ") and self._random.random() < self.loss_rate
        self.num_lost += is_lost
        return "lost" if is_lost else ""

    async def _connect(self, from_client: _Reader, to_client: _Writer) -> None:
        """Serve one client's connection by one to the server; both end when either does."""
        from_server, to_server = await asyncio.open_connection(*self._target)
        fault = ""

        async def send_requests() -> None:
            nonlocal fault
            while data := await from_client.read(_SIZE):
                fault = self._fault_for(data) or fault
                if fault.isdigit():
                    return await self._refuse(fault, data, from_client, to_client)
                if fault == "deaf":
                    await asyncio.sleep(300)
                to_server.write(data)
                await to_server.drain()
            return None

        async def send_replies() -> None:
            while data := await from_server.read(_SIZE):
                head, _, rest = data.partition(b"\r\n\r\n")
                is_all = not fault or (b" 100 Continue" in head.split(b"\r\n")[0] and not rest)
                if is_all or fault in ("half", "cut"):
                    to_client.write(data if is_all else data[: -(len(rest) or len(data)) // 2])
                    await to_client.drain()
                if fault in ("half", "silent") and not is_all:
                    await asyncio.sleep(300)  # the client gives up
                if not is_all:
                    return

        pumps = [asyncio.ensure_future(pump()) for pump in (send_requests, send_replies)]
        with contextlib.suppress(asyncio.CancelledError):  # the end of the test
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        to_client.close()
        to_server.close()

    @staticmethod
    async def _refuse(status: str, data: bytes, from_client: _Reader, to_client: _Writer) -> None:
        """Read the rest of the request unless the client waits for a word before it sends the body, then refuse it."""
        head, _, body = data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if length is not None and b"100-continue" not in head:
            await from_client.readexactly(int(length[1]) - len(body))
        to_client.write(_REFUSAL % status.encode())
        await to_client.drain()

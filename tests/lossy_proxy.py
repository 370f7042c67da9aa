"""A TCP proxy for tests that spoils requests to an HTTP server: it answers 503, falls silent, or cuts connections."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import select
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

FAULTS = {
    "lost": "The server acts on the request; the connection is closed without a byte of the reply.",
    "503": "The server never sees the request; the reply is 503.",
    "deaf": "Nothing of the request is read after its first bytes; the connection stays open.",
    "silent": "The server acts on the request; no byte of the reply comes; the connection stays open.",
    "half": "The server acts on the request; half of the reply comes; the connection stays open.",
    "cut": "The server acts on the request; half of the reply comes, then the connection is closed.",
}

_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_503 = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *([0-9]+)")


@dataclasses.dataclass
class Rule:
    """The requests to spoil: the next `times` whose first line starts with and contains these bytes."""

    fault: str
    starts_with: bytes
    contains: bytes
    times: int


class Proxy:
    """A TCP proxy on 127.0.0.1 that can spoil the next requests of a kind, in one of the ways of `FAULTS`.

    Args:
        endpoint: URL of the server behind it.
    """

    def __init__(self, endpoint: str) -> None:
        server = urlsplit(endpoint)
        self._target = (server.hostname, server.port)
        self._random = random.Random(server.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self.num_lost = 0
        """Number of requests that were spoilt."""
        self.lines: list[bytes] = []
        """First lines of all requests."""
        self.loss_rate = 0.0
        """Share of PUT requests whose reply is lost, beside those that `fail` asks for."""
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, starts_with: bytes, *, contains: bytes = b"", times: int = 1) -> None:
        """Lose the replies to the next `times` requests of this kind, and to no others."""
        with self._lock:
            self._rules.clear()
        self.fail("lost", starts_with, contains=contains, times=times)

    def fail(
        self, fault: str, starts_with: bytes, *, contains: bytes = b"", times: int = 1
    ) -> None:
        """Spoil the next `times` requests of this kind. Earlier calls stay in force."""
        assert fault in FAULTS
        with self._lock:
            self._rules.append(Rule(fault, starts_with, contains, times))

    @property
    def is_spent(self) -> bool:
        """Whether every request that `fail` asked for was spoilt."""
        return not any(rule.times for rule in self._rules)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            connection = _Connection(self, near, socket.create_connection(self._target))
            for pump in (connection.send_requests, connection.send_replies):
                threading.Thread(target=pump, daemon=True).start()

    def fault_for(self, data: bytes) -> str:
        """Return how to spoil the request that begins with `data`; "" if not at all, or if it begins none."""
        line = data.split(b"\r\n", 1)[0]
        if not re.match(rb"[A-Z]+ \S+ HTTP/", line):
            return ""
        with self._lock:
            self.lines.append(line)
            for rule in self._rules:
                if rule.times and line.startswith(rule.starts_with) and rule.contains in line:
                    rule.times -= 1
                    self.num_lost += 1
                    return rule.fault
            if (
                self.loss_rate
                and line.startswith(b"PUT ")
                and self._random.random() < self.loss_rate
            ):
                self.num_lost += 1
                return "lost"
            return ""


class _Connection:
    """One client's connection, and the connection to the server that belongs to it."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy = proxy
        self._near = near
        self._far = far
        self._fault = ""
        self._is_over = threading.Event()
        self._pumps = threading.Semaphore(1)  # the second pump that ends closes both sockets

    def send_requests(self) -> None:
        with self._closing():
            while data := self._near.recv(1 << 16):
                self._fault = self._proxy.fault_for(data) or self._fault
                if self._fault == "503":
                    self._answer_503(data)
                    return
                if self._fault == "deaf":
                    _wait_for_close(self._near)
                    return
                self._far.sendall(data)

    def send_replies(self) -> None:
        with self._closing():
            while data := self._far.recv(1 << 16):
                head, _, rest = data.partition(b"\r\n\r\n")
                if not self._fault or (b" 100 Continue" in head.split(b"\r\n")[0] and not rest):
                    self._near.sendall(data)
                    continue
                if self._fault in ("half", "cut"):
                    self._near.sendall(data[: -(len(rest) or len(data)) // 2])
                if self._fault in ("half", "silent"):
                    self._is_over.wait(300)  # the client gives up, which ends `send_requests`
                return

    def _answer_503(self, data: bytes) -> None:
        """Read the rest of the request unless the client waits for a word before it sends the body, then refuse it."""
        head, _, body = data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if length is not None and b"100-continue" not in head:
            while len(body) < int(length[1]) and (more := self._near.recv(1 << 16)):
                body += more
        self._near.sendall(_503)

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        with contextlib.suppress(OSError):
            yield
        self._is_over.set()
        is_second = not self._pumps.acquire(blocking=False)
        for end in (self._near, self._far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            if is_second:
                end.close()


def _wait_for_close(near: socket.socket) -> None:
    """Return when the client has closed its connection, without reading what it sends."""
    gone = select.poll()
    gone.register(near, select.POLLRDHUP)
    gone.poll(300_000)

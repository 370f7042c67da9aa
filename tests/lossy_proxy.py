"""A TCP proxy for tests that loses replies which the server has already acted on."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """A TCP proxy on 127.0.0.1 that can lose the replies to the next requests, after the server acted on them.

    Args:
        endpoint: URL of the server behind it.
    """

    def __init__(self, endpoint: str) -> None:
        server = urlsplit(endpoint)
        self._target = (server.hostname, server.port)
        self._random = random.Random(server.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.starts_with = b""
        self.contains = b""
        self.num_to_lose = 0
        self.num_lost = 0
        self.loss_rate = 0.0
        """Share of wanted requests whose reply is lost, beside those that `lose` asks for."""
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, starts_with: bytes, *, contains: bytes = b"", times: int = 1) -> None:
        """Lose the replies to the next `times` requests of this kind."""
        self.starts_with, self.contains, self.num_to_lose = starts_with, contains, times

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            is_doomed = threading.Event()
            for source, sink, is_request in ((near, far, True), (far, near, False)):
                threading.Thread(
                    target=self._pump, args=(source, sink, is_request, is_doomed), daemon=True
                ).start()

    def _is_wanted(self, data: bytes) -> bool:
        line = data.split(b"\r\n", 1)[0]
        if self.loss_rate and line.startswith(b"PUT ") and self._random.random() < self.loss_rate:
            return True
        return self.num_to_lose > 0 and line.startswith(self.starts_with) and self.contains in line

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        is_request: bool,
        is_doomed: threading.Event,
    ) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_request and self._is_wanted(data):
                    is_doomed.set()
                if not is_request and is_doomed.is_set():
                    interim, _, rest = data.partition(b"\r\n\r\n")
                    is_interim = b" 100 Continue" in interim.split(b"\r\n")[0]
                    if not is_interim or rest:
                        self.num_to_lose = max(0, self.num_to_lose - 1)
                        self.num_lost += 1
                        break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            if not is_request:
                end.close()

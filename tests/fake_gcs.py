"""Google Cloud Storage on 127.0.0.1: the little of its XML interface that shows generations.

It is no proof of the service itself, only of what the adapter makes of generations.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from web_server import Handler, HttpServer

BUCKET = "my-bucket"


class Held(NamedTuple):
    """One object."""

    data: bytes
    generation: int

    @property
    def etag(self) -> str:
        """As the service's: equal bytes have equal ones."""
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class BucketHandler(Handler):
    """One request to one bucket of objects, `server.objects`."""

    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        url = urlsplit(self.path)
        _, bucket, key = f"{unquote(url.path)}/".split("/", 2)
        query = parse_qs(url.query, keep_blank_values=True)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            if bucket != BUCKET:
                self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            elif self.command == "PUT":
                self.put(key.rstrip("/"), data)
            elif not key:
                self.list(query)
            else:
                self.find(key.rstrip("/"))

    do_GET = do_HEAD = do_PUT = do_DELETE = handle_one  # noqa: N815 - http.server finds them by name

    def put(self, key: str, data: bytes) -> None:
        held = self.server.objects.get(key)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted not in (None, str(held.generation if held else 0)):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        held = self.server.objects[key] = Held(data, next(self.server.generations))
        self.answer(200, b"", held)

    def find(self, key: str) -> None:
        held = self.server.objects.get(key)
        if held is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif self.command == "DELETE":
            del self.server.objects[key]
            self.answer(204, b"")
        else:
            self.answer(200, held.data, held)

    def list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        after = query.get("start-after", query.get("continuation-token", [""]))[0]
        keys = sorted(key for key in self.server.objects if key.startswith(prefix) and key > after)
        page = keys[:1000]
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(held.data)}</Size><ETag>{held.etag}</ETag>"
            "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
            for key in page
            for held in [self.server.objects[key]]
        )
        token = (
            f"<NextContinuationToken>{page[-1]}</NextContinuationToken>"
            if len(keys) > len(page)
            else ""
        )
        self.answer(200, f"<ListBucketResult>{items}{token}</ListBucketResult>".encode())

    def answer(self, status: int, body: bytes, held: Held | None = None) -> None:
        headers = {"Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
        if held is not None:
            headers |= {"ETag": held.etag, "x-goog-generation": str(held.generation)}
        self.reply(status, body, headers)


@contextlib.contextmanager
def serving_gcs() -> Iterator[str]:
    """Yield the address of a server whose one bucket is `BUCKET`."""
    server = HttpServer(
        BucketHandler, objects={}, lock=threading.Lock(), generations=itertools.count(1)
    )
    with contextlib.closing(server):
        yield server.url

"""Google Cloud Storage on 127.0.0.1: the little of its XML interface that shows generations.

It is no proof of the service itself, only of what the adapter makes of generations.
"""

import contextlib
import hashlib
import itertools
from typing import NamedTuple
from xml.sax.saxutils import escape

import pytest
from aiohttp import web

from web_server import HttpServer

BUCKET = "my-bucket"


class Held(NamedTuple):
    """One object."""

    data: bytes
    generation: int

    @property
    def headers(self) -> dict[str, str]:
        """As the service's: equal bytes have equal etags."""
        etag = f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'
        return {"ETag": etag, "x-goog-generation": str(self.generation)}


class Gcs(HttpServer):
    """A server whose one bucket is `BUCKET`. No listing has a second page."""

    def __init__(self) -> None:
        self.objects: dict[str, Held] = {}
        self.generations = itertools.count(1)
        super().__init__(self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        status, body, held = self.found(request, await request.read())
        headers = {
            "Content-Length": str(len(body)),
            "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
            **(held.headers if held else {}),
        }
        return web.Response(status=status, body=body, headers=headers)

    def found(self, request: web.Request, data: bytes) -> tuple[int, bytes, Held | None]:
        _, bucket, key = f"{request.path}/".split("/", 2)
        key = key.rstrip("/")
        held = self.objects.get(key)
        if bucket != BUCKET:
            return 404, b"<Error><Code>NoSuchBucket</Code></Error>", None
        if request.method == "PUT":
            wanted = request.headers.get("x-goog-if-generation-match")
            if wanted not in (None, str(held.generation if held else 0)):
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", None
            self.objects[key] = Held(data, next(self.generations))
            return 200, b"", self.objects[key]
        if not key:
            return 200, self.listing(request.query.get("prefix", "")), None
        if held is None:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", None
        if request.method == "DELETE":
            del self.objects[key]
            return 204, b"", None
        return 200, held.data, held

    def listing(self, prefix: str) -> bytes:
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(held.data)}</Size>"
            f"<ETag>{held.headers['ETag']}</ETag>"
            "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
            for key, held in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult>{items}</ListBucketResult>".encode()


@pytest.fixture
def gcs_url(monkeypatch):
    """Factory: `gcs_url("job")` returns a URL in the bucket of a server of the test's own."""
    with contextlib.closing(Gcs()) as server:
        monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "testing")
        yield lambda prefix: f"gs://{BUCKET}/{prefix}"

"""An S3 server that is quick at large listings: it knows its keys and no more. For `startup.py`, `bookkeeping.py`.

    python benchmarks/s3_stub.py CHUNKS MARKERS [ROWS]

Serves s3://stub/job, a job of CHUNKS chunks of ROWS rows (1), and its run, in which MARKERS of them are done.
Prints its port.
``GET /stub-counts`` tells how many requests came, by method and place: "PUT claims/", "LIST outputs/", "GET run.json".
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import unescape

from batchinfer.core import codec, layout
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job

PAGE = 1000
RUN = "job/runs/default/"
FOLDERS = (
    layout.CHUNKS,
    layout.MANIFESTS,
    layout.OUTPUTS,
    layout.CHECKPOINTS,
    layout.CLAIMS,
    layout.WORKERS,
    layout.PROBES,
)
_MODIFIED = "2026-01-01T00:00:00.000Z"

objects: dict[str, bytes] = {}
keys: list[str] = []
counts: Counter[str] = Counter()
lock = threading.Lock()
"""Held by whoever changes one of the three: every request has a thread of its own."""


@contextlib.contextmanager
def serving(num_chunks: int, num_markers: int, num_rows: int = 1) -> Iterator[str]:
    """Run the server in a process of its own. Yields its endpoint."""
    command = [sys.executable, __file__, str(num_chunks), str(num_markers), str(num_rows)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def variables(endpoint: str) -> dict[str, str]:
    """What a client's environment needs."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def read_counts(endpoint: str) -> Counter[str]:
    """Requests that came so far, by method and place."""
    with urllib.request.urlopen(f"{endpoint}/stub-counts") as answer:
        return Counter(json.load(answer))


def place(key: str) -> str:
    """What a key is for: "claims/", "markers", "run.json".

    >>> place("job/runs/default/claims/part-00000.json"), place("job/chunks/part-00000.jsonl")
    ('claims/', 'chunks/')
    """
    if layout.MARKER_SUFFIX in key:
        return "markers"
    for folder in FOLDERS:
        if f"/{folder}" in f"/{key}":
            return folder
    return key.rpartition("/")[2]


def count(method: str, key: str) -> None:
    """One more request."""
    with lock:
        counts[f"{method} {place(key)}"] += 1


def fill(num_chunks: int, num_markers: int, num_rows: int) -> None:
    """Make the job and its run."""
    chunks, names = [], []
    for index in range(num_chunks):
        name = layout.chunk_name(index, num_chunks)
        file = layout.chunk_file(name, "none")
        names.append(file)
        first = index * num_rows
        data = b"".join(
            b'{"prompt":"row %d","_row":%d,"_id":"%d"}\n' % (row, row, row)
            for row in range(first, first + num_rows)
        )
        objects[f"job/{file}"] = data
        digest = codec.sha256(data)
        chunks.append(
            Chunk(name=name, first_row=first, rows=num_rows, bytes=len(data), sha256=digest)
        )
        if index < num_markers:
            objects[RUN + layout.output_key(layout.output_file(name))] = b"{}\n"
            objects[RUN + layout.marker_key(name)] = b"x" * 700
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=["prompt"],
        rows=num_chunks * num_rows,
        chunks=chunks,
        num_workers=1,
    )
    objects[f"job/{layout.JOB_KEY}"] = codec.encode_pretty(job)
    objects[f"job/{layout.ALL_MANIFEST}"] = "".join(f"{each}\n" for each in names).encode()
    keys.extend(sorted(objects))


def list_page(query: dict[str, list[str]]) -> bytes:
    """One page of a listing as XML."""
    prefix = query.get("prefix", [""])[0]
    after = query.get("continuation-token", query.get("start-after", [""]))[0]
    start = bisect.bisect_right(keys, after) if after else bisect.bisect_left(keys, prefix)
    page = keys[start : start + PAGE + 1]
    page = [key for key in page if key.startswith(prefix)]
    more, page = len(page) > PAGE, page[:PAGE]
    body = [
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">',
        f"<Name>stub</Name><Prefix>{quote(prefix)}</Prefix><MaxKeys>{PAGE}</MaxKeys><KeyCount>{len(page)}</KeyCount>",
        f"<EncodingType>url</EncodingType><IsTruncated>{str(more).lower()}</IsTruncated>",
    ]
    if more:
        body.append(f"<NextContinuationToken>{page[-1]}</NextContinuationToken>")
    body += [
        f"<Contents><Key>{quote(key)}</Key><LastModified>{_MODIFIED}</LastModified>"
        f'<ETag>"{"0" * 32}"</ETag><Size>{len(objects[key])}</Size><StorageClass>STANDARD</StorageClass></Contents>'
        for key in page
    ]
    return "".join([*body, "</ListBucketResult>"]).encode()


class Handler(BaseHTTPRequestHandler):
    """Enough of S3 for a worker over small chunks: there are no multipart uploads."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """An object or a page of a listing."""
        place = urlsplit(self.path)
        query = parse_qs(place.query)
        if place.path == "/stub-counts":
            with lock:
                found = json.dumps(counts).encode()
            self._send(200, found)
        elif "list-type" in query:
            count("LIST", query.get("prefix", [""])[0])
            with lock:
                page = list_page(query)
            self._send(200, page)
        else:
            self._object(unquote(place.path))

    def do_HEAD(self) -> None:
        """As GET, without the body."""
        self._object(unquote(urlsplit(self.path).path))

    def _object(self, path: str) -> None:
        key = path.removeprefix("/stub/")
        count(self.command, key)
        data = objects.get(key)
        if path.strip("/") == "stub":
            self._send(200, b"")  # is the bucket there?
        elif data is None:
            body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
            self._send(404, body)
        else:
            self._send(200, data, hashlib.md5(data).hexdigest())

    def do_PUT(self) -> None:
        """Store an object, if what the request expects is so."""
        data = self._body()
        key = unquote(urlsplit(self.path).path).removeprefix("/stub/")
        count("PUT", key)
        with lock:
            is_refused = self._is_refused(objects.get(key))
            if not is_refused:
                if key not in objects:
                    bisect.insort(keys, key)
                objects[key] = data
        if is_refused:
            self._send(412, b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>")
        else:
            self._send(200, b"", hashlib.md5(data).hexdigest())

    def _is_refused(self, before: bytes | None) -> bool:
        if before is not None and self.headers.get("If-None-Match") == "*":
            return True
        expected = self.headers.get("If-Match", "").strip('"')
        if not expected:
            return False
        return before is None or hashlib.md5(before).hexdigest() != expected

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        else:
            data = self._chunks()
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            head, _, rest = data.partition(b"\r\n")
            data = rest[: int(head.split(b";")[0], 16)]
        return data

    def _chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return data

    def do_POST(self) -> None:
        """Delete a list of objects. One request, of the first one's place."""
        doomed = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", self._body().decode())]
        count("DELETE", doomed[0] if doomed else "")
        for key in doomed:
            self._remove(key)
        self._send(200, b"<DeleteResult></DeleteResult>")

    def do_DELETE(self) -> None:
        """Delete one."""
        key = unquote(urlsplit(self.path).path).removeprefix("/stub/")
        count("DELETE", key)
        self._remove(key)
        self._send(204, b"")

    def _remove(self, key: str) -> None:
        with lock:
            if objects.pop(key, None) is not None:
                keys.remove(key)

    def _send(self, status: int, body: bytes, etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def main() -> None:
    """Serve until killed."""
    num_chunks, num_markers, *num_rows = map(int, sys.argv[1:])
    fill(num_chunks, num_markers, *(num_rows or [1]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

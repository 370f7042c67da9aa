"""An S3 server that is quick at large listings: it knows its keys and no more. For `startup.py`.

    python benchmarks/s3_stub.py CHUNKS MARKERS

Serves s3://stub/job, a job of CHUNKS chunks of one row, and its run, in which MARKERS of them are done.
Prints its port.
``GET /stub-counts`` tells how many requests of each kind came.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

from batchinfer import codec, layout
from batchinfer.records import FORMAT_VERSION, Chunk, Job

PAGE = 1000
RUN = "job/runs/default/"
_MODIFIED = "2026-01-01T00:00:00.000Z"

objects: dict[str, bytes] = {}
keys: list[str] = []
counts: Counter[str] = Counter()


def fill(num_chunks: int, num_markers: int) -> None:
    """Make the job and its run."""
    chunks, names = [], []
    for index in range(num_chunks):
        name = layout.chunk_name(index, num_chunks)
        file = layout.chunk_file(name, "none")
        names.append(file)
        data = b'{"prompt":"row %d","_row":%d,"_id":"%d"}\n' % (index, index, index)
        objects[f"job/{file}"] = data
        chunks.append(
            Chunk(name=name, first_row=index, rows=1, bytes=len(data), sha256=codec.sha256(data))
        )
        if index < num_markers:
            objects[RUN + layout.output_key(layout.output_file(name))] = b"{}\n"
            objects[RUN + layout.marker_key(name)] = b"x" * 700
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=["prompt"],
        rows=num_chunks,
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
    """Enough of S3 for a worker's start."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """An object or a page of a listing."""
        place = urlsplit(self.path)
        query = parse_qs(place.query)
        if place.path == "/stub-counts":
            self._send(200, json.dumps(counts).encode())
        elif "list-type" in query:
            counts["list"] += 1
            self._send(200, list_page(query))
        else:
            self._object(unquote(place.path))

    def do_HEAD(self) -> None:
        """As GET, without the body."""
        self._object(unquote(urlsplit(self.path).path))

    def _object(self, path: str) -> None:
        counts[self.command] += 1
        data = objects.get(path.removeprefix("/stub/"))
        if path.strip("/") == "stub":
            self._send(200, b"")  # is the bucket there?
        elif data is None:
            body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
            self._send(404, body)
        else:
            self._send(200, data, hashlib.md5(data).hexdigest())

    def do_PUT(self) -> None:
        """Store an object, if what the request expects is so."""
        counts["PUT"] += 1
        data = self._body()
        key = unquote(urlsplit(self.path).path).removeprefix("/stub/")
        before = objects.get(key)
        expected = self.headers.get("If-Match", "").strip('"')
        is_refused = before is not None and self.headers.get("If-None-Match") == "*"
        if expected and (before is None or hashlib.md5(before).hexdigest() != expected):
            is_refused = True
        if is_refused:
            self._send(412, b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>")
            return
        if before is None:
            bisect.insort(keys, key)
        objects[key] = data
        self._send(200, b"", hashlib.md5(data).hexdigest())

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
        """Delete a list of objects: said to be done."""
        self._body()
        self._send(200, b"<DeleteResult></DeleteResult>")

    def do_DELETE(self) -> None:
        """Delete one."""
        objects.pop(unquote(urlsplit(self.path).path).removeprefix("/stub/"), None)
        self._send(204, b"")

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
    fill(int(sys.argv[1]), int(sys.argv[2]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

"""The S3 server of the benchmarks: it counts requests, and is quick at large listings since it knows only its keys.

    python benchmarks/s3_stub.py CHUNKS MARKERS

Serves the bucket s3://stub. Unless CHUNKS is 0, the bucket holds s3://stub/job, a job of CHUNKS chunks of one row each,
and its run, in which MARKERS of the chunks are done. Prints its port.
``GET /stub-finish?markers=N`` finishes N chunks like the first one, which a worker has done.
``GET /stub-counts`` answers with the number of requests by method and place: "PUT claims/", "GET run.json".
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import harness
import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.records import Job, Marker
from batchinfer.storage.opening import open_store

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
_MARKED = "2026-01-01T00:00:01.000Z"
"""When markers were written: after run.json."""

objects: dict[str, bytes] = {}
uploads: dict[str, dict[int, bytes]] = {}
"""Parts of uploads that have begun, by number."""
keys: list[str] = []
counts: Counter[str] = Counter()
lock = threading.Lock()
"""Guards the three above: every request has a thread of its own."""


@contextlib.contextmanager
def serving(num_chunks: int = 0, num_markers: int = 0) -> Iterator[str]:
    """Run the server in a process of its own. Yields its endpoint."""
    command = [sys.executable, __file__, str(num_chunks), str(num_markers)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=harness.environment()
    ) as server:
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def variables(endpoint: str) -> dict[str, str]:
    """Return the variables that lead a client to the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def read_counts(endpoint: str) -> Counter[str]:
    """Return the number of requests so far, by method and place."""
    with urllib.request.urlopen(f"{endpoint}/stub-counts") as answer:
        return Counter(json.load(answer))


def place(key: str) -> str:
    """Return what a key is for: "claims/", "markers", "run.json".

    >>> place("job/runs/default/claims/part-00000.json"), place("job/chunks/part-00000.jsonl")
    ('claims/', 'chunks/')
    """
    if layout.MARKER_SUFFIX in key:
        return "markers"
    if key.endswith(layout.STATISTICS_SUFFIX):
        return "statistics"
    for folder in FOLDERS:
        if f"/{folder}" in f"/{key}":
            return folder
    return key.rpartition("/")[2]


def count(method: str, key: str) -> None:
    """Count a request."""
    with lock:
        counts[f"{method} {place(key)}"] += 1


def keep(key: str, data: bytes) -> None:
    """Put an object. The lock must be held."""
    if key not in objects:
        bisect.insort(keys, key)
    objects[key] = data


def fill(num_chunks: int, num_markers: int) -> None:
    """Make the job and its run."""
    harness.write_job(
        "memory://stub/job",
        num_chunks,
        lambda row: harness.as_line({"prompt": f"row {row}"}, row),
        per_chunk=1,
    )
    store = open_store("memory://stub")
    objects.update({info.key: store.get(info.key).data for info in store.list()})
    for index in range(num_markers):
        name = layout.chunk_name(index, num_chunks)
        objects[RUN + layout.output_key(layout.output_file(name, "0"))] = b"{}\n"
        objects[RUN + layout.marker_key(name)] = b"x" * 700
    keys.extend(sorted(objects))


def finish(num_markers: int) -> None:
    """Do the first chunks of the job by hand: each gets an output and a marker like those of the first chunk.

    The first chunk must have been done by a worker, in the job's run.
    """
    job = codec.decode(objects["job/job.json"], Job, name="job.json")
    first = job.chunks[0].name
    marker = codec.decode(objects[RUN + layout.marker_key(first)], Marker, name=first)
    line = objects[RUN + layout.output_key(marker.output)]
    for index, chunk in enumerate(job.chunks[1:num_markers], 1):
        file = layout.output_file(chunk.name, "0")
        data = line.replace(b'"_row":0,"_id":"0"', b'"_row":%d,"_id":"%d"' % (index, index))
        own = msgspec.structs.replace(
            marker,
            output=file,
            output_bytes=len(data),
            output_sha256=codec.sha256(data),
            chunk=layout.chunk_file(chunk.name, job.compression),
            chunk_sha256=chunk.sha256,
        )
        objects[RUN + layout.output_key(file)] = data
        objects[RUN + layout.marker_key(chunk.name)] = codec.encode(own)
    keys[:] = sorted(objects)


def list_page(query: dict[str, list[str]]) -> bytes:
    """Return one page of a listing as XML."""
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
        f"<Contents><Key>{quote(key)}</Key>"
        f"<LastModified>{_MARKED if layout.MARKER_SUFFIX in key else _MODIFIED}</LastModified>"
        f'<ETag>"{"0" * 32}"</ETag><Size>{len(objects[key])}</Size><StorageClass>STANDARD</StorageClass></Contents>'
        for key in page
    ]
    return "".join([*body, "</ListBucketResult>"]).encode()


class Handler(BaseHTTPRequestHandler):
    """Enough of S3 for workers and commands."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the client waits 40 ms for a body after its head

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Send an object, a page of a listing, or the counts."""
        place = urlsplit(self.path)
        query = parse_qs(place.query)
        if place.path == "/stub-counts":
            with lock:
                found = json.dumps(counts).encode()
            self._send(200, found)
        elif place.path == "/stub-finish":
            with lock:
                finish(int(query["markers"][0]))
            self._send(200, b"")
        elif "list-type" in query:
            count("LIST", query.get("prefix", [""])[0])
            with lock:
                page = list_page(query)
            self._send(200, page)
        else:
            self._object(unquote(place.path))

    def do_HEAD(self) -> None:
        """Answer like GET, without the body."""
        self._object(unquote(urlsplit(self.path).path))

    def _object(self, path: str) -> None:
        key = path.removeprefix("/stub/")
        count(self.command, key)
        data = objects.get(key)
        if path.strip("/") == "stub":
            self._send(200, b"")  # the question whether there is such a bucket
        elif data is None:
            body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
            self._send(404, body)
        else:
            self._send(200, data, hashlib.md5(data).hexdigest())

    def do_PUT(self) -> None:
        """Store an object, unless a condition of the request is not met, or a part of a large one."""
        data = self._body()
        place = urlsplit(self.path)
        query = parse_qs(place.query)
        key = unquote(place.path).removeprefix("/stub/")
        count("PUT", key)
        if "uploadId" in query:
            uploads[query["uploadId"][0]][int(query["partNumber"][0])] = data
            self._send(200, b"", hashlib.md5(data).hexdigest())
            return
        with lock:
            is_refused = self._is_refused(objects.get(key))
            if not is_refused:
                keep(key, data)
        if is_refused:
            self._send(412, b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>")
        else:
            self._send(200, b"", hashlib.md5(data).hexdigest())

    def _upload(self, key: str, query: dict[str, list[str]]) -> None:
        """Begin an upload in parts, or make an object of its parts."""
        body = f"<Bucket>stub</Bucket><Key>{escape(key)}</Key>"
        count("POST", key)
        with lock:
            if "uploads" in query:
                name, kind = f"upload-{len(uploads)}", "InitiateMultipartUploadResult"
                uploads[name] = {}
                body += f"<UploadId>{name}</UploadId>"
            else:
                parts, kind = uploads[query["uploadId"][0]], "CompleteMultipartUploadResult"
                data = b"".join(parts[number] for number in sorted(parts))
                parts.clear()
                keep(key, data)
                body += f'<ETag>"{hashlib.md5(data).hexdigest()}"</ETag>'
        self._send(200, f"<{kind}>{body}</{kind}>".encode())

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
        """Delete a list of objects, counted as one request at the place of the first; or see `_upload`."""
        place, content = urlsplit(self.path), self._body()
        query = parse_qs(place.query, keep_blank_values=True)
        if query.keys() & {"uploads", "uploadId"}:
            self._upload(unquote(place.path).removeprefix("/stub/"), query)
            return
        doomed = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", content.decode())]
        count("DELETE", doomed[0] if doomed else "")
        for key in doomed:
            self._remove(key)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in doomed)
        self._send(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_DELETE(self) -> None:
        """Delete one object."""
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
    num_chunks, num_markers = map(int, sys.argv[1:])
    if num_chunks:
        fill(num_chunks, num_markers)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

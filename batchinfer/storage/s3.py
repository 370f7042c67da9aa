"""A store in an S3 bucket, on AWS or on another service with the same API (R2, MinIO, Ceph).

Requests are sent with botocore's synchronous client, which finds credentials, region and endpoint.
A small file is uploaded in one piece, a large one in parts, several at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    ObjectNotFound,
    PreconditionFailed,
)
from batchinfer.storage import Object, ObjectInfo, check_key, check_prefix, split_bucket
from batchinfer.storage.retrying import (
    NotSupported,
    RetryPolicy,
    TransientError,
    Unreachable,
    retried,
)
from batchinfer.storage.s3_client import S3Clients
from batchinfer.storage.s3_errors import (
    already_exists,
    fields_of,
    is_unreachable,
    no_such_bucket,
    of_answer,
    s3_errors,
)
from batchinfer.storage.scratch import scratch_errors
from batchinfer.storage.waits import waiting

T = TypeVar("T")

logger = logging.getLogger(__name__)

MULTIPART_BYTES = 64 << 20
"""Bytes of the smallest file that is uploaded in parts."""
PART_BYTES = 16 << 20
"""Least number of bytes of every part but the last. These parts have the same size because R2 requires it."""
PART_CONCURRENCY = 4
MAX_PARTS = 10_000
KEYS_PER_DELETE = 1000
_READ_BYTES = 1 << 20
_HEAVY_BYTES = 1 << 20
"""Bytes of the smallest upload that a store may take long to answer."""
_HEAVY = ("upload_part", "complete_multipart_upload")
"""Requests that a store may take long to answer, whatever their size."""


class Upload(NamedTuple):
    """An unfinished multipart upload. `started`: Unix seconds by the store's clock."""

    key: str
    upload_id: str
    started: float


class S3Store:
    """Objects below ``s3://bucket/prefix``.

    Safe for threads. Credentials, profile, region and endpoint come from where botocore looks for them: environment
    variables (``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, ``AWS_PROFILE`` …), ~/.aws, the machine's role.

    Args:
        url: ``s3://bucket`` or ``s3://bucket/prefix``.
        retries: How each request is repeated.
        part_bytes: As `PART_BYTES`. S3 requires at least 5 MiB.
        multipart_bytes: As `MULTIPART_BYTES`.
    """

    def __init__(
        self,
        url: str,
        *,
        retries: RetryPolicy | None = None,
        part_bytes: int = PART_BYTES,
        multipart_bytes: int = MULTIPART_BYTES,
    ) -> None:
        self.bucket, self._root = split_bucket(url)
        self.url = f"s3://{self.bucket}/{self._root}".rstrip("/")
        self._retries = retries or RetryPolicy()
        self._has_answered = False
        """Whether anything has ever answered at the store's address."""
        self._multipart_bytes = multipart_bytes
        self._is_bucket_seen = False
        self._part_bytes = part_bytes
        self._clients = S3Clients()
        self._attempt = _Attempt()

    def get(self, key: str) -> Object:
        """See `Store.get`. One request."""
        return self._retry(partial(self._read, self._path(key)))

    def download(self, key: str, path: Path) -> None:
        """See `Store.download`. One request."""
        self._retry(partial(self._fetch, self._path(key), path))

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`. One request."""
        try:
            found = self._retry(partial(self._call, "head_object", Key=self._path(key)))
        except ObjectNotFound:
            self._check_bucket()  # The answer to a HEAD has no body, so it does not say whether the bucket is missing.
            raise
        size, etag = fields_of(found, self._url(self._path(key)), "ContentLength", "ETag")
        return ObjectInfo(key, size, etag, _timestamp(found))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. Lazy: one request for every 1000 keys that are taken."""
        return self._list(check_prefix(prefix))

    def create(self, key: str, data: bytes) -> str:
        """See `Store.create`. One request, two if the key is taken."""
        if not data:
            raise ValueError(f"{key}: an object that is created must not be empty")
        path = self._path(key)
        try:
            return self._put(path, data, IfNoneMatch="*")
        except PreconditionFailed as error:
            etag = self._etag_if_equal(path, data)
            if etag is None:
                raise already_exists(self._url(path)) from error
            return etag

    def put_file(self, key: str, path: Path) -> None:
        """See `Store.put_file`. A process that is killed half way may leave an unfinished upload, which nobody sees."""
        name = self._path(key)
        with scratch_errors(path.parent):
            size = path.stat().st_size
        if size >= self._multipart_bytes:
            self._retry(partial(self._put_parts, name, path, size))
        else:
            with scratch_errors(path.parent):
                data = path.read_bytes()
            self._put(name, data)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """See `Store.replace`. One request, two if the object has changed."""
        path = self._path(key)
        try:
            return self._put(path, data, IfMatch=etag)
        except ObjectNotFound as error:
            raise PreconditionFailed(
                f"{self._url(path)}: is absent, expected the version that was read"
            ) from error
        except PreconditionFailed:
            current = self._etag_if_equal(path, data)
            if current is None:
                raise
            return current

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`. One request for every 1000 keys."""
        paths = iter([self._path(key) for key in keys])
        while batch := list(itertools.islice(paths, KEYS_PER_DELETE)):
            try:
                self._retry(partial(self._delete_batch, batch))
            except NotSupported:  # Some stores can only delete one object at a time.
                for path in batch:
                    self._retry(partial(self._call, "delete_object", Key=path))

    def list_multipart_uploads(self) -> Iterator[Upload]:
        """Yield the unfinished multipart uploads below the root, in key order, also those of live processes."""
        marker: dict[str, str] = {}
        while True:
            page = self._retry(
                partial(self._call, "list_multipart_uploads", Prefix=self._root, **marker)
            )
            for item in page.get("Uploads", ()):
                key = item["Key"][len(self._root) :]
                yield Upload(key, item["UploadId"], item["Initiated"].timestamp())
            if not page.get("IsTruncated"):
                return
            names = ("NextKeyMarker", "NextUploadIdMarker")
            key_marker, id_marker = fields_of(page, self._url(self._root), *names)
            marker = {"KeyMarker": key_marker, "UploadIdMarker": id_marker}

    def abort_multipart_uploads(self, older_than_seconds: float) -> int:
        """Abort unfinished multipart uploads, which cost storage although nobody sees them. Return their number.

        Args:
            older_than_seconds: Younger uploads stay, because they may belong to a live worker. An age is the time since
                the upload began by the store's clock until now by this machine's.
        """
        limit = time.time() - older_than_seconds
        old = [upload for upload in self.list_multipart_uploads() if upload.started < limit]
        for upload in old:
            with contextlib.suppress(ObjectNotFound):  # finished or aborted meanwhile
                self._retry(partial(self._abort, self._path(upload.key), upload.upload_id))
        return len(old)

    def is_on_aws(self) -> bool:
        """Whether requests go to AWS itself. Sends nothing to the store."""
        with s3_errors(self.url, self.bucket):
            endpoint = str(self._connect().meta.endpoint_url)
        host = urlsplit(endpoint).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    # ------------------------------------------------------------------ helpers of the verbs

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        where = self._url(self._root + prefix)
        token: dict[str, str] = {}
        while True:
            page = self._retry(
                partial(self._call, "list_objects_v2", Prefix=self._root + prefix, **token)
            )
            for item in page.get("Contents", ()):
                path, size, etag = fields_of(item, where, "Key", "Size", "ETag")
                key = path[len(self._root) :]
                # Web consoles make empty objects like "a/" to show a folder.
                if key and not key.endswith("/"):
                    yield ObjectInfo(key, size, etag, _timestamp(item))
            if not page.get("IsTruncated"):
                return
            (next_token,) = fields_of(page, where, "NextContinuationToken")
            token = {"ContinuationToken": next_token}

    def _put(self, path: str, data: bytes, **condition: str) -> str:
        answer = self._retry(partial(self._call, "put_object", Key=path, Body=data, **condition))
        return str(answer["ETag"])

    def _put_parts(self, path: str, file: Path, size: int) -> None:
        """Upload a file in parts.

        Raises:
            TransientError: The store has dropped the upload, or completed it with a reply that was lost. The caller
                may start again.
        """
        part_bytes = max(self._part_bytes, -(-size // MAX_PARTS))
        answer = self._call("create_multipart_upload", Key=path)
        (upload_id,) = fields_of(answer, self._url(path), "UploadId")

        def send(number: int) -> dict[str, Any]:
            part = {"Key": path, "UploadId": upload_id, "PartNumber": number}
            with scratch_errors(file.parent), file.open("rb") as source:
                source.seek((number - 1) * part_bytes)
                body = source.read(part_bytes)
            answer = self._retry(partial(self._call, "upload_part", Body=body, **part))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        pool = ThreadPoolExecutor(PART_CONCURRENCY, thread_name_prefix="upload-part")
        try:
            parts = list(pool.map(send, range(1, -(-size // part_bytes) + 1)))
            whole = {"Key": path, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
            self._retry(partial(self._call, "complete_multipart_upload", **whole))
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, ObjectNotFound):
                raise TransientError(f"{self._url(path)}: its upload is gone") from error
            with contextlib.suppress(BatchinferError):  # the first error is the one to report
                self._abort(path, upload_id)
            raise
        finally:
            pool.shutdown()

    def _abort(self, path: str, upload_id: str) -> None:
        """Drop an upload and its parts. Raises ObjectNotFound if the store no longer has this upload."""
        self._call("abort_multipart_upload", Key=path, UploadId=upload_id)

    def _delete_batch(self, paths: Sequence[str]) -> None:
        wanted = {"Objects": [{"Key": path} for path in paths], "Quiet": True}
        for failure in self._call("delete_objects", Delete=wanted).get("Errors", ()):
            # `of_answer` translates the answer to a whole request, so the failure of one key is put into that form.
            code = failure.get("Code", "")
            answer = {
                "Error": failure,
                "ResponseMetadata": {"HTTPStatusCode": 403 if code == "AccessDenied" else 0},
            }
            raise of_answer(answer, self._url(failure.get("Key", "")), self.bucket)

    def _etag_if_equal(self, path: str, data: bytes) -> str | None:
        """Return the etag of an object if it holds exactly `data`; None if it holds something else or is gone."""
        try:
            held = self._retry(partial(self._read, path))
        except ObjectNotFound:
            return None
        return held.etag if held.data == data else None

    def _read(self, path: str) -> Object:
        pieces = bytearray()
        etag = self._stream(path, pieces.extend)
        return Object(bytes(pieces), etag)

    def _fetch(self, path: str, file: Path) -> None:
        with scratch_errors(file.parent):
            target = file.open("wb", buffering=0)

        def write(piece: bytes) -> None:
            with scratch_errors(file.parent):
                rest = memoryview(piece)
                while rest:
                    rest = rest[target.write(rest) :]

        with target:
            self._stream(path, write)

    # ------------------------------------------------------------------ requests

    def _retry(self, action: Callable[[], T]) -> T:
        """Do `action` with retries. The number of the attempt decides how long its requests wait for an answer."""
        numbers = itertools.count(1)

        def attempt() -> T:
            outer, self._attempt.number = self._attempt.number, next(numbers)
            try:
                found = action()
            except BatchinferError as error:
                is_lost = is_unreachable(error)
                self._has_answered = self._has_answered or not is_lost
                if is_lost and not self._has_answered:
                    raise Unreachable(error.message, hint=error.hint) from error
                raise
            finally:
                self._attempt.number = outer
            self._has_answered = True
            return found

        return retried(self._retries, attempt)

    def _call(self, method: str, **arguments: Any) -> Any:
        """Send one S3 request, without repeating it, and return botocore's answer."""
        where = self._url(arguments.get("Key", self._root))
        body = arguments.get("Body", b"")
        is_heavy = method in _HEAVY or not isinstance(body, bytes) or len(body) >= _HEAVY_BYTES
        with s3_errors(where, self.bucket), waiting(f"{method} {where}"):
            client = self._connect(is_heavy=is_heavy)
            return getattr(client, method)(Bucket=self.bucket, **arguments)

    def _stream(self, path: str, write: Callable[[bytes], object]) -> str:
        """Send one GET, and pass the object's bytes to `write` piece by piece. Return the etag.

        An error is raised if the connection ends before all bytes have come.
        """
        where = self._url(path)
        with s3_errors(where, self.bucket), waiting(f"get_object {where}") as has_come:
            answer = self._connect().get_object(Bucket=self.bucket, Key=path)
            with contextlib.closing(answer["Body"]) as body:
                while piece := body.read(
                    _READ_BYTES
                ):  # the read at the end raises if bytes are missing
                    has_come()
                    write(piece)
            return str(answer["ETag"])

    def _connect(self, *, is_heavy: bool = False) -> Any:
        """Return botocore's client for this attempt of a request."""
        policy = self._retries
        return self._clients.get(policy.silence_limit(self._attempt.number, is_heavy=is_heavy))

    def _check_bucket(self) -> None:
        """Raise InputError if the bucket is missing.

        A bucket that was found is not looked for again.
        """
        if self._is_bucket_seen:
            return
        with contextlib.suppress(AccessDenied):
            try:
                self._retry(partial(self._call, "head_bucket"))
            except ObjectNotFound as error:
                raise no_such_bucket(self.bucket) from error
        self._is_bucket_seen = True

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _url(self, path: str) -> str:
        return f"s3://{self.bucket}/{path}"


class _Attempt(threading.local):
    """The number of the present attempt of the request that the present thread sends."""

    number = 1


def _timestamp(answer: dict[str, Any]) -> float:
    """Return the Unix time at which an object was written; 0 if the store does not tell."""
    modified = answer.get("LastModified")
    return modified.timestamp() if modified else 0.0

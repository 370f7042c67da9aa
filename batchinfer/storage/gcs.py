"""A store in a Google Cloud Storage bucket, over its JSON API.

An object's generation number serves as its etag. The service compares generations exactly, so preconditions hold.
gcsfs provides the session and the credentials, and repeats failed requests by itself (6 tries, about half a minute of
pauses). This module repeats requests after failures that may pass but that gcsfs does not repeat.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import gcsfs.core
import google.auth.exceptions
import requests.exceptions
from gcsfs.retry import HttpError

from batchinfer.core import codec
from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    BatchinferError,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from batchinfer.storage import Object, ObjectInfo, check_key, check_prefix, split_bucket
from batchinfer.storage.retrying import RetryPolicy, TransientError, retried
from batchinfer.storage.scratch import scratch_errors
from batchinfer.storage.waits import waiting

RESUMABLE_BYTES = 64 << 20
"""Bytes of the smallest file that is uploaded in pieces of `PIECE_BYTES`; only the last piece creates the object."""
PIECE_BYTES = 16 << 20
CONNECT_SECONDS = 10.0
_SOURCE_SILENCE_SECONDS = 60.0
"""Seconds without a byte of a source file after which a request is given up. gcsfs by itself would wait for ever."""
_HEAVY_BYTES = 1 << 20
"""Bytes of the smallest upload that the service may take long to answer."""
DELETE_CONCURRENCY = 8
ABSENT = "0"
"""The generation of an object that does not exist."""

CREDENTIALS_HINT = (
    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key file "
    "(see docs/object-storage.md)"
)
_ROLE_HINT = "grant the role Storage Object User (roles/storage.objectUser) on the bucket"
_FAILURES = (
    OSError,
    ValueError,
    RuntimeError,
    HttpError,
    aiohttp.ClientError,
    google.auth.exceptions.GoogleAuthError,
    requests.exceptions.RequestException,
)


class GcsStore:
    """Objects below ``gs://bucket/prefix``. Safe for threads.

    Args:
        url: ``gs://bucket`` or ``gs://bucket/prefix``.
        retries: How requests are repeated after failures that gcsfs does not repeat.
        resumable_bytes: As `RESUMABLE_BYTES`.
    """

    def __init__(
        self,
        url: str,
        *,
        retries: RetryPolicy | None = None,
        resumable_bytes: int = RESUMABLE_BYTES,
    ) -> None:
        self.bucket, self._root = split_bucket(url)
        self.url = f"gs://{self.bucket}/{self._root}".rstrip("/")
        self._retries = retries or RetryPolicy()
        self._resumable_bytes = resumable_bytes
        self._is_bucket_seen = False
        with self._errors(self._root):
            # This base class is used because the package's default class asks a second API about the bucket's kind. The
            # project is empty: only making a bucket needs one. gcsfs would warn if the argument were left out.
            self._fs = gcsfs.core.GCSFileSystem(
                project="",
                use_listings_cache=False,
                skip_instance_cache=True,
                requests_timeout=patience(self._retries.silence_limit(1)),
            )
            self._patient_fs = copy.copy(
                self._fs
            )  # the same credentials, with a connection pool of its own
            self._patient_fs.requests_timeout = patience(
                self._retries.silence_limit(1, is_heavy=True)
            )

    def get(self, key: str) -> Object:
        """See `Store.get`. One request."""
        headers, data = self._find(self._path(key), alt="media")
        return Object(bytes(data), str(headers["X-Goog-Generation"]))

    def download(self, key: str, path: Path) -> None:
        """See `Store.download`. One request for the size, and one for every piece."""
        pieces = self._pieces(self.stat(key))
        with scratch_errors(path.parent), path.open("wb", buffering=0) as target:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    rest = rest[target.write(rest) :]

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`. One request."""
        return self._info(json.loads(self._find(self._path(key))[1]))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. Lazy: one request for every 1000 keys that are taken."""
        return self._list(check_prefix(prefix))

    def create(self, key: str, data: bytes) -> str:
        """See `Store.create`. One request, two if the key is taken."""
        if not data:
            raise ValueError(f"{key}: an object that is created must not be empty")
        return self._create(self._path(key), data)

    def put_file(self, key: str, path: Path) -> None:
        """See `Store.put_file`."""
        name = self._path(key)
        with scratch_errors(path.parent):
            size = path.stat().st_size
            data = path.read_bytes() if size < self._resumable_bytes else None
        if data is not None:
            self._put(name, data)
        else:
            retried(self._retries, partial(self._upload, name, path))

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """See `Store.replace`. One request, two if the object has changed."""
        path = self._path(key)
        if not (etag.isdecimal() and int(etag)):
            raise PreconditionFailed(f"{self._url(path)}: {etag!r} is no generation of it")
        try:
            return self._put(path, data, etag)
        except PreconditionFailed:
            current = self._etag_if_equal(path, data)
            if current is None:
                raise
            return current

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`. One request for every key, several at a time."""

        def remove(path: str) -> None:
            with suppress(ObjectNotFound):
                self._call("DELETE", path)

        paths = [self._path(key) for key in keys]
        with ThreadPoolExecutor(DELETE_CONCURRENCY, thread_name_prefix="delete") as pool:
            for _ in pool.map(remove, paths):
                pass

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        token: dict[str, str] = {}
        while True:
            page = self._request(
                "GET",
                "b/{}/o",
                self.bucket,
                about="",
                json_out=True,
                prefix=self._root + prefix,
                fields="items(name,size,generation,updated),nextPageToken",
                **token,
            )
            for item in page.get("items", ()):
                # Web consoles make empty objects like "a/" to show a folder.
                if not item["name"].endswith("/"):
                    yield self._info(item)
            if not page.get("nextPageToken"):
                return
            token = {"pageToken": page["nextPageToken"]}

    def _info(self, item: dict[str, Any]) -> ObjectInfo:
        updated = datetime.fromisoformat(item["updated"]).timestamp()
        key = item["name"][len(self._root) :]
        return ObjectInfo(key, int(item["size"]), str(item["generation"]), updated)

    def _create(self, path: str, data: bytes) -> str:
        try:
            return self._put(path, data, ABSENT)
        except PreconditionFailed as error:
            etag = self._etag_if_equal(path, data)
            if etag is None:
                raise AlreadyExists(
                    f"{self._url(path)}: exists with other bytes, expected none"
                ) from error
            return etag

    def _put(self, path: str, data: bytes, generation: str = "") -> str:
        condition = {"ifGenerationMatch": generation} if generation else {}
        with self._missing_bucket():
            # The upload service lives beside the API's base path, at the same host.
            host = self._fs.base.removesuffix("/storage/v1/")
            answer = self._request(
                "POST",
                f"{host}/upload/storage/v1/b/{quote(self.bucket)}/o",
                about=path,
                uploadType="media",
                name=path,
                **condition,
                data=io.BytesIO(data),
                headers={"Content-Type": "application/octet-stream"},
                json_out=True,
            )
        return str(answer["generation"])

    def _upload(self, path: str, file: Path) -> None:
        """Upload a file in pieces.

        Raises:
            TransientError: The service no longer knows the upload. The caller may start again.
        """
        try:
            with self._errors(path), waiting(f"upload {self._url(path)}"):
                self._patient_fs.put_file(str(file), f"{self.bucket}/{path}", chunksize=PIECE_BYTES)
        except ObjectNotFound as error:
            # The service answers 404 for an upload that it has lost, and for a missing bucket. The listing raises
            # InputError if the bucket is missing.
            with suppress(AccessDenied):
                next(self._list(path), None)
            raise TransientError(f"{self._url(path)}: its upload was lost") from error

    def _etag_if_equal(self, path: str, data: bytes) -> str | None:
        try:
            headers, held = self._call("GET", path, alt="media")
        except ObjectNotFound:
            return None
        return str(headers["X-Goog-Generation"]) if held == data else None

    def _pieces(self, info: ObjectInfo) -> Iterator[bytes]:
        """Read one generation of an object piece by piece."""
        path = self._path(info.key)
        for start in range(0, info.bytes, PIECE_BYTES):
            span = {"Range": f"bytes={start}-{start + PIECE_BYTES - 1}"}
            yield self._call("GET", path, alt="media", generation=info.etag, headers=span)[1]

    def _find(self, path: str, **parameters: str) -> tuple[Any, bytes]:
        """Send a GET for an object that may be absent.

        The first time that an object is absent, a listing checks that the bucket exists.
        """
        try:
            return self._call("GET", path, **parameters)
        except ObjectNotFound:
            if not self._is_bucket_seen:
                with suppress(AccessDenied):
                    next(self._list(path), None)
                self._is_bucket_seen = True
            raise

    @contextmanager
    def _missing_bucket(self) -> Iterator[None]:
        """Turn ObjectNotFound into the error for a missing bucket, the only thing that an upload can fail to find."""
        try:
            yield
        except ObjectNotFound as error:
            raise self._no_such_bucket() from error

    def _call(self, method: str, path: str, **parameters: Any) -> tuple[Any, bytes]:
        headers, data = self._request(
            method, "b/{}/o/{}", self.bucket, path, about=path, **parameters
        )
        return headers, data

    def _request(self, method: str, *address: str, about: str, **parameters: Any) -> Any:
        """Send one request, with retries, and return gcsfs's answer. Errors name the object or prefix `about`."""
        is_heavy = "data" in parameters and parameters["data"].getbuffer().nbytes >= _HEAVY_BYTES
        filesystem = self._patient_fs if is_heavy else self._fs

        def send() -> Any:
            with self._errors(about), waiting(f"{method} {self._url(about)}"):
                return filesystem.call(method, *address, **parameters)

        return retried(self._retries, send)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except BatchinferError:
            raise
        except _FAILURES as error:
            raise self._translate(error, path) from error

    def _translate(self, error: Exception, path: str) -> BatchinferError:
        url = self._url(path)
        code = str(getattr(error, "code", "") or getattr(error, "status", ""))
        if isinstance(error, FileExistsError) or code == "412":
            return PreconditionFailed(f"{url}: is not the version that was expected")
        if isinstance(error, FileNotFoundError) or code == "404":
            # The service answers 404 for a missing object and for a missing bucket. A listing (its `path` is empty)
            # fails with 404 only if the bucket is missing.
            if not path:
                return self._no_such_bucket()
            return ObjectNotFound(f"{url}: no such object")
        if code == "410":
            return TransientError(f"{url}: its upload was lost")
        if _is_passing(error):
            return TransientError(
                f"{url}: credentials could not be refreshed ({error.__cause__ or error})",
                hint="check the network and the machine's metadata server",
            )
        if isinstance(error, google.auth.exceptions.GoogleAuthError) or code == "401":
            return AccessDenied(f"{url}: no usable credentials ({error})", hint=CREDENTIALS_HINT)
        # gcsfs raises a plain OSError without errno for a 403. Network errors have an errno or a subclass of OSError.
        is_refusal = type(error) is OSError and error.errno is None
        if code == "403" or isinstance(error, PermissionError) or is_refusal:
            return AccessDenied(f"{url}: the store refused access", hint=_ROLE_HINT)
        if isinstance(error, TimeoutError):
            return StorageError(f"{url}: no answer from the store", hint="check the network")
        return StorageError(f"{url}: {type(error).__name__}: {error}")

    def _no_such_bucket(self) -> InputError:
        return InputError(
            f"bucket {self.bucket!r}: does not exist, expected an existing bucket",
            hint=f"create it (gcloud storage buckets create gs://{self.bucket}), or check the name",
        )

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _url(self, path: str) -> str:
        return f"gs://{self.bucket}/{path}"


def patience(silence_seconds: float = _SOURCE_SILENCE_SECONDS) -> aiohttp.ClientTimeout:
    """Return the time-outs for gcsfs's requests: seconds to connect, and `silence_seconds` without any data."""
    return aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)


def _is_passing(error: BaseException) -> bool:
    """Whether an error means that credentials could not be checked just now, and not that they were refused.

    gcsfs reports both cases as a 401.
    """
    cause: BaseException | None = error
    while cause is not None:
        # A TransportError with a second argument carries an answer of the metadata server, which then has refused.
        if isinstance(cause, google.auth.exceptions.TransportError) and len(cause.args) < 2:
            return True
        if isinstance(cause, google.auth.exceptions.GoogleAuthError) and cause.retryable:
            return True
        cause = cause.__cause__
    return False


def _file_sha256(path: Path) -> str:
    with scratch_errors(path.parent), path.open("rb") as file:
        return codec.sha256_file(file)

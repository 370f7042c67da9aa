"""A store in a bucket (S3, GCS, Azure) or in memory, over obstore.

obstore sends each request once. Which failures are worth another try, and what a lost reply means, is decided here: a
conditional write that was refused may have been done by an earlier try whose reply was lost, so the object is read back
and compared.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from batchinfer.core.errors import (
    AlreadyExists,
    BatchinferError,
    ObjectNotFound,
    PreconditionFailed,
)
from batchinfer.storage import Object, ObjectInfo, check_key, check_prefix, split_bucket
from batchinfer.storage.cloud_errors import Cloud, translate
from batchinfer.storage.retrying import RetryPolicy, TransientError, retried
from batchinfer.storage.scratch import scratch_errors

T = TypeVar("T")

PART_BYTES = 8 << 20
"""Bytes of the parts in which a large file goes up, unless there would be too many. R2 wants equal ones."""
_MOST_PARTS = 10_000
"""Parts that every store takes."""
_PARTS_AT_ONCE = 4
_HEAVY_BYTES = 1 << 20
_KEYS_PER_PAGE = 1000
_PIECE_BYTES = 1 << 20
_WAKE_SECONDS = 1.0


class BucketStore:
    """Objects below one URL. Safe for threads.

    Args:
        url: For example ``s3://bucket/prefix``.
        store: obstore's store of the bucket, or what has the same methods. Each call is one request, or few.
        cloud: Whose bucket it is, for messages and hints.
        patient: The same store, with more time for each request.
        retries: How each request is repeated.
    """

    def __init__(
        self,
        url: str,
        store: Any,
        cloud: Cloud,
        *,
        patient: Any = None,
        retries: RetryPolicy | None = None,
    ) -> None:
        self.bucket, self._root = split_bucket(url)
        check_key(f"{self.bucket}/{self._root}".rstrip("/"))
        self.url = f"{url.partition('://')[0]}://{self.bucket}/{self._root}".rstrip("/")
        self._store, self._patient = store, patient or store
        self._cloud = cloud._replace(create=cloud.create.format(bucket=self.bucket))
        self._retries = retries or RetryPolicy()

    def get(self, key: str) -> Object:
        """See `Store.get`. One request."""

        def read() -> Object:
            found = self._store.get(self._path(key))
            return Object(bytes(found.bytes()), self._etag(key, found.meta))

        return self._ask(key, read)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Read the bytes of an object from `start` up to, but not including, `end`. One request."""
        ask = partial(self._store.get_range, self._path(key), start=start, end=end)
        return bytes(self._ask(key, ask))

    def download(self, key: str, path: Path) -> None:
        """See `Store.download`. One request."""

        def fetch() -> None:
            found = self._store.get(self._path(key))
            self._etag(key, found.meta)
            with scratch_errors(path.parent), path.open("wb") as target:
                for piece in found.stream(min_chunk_size=_PIECE_BYTES):
                    target.write(piece)

        self._ask(key, fetch)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`. One request."""
        return self._ask(key, lambda: self._info(key, self._store.head(self._path(key))))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. Lazy: one request for every 1000 keys that are taken."""
        return self._list(check_prefix(prefix))

    def create(self, key: str, data: bytes) -> str:
        """See `Store.create`. One request, two if the key is taken."""
        if not data:
            raise ValueError(f"{key}: an object that is created must not be empty")
        try:
            return self._put(key, data, "create")
        except AlreadyExists as error:
            return self._settle(key, data, error)

    def put_file(self, key: str, path: Path) -> None:
        """See `Store.put_file`. A process that is killed half way may leave an unfinished upload, which nobody sees."""
        with scratch_errors(path.parent):
            is_empty = not path.stat().st_size
        self._put(key, b"" if is_empty else path, None)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """See `Store.replace`. One request, two if the object has changed."""
        try:
            return self._put(key, data, self._version_of(etag))
        except (PreconditionFailed, ObjectNotFound) as error:
            return self._settle(key, data, PreconditionFailed(error.message))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`. One request for every 1000 keys on S3, 256 on Azure, one on GCS."""
        paths = [self._path(key) for key in keys]
        try:
            if paths:
                self._ask("", partial(self._store.delete, paths))
        except ObjectNotFound:
            for path in paths:  # nobody knows which of them are gone
                with contextlib.suppress(ObjectNotFound):
                    self._ask("", partial(self._store.delete, [path]))

    # ------------------------------------------------------------------ helpers of the verbs

    def _put(self, key: str, file: bytes | Path, mode: Any) -> str:
        path, is_light = self._path(key), isinstance(file, bytes) and len(file) < _HEAVY_BYTES
        size = len(file) if isinstance(file, bytes) else file.stat().st_size
        part_bytes = max(PART_BYTES, -(-size // _MOST_PARTS))

        def put() -> str:
            stored = (self._store if is_light else self._patient).put(
                path, file, mode=mode, chunk_size=part_bytes, max_concurrency=_PARTS_AT_ONCE
            )
            return self._etag(key, stored)

        return self._ask(key, put)

    @staticmethod
    def _version_of(etag: str) -> dict[str, str]:
        """Return obstore's UpdateVersion for an etag."""
        content, _, version = etag.partition(";")
        return {"e_tag": content, "version": version} if version else {"e_tag": content}

    def _settle(self, key: str, data: bytes, error: BatchinferError) -> str:
        """Return the etag if the object holds `data`: an earlier try succeeded, and its reply was lost. Else raise."""
        with contextlib.suppress(ObjectNotFound):
            held = BucketStore.get(self, key)
            if held.data == data:
                return held.etag
        raise error

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        # obstore lists whole folders, so the rest of the prefix is compared here. All keys that begin with it come
        # after the text whose last character is one less.
        folder, _, rest = prefix.rpartition("/")
        place = self._root + folder
        after = f"{self._root}{prefix[:-1]}{chr(ord(prefix[-1]) - 1)}~" if rest > "!" else None
        pages: Iterator[Sequence[Mapping[str, Any]]] | None = None

        def next_page() -> Sequence[Mapping[str, Any]]:
            nonlocal pages
            try:
                pages = pages or iter(
                    self._store.list(
                        place.rstrip("/") or None, offset=after, chunk_size=_KEYS_PER_PAGE
                    )
                )
                return next(pages, ())
            except BaseException:
                pages = None  # the next try goes on behind the last key
                raise

        while page := self._ask(prefix, next_page):
            for item in page:
                after = item["path"]
                key = after[len(self._root) :]
                if not after.startswith(self._root + prefix):
                    if key > prefix:
                        return
                elif item["size"]:  # consoles make empty objects to show a folder
                    yield self._info(key, item)

    def _info(self, key: str, item: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(
            key, item["size"], self._etag(key, item), item["last_modified"].timestamp()
        )

    def _etag(self, key: str, item: Mapping[str, Any]) -> str:
        etag = item["e_tag"]
        if not etag:
            raise TransientError(
                f"{self.url}/{key}: the answer is not one of a store (it has no ETag)",
                hint="check the endpoint and HTTP_PROXY: a proxy or a login page may answer in the store's place",
            )
        etag = (
            etag if etag.startswith('"') else f'"{etag}"'
        )  # listings of Azure leave the quotes out
        # GCS compares generations, which a listing does not show.
        return f"{etag};{item['version']}" if item["version"] else etag

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    # ------------------------------------------------------------------ requests

    def _ask(self, key: str, request: Callable[[], T]) -> T:
        """Do `request`, again if it fails in a way that may pass."""
        where = f"{self.url}/{key}".rstrip("/")

        def attempt() -> T:
            try:
                return request()
            except BatchinferError:
                raise
            except BaseException as error:  # obstore's panics are no Exceptions
                if ours := translate(error, where, self._cloud):
                    raise ours from error
                raise

        return self._retry(attempt)

    def _retry(self, attempt: Callable[[], T]) -> T:
        if not self._cloud.is_remote:
            return attempt()
        return retried(self._retries, lambda: interruptible(attempt))


def interruptible(work: Callable[[], T]) -> T:
    """Do `work` so that signals are heard meanwhile. obstore does not return to Python while it waits for an answer.

    Only the main thread hears signals. There `work` runs on a thread of its own, which is left behind if a signal
    raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed on to the main thread
            done.set_exception(error)

    threading.Thread(target=run, name="storage", daemon=True).start()
    # Python does not hear a signal that comes at the very end of another one's handler until it wakes again.
    while not wait([done], _WAKE_SECONDS).done:
        pass
    return done.result()

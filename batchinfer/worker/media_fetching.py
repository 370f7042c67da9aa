"""Fetches what rows name by link or path (images, sounds, videos), beside the engine: a few threads, a row each.

What several rows name is fetched once, as long as the cache has room for it. The server decodes it; here only its size
counts, and whether rows may name its place. `MediaFetcher` is used on the main thread.
"""

from __future__ import annotations

import functools
import posixpath
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from urllib.parse import quote

from batchinfer.core.errors import BatchinferError, ConfigError
from batchinfer.core.records import Failure
from batchinfer.core.row_codes import Code
from batchinfer.ledger.jobs import OpenStore
from batchinfer.prompts.builder import internal_failure
from batchinfer.prompts.types import MediaRef, RowError
from batchinfer.storage import check_key, split_bucket, web
from batchinfer.storage.opening import (
    BUCKET_SCHEMES,
    join_url,
    local_path,
    split_url,
)
from batchinfer.worker.background import Background
from batchinfer.worker.worker_config import Limits

NUM_THREADS = 16
"""Rows whose media are fetched at the same time."""
_ENTRY_BYTES = 1000
"""Bytes of memory that an entry of the cache takes beside its content and its place."""
_RECENT = 64
"""Rows by whose sizes the memory is estimated that the next ones will take."""
_MOST_STORES = 64
"""Most stores that are kept open. Each row may name another bucket."""
_BUCKETS = (*BUCKET_SCHEMES, "hf")


class MediaFetcher:
    """The images, sounds and videos of a worker's rows.

    Args:
        limits: Limits of the worker.
        open_store: Function that opens the store at a URL.
        background: The worker's background. Media are fetched on threads beside its own.
    """

    def __init__(self, limits: Limits, open_store: OpenStore, background: Background) -> None:
        self._limits = limits
        self._background = background
        self._cache = MediaCache(limits.max_row_memory << 19)
        self._store_at = functools.lru_cache(_MOST_STORES)(open_store)
        self.body_sizes = deque[int](maxlen=_RECENT)
        """Bytes of the bodies of the rows that got their media last."""

    def fetch(self, refs: list[MediaRef]) -> Future[list[bytes] | Failure]:
        """Begin to fetch the media of one row. The result is a failure if one of them cannot be used."""
        return self._background.submit(partial(self.fetch_now, refs))

    def fetch_now(self, refs: list[MediaRef]) -> list[bytes] | Failure:
        """Fetch the media of one row, one after the other. Safe for threads."""
        found: list[bytes] = []
        limits = self._limits
        most = max(limits.max_row_memory << 20, limits.max_media_bytes)
        try:
            for ref in refs:
                found.append(self._fetch_one(ref))
                if sum(map(len, found)) > most:
                    message = f"the row's media have more than {most} bytes in all"
                    raise RowError(Code.MEDIA_TOO_LARGE, message)
        except RowError as problem:
            return problem.as_failure()
        except Exception as error:  # noqa: BLE001 -- a fault of any class
            return internal_failure(error)
        return found

    def _fetch_one(self, ref: MediaRef) -> bytes:
        try:
            return self._cache.get(ref.place, lambda: self._at(ref.place))
        except RowError as problem:
            message = f"{ref.kind}: {problem.message}"
            raise RowError(problem.code, message, param=problem.param) from problem

    # -- places

    def _at(self, place: str) -> bytes:
        """Return the bytes at a URL or path that a row names."""
        limits = self._limits
        scheme, colon, _ = place.partition("://")
        scheme = scheme.lower() if colon else ""
        try:
            if scheme in ("http", "https"):
                return self._on_the_web(place)
            if scheme in _BUCKETS:
                return self._in_a_store(*split_object(place))
            if scheme in ("", "file"):
                return self._below_root(place, limits.media_root)
        except web.TooLarge as error:
            raise RowError(Code.MEDIA_TOO_LARGE, error.message) from error
        except web.Forbidden as error:
            raise RowError(Code.MEDIA_FORBIDDEN, error.message) from error
        except RowError:
            raise
        except BatchinferError as error:
            raise RowError(Code.MEDIA_UNAVAILABLE, error.message) from error
        raise RowError(
            Code.MEDIA_FORBIDDEN,
            f"{place[:100]}: expected http://, https://, s3:// or another bucket",
        )

    def _on_the_web(self, url: str) -> bytes:
        limits = self._limits
        rules = web.WebRules(
            limits.max_media_bytes,
            limits.media_timeout_seconds,
            allows_private=limits.allow_private_urls,
        )
        return web.fetch(url, rules)

    def _in_a_store(self, root: str, key: str) -> bytes:
        store = self._store_at(root)
        self._check_size(store.stat(check_key(key)).bytes)
        return store.get(key).data

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > (most := self._limits.max_media_bytes):
            message = f"has {num_bytes} bytes, expected at most {most} (--max-media-bytes)"
            raise RowError(Code.MEDIA_TOO_LARGE, message)

    def _below_root(self, place: str, root: str) -> bytes:
        """Return a file that a row names by a path, which counts from --media-root and does not leave it."""
        if not root:
            raise RowError(
                Code.MEDIA_FORBIDDEN,
                f"{place[:100]}: a path; --media-root says from which folder or bucket rows may name media",
            )
        scheme, _ = split_url(root)
        if scheme == "file":
            return self._in_folder(local_path(place), local_path(root))
        key = posixpath.normpath(place)
        if key.startswith(("/", "../")):
            message = f"{place[:100]}: a path that is not below --media-root {root}"
            raise RowError(Code.MEDIA_FORBIDDEN, message)
        if scheme in ("http", "https"):
            return self._on_the_web(join_url(root, quote(check_key(key), safe="/%")))
        return self._in_a_store(root.rstrip("/"), key)

    def _in_folder(self, path: Path, folder: Path) -> bytes:
        try:
            folder = folder.resolve()
            whole = (folder / path).resolve()
            if not whole.is_relative_to(folder):
                message = f"{path}: is {whole}, which is not below --media-root {folder}"
                raise RowError(Code.MEDIA_FORBIDDEN, message)
            if not whole.is_file():
                raise RowError(Code.MEDIA_UNAVAILABLE, f"{path}: no such file below {folder}")
            self._check_size(whole.stat().st_size)
            return whole.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            raise RowError(Code.MEDIA_UNAVAILABLE, f"{path}: {error}") from error


def check_media(limits: Limits) -> None:
    """Refuse options with which no medium could be taken.

    Raises:
        ConfigError: --media-root names no folder of this machine and no store.
    """
    root = limits.media_root
    if not root:
        return
    scheme, _ = split_url(root)
    if scheme == "file" and not local_path(root).is_dir():
        raise ConfigError(
            f"--media-root {root}: is no folder of this machine",
            hint="name the folder or the bucket that the rows' paths count from",
        )
    if scheme not in ("file", *_BUCKETS, "http", "https"):
        raise ConfigError(f"--media-root {root}: unknown scheme {scheme!r}")


def split_object(url: str) -> tuple[str, str]:
    """Return the URL of the store that holds an object, and the object's key.

    >>> split_object("s3://bucket/images/1.png")
    ('s3://bucket', 'images/1.png')
    >>> split_object("hf://datasets/org/name/images/1.png")
    ('hf://datasets/org/name', 'images/1.png')
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "hf":
        parts = rest.split("/", 3)
        return f"{scheme}://{'/'.join(parts[:3])}", parts[3] if len(parts) > 3 else ""
    bucket, _ = split_bucket(url)
    return f"{scheme}://{bucket}", rest.partition("/")[2]


class MediaCache:
    """Media by the place that rows name, those used last. Safe for threads.

    Args:
        max_bytes: Bytes of memory that the cache takes at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[bytes]] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def get(self, place: str, fetch: Callable[[], bytes]) -> bytes:
        """Return what is at a place. If it is not kept, it is fetched once, however many threads ask for it just then.

        Raises:
            RowError: it cannot be used. It is asked for again for the next row.
        """
        with self._lock:
            if place in self._kept:
                self._kept.move_to_end(place)
                return self._kept[place]
            is_first = place not in self._under_way
            fetching = self._under_way.setdefault(place, Future())
        if is_first:
            try:
                fetching.set_result(fetch())
            except BaseException as error:  # noqa: BLE001 -- `result` raises it again, in every waiting thread
                fetching.set_exception(error)
            with self._lock:
                del self._under_way[place]
                if fetching.exception() is None:
                    self._keep(place, fetching.result())
        return fetching.result()

    def _keep(self, place: str, found: bytes) -> None:
        self._kept[place] = found
        self._num_bytes += _size(place, found)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._kept.popitem(last=False))


def _size(place: str, found: bytes) -> int:
    return _ENTRY_BYTES + len(place) + len(found)

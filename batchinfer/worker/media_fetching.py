"""Fetches what rows name by link or path (images, sounds, videos), beside the engine: a few threads, a row each.

What several rows name is fetched once, as long as the cache has room for it. The server decodes it; here only its size
counts, and whether rows may name its place. `MediaFetcher` is used on the main thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

from batchinfer.core.errors import BatchinferError, ConfigError, RowError
from batchinfer.core.records import Failure
from batchinfer.core.row_codes import Code
from batchinfer.ledger.jobs import OpenStore
from batchinfer.prompts.builder import internal_failure
from batchinfer.prompts.types import MediaRef, RowProblem
from batchinfer.storage import Store, check_key, split_bucket, web
from batchinfer.storage.opening import (
    AZURE_SCHEMES,
    GCS_SCHEMES,
    READ_ONLY_SCHEMES,
    S3_SCHEMES,
    join_url,
    local_path,
    split_url,
)
from batchinfer.worker.background import Background, Pending
from batchinfer.worker.worker_config import Limits

NUM_THREADS = 16
"""Rows whose media are fetched at the same time."""
_CACHE_BYTES = 128 << 20
_ENTRY_BYTES = 1000
"""Bytes of memory that an entry of the cache takes beside its content and its place."""
UNAVAILABLE_SECONDS = 60.0
"""Seconds after a fetch has failed, repetitions included, in which no row asks for the place again. Later the fault may
have passed."""
_MOST_STORES = 64
"""Most stores that are kept open. Each row may name another bucket."""
_BUCKETS = (*S3_SCHEMES, *GCS_SCHEMES, *AZURE_SCHEMES, "hf", "memory")


class MediaFetcher:
    """The images, sounds and videos of a worker's rows.

    Args:
        limits: Limits of the worker.
        open_store: Function that opens the store at a URL.
        background: The worker's background, for `fetch`. Media are fetched on threads beside its own.
    """

    def __init__(
        self, limits: Limits, open_store: OpenStore, background: Background | None = None
    ) -> None:
        self._limits = limits
        self._open_store = open_store
        self._background = background
        self._threads: Background | None = None
        self._cache = MediaCache(_CACHE_BYTES)
        self._stores: dict[str, Store] = {}

    def fetch(self, refs: list[MediaRef]) -> Pending[list[bytes] | Failure]:
        """Begin to fetch the media of one row. The result is a failure if one of them cannot be used."""
        if self._threads is None:
            assert self._background is not None, "only fetch_now needs no background"
            self._threads = self._background.beside(NUM_THREADS)
        return self._threads.submit(partial(self.fetch_now, refs))

    def fetch_now(self, refs: list[MediaRef]) -> list[bytes] | Failure:
        """Fetch the media of one row, one after the other. Safe for threads."""
        found: list[bytes] = []
        num_bytes, limits = 0, self._limits
        most = max(limits.max_row_memory << 20, limits.max_media_bytes)
        try:
            for ref in refs:
                found.append(self._fetch_one(ref))
                num_bytes += len(found[-1])
                if num_bytes > most:
                    raise RowProblem(
                        Code.MEDIA_TOO_LARGE,
                        f"the row's media have more than {most} bytes in all",
                    )
        except RowProblem as problem:
            return problem.as_failure()
        except BatchinferError:
            raise
        except Exception as error:  # noqa: BLE001 -- a fault of any class
            return internal_failure(error)
        return found

    def _fetch_one(self, ref: MediaRef) -> bytes:
        try:
            return self._cache.get(ref.place, lambda: self._at(ref.place))
        except RowProblem as problem:
            message = f"{ref.kind}: {problem.message}"
            raise RowProblem(problem.code, message, param=problem.param) from problem

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
            raise RowProblem(Code.MEDIA_TOO_LARGE, error.message) from error
        except web.Forbidden as error:
            raise RowProblem(Code.MEDIA_FORBIDDEN, error.message) from error
        except RowError:
            raise
        except BatchinferError as error:
            raise RowProblem(Code.MEDIA_UNAVAILABLE, error.message) from error
        raise RowProblem(
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
        store = self._stores.get(root)
        if store is None:
            if len(self._stores) >= _MOST_STORES:
                self._stores.clear()
            store = self._stores[root] = self._open_store(root)
        most = self._limits.max_media_bytes
        if (size := store.stat(check_key(key)).bytes) > most:
            raise too_large(f"{size} bytes", most)
        return store.get(key).data

    def _below_root(self, place: str, root: str) -> bytes:
        """Return a file that a row names by a path, which counts from --media-root and does not leave it."""
        if not root:
            raise RowProblem(
                Code.MEDIA_FORBIDDEN,
                f"{place[:100]}: a path; --media-root says from which folder or bucket rows may name media",
            )
        scheme, _ = split_url(root)
        if scheme == "file":
            return self._in_folder(local_path(place), local_path(root))
        key = check_key(place)
        if scheme in ("http", "https"):
            return self._on_the_web(join_url(root, key))
        return self._in_a_store(root.rstrip("/"), key)

    def _in_folder(self, path: Path, folder: Path) -> bytes:
        most = self._limits.max_media_bytes
        try:
            folder = folder.resolve()
            whole = (folder / path).resolve()
            if not whole.is_relative_to(folder):
                raise RowProblem(
                    Code.MEDIA_FORBIDDEN, f"{path}: is not below --media-root {folder}"
                )
            if not whole.is_file():
                raise RowProblem(Code.MEDIA_UNAVAILABLE, f"{path}: no such file below {folder}")
            if (size := whole.stat().st_size) > most:
                raise too_large(f"{size} bytes", most)
            return whole.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            raise RowProblem(Code.MEDIA_UNAVAILABLE, f"{path}: {error}") from error


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
    if scheme not in ("file", *_BUCKETS, *READ_ONLY_SCHEMES):
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


def too_large(found: str, most: int) -> RowProblem:
    """Return the error for a medium of too many bytes."""
    return RowProblem(
        Code.MEDIA_TOO_LARGE, f"has {found}, expected at most {most} (--max-media-bytes)"
    )


class MediaCache:
    """Media by the place that rows name, those used last. Also why one cannot be used. Safe for threads.

    What could not be fetched is asked for again after `UNAVAILABLE_SECONDS`.

    Args:
        max_bytes: Bytes of memory that the cache takes at most.
        now: Function that returns a time in seconds.
    """

    def __init__(self, max_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._now = now
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._under_way: dict[str, Future[bytes]] = {}

    def get(self, place: str, fetch: Callable[[], bytes]) -> bytes:
        """Return what is at a place. If it is not kept, it is fetched once, however many threads ask for it.

        Raises:
            RowProblem: it cannot be used.
        """
        with self._lock:
            kept = self._kept.get(place)
            if kept is not None and kept.until < self._now():
                self._drop(place)
            elif kept is not None:
                self._kept.move_to_end(place)
                if isinstance(kept.found, RowProblem):
                    raise RowProblem(kept.found.code, kept.found.message)
                return kept.found
            future = self._under_way.get(place)
            is_first = future is None
            if future is None:
                future = self._under_way[place] = Future()
        if is_first:
            self._fill(place, future, fetch)
        return future.result()

    def _fill(self, place: str, future: Future[bytes], fetch: Callable[[], bytes]) -> None:
        try:
            media = fetch()
        except BaseException as error:  # noqa: BLE001 - `result` raises it again, in every waiting thread
            with self._lock:
                del self._under_way[place]
                if isinstance(error, RowProblem):
                    self._keep(place, error)
            future.set_exception(error)
        else:
            with self._lock:
                del self._under_way[place]
                self._keep(place, media)
            future.set_result(media)

    def _keep(self, place: str, found: bytes | RowProblem) -> None:
        size = _ENTRY_BYTES + len(place)
        size += len(found.message) if isinstance(found, RowProblem) else len(found)
        if size > self._max_bytes:
            return
        is_passing = isinstance(found, RowProblem) and found.code == Code.MEDIA_UNAVAILABLE
        until = self._now() + UNAVAILABLE_SECONDS if is_passing else math.inf
        self._kept[place] = _Kept(found, size, until)
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, place: str) -> None:
        self._num_bytes -= self._kept.pop(place).num_bytes


class _Kept(NamedTuple):
    """An entry of the cache: a medium, or why it cannot be used."""

    found: bytes | RowProblem
    num_bytes: int
    until: float
    """Time until which the entry is valid."""

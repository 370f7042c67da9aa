"""A store that counts requests, for benchmarks and for tests of what a chunk costs."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from batchinfer.storage import Object, ObjectInfo, Store

KEYS_PER_REQUEST = 1000
"""Number of keys that object stores list or delete with one request."""


class CountingStore:
    """Another store's verbs, counted in `requests` as an object store bills them. Safe for threads.

    A verb is one request, a list or a delete one for every 1000 keys (a list at least one). Parts of a multipart
    upload, retries and the look after a lost create are not seen from here.
    """

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self.requests: Counter[str] = Counter()
        self._store = store
        self._lock = threading.Lock()

    def get(self, key: str) -> Object:
        """See `Store.get`."""
        self._count("get")
        return self._store.get(key)

    def download(self, key: str, path: Path) -> None:
        """See `Store.download`."""
        self._count("download")
        self._store.download(key, path)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        self._count("stat")
        return self._store.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        self._count("list")
        for index, found in enumerate(self._store.list(prefix)):
            if index and index % KEYS_PER_REQUEST == 0:
                self._count("list")
            yield found

    def create(self, key: str, data: bytes) -> str:
        """See `Store.create`."""
        self._count("create")
        return self._store.create(key, data)

    def put_file(self, key: str, path: Path) -> None:
        """See `Store.put_file`."""
        self._count("put_file")
        self._store.put_file(key, path)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """See `Store.replace`."""
        self._count("replace")
        return self._store.replace(key, data, etag)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        doomed = tuple(keys)
        self._count("delete", math.ceil(len(doomed) / KEYS_PER_REQUEST))
        self._store.delete(doomed)

    def _count(self, verb: str, times: int = 1) -> None:
        with self._lock:
            self.requests[verb] += times

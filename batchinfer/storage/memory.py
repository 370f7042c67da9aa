"""A store in this process's memory, for tests and rehearsals: real preconditions, nothing durable."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from batchinfer.core.errors import AlreadyExists, ObjectNotFound, PreconditionFailed
from batchinfer.storage import Object, ObjectInfo, check_key, check_prefix
from batchinfer.storage.scratch import scratch_errors

SCHEME = "memory://"

_lock = threading.Lock()
_objects: dict[str, tuple[bytes, str, float]] = {}
"""Every object of every memory:// URL in this process, by full path: (data, etag, modified)."""
_versions = itertools.count(1)


class MemoryStore:
    """Objects below one memory:// URL. Two stores of one URL, or of nested ones, share objects.

    Safe for threads: one lock guards all objects.

    Args:
        url: For example ``memory://job``.
        clock: Gives Unix seconds for `ObjectInfo.modified`.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        root = url.removeprefix(SCHEME).strip("/")
        self.url = SCHEME + root
        self._root = root + "/"
        self._clock = clock

    def get(self, key: str) -> Object:
        """See `Store.get`."""
        path = self._path(key)
        with _lock:
            data, etag, _ = self._held(path, key)
        return Object(data, etag)

    def download(self, key: str, path: Path) -> None:
        """See `Store.download`."""
        data = self.get(key).data
        with scratch_errors(path.parent):
            path.write_bytes(data)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        path = self._path(key)
        with _lock:
            data, etag, modified = self._held(path, key)
        return ObjectInfo(key, len(data), etag, modified)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. Later changes do not show in the listing."""
        start = self._root + check_prefix(prefix)
        with _lock:
            found = sorted(
                ObjectInfo(path[len(self._root) :], len(data), etag, modified)
                for path, (data, etag, modified) in _objects.items()
                if path.startswith(start)
            )
        return iter(found)

    def create(self, key: str, data: bytes) -> str:
        """See `Store.create`."""
        if not data:
            raise ValueError(f"{key}: an object that is created must not be empty")
        path = self._path(key)
        with _lock:
            held = _objects.get(path)
            if held is None:
                return self._put(path, data)
            if held[0] == data:
                return held[1]
        raise AlreadyExists(f"{self.url}/{key}: exists with other bytes, expected none")

    def put_file(self, key: str, path: Path) -> None:
        """See `Store.put_file`."""
        with scratch_errors(path.parent):
            data = path.read_bytes()
        with _lock:
            self._put(self._path(key), data)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """See `Store.replace`."""
        path = self._path(key)
        with _lock:
            held = _objects.get(path)
            if held is not None and held[1] == etag:
                return self._put(path, data)
            if held is not None and held[0] == data:
                return held[1]
        raise PreconditionFailed(f"{self.url}/{key}: is not the version that was read")

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        for key in keys:
            path = self._path(key)
            with _lock:
                _objects.pop(path, None)

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _held(self, path: str, key: str) -> tuple[bytes, str, float]:
        if path not in _objects:
            raise ObjectNotFound(f"{self.url}/{key}: no such object")
        return _objects[path]

    def _put(self, path: str, data: bytes) -> str:
        etag = str(next(_versions))
        _objects[path] = (bytes(data), etag, self._clock())
        return etag


def forget(url: str) -> None:
    """Free every object below a memory:// URL."""
    root = url.removeprefix(SCHEME).strip("/") + "/"
    with _lock:
        for path in [path for path in _objects if path.startswith(root)]:
            del _objects[path]

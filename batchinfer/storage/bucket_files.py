"""The objects of a bucket in fsspec's interface, for code that looks for files there and reads them."""

from __future__ import annotations

import contextlib
from typing import Any, cast

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from batchinfer.core.errors import ObjectNotFound
from batchinfer.storage import ObjectInfo, Store, split_bucket
from batchinfer.storage.bucket import BucketStore


class BucketFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The objects of a whole bucket. Paths are `bucket/key`, as in fsspec's own filesystems."""

    cachable = False

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Describe an object, or the folder that the keys below `path` make. Raises FileNotFoundError."""
        key = path.partition("/")[2]
        with contextlib.suppress(ObjectNotFound):
            if key:
                return _described(self._store.stat(key))
        if not any(self._store.list(key and f"{key}/")):
            raise FileNotFoundError(path)
        return {"type": "directory"}

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        """Return the objects below `path`, however deep, by their paths. fsspec's `glob` chooses among them."""
        bucket, key = split_bucket(f"bucket://{path}")
        below = self._store.list(key)
        found = {f"{bucket}/{info.key}": _described(info) for info in below}
        return found if detail else list(found)

    def _open(self, path: str, *_: Any, **options: Any) -> _ObjectFile:
        """Open an object for reading, from any place in it."""
        size = self._store.stat(path.partition("/")[2]).bytes
        return _ObjectFile(self, path, size=size, **options)

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Read the bytes of an object from `start` up to, but not including, `end`."""
        return cast("BucketStore", self._store).get_range(path.partition("/")[2], start, end)


class _ObjectFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        found: bytes = self.fs.read_range(self.path, start, end)
        if len(found) < end - start:  # the object has been replaced by a shorter one
            self.size = self.cache.size = start + len(found)
        return found


def _described(info: ObjectInfo) -> dict[str, Any]:
    return {"type": "file", "size": info.bytes, "etag": info.etag}

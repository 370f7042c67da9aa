"""The objects of a bucket in fsspec's interface, for code that looks for files there and reads them."""

from __future__ import annotations

import contextlib
from typing import Any, BinaryIO, cast

from fsspec.spec import AbstractFileSystem

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

    def open(self, path: str, *_: Any, **__: Any) -> BinaryIO:
        """Open an object for reading, from any place in it."""
        return cast("BucketStore", self._store).open(path.partition("/")[2])


def _described(info: ObjectInfo) -> dict[str, Any]:
    return {"type": "file", "size": info.bytes, "etag": info.etag}

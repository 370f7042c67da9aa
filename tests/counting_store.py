"""A store that counts requests, for tests of what commands cost."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from batchinfer.storage import ObjectInfo, Store


class CountingStore:
    """Another store's verbs, counted in `requests` as an object store bills them. Safe for threads.

    A verb is one request, a list one for every 1000 keys, at least one. Parts of a multipart upload, retries and the
    look after a lost create are not seen from here.
    """

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self.requests: Counter[str] = Counter()
        self._store = store
        self._lock = threading.Lock()

    def __getattr__(self, verb: str) -> Any:
        """Return the other store's verb, counted."""
        found = getattr(self._store, verb)

        def counted(*arguments: Any) -> Any:
            self._count(verb)
            return found(*arguments)

        return counted

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        self._count("list")
        for index, found in enumerate(self._store.list(prefix)):
            if index and index % 1000 == 0:
                self._count("list")
            yield found

    def _count(self, verb: str) -> None:
        with self._lock:
            self.requests[verb] += 1

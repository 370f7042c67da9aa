"""Time that a test moves by hand, and records with sensible defaults."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import StorageError
from batchinfer.core.records import Marker, Worker, WorkerLease
from batchinfer.ledger.claims import Lease
from batchinfer.storage import ObjectInfo, Store, clouds
from batchinfer.storage.bucket import BucketStore
from batchinfer.storage.retrying import RetryPolicy

QUICK = RetryPolicy(attempts=3, first_pause_seconds=0.01, longest_pause_seconds=0.01)


class FakeClock(Clock):
    """A clock that stands still until the test moves it."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.seconds = now

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class HeldLease(Lease):
    """A lease that is held for ever, without a record."""

    def __init__(self, nonce: str) -> None:
        self.nonce, self.numbers = nonce, count(1)

    def require(self) -> None:
        pass


def worker_record(**values: Any) -> Worker:
    """A worker's record."""
    return Worker(**_BEATING | {"started": 0.0} | values)


def lease_record(**values: Any) -> WorkerLease:
    """A worker's lease."""
    return WorkerLease(**_BEATING | values)


_BEATING = {"id": "w0", "nonce": "", "state": "running", "heartbeat": 0.0}


def put_worker(store: Store, record: Worker) -> None:
    """Put a worker's lease and its statistics, over those that are there."""
    keys = layout.worker_key(record.id), layout.statistics_key(record.id)
    store.delete(keys)
    for key in keys:
        store.create(key, codec.encode(record))  # of a lease, what it has not is ignored


def marker_record(**values: Any) -> Marker:
    """A marker as the worker hands it to the publisher."""
    return Marker(
        **{
            "output": "",
            "output_bytes": 0,
            "output_sha256": "",
            "chunk": "chunks/part-00000.jsonl",
            "chunk_sha256": "c" * 64,
            "generation": 0,
            "rows_ok": 2,
            "fingerprint": "f",
            "worker": "w0",
            "start": "2026-01-01T00:00:00.000Z",
            "end": "2026-01-01T00:00:01.000Z",
            "nonce": "",
        }
        | values
    )


def meanwhile(monkeypatch: Any, owner: Any, step: str, act: Callable[[], object]) -> None:
    """Let somebody else act just before the next call of a function, and only then."""
    original = getattr(owner, step)

    def step_after(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, step, original)
        act()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, step, step_after)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Done(Future[Any]):
    """Work that was done at once."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        try:
            self.set_result(work())
        except StorageError as error:
            self.set_exception(error)


_written: dict[tuple[str, str, str], float] = {}
"""When objects were written by stores with a clock: by bucket, path and etag."""


class MemoryStore(BucketStore):
    """As `open_store(url)` for a memory:// URL. `clock` gives the times, in Unix seconds, of what it writes."""

    def __init__(self, url: str, *, clock: Callable[[], float] | None = None) -> None:
        opened = clouds.open_bucket("memory", url)
        super().__init__(url, opened._store, opened._cloud)
        self._clock = clock

    def _put(self, key: str, file: bytes | Path, mode: Any) -> str:
        etag = super()._put(key, file, mode)
        if self._clock is not None:
            _written[self.bucket, self._path(key), etag] = self._clock()
        return etag

    def _info(self, key: str, item: Mapping[str, Any]) -> ObjectInfo:
        info = super()._info(key, item)
        written = _written.get((self.bucket, self._path(key), info.etag), info.modified)
        return info._replace(modified=written)

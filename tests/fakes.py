"""Time that a test moves by hand, and records with sensible defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchinfer.core import codec, layout
from batchinfer.core.errors import StorageError
from batchinfer.core.records import Marker, Worker, WorkerLease
from batchinfer.storage import Store


class FakeClock:
    """A clock that stands still until the test moves it."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.seconds = now

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def worker_record(**values: Any) -> Worker:
    """A worker's record."""
    return Worker(
        **{
            "id": "w0",
            "nonce": "",
            "state": "running",
            "started": 0.0,
            "heartbeat": 0.0,
        }
        | values
    )


def lease_record(**values: Any) -> WorkerLease:
    """A worker's lease."""
    return WorkerLease(**{"id": "w0", "nonce": "", "state": "running", "heartbeat": 0.0} | values)


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
            "rows_error": 0,
            "rows_resumed": 0,
            "fingerprint": "f",
            "worker": "w0",
            "start": "2026-01-01T00:00:00.000Z",
            "end": "2026-01-01T00:00:01.000Z",
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "nonce": "",
        }
        | values
    )


class Done:
    """Work that was done at once."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._error: Exception | None = None
        self._value: Any = None
        try:
            self._value = work()
        except StorageError as error:
            self._error = error

    def is_done(self) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

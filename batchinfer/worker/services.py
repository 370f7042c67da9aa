"""What the parts of a worker share: the services that they work with, the limits that they keep, and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batchinfer.core.clock import Clock
from batchinfer.core.records import Failure, Record
from batchinfer.ledger.checkpoints import FinishedRow
from batchinfer.ledger.claims import Claims, Lease
from batchinfer.ledger.publishing import Publisher
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.background import Background
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.opening import Opener

_LONGEST_DELAY_SECONDS = 60.0


class Limits(Record, frozen=True, kw_only=True):
    """What bounds memory and disk beside the engine's own `max_in_flight`."""

    max_open_chunks: int = 64
    max_openings: int = 4
    max_open_bytes: int = 16 << 30
    """Of open chunks in the scratch folder: their rows as text, and what of them is finished."""
    prefix_window: int = 0
    """Rows that are put in order of their prompts' beginnings; 0: none."""
    max_build_rows: int = 512
    max_build_bytes: int = 8 << 20
    max_waiting_tokens: int = 4 << 20
    """Of prompts that are built and not yet in the engine; a token is some 36 bytes here."""
    row_attempts: int = 3
    storage_attempts: int = 4
    """For a chunk that cannot be opened or published; more of them while there are other rows to generate."""
    storage_retry_seconds: float = 5.0
    """After the first failure; each further wait is twice as long, up to a minute."""

    def storage_delay_seconds(self, attempts: int) -> float:
        """How long to wait after so many failures."""
        return min(self.storage_retry_seconds * 2.0 ** max(0, attempts - 1), _LONGEST_DELAY_SECONDS)


class Observer(Protocol):
    """Told of everything that status and logs show. Called on the main thread; must be quick."""

    def chunk_opened(self, chunk: OpenChunk) -> None:
        """A chunk is open; its resumed rows are in chunk.counts."""
        ...

    def chunk_closed(self, chunk: OpenChunk, outcome: str) -> None:
        """A chunk ended here: done, lost (somebody else published it) or released."""
        ...

    def chunk_skipped(self, name: str) -> None:
        """A chunk turned out to be done already."""
        ...

    def rows_finished(self, rows: list[FinishedRow]) -> None:
        """Rows finished here, none of them resumed."""
        ...

    def row_failed(self, chunk: str, line: int, failure: Failure) -> None:
        """A row becomes an error row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the worker's parts work with, made once. `claims` is None where the store cannot keep them."""

    run: Store
    background: Background
    clock: Clock
    lease: Lease
    claims: Claims | None
    opener: Opener
    publisher: Publisher
    scratch: Scratch
    observer: Observer

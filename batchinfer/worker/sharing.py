"""Rows of open chunks that other workers finish: a `Sharing` finds them and gives them to the chunks.

At the end of a run an idle worker helps a slow one with its chunk. The slow worker goes from the first row to the last,
the helper from the last to the first, and each reads the other's checkpoints, so they meet somewhere between
(docs/decisions/0027). A row that both have finished counts once: the first result that a worker has stays.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from batchinfer.core.errors import InputError, StorageError
from batchinfer.worker.background import Pending
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.config import Environment, RunAccess
from batchinfer.worker.opening import AlreadyDone, FoundRows, Opener

logger = logging.getLogger(__name__)

_MOST_CHUNKS = 2
"""Number of open chunks that are looked at: those with the most rows left. Each look costs a listing."""
_SHARED_SECONDS = 10.0
"""Longest time between two looks at a chunk that another worker does, too."""
_START_SECONDS = 1.0
"""Seconds in which looks are begun once at most. Thousands of small chunks may be open, and the loop turns often."""


@dataclass(slots=True)
class _Look:
    chunk: OpenChunk
    pending: Pending[FoundRows | AlreadyDone | None]


class Found(NamedTuple):
    """What is to be done with open chunks after a look at what others have done of them."""

    published: list[str]
    """Names of chunks that another worker has published."""
    complete: list[str]
    """Names of chunks whose last rows were in other workers' segments. This worker may publish them."""
    to_checkpoint: list[OpenChunk]
    """Chunks that another worker does, too. It looks for this worker's rows."""


class Sharing:
    """Looks at the segments of this worker's open chunks, in the background.

    Args:
        run: The lease, whose length decides how often to look.
        environment: The clock and the background.
        opener: Reads other workers' segments.
    """

    def __init__(self, run: RunAccess, environment: Environment, opener: Opener) -> None:
        self._clock = environment.clock
        self._background = environment.background
        self._opener = opener
        self._has_others = run.claims is not None
        self._look_seconds = run.lease.heartbeat_seconds
        self._looks: list[_Look] = []
        self._started = float("-inf")
        self._shared: set[str] = set()
        """Names of open chunks of which another worker has written segments while they were open here."""
        self._due: dict[str, float] = {}
        """Monotonic seconds of the next look at a chunk, by the names of open chunks."""

    def tick(self, chunks: Mapping[str, OpenChunk]) -> Found:
        """Give found rows to their chunks, and begin the looks that are due.

        No background job may read rows of the chunks while this runs.

        Args:
            chunks: The open chunks by name.
        """
        found = Found([], [], [])
        for look in [look for look in self._looks if look.pending.is_done()]:
            self._looks.remove(look)
            chunk = look.chunk
            if chunks.get(chunk.name) is chunk and chunk.num_left:
                self._take_in(chunk, look.pending, found)
        if self._has_others:
            self._start(chunks, found)
        return found

    def _take_in(
        self, chunk: OpenChunk, pending: Pending[FoundRows | AlreadyDone | None], found: Found
    ) -> None:
        try:
            seen = pending.result()
        except (StorageError, InputError) as error:
            logger.warning("%s: cannot look at others' checkpoints (%s)", chunk.name, error)
            return
        if isinstance(seen, AlreadyDone):
            found.published.append(chunk.name)
        elif seen is not None and seen.keys:
            chunk.adopt(seen.rows)
            chunk.segment_keys.extend(seen.keys)
            self._shared.add(chunk.name)
            if seen.is_cut:
                self._due[chunk.name] = self._clock.monotonic()
            if not chunk.num_left:
                found.complete.append(chunk.name)

    def _start(self, chunks: Mapping[str, OpenChunk], found: Found) -> None:
        now = self._clock.monotonic()
        if now < self._started + _START_SECONDS:
            return
        self._started = now
        for name in self._due.keys() - chunks.keys():
            del self._due[name]
        self._shared &= chunks.keys()
        busy = {look.chunk.name for look in self._looks}
        for chunk in heapq.nlargest(_MOST_CHUNKS, chunks.values(), key=lambda each: each.num_left):
            is_shared = chunk.is_help or chunk.name in self._shared
            pause = min(_SHARED_SECONDS, self._look_seconds) if is_shared else self._look_seconds
            if self._due.setdefault(chunk.name, now + pause) > now or chunk.name in busy:
                continue
            if not chunk.num_left:
                continue
            self._due[chunk.name] = now + pause
            if is_shared:
                found.to_checkpoint.append(chunk)
            self._begin(chunk)

    def _begin(self, chunk: OpenChunk) -> None:
        opener, known = self._opener, frozenset(chunk.segment_keys)
        pending = self._background.submit(lambda: opener.look_at_others(chunk, known))
        self._looks.append(_Look(chunk, pending))

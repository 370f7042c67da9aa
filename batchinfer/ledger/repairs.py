"""Which generation ``--retry-errors`` is to reach.

Rows may fail for good, so that chunks which were repaired already have errors again. Without a goal, a worker that is
stopped now and then would repair the first chunks for ever, and never come to the last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from threading import Event

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import Marker
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.storage import Store
from batchinfer.worker.background import Background

_HANDS = 4
"""Markers are read by so many at once."""


class Goal:
    """Finds out, in the background, whether the last repair is through: only then is there a next one.

    Args:
        store: The run's.
        background: Where markers are read.
        chunks: The worker's own.
        done: Chunks that have a marker, with their highest generation.
    """

    def __init__(
        self, store: Store, background: Background, chunks: Iterable[ChunkRef], done: dict[str, int]
    ) -> None:
        self._highest = max(done.values(), default=0)
        self._has_errors = Event()
        mine = [(ref.name, done[ref.name]) for ref in chunks if ref.name in done]
        behind = [(name, generation) for name, generation in mine if generation < self._highest]
        self.looks = [
            background.submit(
                partial(look_for_errors, store, behind[hand::_HANDS], self._has_errors)
            )
            for hand in range(_HANDS)
        ]
        """To be waited for."""

    @property
    def is_begun(self) -> bool:
        """Whether a repair was begun that has not reached every chunk with errors, once `looks` are done."""
        return self._has_errors.is_set()

    @property
    def generation(self) -> int:
        """The last repair's where it is to be ended, else the next."""
        return self._highest + (not self.is_begun)


def look_for_errors(store: Store, chunks: Iterable[tuple[str, int]], found: Event) -> None:
    """Set `found` if a marker of these chunks, each with its generation, counts error rows. Ends once it is set."""
    for name, generation in chunks:
        if found.is_set():
            return
        key = layout.marker_key(name, generation)
        with contextlib.suppress(ObjectNotFound, InputError):  # damaged ones are no reason to go on
            if codec.decode(store.get(key).data, Marker, name=key).rows_error:
                found.set()

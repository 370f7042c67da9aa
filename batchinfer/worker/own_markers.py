"""What the markers of a run tell a worker: whose configuration made them, whether rows have answers, what to repair."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from batchinfer.core.records import Marker
from batchinfer.ledger.inventory import read_markers
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.runs import refuse_foreign
from batchinfer.ledger.survey import beginning_of, newest_markers
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_NUM_READERS = 4
"""Markers that are read at the same time, so that many workers that start do not ask for all at once."""
MOST_READ = 2000
"""Most markers of which a start compares the configuration. To read all of a large run would take long."""


class OwnMarkers:
    """Reads markers for one start of a worker.

    Args:
        store: The run's store.
        do: Does work in the background and returns its result, unless the worker is asked to stop.
    """

    def __init__(self, store: Store, do: Callable[[Callable[[], Any]], Any]) -> None:
        self._store = store
        self._do = do
        self.rows_ok = self.rows_error = 0
        """Sums over the markers that were read, each as often as it stands for a chunk."""
        self.unreadable: set[str] = set()
        """Chunks whose markers cannot be read."""

    def read(self, generations: Mapping[str, int], each: int = 1) -> dict[str, Marker]:
        """Read markers, given by their chunk and generation. Those that cannot be read are left out.

        Each of them stands for `each` chunks.
        """
        work = partial(read_markers, self._store, generations, _NUM_READERS)
        markers: dict[str, Marker] = self._do(work)
        self.unreadable |= generations.keys() - markers.keys()
        self.rows_ok += each * sum(marker.rows_ok for marker in markers.values())
        self.rows_error += each * sum(marker.rows_error for marker in markers.values())
        return markers

    def fingerprints(self, done: Mapping[str, int], names: Collection[str]) -> dict[str, str]:
        """Return the fingerprints in the markers of some chunks: of very many, `MOST_READ` at even distances.

        `verify` reads all.

        Args:
            done: The generation of the newest marker of each chunk that has one.
            names: The chunks that are wanted, with a marker or without.
        """
        wanted = sorted(done.keys() & set(names))
        step = max(1, -(-len(wanted) // MOST_READ))
        markers = self.read({name: done[name] for name in wanted[::step]}, step)
        return {name: marker.fingerprint for name, marker in markers.items()}

    def refuse_mixed(
        self, fingerprint: str, before: Mapping[str, int], names: Collection[str]
    ) -> None:
        """Refuse a run in which other workers have done some chunks with another configuration since `before`.

        A worker that runs while run.json is replaced goes on with its own configuration until its end.

        Args:
            fingerprint: The run's.
            before: The generation of each chunk's newest marker that was compared already.
            names: The chunks that this worker has not published itself.

        Raises:
            RunMismatch: a chunk was done with another configuration.
        """
        if not names:
            return
        # The chunks of a manifest are neighbours. All of a large run would be listed by many workers that end together.
        now = self._do(partial(newest_markers, self._store, beginning_of(names)))
        late = [name for name in names if name in now and before.get(name) != now[name]]
        refuse_foreign(self.fingerprints(now, late), fingerprint, url=self._store.url)


def to_repair(
    own: list[ChunkRef], done: dict[str, int], markers: dict[str, Marker]
) -> list[ChunkRef]:
    """Return those of a worker's own chunks that are to be done again, each with the generation that it gets. Pure.

    A chunk with error rows gets the highest generation of the run, if a chunk with error rows is below it, else the
    next one. Some rows fail every time, so a chunk may have error rows even after a repair. Without this goal, a
    worker that is often stopped would repair the first chunks again after each start, and never reach the last. A
    chunk whose marker cannot be read is done again from the start.

    Args:
        own: The worker's own chunks.
        done: The generation of the newest marker of each chunk of the run that has one.
        markers: Those markers of own chunks that could be read.
    """
    failed = {name for name, marker in markers.items() if marker.rows_error}
    highest = max(done.values(), default=0)
    is_begun = any(done[name] < highest for name in failed)
    if is_begun:
        text = "going on with the repair that was begun (generation %d); the next one tries again what has reached it"
        logger.info(text, highest)
    goal = highest if is_begun else highest + 1
    left = []
    for ref in own:
        name = ref.name
        if name not in done:
            left.append(ref)
        elif name not in markers:
            left.append(ref._replace(generation=done[name]))
        elif name in failed and done[name] < goal:
            left.append(ref._replace(generation=goal, base=done[name]))
    return left

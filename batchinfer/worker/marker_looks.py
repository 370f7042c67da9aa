"""How a worker reads the markers of its run: to compare them with the run's configuration, and to see what is left.

Markers are read in the background, a few at a time, since a run may have very many. Each is read once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from batchinfer.core.records import Marker
from batchinfer.ledger.inventory import SeenMarker
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import find_marker
from batchinfer.ledger.survey import newest_markers
from batchinfer.storage import Store
from batchinfer.worker.background import Pending
from batchinfer.worker.config import Environment
from batchinfer.worker.joining import Membership

logger = logging.getLogger(__name__)

_NUM_LOOKS = 4
"""Number of background jobs that read markers at the same time."""
_MOST_READ = 2000
"""Most markers that a start compares with run.json. To read all of a large run would take long."""
_FEW = 20
"""Number of markers that are read to find an answer in the run, before all of them are."""


class MarkerLooks:
    """Reads markers for one start of a worker.

    Args:
        environment: The outside world.
        store: The run's store.
        wait: Waits for a background job and returns its result, unless the worker is asked to stop.
        finish: Does work in the background and waits for its result, also for a while after it was asked to stop.
    """

    def __init__(
        self,
        environment: Environment,
        store: Store,
        wait: Callable[[Pending[Any]], Any],
        finish: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._background = environment.background
        self._store = store
        self._wait = wait
        self._finish = finish
        self._known: dict[tuple[str, int], Marker | None] = {}

    def read(self, generations: Mapping[str, int]) -> dict[str, Marker]:
        """Read markers, given by their chunk and generation. Those that cannot be read are left out."""
        wanted = list(generations.items())
        unread = [each for each in wanted if each not in self._known]

        def read(part: list[tuple[str, int]]) -> None:
            for each in part:
                self._known[each] = find_marker(self._store, *each)

        parts = [unread[index::_NUM_LOOKS] for index in range(_NUM_LOOKS)]
        for pending in [self._background.submit(partial(read, part)) for part in parts if part]:
            self._wait(pending)
        return {each[0]: marker for each in wanted if (marker := self._known[each]) is not None}

    def compare(self, membership: Membership, markers: dict[str, SeenMarker]) -> None:
        """Refuse a run whose markers are of another configuration than run.json.

        Markers of this worker's own manifests are compared, whenever they were written: a worker that ran while
        run.json was replaced goes on with its own configuration until its end. Of very many markers, `_MOST_READ` are
        read, at even distances; `verify` reads all. Without run.json, the markers of all chunks are compared when the
        worker joins the run.
        """
        names = {ref.name for ref in membership.assignment.chunks}
        wanted = sorted(name for name in markers if membership.run is None or name in names)
        step = 1 if membership.run is None else -(-len(wanted) // _MOST_READ)
        self._compare(membership, {name: markers[name] for name in wanted[:: max(step, 1)]})

    def confirm(
        self,
        membership: Membership,
        before: dict[str, SeenMarker],
        published: Collection[str],
    ) -> None:
        """Check that all chunks of this worker's manifests were done with the configuration of the run.

        Args:
            membership: The worker's membership of the run.
            before: The markers that this start found at its beginning.
            published: Names of the chunks that this start has published.
        """
        own = {ref.name for ref in membership.assignment.chunks}.difference(published)
        if own and (membership.config.retry_errors or not own <= before.keys()):
            now = self._listed()
            new = {name: each for name, each in now.items() if name in own}
            self._compare(
                membership, {name: each for name, each in new.items() if before.get(name) != each}
            )
        self._finish(membership.confirm)

    def to_repair(self, own: list[ChunkRef], done: dict[str, int]) -> list[ChunkRef]:
        """Return the own chunks that --retry-errors has to do, with the generation that each of them gets.

        A chunk with error rows gets the highest generation of the run, if a chunk with error rows is below it, else the
        next one. Some rows fail every time, so a chunk may have error rows even after a repair. Without this goal, a
        worker that is often stopped would repair the first chunks again after each start, and never reach the last. A
        chunk whose marker cannot be read is done again from the start.
        """
        markers = self.read({ref.name: done[ref.name] for ref in own if ref.name in done})
        failed = {name for name, marker in markers.items() if marker.rows_error}
        highest = max(done.values(), default=0)
        goal = highest
        if any(done[name] < highest for name in failed):
            logger.info(
                "going on with the repair that was begun (generation %d); chunks that have reached it are tried again "
                "by the next one",
                highest,
            )
        else:
            goal += 1
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

    def has_answers(self, before: dict[str, SeenMarker]) -> bool:
        """Whether a chunk of the run has a row with an answer. `before`: markers that this start saw at its beginning.

        A few of them are read first, which may save a listing of the run.
        """
        few = dict(list(before.items())[:_FEW])
        if self._any_answer(few):
            return True
        now = self._listed()
        return self._any_answer(now) or not now

    def _any_answer(self, markers: dict[str, SeenMarker]) -> bool:
        found = self.read({name: each.generation for name, each in markers.items()})
        return any(marker.rows_ok or not marker.rows_error for marker in found.values())

    def _listed(self) -> dict[str, SeenMarker]:
        listing = self._background.submit(partial(newest_markers, self._store))
        found: dict[str, SeenMarker] = self._wait(listing)
        return found

    def _compare(self, membership: Membership, markers: dict[str, SeenMarker]) -> None:
        found = self.read({name: each.generation for name, each in markers.items()})
        membership.compare({name: marker.fingerprint for name, marker in found.items()})

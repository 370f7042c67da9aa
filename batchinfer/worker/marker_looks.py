"""How a worker reads the markers of its run: to compare them with the run's configuration, and to see what is left.

Markers are read in the background, a few at a time, since a run may have very many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from batchinfer.ledger.inventory import SeenMarker
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import (
    has_error_rows,
    has_own_marker,
    marker_fingerprint,
    repair_generation,
)
from batchinfer.ledger.survey import newest_markers
from batchinfer.storage import Store
from batchinfer.worker.background import Pending
from batchinfer.worker.config import Environment
from batchinfer.worker.joining import Membership

T = TypeVar("T")

_NUM_LOOKS = 4
"""Number of background jobs that read markers at the same time."""
_MOST_READ = 2000
"""Most markers that a start compares with run.json. To read all of a large run would take long."""


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
        self._environment = environment
        self._store = store
        self._wait = wait
        self._finish = finish

    def select(
        self, check: Callable[[T], bool], items: Sequence[T], most: int | None = None
    ) -> list[T]:
        """Return the items for which `check` is true, in any order.

        Background threads check a few items at a time. If `most` is given, the checks end once that many items are
        found.
        """
        found: list[T] = []

        def look(part: Sequence[T]) -> None:
            for item in part:
                if most is not None and len(found) >= most:
                    return
                if check(item):
                    found.append(item)

        parts = [items[index::_NUM_LOOKS] for index in range(_NUM_LOOKS)]
        looks = [self._environment.background.submit(partial(look, part)) for part in parts if part]
        for pending in looks:
            self._wait(pending)
        return found

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
        membership.compare(
            self._read_fingerprints(
                {name: markers[name].generation for name in wanted[:: max(step, 1)]}
            )
        )

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
        environment = self._environment
        own = {ref.name for ref in membership.assignment.chunks}.difference(published)
        if own and (membership.config.retry_errors or not own <= before.keys()):
            listing = environment.background.submit(partial(newest_markers, self._store))
            now = self._wait(listing)
            new = {
                name: marker.generation
                for name, marker in now.items()
                if name in own and before.get(name) != marker
            }
            membership.compare(self._read_fingerprints(new))
        self._finish(membership.confirm)

    def without_foreign(self, own: list[ChunkRef], done: dict[str, int]) -> dict[str, int]:
        """Return `done` without those own chunks whose marker was written for a different file of the same name.

        When such a chunk is opened later, it is refused or done again. Only chunks that do not belong to a job are
        checked. Each check reads one marker.
        """
        listed = [ref for ref in own if ref.sha256 is None and ref.name in done]
        foreign = self.select(
            lambda ref: not has_own_marker(self._store, ref, done[ref.name]), listed
        )
        names = {ref.name for ref in foreign}
        return {name: each for name, each in done.items() if name not in names}

    def goal(self, done: dict[str, int], own: list[ChunkRef]) -> int:
        """Return the marker generation that --retry-errors brings own chunks with error rows to."""

        def have_errors(chunks: list[tuple[str, int]]) -> bool:
            return bool(
                self.select(lambda each: has_error_rows(self._store, *each), chunks, most=1)
            )

        return repair_generation([ref.name for ref in own], done, have_errors)

    def _read_fingerprints(self, generations: dict[str, int]) -> dict[str, str]:
        """Read markers, given by their chunk and generation. Returns the fingerprints in them, by chunk."""
        found: dict[str, str] = {}

        def read(each: tuple[str, int]) -> bool:
            found[each[0]] = marker_fingerprint(self._store, *each)
            return True

        self.select(read, list(generations.items()))
        return found

"""Which chunks --retry-errors does again."""

from __future__ import annotations

import logging

from batchinfer.core.records import Marker
from batchinfer.ledger.jobs import ChunkRef

logger = logging.getLogger(__name__)


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

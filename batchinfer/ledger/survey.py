"""A survey of a run for one worker: which chunks are done, and which are claimed by other workers.

Read-only, except for `release_given_up`. For each chunk the marker is looked up first, then the claim, then the record
of the claim's owner.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.errors import ObjectNotFound
from batchinfer.core.records import WorkerLease
from batchinfer.ledger.claims import Claims, Held, decode_claim
from batchinfer.ledger.inventory import SeenMarker
from batchinfer.ledger.publishing import SMALLEST_MARKER_BYTES, read_marker
from batchinfer.storage import Store

_FEW = 10
"""Largest number of neighbours that are looked up one by one. More of them are read from a listing."""
_SINGLES_FACTOR = 5
"""At most this many times `_FEW` chunks are looked up one by one in all. More are read from one listing of all."""
_NEIGHBOUR_DIGITS = 3
"""Number of last characters in which the names of neighbours differ, so that one listing shows a thousand chunks."""
MOST_SAMPLED = 16
"""Largest number of claims that are read for `sample` of `look_at_owners`. If each worker read the claims of all
others, the requests would grow with the square of the number of workers."""


class Survey(NamedTuple):
    """Result of one look at a run."""

    done: set[str]
    """Chunks that have their marker."""
    lapsed: dict[str, Held]
    """Chunks whose claim was released, or has lapsed."""
    alive: dict[str, tuple[Held, WorkerLease]]
    """Chunks that are claimed by a worker that is alive, each with the claim and that worker's record."""
    unclaimed: list[str]
    """Chunks that have no claim."""


def neighbours_of(name: str) -> str:
    """Return what the names of a chunk and its neighbours begin with: up to a thousand of a job's chunks share it.

    >>> neighbours_of("part-04711"), neighbours_of("part-0104711")
    ('part-04', 'part-0104')
    """
    return name[: max(0, len(name) - _NEIGHBOUR_DIGITS)]


def finished_chunks(store: Store) -> dict[str, int]:
    """Return every chunk that has a marker, with the highest generation of its markers. See `newest_markers`."""
    return {name: marker.generation for name, marker in newest_markers(store).items()}


def newest_markers(store: Store, beginning: str = "") -> dict[str, SeenMarker]:
    """Return every chunk that has a marker, with the newest of its markers, from one listing of outputs/.

    A marker does not count if it is too short to be whole, or if its chunk has no output.

    Args:
        store: The run's store.
        beginning: What the chunks' names begin with; others are not listed.
    """
    found: dict[str, SeenMarker] = {}
    outputs: set[str] = set()
    for info in store.list(layout.OUTPUTS + beginning):
        marker = layout.parse_marker(info.key)
        if marker is None:
            outputs.add(layout.chunk_of_output(info.key))
        elif info.bytes >= SMALLEST_MARKER_BYTES:
            name, generation = marker
            if name not in found or generation > found[name].generation:
                found[name] = SeenMarker(generation, info.modified)
    return {name: marker for name, marker in found.items() if name in outputs}


def chunks_with_checkpoints(store: Store) -> dict[str, int]:
    """Return all chunks that have checkpoint segments, from one listing of checkpoints/.

    The value is the number of finished rows in a chunk's segments. A row that is in two segments counts twice.
    """
    rows: dict[str, int] = {}
    for info in store.list(layout.CHECKPOINTS):
        segment = layout.parse_segment(info.key)
        if segment is not None:
            rows[segment.chunk] = rows.get(segment.chunk, 0) + segment.rows
    return rows


def look_at_owners(
    store: Store,
    claims: Claims | None,
    generations: dict[str, int],
    *,
    sample: Collection[str] = (),
) -> Survey:
    """Find out which chunks are done, and which workers hold claims of the other chunks.

    Args:
        store: The run's store.
        claims: Tells which claims are valid. None on a store that cannot keep claims; only `done` is then filled.
        generations: Generation of the wanted marker for each chunk to look up, by name. A chunk with it is done.
        sample: The chunks in `generations` of which only some claims are read, if many of them have one. The others are
            in no field then. They are sorted by preference.
    """
    places = _Places(generations)
    done = places.done(store, generations)
    survey = Survey(done, {}, {}, [])
    if claims is None:
        return survey
    sampled = set(sample)
    left = {name for name in generations if name not in done}
    wanted = [name for name in generations if name in left and name not in sampled]
    may_be_claimed = places.claimed(store, left)
    num_sampled = 0
    owners: dict[tuple[str, str], WorkerLease] = {}
    for name in [*wanted, *(name for name in sample if name in left)]:
        if name in sampled and name in may_be_claimed and num_sampled >= MOST_SAMPLED:
            continue
        held = _read_claim(store, name) if name in may_be_claimed else None
        if held is None:
            survey.unclaimed.append(name)
            continue
        num_sampled += name in sampled
        if not held.claim.worker:
            survey.lapsed[name] = held  # A claim that names no worker was released.
            continue
        key = (held.claim.worker, held.claim.nonce)
        # `owners` remembers only workers that are alive. A worker that seemed gone at an earlier chunk may have come
        # back and made this claim since, so its record is read again.
        owner = owners.get(key) or claims.look(held)
        if owner is None:
            survey.lapsed[name] = held
        else:
            owners[key] = owner
            survey.alive[name] = (held, owner)
    return survey


def release_given_up(store: Store, claims: Claims | None, names: Collection[str]) -> None:
    """Release this worker's claims of the chunks in `names`, which it has given up.

    A claim whose write timed out may still appear on storage much later. If these claims stayed, two workers that have
    given up different chunks could wait for each other for ever.
    """
    if claims is None:
        return
    if len(names) > _FEW:
        names = sorted(_claimed(store).intersection(names))
    for name in names:
        with contextlib.suppress(ObjectNotFound):
            held = _read_claim(store, name)
            if held is not None and claims.is_ours(held.claim):
                claims.release(name, held.etag)


class _Places:
    """Decides how chunks are looked up on storage.

    More than `_FEW` neighbours are read from one listing, which shows only chunks with the same beginning of the name.
    Other chunks are looked up one by one, unless these are too many: then all are read from one listing of everything.
    """

    def __init__(self, names: Collection[str]) -> None:
        groups: dict[str, list[str]] = defaultdict(list)
        for name in names:
            groups[neighbours_of(name)].append(name)
        self._singles = [name for group in groups.values() if len(group) <= _FEW for name in group]
        self._beginnings = [each for each, group in groups.items() if len(group) > _FEW]
        if len(self._singles) > _SINGLES_FACTOR * _FEW:
            self._singles, self._beginnings = [], [""]

    def done(self, store: Store, generations: dict[str, int]) -> set[str]:
        """Return the chunks in `generations` that have a marker of that generation or a higher one."""
        found = {
            name
            for name in self._singles
            if read_marker(store, name, generations[name])[0] is not None
        }
        for beginning in self._beginnings:
            for name, marker in newest_markers(store, beginning).items():
                if marker.generation >= generations.get(name, sys.maxsize):
                    found.add(name)
        return found

    def claimed(self, store: Store, names: Collection[str]) -> set[str]:
        """Return those of `names` that have a claim, and those whose claims must be read to know it."""
        found = set(self._singles).intersection(names)
        for beginning in self._beginnings:
            if any(name.startswith(beginning) for name in names):
                found |= _claimed(store, beginning)
        return found


def _claimed(store: Store, beginning: str = "") -> set[str]:
    """Return the names of all chunks that begin so and have a claim, from one listing of claims/."""
    infos = store.list(layout.CLAIMS + beginning)
    return {layout.stem(info.key).removesuffix(".json") for info in infos}


def _read_claim(store: Store, name: str) -> Held | None:
    """Read a chunk's claim. Return None if the chunk has no claim."""
    key = layout.claim_key(name)
    try:
        data, etag = store.get(key)
    except ObjectNotFound:
        return None
    return Held(decode_claim(data, key), etag)

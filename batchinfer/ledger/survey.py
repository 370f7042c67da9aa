"""A survey of a run for one worker: which chunks are done, and which are claimed by other workers.

Read-only, except for `release_given_up`. For each chunk the marker is looked up first, then the claim, then the record
of the claim's owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.errors import ObjectNotFound
from batchinfer.core.records import Worker
from batchinfer.ledger.claims import Claims, Held, decode_claim
from batchinfer.ledger.inventory import SeenMarker
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import SMALLEST_MARKER_BYTES, has_own_marker, read_marker
from batchinfer.storage import Store

_FEW = 20
"""Largest number of chunks that are looked up one by one. More chunks are looked up in a listing."""


class Survey(NamedTuple):
    """Result of one look at a run. A chunk that this worker has open is only in `done`, or in no field."""

    done: set[str]
    """Chunks that have their marker."""
    lapsed: dict[str, Held]
    """Chunks whose claim was released, or has lapsed."""
    alive: dict[str, tuple[Held, Worker]]
    """Chunks that are claimed by a worker that is alive, each with the claim and that worker's record."""
    unclaimed: list[str]
    """Chunks that have no claim."""


def finished_chunks(store: Store) -> dict[str, int]:
    """Return every chunk that has a marker, with the highest generation of its markers. See `newest_markers`."""
    return {name: marker.generation for name, marker in newest_markers(store).items()}


def newest_markers(store: Store) -> dict[str, SeenMarker]:
    """Return every chunk that has a marker, with the newest of its markers, from one listing of outputs/.

    A marker does not count if it is too short to be whole, or if its chunk has no output.
    """
    found: dict[str, SeenMarker] = {}
    outputs: set[str] = set()
    for info in store.list(layout.OUTPUTS):
        marker = layout.parse_marker(info.key)
        if marker is None:
            outputs.update(layout.chunks_of_output(info.key))
        elif info.bytes >= SMALLEST_MARKER_BYTES:
            name, generation = marker
            if name not in found or generation > found[name].generation:
                found[name] = SeenMarker(generation, info.modified)
    return {name: marker for name, marker in found.items() if name in outputs}


def chunks_with_checkpoints(store: Store) -> dict[str, int]:
    """Return all chunks that have checkpoint segments, from one listing of checkpoints/.

    The value is the number of finished rows in a chunk's segments. A row that is in two segments counts twice, and
    segments of earlier versions, whose keys tell no number, count as 0 rows.
    """
    rows: dict[str, int] = {}
    for info in store.list(layout.CHECKPOINTS):
        segment = layout.parse_segment(info.key)
        if segment is not None:
            rows[segment.chunk] = rows.get(segment.chunk, 0) + (segment.rows or 0)
    return rows


def look_at_owners(
    store: Store,
    claims: Claims | None,
    generations: dict[str, int],
    *,
    own: Collection[str] = (),
    listed: Collection[ChunkRef] = (),
) -> Survey:
    """Find out which chunks are done, and which workers hold claims of the other chunks.

    Args:
        store: The run's store.
        claims: Tells which claims are valid. None on a store that cannot keep claims; only `done` is then filled.
        generations: Generation of the wanted marker for each chunk to look up, by name. A chunk with it is done.
        own: Names of the chunks in `generations` that this worker itself has open. Their claims are not read.
        listed: The chunks in `generations` that no job.json describes. Another file may have the same name as one of
            these, so a marker is read to see whether it was written for this file.
    """
    done = _done(store, generations)
    for ref in listed:
        if ref.name in done and not has_own_marker(store, ref, ref.generation):
            done.remove(ref.name)
    survey = Survey(done, {}, {}, [])
    if claims is None:
        return survey
    wanted = [name for name in generations if name not in own]
    claimed = _claimed(store) if len(wanted) > _FEW else None
    owners: dict[tuple[str, int], Worker] = {}
    for name in wanted:
        if name in done:
            continue
        held = _read_claim(store, name) if claimed is None or name in claimed else None
        if held is None:
            survey.unclaimed.append(name)
            continue
        if not held.claim.worker:
            survey.lapsed[name] = held  # A claim that names no worker was released.
            continue
        key = (held.claim.worker, held.claim.epoch)
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


def _done(store: Store, generations: dict[str, int]) -> set[str]:
    if len(generations) > _FEW:
        finished = finished_chunks(store)
        return {name for name, wanted in generations.items() if finished.get(name, -1) >= wanted}
    return {
        name
        for name, wanted in generations.items()
        if read_marker(store, name, wanted)[0] is not None
    }


def _claimed(store: Store) -> set[str]:
    """Return the names of all chunks that have a claim, from one listing of claims/."""
    infos = store.list(layout.CLAIMS)
    return {layout.stem(info.key).removesuffix(".json") for info in infos}


def _read_claim(store: Store, name: str) -> Held | None:
    """Read a chunk's claim. Return None if the chunk has no claim."""
    key = layout.claim_key(name)
    try:
        data, etag = store.get(key)
    except ObjectNotFound:
        return None
    return Held(decode_claim(data, key), etag)

"""A survey of a run for one worker: which chunks are done, and which are claimed by other workers. Read-only."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from posixpath import commonprefix
from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.errors import AlreadyExists
from batchinfer.core.records import WorkerLease
from batchinfer.ledger.claims import Claims, read_claim
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import SMALLEST_MARKER_BYTES, read_marker
from batchinfer.storage import Store

_MOST_NEIGHBOURS = 1000
"""Largest number of neighbours: so many chunks whose names begin alike are listed together."""
MOST_SAMPLED = 16
"""Largest number of claims that one look reads. If each worker read the claims of all others, the requests would grow
with the square of the number of workers. A look may be told to read fewer."""


class Survey(NamedTuple):
    """Result of one look at neighbouring chunks. A chunk whose claim was not read is in no list."""

    done: set[str]
    """Chunks that have their marker."""
    unclaimed: list[str]
    """Chunks that have no claim."""
    lapsed: list[str]
    """Chunks whose claim was released, or has lapsed."""
    owners: list[WorkerLease]
    """The records of living workers that hold one of the chunks, for each of these chunks."""
    num_reads: int
    """About how many requests it took, but for those of notes, which are few and have a prefix of their own."""
    complete: frozenset[str] = frozenset()
    """Keys of the blocks of which some worker has noted that all of their chunks are done."""


def neighbours(names: Iterable[str]) -> list[list[str]]:
    """Group the chunks of a job: those of one group begin alike, as no other chunk does, and are at most a thousand.

    So the listing of a group shows no other chunk, however the chunks are named.

    >>> [len(group) for group in neighbours(f"train-{index:05d}-of-01500" for index in range(1500))]
    [1000, 500]
    """
    group = sorted(names, key=lambda name: f"{name}.")
    if len(group) <= _MOST_NEIGHBOURS:
        return [group]
    length = len(beginning_of(group)) + 1
    longer = groupby(group, key=lambda name: f"{name}."[:length])
    return [found for _, alike in longer for found in neighbours(alike)]


def blocks_of(refs: Mapping[str, ChunkRef]) -> dict[str, list[str]]:
    """Group chunks into blocks of neighbours. The key of each is that of the note that all of its chunks are done.

    It follows from the names and generations, so a note stays true whatever is appended or repaired.
    """
    found = {}
    for names in neighbours(refs):
        lines = "".join(f"{name} {refs[name].generation}\n" for name in names)
        found[f"{layout.COMPLETE}{hashlib.sha256(lines.encode()).hexdigest()[:32]}"] = names
    return found


def beginning_of(names: Collection[str]) -> str:
    """Return what all keys of these chunks begin with, after the folder. A dot follows the name in each of them."""
    return commonprefix([f"{name}." for name in names])


def newest_markers(store: Store, beginning: str = "") -> dict[str, int]:
    """Return every chunk that has a marker, with its newest marker's generation, from one listing of outputs/.

    A marker does not count if it is too short to be whole, or if its chunk has no output.

    Args:
        store: The run's store.
        beginning: What the chunks' names begin with; others are not listed.
    """
    found: dict[str, int] = {}
    outputs: set[str] = set()
    for info in store.list(layout.OUTPUTS + beginning):
        marker = layout.parse_marker(info.key)
        if marker is None:
            outputs.add(layout.chunk_of_output(info.key))
        elif info.bytes >= SMALLEST_MARKER_BYTES:
            name, generation = marker
            found[name] = max(generation, found.get(name, 0))
    return {name: generation for name, generation in found.items() if name in outputs}


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


def look_at_block(
    store: Store,
    claims: Claims,
    generations: Mapping[str, int],
    own: Collection[str],
    *,
    key: str,
    block: Mapping[str, int],
    most_claims: int,
) -> Survey:
    """Look at a block's chunks, unless there is a note that all of them are done. Leave this note where it is so.

    A note may be older than what somebody has removed since. So it does not count for a worker's own chunks.

    Args:
        store: The run's store.
        claims: Tells which claims are valid.
        generations: As in `look_at_neighbours`, of those of its chunks that are not known to be done.
        own: Chunks of this worker's manifests among these.
        key: Key of the block's note.
        block: Generation of the wanted marker for each chunk of the block.
        most_claims: As in `look_at_neighbours`.
    """
    complete = frozenset(info.key for info in store.list(layout.COMPLETE))
    if key in complete and not own:
        return Survey(set(), [], [], [], 1, complete)
    survey = look_at_neighbours(store, claims, generations, own, most_claims)
    if key not in complete and survey.done >= generations.keys():
        others = block.keys() - generations  # they were done once
        markers = newest_markers(store, beginning_of(others)) if others else {}
        if all(markers.get(name, -1) >= block[name] for name in others):
            with contextlib.suppress(AlreadyExists):
                store.create(key, b"complete\n")
    return survey._replace(complete=complete)


def look_at_neighbours(
    store: Store,
    claims: Claims,
    generations: Mapping[str, int],
    own: Collection[str] = (),
    most_claims: int = MOST_SAMPLED,
) -> Survey:
    """Find out which of some neighbouring chunks are done, and which are held by living workers.

    Args:
        store: The run's store.
        claims: Tells which claims are valid.
        generations: Generation of the wanted marker for each chunk, by name; those first whose claims are to be read.
            A chunk with a marker of this generation or a higher one is done.
        own: Chunks of this worker's manifests. Their markers are read, since a listed one may be damaged.
        most_claims: Largest number of claims to read.
    """
    beginning = beginning_of(generations)
    markers = newest_markers(store, beginning)
    done = {name for name in generations if markers.get(name, -1) >= generations[name]}
    doubtful = done.intersection(own)
    done -= {name for name in doubtful if read_marker(store, name, markers[name])[0] is None}
    # Pages of a thousand outputs and their markers; and those that were read.
    num_reads = 2 + 2 * len(doubtful)
    may_be_claimed = set[str]()
    if not done >= generations.keys():
        infos = store.list(layout.CLAIMS + beginning)
        may_be_claimed = {layout.stem(info.key).removesuffix(".json") for info in infos}
        num_reads += 2  # a page of claims, and one of the workers that `watch` lists
    claims.watch()
    unclaimed, lapsed, owners = list[str](), list[str](), list[WorkerLease]()
    for name in generations:
        num_claims = len(lapsed) + len(owners)
        if name in done or (name in may_be_claimed and num_claims >= most_claims):
            continue
        held = read_claim(store, name) if name in may_be_claimed else None
        if held is None:
            unclaimed.append(name)
            continue
        owner = claims.look(held) if held.claim.worker else None
        if owner is None:
            lapsed.append(name)
        else:
            owners.append(owner)
    num_reads += 2 * (len(lapsed) + len(owners))
    return Survey(done, unclaimed, lapsed, owners, num_reads)

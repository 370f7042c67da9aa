"""Publishing one chunk: first its output, then the marker that names the output, then leftovers are deleted.

This order keeps promises P2 to P4. A crash between two steps leaves an orphan output, or segments and a claim of a
finished chunk. Readers ignore these objects, and `clean` removes them. Every output has a name of its own, so none is
ever overwritten. Markers are created, and not changed later. The first marker of a chunk wins; a worker that comes
second discards its own output. There is one exception: a marker that was damaged from outside (it cannot be read, or
its output is gone) does not count. The chunk is done again, and the new marker replaces the damaged one by if-match,
so that only one of two workers can do so.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from batchinfer.core.events import event
from batchinfer.core.records import Marker
from batchinfer.ledger.claims import Lease
from batchinfer.storage import Store
from batchinfer.storage.retrying import WRITES, keeps_refusing
from batchinfer.storage.scratch import scratch_errors

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 17
SMALLEST_MARKER_BYTES = sum(
    len(f'"{field.name}":0,') for field in msgspec.structs.fields(Marker) if field.required
)
"""Bytes that every marker has at least. A shorter object is no whole marker."""


class Built(NamedTuple):
    """A finished output in the scratch folder."""

    path: Path
    bytes: int
    sha256: str


class Published(NamedTuple):
    """The chunk's current marker, and whether this process wrote it."""

    marker: Marker
    is_ours: bool


def build_output(path: Path, lines: Iterable[bytes]) -> Built:
    """Write output lines to a local file, with a newline after each line. Return the file with its size and sha256."""
    digest = hashlib.sha256()
    size = 0
    with scratch_errors(path.parent), path.open("wb", buffering=_BLOCK_BYTES) as file:
        for line in lines:
            data = line + b"\n"
            digest.update(data)
            size += file.write(data)
    return Built(path, size, digest.hexdigest())


def read_marker(store: Store, chunk: str, generation: int) -> tuple[Marker | None, str]:
    """Read a chunk's marker, and check that the output that it names exists.

    Returns:
        (marker, etag). The marker is None if none is stored, if it cannot be read or is of another chunk, or if its
            output is gone. The etag is the stored object's, also if that cannot be read; it is "" if no marker is
            stored.
    """
    key = layout.marker_key(chunk, generation)
    try:
        data, etag = store.get(key)
    except ObjectNotFound:
        return None, ""
    try:
        marker = codec.decode(data, Marker, name=key)
        store.stat(layout.output_key(marker.output))
        if layout.chunk_of_output(marker.output) != chunk:
            raise InputError(f"{key}: is of another chunk")
    except InputError as error:
        logger.warning("%s; the chunk is done again", error)
    except ObjectNotFound:
        logger.warning("%s: its output is gone; the chunk is done again", key)
    else:
        return marker, etag
    return None, etag


def publish(
    store: Store,
    lease: Lease,
    built: Built,
    marker: Marker,
    *,
    chunk: str,
    leftovers: Sequence[str],
) -> Published:
    """Publish one output and its marker, then delete `leftovers` (the chunk's segments and claim).

    The call may be repeated after a failure: the chunk still gets exactly one marker.

    Args:
        store: The run's store.
        lease: This worker's. If a marker has its nonce, an earlier try of this process wrote it, although its times may
            differ.
        built: The output.
        marker: What the marker says. The output's name, size and checksum, and the nonce, are filled in here.
        chunk: Name of the chunk.
        leftovers: Keys of what is not needed once the chunk has its marker.

    Raises:
        Superseded: Before a write, a newer start of this worker was found.
        LeaseLapsed: Before a write, this worker's lease was found not renewed in time.
        StorageError: Storage failed. `leftovers` were not deleted.
    """
    logger.debug("%s: publishing its output", chunk, extra=event("publish_output", chunk=chunk))
    file = _put_output(store, lease, built, chunk)
    marker = msgspec.structs.replace(
        marker,
        output=file,
        output_bytes=built.bytes,
        output_sha256=built.sha256,
        nonce=lease.nonce,
    )
    logger.debug("%s: publishing its marker", chunk, extra=event("publish_marker", chunk=chunk))
    current = _put_marker(store, lease, marker, chunk)
    logger.debug("%s: tidying up", chunk, extra=event("publish_tidy", chunk=chunk))
    discarded: list[str] = []
    if current.output != file:
        logger.info("%s: %s was first; our output is discarded", chunk, current.worker)
        discarded = [layout.output_key(file)]
    try:
        store.delete([*discarded, *leftovers])
    except (StorageError, AccessDenied) as error:
        # The chunk has its marker, so it is done, even if leftovers could not be deleted.
        logger.warning("%s: not tidied up (%s); `batchinfer clean` can", chunk, error)
    return Published(current, current.nonce == lease.nonce)


def _put_output(store: Store, lease: Lease, built: Built, chunk: str) -> str:
    """Store an output under a name that no other try has, of this start or of another one. Return the name."""
    file = layout.output_file(chunk, f"{lease.nonce}{next(lease.numbers)}")
    lease.require()  # before every write, since the one before it may have taken long
    store.put_file(layout.output_key(file), built.path)
    return file


def _put_marker(store: Store, lease: Lease, marker: Marker, chunk: str) -> Marker:
    """Create the marker unless the chunk has one already. Return the marker that the chunk now has.

    A damaged marker is replaced.
    """
    key = layout.marker_key(chunk, marker.generation)
    data = codec.encode(marker)
    for _ in range(WRITES):
        lease.require()
        with contextlib.suppress(AlreadyExists):
            store.create(key, data)
            return marker
        current, etag = read_marker(store, chunk, marker.generation)
        if current is not None:
            return current
        if etag:
            lease.require()
            with contextlib.suppress(PreconditionFailed):  # it has changed since it was read
                store.replace(key, data, etag)
                return marker
    raise keeps_refusing(key)

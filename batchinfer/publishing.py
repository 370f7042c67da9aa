"""Publishing one chunk: output first, then the marker that vouches for it, then the tidying up.

The order is the promise (P2-P4). A crash between any two steps leaves an orphan output, or segments and a claim of a
finished chunk; readers look at neither, and `clean` removes both. Outputs and markers are only ever created. The
first marker wins; whoever comes second discards its own output.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from batchinfer import codec, layout
from batchinfer.errors import AlreadyExists, ObjectNotFound
from batchinfer.records import Marker
from batchinfer.scratch import scratch_errors
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20


class Built(NamedTuple):
    """A finished output in the scratch folder."""

    path: Path
    bytes: int
    sha256: str


class Published(NamedTuple):
    """The marker that stands for the chunk now, and whether it is the one that we wrote."""

    marker: Marker
    is_ours: bool


def build_output(path: Path, lines: Iterable[bytes]) -> Built:
    """Write output lines to a local file, a newline after each, hashing on the way."""
    digest = hashlib.sha256()
    size = 0
    block: list[bytes] = []
    held = 0
    with scratch_errors(path.parent), path.open("wb") as file:
        for line in lines:
            block.append(line)
            held += len(line) + 1
            if held >= _BLOCK_BYTES:
                data = b"\n".join(block) + b"\n"
                digest.update(data)
                file.write(data)
                size += len(data)
                block, held = [], 0
        if block:
            data = b"\n".join(block) + b"\n"
            digest.update(data)
            file.write(data)
            size += len(data)
    return Built(path, size, digest.hexdigest())


class Publisher:
    """Publishes outputs to one run.

    `is_safe`: the store really honours create-only writes (see storage.probing). `nonce` is this process's own, so a
    second try after a failure writes the same bytes to the same keys.
    """

    def __init__(
        self, store: Store, *, is_safe: bool, nonce: str, require_lease: Callable[[], None]
    ) -> None:
        self._store = store
        self._is_safe = is_safe
        self._nonce = nonce
        self._require_lease = require_lease

    def publish(
        self, built: Built, marker: Marker, *, chunk: str, leftovers: Sequence[str]
    ) -> Published:
        """Publish one output and its marker, then delete `leftovers` (the chunk's segments and claim).

        `marker` comes without output, nonce and sizes: they are filled in here. Idempotent as a whole: called again
        after a failure it ends with exactly one marker.

        Raises:
            Superseded: a newer epoch of this worker exists; nothing was made visible.
        """
        self._require_lease()
        file = self._put_output(built, chunk, marker.generation)
        marker = msgspec.structs.replace(
            marker,
            output=file,
            output_bytes=built.bytes,
            output_sha256=built.sha256,
            nonce=self._nonce,
        )
        self._require_lease()
        standing = self._put_marker(marker, chunk)
        is_ours = standing.nonce == self._nonce
        discarded = [] if standing.output == file else [layout.output_key(file)]
        if discarded:
            logger.info("%s: %s was first; our output is discarded", chunk, standing.worker)
        self._store.delete([*discarded, *leftovers])
        return Published(standing, is_ours)

    def standing_marker(self, chunk: str, generation: int) -> Marker | None:
        """Read a chunk's marker of one generation, None if there is none."""
        key = layout.marker_key(chunk, generation)
        try:
            return codec.decode(self._store.get(key).data, Marker, name=key)
        except ObjectNotFound:
            return None

    def _put_output(self, built: Built, chunk: str, generation: int) -> str:
        if self._is_safe and generation == 0:
            file = layout.output_file(chunk)
            try:
                self._store.create_file(layout.output_key(file), built.path)
            except AlreadyExists:
                logger.info("%s: another output lies there; ours gets a name of its own", file)
            else:
                return file
        file = layout.output_file(chunk, self._nonce)
        self._store.create_file(layout.output_key(file), built.path)
        return file

    def _put_marker(self, marker: Marker, chunk: str) -> Marker:
        """Create the marker and return the one that stands. Without preconditions: check, put, read back."""
        key = layout.marker_key(chunk, marker.generation)
        if not self._is_safe:
            standing = self.standing_marker(chunk, marker.generation)
            if standing is not None:
                return standing
        try:
            self._store.create(key, codec.encode(marker))
        except AlreadyExists:
            pass
        else:
            if self._is_safe:
                return marker
        return codec.decode(self._store.get(key).data, Marker, name=key)

"""Opening a chunk: claim it, download it, and adopt the rows that earlier starts or other workers have finished."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import BinaryIO

from batchinfer.core import codec, layout
from batchinfer.core.counts import Counts
from batchinfer.core.errors import BatchinferError, InputError
from batchinfer.core.records import FinishedRow, Marker, Usage
from batchinfer.core.shell import quote
from batchinfer.formats.lines import answer_of, read_line
from batchinfer.ledger.checkpoints import Segments
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.claims import Held, Taken
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import read_marker
from batchinfer.ledger.runs import refuse_foreign
from batchinfer.storage.scratch import remove_quietly, scratch_errors
from batchinfer.worker.chunk import OpenChunk, Spool
from batchinfer.worker.worker_config import RunAccess

Opened = OpenChunk | Marker | Held
"""An open chunk, the marker of one that needs no work, or the claim of the worker that has it."""


def open_chunk(ref: ChunkRef, run: RunAccess, *, now: float) -> Opened:
    """Claim a chunk, download it and adopt the rows that earlier starts or other workers have finished.

    The worker looks for the chunk's marker after it has the claim, because somebody may have published the chunk
    after the worker listed the markers. A claim of a chunk that is not opened is released.

    Args:
        ref: The chunk.
        run: Access to the run, which the worker has joined.
        now: The time in seconds since 1970.

    Raises:
        InputError: the chunk's file is missing, damaged, or not the file that job.json describes; or, in a repair, the
            old output was changed.
    """
    claim = run.claims.take(ref.name)
    if isinstance(claim, Held):
        return claim
    try:
        opened = _open_claimed(ref, claim, run, now=now)
    except BaseException:
        with contextlib.suppress(BatchinferError):
            run.claims.release(ref.name, claim.etag)
        raise
    if isinstance(opened, Marker):
        with contextlib.suppress(BatchinferError):
            run.store.delete([layout.claim_key(ref.name)])
    return opened


def _open_claimed(ref: ChunkRef, claim: Taken, run: RunAccess, *, now: float) -> OpenChunk | Marker:
    marker, _ = read_marker(run.store, ref.name, ref.generation)
    if marker is not None:
        return marker
    with contextlib.ExitStack() as undo:
        local = fetch(run.source_at(ref.root), ref, run.scratch)
        undo.callback(remove_quietly, local.path)
        num_rows = ref.rows_to_do
        spool = Spool(run.scratch.new_path(f"{ref.name}.spool"), num_rows)
        chunk = OpenChunk(ref, local, spool, num_rows=num_rows, started=now, claim_etag=claim.etag)
        undo.callback(chunk.close)
        _resume(chunk, run)
        undo.pop_all()
    return chunk


def _resume(chunk: OpenChunk, run: RunAccess) -> None:
    """Adopt what is on storage of a chunk."""
    if chunk.ref.base is not None:
        _keep_good_rows(chunk, chunk.ref.base, run)
    wanted = {"chunk_sha256": chunk.local.sha256, "fingerprint": run.fingerprint}
    segments = Segments(run.store, chunk.name, **wanted)
    chunk.adopt(row for row in segments.rows() if row.ok)
    # A repair (generation above 0) does error rows again. Segments of the generation before may still exist.
    if not (chunk.ref.generation or run.retry_errors):
        # Errors come after the answers to the same rows, which were asked again. They are read anew, because all errors
        # of a chunk may be larger than the memory, and from the same segments: later ones would be read in part only.
        again = Segments(run.store, chunk.name, **wanted)
        keys = segments.keys_with_errors
        chunk.adopt(row for key in keys for row in again.rows_of(key) if not row.ok)
    # Segments, and the output that a repair replaces, stay on storage until the chunk has its new marker. So if every
    # segment could be read, no new segment has to repeat the adopted rows.
    chunk.adopt_segments(segments.keys, segments.deaths, holds_every_row=not segments.has_vanished)


def _keep_good_rows(chunk: OpenChunk, base: int, run: RunAccess) -> None:
    """Adopt the rows without an error from the chunk's output of the generation `base` (--retry-errors).

    Raises:
        InputError: that output or its marker is missing or changed, or the chunk itself has changed since.
        RunMismatch: the output was made with another configuration.
    """
    before, _ = read_marker(run.store, chunk.name, base)
    redo = f"batchinfer clean RUN --redo {quote(chunk.name)} --yes"
    hint = f"restore it, or do the chunk again from the start: {redo}"
    if before is None:
        raise InputError(f"{chunk.name}: its marker of generation {base} is gone", hint=hint)
    if before.chunk_sha256 != chunk.local.sha256:  # job.json was replaced by hand
        raise InputError(f"{chunk.name}: was changed after it was done", hint=hint)
    refuse_foreign({chunk.name: before.fingerprint}, run.fingerprint, url=run.store.url)
    path = run.scratch.new_path(f"{chunk.name}.before")
    try:
        run.store.download(layout.output_key(before.output), path)
        with scratch_errors(path.parent), path.open("rb") as file:
            if codec.sha256_file(file) != before.output_sha256:
                # A changed output is refused: rows are adopted by line number, and its lines may have moved.
                raise InputError(
                    f"{chunk.name}: {before.output} is not what its marker vouches for", hint=hint
                )
            file.seek(0)
            # Lines do not tell all tokens of a row. Error rows have none, so those of the marker are of the rows kept.
            tokens = {name: getattr(before, name) for name in Usage.__struct_fields__}
            chunk.adopt(good_rows(file, chunk.num_rows), Counts(**tokens))
    finally:
        remove_quietly(path)


def good_rows(file: BinaryIO, num_rows: int) -> Iterator[FinishedRow]:
    """Yield the rows without an error from a published output's first `num_rows` lines, without their tokens."""
    for index, data in enumerate(codec.lines(file)):
        if index >= num_rows:
            return
        line = read_line(data)
        if line.is_ok:
            reason = answer_of(line).finish_reason
            yield FinishedRow(line=index, ok=True, finish_reason=reason, output=codec.raw(data))

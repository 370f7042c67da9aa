"""Opening a chunk: claim it, fetch it, and adopt the finished rows that earlier workers left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError, InputError
from batchinfer.core.records import Marker
from batchinfer.formats import read_line
from batchinfer.ledger.checkpoints import FinishedRow, Segments
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.claims import Claims, Held, Taken
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import check_belongs_to
from batchinfer.ledger.runs import read_run
from batchinfer.storage import Store
from batchinfer.storage.scratch import remove_quietly, scratch_errors
from batchinfer.worker.chunk import OpenChunk, Spool
from batchinfer.worker.config import RunAccess


class AlreadyDone(NamedTuple):
    """Opening found a marker."""

    marker: Marker


class HeldByOther(NamedTuple):
    """Opening found another worker's claim."""

    held: Held


Opened = OpenChunk | AlreadyDone | HeldByOther


class Opener:
    """Opens chunks: claim, marker, local copy, finished rows. Runs in the background; holds no chunk's state.

    Args:
        run: Access to the run.
        sources: The stores that chunks are read from, by URL.
        chunks_with_checkpoints: Names of chunks that had checkpoints when the worker started.
    """

    def __init__(
        self,
        run: RunAccess,
        sources: dict[str, Store],
        chunks_with_checkpoints: set[str],
    ) -> None:
        self._run = run.store
        self._sources = sources
        self._claims = run.claims
        self._publisher = run.publisher
        self._scratch = run.scratch
        self.chunks_with_checkpoints = chunks_with_checkpoints
        """Chunks with checkpoints at start-up. A chunk outside this set whose claim is new cannot have any checkpoint,
        so its checkpoints need not be listed."""
        self.fingerprint = ""
        """Fingerprint of the run whose segments are adopted; "" while unknown."""

    def join(self, fingerprint: str) -> None:
        """Learn the fingerprint of the run that the worker has joined.

        Raises:
            InputError: rows of another configuration have been adopted before.
        """
        if self.fingerprint not in ("", fingerprint):
            raise InputError(
                f"{self._run.url}/{layout.RUN_KEY}: was replaced while this worker started",
                hint="start it again",
            )
        self.fingerprint = fingerprint

    def open(self, ref: ChunkRef, *, now: float, take_over: Held | None = None) -> Opened:
        """Claim a chunk, fetch it and adopt the finished rows that earlier workers left.

        The marker is looked for after the claim is taken: somebody may have published since the worker's listing.

        Args:
            ref: The chunk.
            now: The time in seconds since 1970.
            take_over: A claim that seemed to have lapsed; its owner is checked once more.

        Raises:
            InputError: the chunk is missing, damaged, or not the one that job.json describes; or its marker was written
                for a different file of the same name.
        """
        if ref.generation:
            # Most chunks of a finished run need no repair. Their markers show it, so no claim is taken.
            before = self._current_marker(ref, ref.generation - 1)
            if before is None:
                ref = ref._replace(generation=ref.generation - 1)
            elif not before.rows_error:
                return AlreadyDone(before)
        if self._claims is None:
            return self._open_claimed(ref, Taken(""), now=now)
        claim = self._take(self._claims, ref.name, take_over)
        if isinstance(claim, Held):
            return HeldByOther(claim)
        try:
            opened = self._open_claimed(ref, claim, now=now)
        except BaseException:
            # A kept claim would block the chunk for everybody else as long as this worker lives.
            with contextlib.suppress(BatchinferError):
                self._claims.release(ref.name, claim.etag)
            raise
        if isinstance(opened, AlreadyDone):
            with contextlib.suppress(BatchinferError):
                self._run.delete([layout.claim_key(ref.name)])
        return opened

    def open_backup(self, ref: ChunkRef, *, now: float) -> Opened:
        """Open a chunk that a slower worker holds, without its claim: the first of the two to publish wins."""
        return self._open_claimed(ref, Taken(""), now=now)

    def _open_claimed(self, ref: ChunkRef, claim: Taken, *, now: float) -> Opened:
        marker = self._current_marker(ref, ref.generation)
        if marker is not None:
            return AlreadyDone(marker)
        local = fetch(self._sources[ref.root], ref, self._scratch)
        num_rows = local.num_lines if ref.row_limit is None else min(ref.row_limit, local.num_lines)
        chunk = OpenChunk(
            ref,
            local,
            Spool(self._scratch.new_path(f"{ref.name}.spool"), num_rows),
            num_rows=num_rows,
            started=now,
            claim_etag=claim.etag,
        )
        may_have_segments = chunk.name in self.chunks_with_checkpoints
        if claim.is_new and not may_have_segments and not chunk.generation:
            return chunk
        try:
            return self._resume(chunk)
        except BaseException:
            chunk.close()
            raise

    def _resume(self, chunk: OpenChunk) -> Opened:
        if chunk.generation:
            self._keep_good_rows(chunk)
        segments = Segments(
            self._run,
            chunk.name,
            chunk_sha256=chunk.local.sha256,
            fingerprint=self._run_fingerprint,
            num_lines=chunk.num_rows,
        )
        # Segments of the previous generation may be left. Their error rows are not adopted, since they are to be done
        # again.
        chunk.adopt(row for row in segments.rows() if row.ok or not chunk.generation)
        if segments.has_vanished:
            marker = self._current_marker(chunk.ref, chunk.generation)
            if marker is not None:
                chunk.close()
                return AlreadyDone(marker)
        # Rows that were read from segments stay on storage until the chunk has its marker, so no new segment repeats
        # them.
        chunk.adopt_segments(
            segments.keys, segments.deaths, holds_every_row=not segments.has_vanished
        )
        return chunk

    def _current_marker(self, ref: ChunkRef, generation: int) -> Marker | None:
        """See Publisher.current_marker. Raises InputError for the marker of a different file of the same name."""
        marker = self._publisher.current_marker(ref.name, generation)
        if marker is not None:
            check_belongs_to(ref, marker)
        return marker

    def _run_fingerprint(self) -> str:
        """Return the fingerprint of run.json, "" before there is one."""
        if not self.fingerprint:
            run = read_run(self._run)
            self.fingerprint = "" if run is None else run.fingerprint
        return self.fingerprint

    def _keep_good_rows(self, chunk: OpenChunk) -> None:
        """Adopt the good rows of the previous generation (``--retry-errors``)."""
        before = self._current_marker(chunk.ref, chunk.generation - 1)
        if before is None:
            raise InputError(
                f"{chunk.name}: its marker of generation {chunk.generation - 1} is gone"
            )
        if before.chunk_sha256 != chunk.local.sha256:
            raise InputError(
                f"{chunk.name}: was changed after it was done: sha256 {chunk.local.sha256[:12]}…, "
                f"its marker says {before.chunk_sha256[:12]}…",
                hint=f"restore it, or do it again from the start: batchinfer clean RUN --redo {chunk.name} --yes",
            )
        path = self._scratch.new_path(f"{chunk.name}.before")
        try:
            self._run.download(layout.output_key(before.output), path)
            with scratch_errors(path.parent), path.open("rb") as file:
                if codec.sha256_file(file) != before.output_sha256:
                    # Refused because rows are adopted by line number, and the lines may have moved.
                    raise InputError(
                        f"{chunk.name}: {before.output} is not what its marker vouches for",
                        hint="restore it, or do the chunk again from the start: "
                        f"batchinfer clean RUN --redo {chunk.name} --yes",
                    )
                file.seek(0)
                chunk.adopt(good_rows(file, chunk.num_rows))
        finally:
            remove_quietly(path)

    @staticmethod
    def _take(claims: Claims, name: str, take_over: Held | None) -> Taken | Held:
        if take_over is not None:
            # Look again, because time has passed since the claim lapsed: a frozen owner may be back, with its claims
            # unchanged.
            if take_over.claim.worker and claims.look(take_over) is not None:
                return take_over
            taken = claims.take_over(name, take_over.etag)
            if taken is not None:
                return taken
        return claims.take(name)


def good_rows(file: BinaryIO, num_rows: int) -> Iterator[FinishedRow]:
    """Yield the ok rows of a published output as finished rows."""
    for index, data in enumerate(codec.lines(file)):
        if index >= num_rows:
            return
        summary = read_line(data)
        if summary.is_ok:
            yield FinishedRow(
                line=index,
                ok=True,
                finish_reason=summary.finish_reasons[0] if summary.finish_reasons else "",
                prompt_tokens=summary.usage.prompt_tokens,
                cached_tokens=summary.usage.cached_tokens,
                completion_tokens=summary.usage.completion_tokens,
                output=codec.raw(data),
            )

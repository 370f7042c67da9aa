"""Opening a chunk: claim it, download it, and adopt the rows that earlier starts or other workers have finished."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from typing import BinaryIO, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError, InputError
from batchinfer.core.records import Marker
from batchinfer.core.shell import quote
from batchinfer.formats import answer_of, read_line
from batchinfer.ledger.checkpoints import FinishedRow, Segments
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.claims import Claims, Held, Taken
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.runs import refuse_foreign
from batchinfer.storage import Store
from batchinfer.storage.scratch import remove_quietly, scratch_errors
from batchinfer.worker.chunk import OpenChunk, Spool
from batchinfer.worker.config import RunAccess


class AlreadyDone(NamedTuple):
    """The result of opening a chunk that needs no work, because it has a marker."""

    marker: Marker


class HeldByOther(NamedTuple):
    """The result of opening a chunk that another worker has claimed."""

    held: Held


Opened = OpenChunk | AlreadyDone | HeldByOther


class Opener:
    """Opens chunks: claims, looks for the marker, downloads, and adopts finished rows.

    `open` runs in background jobs. An Opener keeps no state of the chunks that it opens.

    Args:
        run: Access to the run, which the worker has joined.
        sources: The stores that chunks are read from, by URL.
        chunks_with_checkpoints: Names of chunks that had checkpoints when the worker started. A chunk that is not among
            them, and that nobody had claimed before, cannot have a checkpoint. Then no request looks for one.
    """

    def __init__(
        self,
        run: RunAccess,
        sources: dict[str, Store],
        chunks_with_checkpoints: Container[str],
    ) -> None:
        self._run = run
        self._sources = sources
        self.chunks_with_checkpoints = chunks_with_checkpoints

    def open(self, ref: ChunkRef, *, now: float, take_over: Held | None = None) -> Opened:
        """Claim a chunk, download it and adopt the rows that earlier starts or other workers have finished.

        The worker looks for the chunk's marker after it has the claim, because somebody may have published the chunk
        after the worker listed the markers.

        Args:
            ref: The chunk.
            now: The time in seconds since 1970.
            take_over: A claim of the chunk that was released or seemed to have lapsed. This is checked once more.

        Raises:
            InputError: the chunk's file is missing, damaged, or not the file that job.json describes; the chunk's
                marker was written for a different file of the same name; or, in a repair, the old output was changed.
        """
        claims = self._run.claims
        if claims is None:
            return self._open_claimed(ref, Taken(""), now=now)
        claim = self._take(claims, ref.name, take_over)
        if isinstance(claim, Held):
            return HeldByOther(claim)
        try:
            opened = self._open_claimed(ref, claim, now=now)
        except BaseException:
            self._release(claims, ref, claim)
            raise
        if isinstance(opened, AlreadyDone):
            with contextlib.suppress(BatchinferError):
                self._run.store.delete([layout.claim_key(ref.name)])
        return opened

    @staticmethod
    def _release(claims: Claims, ref: ChunkRef, claim: Taken) -> None:
        """Release the claim of a chunk that was not opened. Else no other worker could take it while this one lives."""
        with contextlib.suppress(BatchinferError):
            claims.release(ref.name, claim.etag)

    def _open_claimed(self, ref: ChunkRef, claim: Taken, *, now: float) -> Opened:
        marker = self._current_marker(ref, ref.generation)
        if marker is not None:
            return AlreadyDone(marker)
        scratch = self._run.scratch
        local = fetch(self._sources[ref.root], ref, scratch)
        num_rows = local.num_lines if ref.row_limit is None else min(ref.row_limit, local.num_lines)
        chunk = OpenChunk(
            ref,
            local,
            Spool(scratch.new_path(f"{ref.name}.spool"), num_rows),
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
        if chunk.ref.base is not None:
            self._keep_good_rows(chunk, chunk.ref.base)
        segments = Segments(
            self._run.store,
            chunk.name,
            chunk_sha256=chunk.local.sha256,
            fingerprint=self._run.fingerprint,
            first_row=chunk.ref.first_row,
            num_lines=chunk.num_rows,
        )
        # Segments of an earlier generation may still exist. A repair (generation above 0) does not adopt error rows
        # from segments, because it does error rows again.
        chunk.adopt(row for row in segments.rows() if row.ok or not chunk.generation)
        if segments.has_vanished:
            marker = self._current_marker(chunk.ref, chunk.generation)
            if marker is not None:
                chunk.close()
                return AlreadyDone(marker)
        # Segments, and the output that a repair replaces, stay on storage until the chunk has its new marker. So if
        # every segment could be read, no new segment has to repeat the adopted rows.
        chunk.adopt_segments(
            segments.keys, segments.deaths, holds_every_row=not segments.has_vanished
        )
        return chunk

    def _current_marker(self, ref: ChunkRef, generation: int) -> Marker | None:
        """Read a chunk's marker of one generation, None if the marker is missing or damaged."""
        return self._run.publisher.current_marker(ref.name, generation)

    def _keep_good_rows(self, chunk: OpenChunk, base: int) -> None:
        """Adopt the rows without an error from the chunk's output of the generation `base` (--retry-errors).

        Raises:
            InputError: that output or its marker is missing or changed, or the chunk itself has changed since.
            RunMismatch: the output was made with another configuration.
        """
        before = self._current_marker(chunk.ref, base)
        if before is None:
            raise InputError(f"{chunk.name}: its marker of generation {base} is gone")
        if before.chunk_sha256 != chunk.local.sha256:
            raise InputError(
                f"{chunk.name}: was changed after it was done: sha256 {chunk.local.sha256[:12]}…, "
                f"its marker says {before.chunk_sha256[:12]}…",
                hint="restore it, or do it again from the start: "
                f"batchinfer clean RUN --redo {quote(chunk.name)} --yes",
            )
        refuse_foreign(
            {chunk.name: before.fingerprint}, self._run.fingerprint, url=self._run.store.url
        )
        path = self._run.scratch.new_path(f"{chunk.name}.before")
        try:
            self._run.store.download(layout.output_key(before.output), path)
            with scratch_errors(path.parent), path.open("rb") as file:
                if codec.sha256_file(file) != before.output_sha256:
                    # A changed output is refused: rows are adopted by line number, and its lines may have moved.
                    raise InputError(
                        f"{chunk.name}: {before.output} is not what its marker vouches for",
                        hint="restore it, or do the chunk again from the start: "
                        f"batchinfer clean RUN --redo {quote(chunk.name)} --yes",
                    )
                file.seek(0)
                chunk.adopt(good_rows(file, chunk.num_rows))
        finally:
            remove_quietly(path)

    @staticmethod
    def _take(claims: Claims, name: str, take_over: Held | None) -> Taken | Held:
        if take_over is not None:
            # Look at the owner again, because time has passed since its claim seemed lapsed. An owner that was frozen
            # may run again, and its claim has not changed.
            if take_over.claim.worker and claims.look(take_over) is not None:
                return take_over
            taken = claims.take_over(name, take_over)
            if taken is not None:
                return taken
        return claims.take(name)


def good_rows(file: BinaryIO, num_rows: int) -> Iterator[FinishedRow]:
    """Yield the rows without an error from a published output's first `num_rows` lines, as finished rows."""
    for index, data in enumerate(codec.lines(file)):
        if index >= num_rows:
            return
        line = read_line(data)
        if line.is_ok:
            answer = answer_of(line)
            yield FinishedRow(
                line=index,
                ok=True,
                finish_reason=answer.finish_reason,
                prompt_tokens=answer.usage.prompt_tokens,
                cached_tokens=answer.usage.cached_tokens,
                completion_tokens=answer.usage.completion_tokens,
                reasoning_tokens=answer.usage.reasoning_tokens or 0,
                output=codec.raw(data),
            )

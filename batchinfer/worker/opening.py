"""Opening a chunk: claim it, download it, and adopt the rows that earlier starts or other workers have finished."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container, Iterator
from functools import partial
from typing import BinaryIO, NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import AlreadyExists, BatchinferError, InputError, RunMismatch
from batchinfer.core.records import Claim, Marker
from batchinfer.formats import answer_of, read_line
from batchinfer.ledger.checkpoints import FinishedRow, Segments, write_segment
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.claims import Claims, Held, Taken
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import check_belongs_to
from batchinfer.ledger.runs import read_run, refuse_foreign
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


class AwaitsRun(NamedTuple):
    """The result of opening a chunk that has checkpoints while there is no run.json.

    Nothing then tells whether the checkpoints are of this run. The worker knows it once it has joined the run.
    """


class FoundRows(NamedTuple):
    """The result of a look at an open chunk's segments: what other workers have written since the last look."""

    rows: list[FinishedRow]
    keys: list[str]
    """Keys of the segments with these rows, and of segments without rows."""
    is_cut: bool
    """Whether there are more such segments, which the next look will find."""


Opened = OpenChunk | AlreadyDone | HeldByOther | AwaitsRun


_HEARTBEATS_OF_HELP = 2.0
"""Number of heartbeats in which a slow worker would finish a chunk, below which nobody begins to help it with it.

It looks for help once in the time of a heartbeat. Help that it does not see in time is work done twice.
"""
_MOST_FOUND_BYTES = 8 << 20
"""Bytes of other workers' segments after which a look at an open chunk reads no further ones."""


class _NoRun(Exception):
    """There is no run.json, and the worker has not joined the run yet."""


class Opener:
    """Opens chunks: claims, looks for the marker, downloads, and adopts finished rows.

    `open`, `open_backup` and `look_at_others` run in background jobs. An Opener keeps no state of the chunks that it
    opens.

    Args:
        run: Access to the run.
        sources: The stores that chunks are read from, by URL.
        chunks_with_checkpoints: Names of chunks that had checkpoints when the worker started.
    """

    def __init__(
        self,
        run: RunAccess,
        sources: dict[str, Store],
        chunks_with_checkpoints: Container[str],
    ) -> None:
        self._run = run.store
        self._sources = sources
        self._claims = run.claims
        self._lease = run.lease
        self._publisher = run.publisher
        self._scratch = run.scratch
        self.chunks_with_checkpoints = chunks_with_checkpoints
        """Names of chunks that had checkpoints when the worker started.

        A chunk that is not in this set, and that nobody had claimed before, cannot have a checkpoint. Then no request
        looks for its checkpoints.
        """
        self._joined = ""
        """Fingerprint of the run that the worker has joined; "" before."""
        self._read = ""
        """Fingerprint in run.json, as read before the worker joined the run; "" if it was not read.

        Only segments with the fingerprint in `_joined`, or until then in `_read`, are adopted.
        """

    @property
    def has_joined(self) -> bool:
        """Whether `join` was called."""
        return bool(self._joined)

    def join(self, fingerprint: str) -> None:
        """Note the fingerprint of the run that the worker has joined.

        Raises:
            InputError: the worker has read another fingerprint before, so it may have adopted rows of another run.
        """
        # `_joined` is set first, so that a background job that reads run.json just now either uses it or is seen here.
        self._joined = fingerprint
        if self._read not in ("", fingerprint):
            raise InputError(
                f"{self._run.url}/{layout.RUN_KEY}: was replaced while this worker started",
                hint="start it again",
            )

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
        if ref.generation:
            # A repair does only chunks with error rows. The marker of the previous generation shows whether the chunk
            # has any. If it has none, no claim is needed. This saves most claims, since few chunks have error rows.
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
            self._release(self._claims, ref, claim)
            raise
        if isinstance(opened, AwaitsRun):
            self._release(self._claims, ref, claim)
        elif isinstance(opened, AlreadyDone):
            with contextlib.suppress(BatchinferError):
                self._run.delete([layout.claim_key(ref.name)])
        return opened

    @staticmethod
    def _release(claims: Claims, ref: ChunkRef, claim: Taken) -> None:
        """Release the claim of a chunk that was not opened. Else no other worker could take it while this one lives."""
        with contextlib.suppress(BatchinferError):
            claims.release(ref.name, claim.etag)

    def open_backup(
        self,
        ref: ChunkRef,
        owner: Held,
        *,
        now: float,
        owner_rate: float = 0.0,
        other_helpers: int = 0,
    ) -> Opened:
        """Open a chunk that a slower worker has claimed, without taking the claim.

        Both workers then do the chunk, each from its own end, and the first of them to publish wins. A chunk that the
        owner will soon have finished is left alone.

        Args:
            ref: The chunk.
            owner: The slower worker's claim.
            now: The time in seconds since 1970.
            owner_rate: Rows per second of the slower worker; 0 if it stands still or if its rate is unknown.
            other_helpers: Number of further workers that may help with this chunk, too. If more do, it is left alone.
                Among many workers that have nothing else to do, dozens would do the same chunk.
        """
        if self._claims is None:
            return self._open_claimed(ref, Taken(""), now=now, is_help=True)
        find_helper = partial(
            self._helper, self._claims, ref.name, owner.claim.worker, set(), other_helpers
        )
        helper = find_helper()
        if helper is not None:
            return HeldByOther(helper)
        if ref.sha256 is None or not self._joined or not self._lease.is_held():
            return self._open_help(ref, owner, owner_rate, now=now)
        try:
            key = self._announce(ref.name, ref.sha256)
        except AlreadyExists:
            # No other start writes this key: the first attempt succeeded, and its reply was lost. The store found
            # nothing to compare with, because whoever has published the chunk removes its segments.
            return self._open_help(ref, owner, owner_rate, now=now)
        opened: Opened | None = None
        try:
            # Several workers may announce their help at the same moment. Then as many go on as may.
            helper = find_helper(has_announced=True)
            if helper is not None:
                return HeldByOther(helper)
            opened = self._open_help(ref, owner, owner_rate, now=now)
        finally:
            if not isinstance(opened, OpenChunk):
                with contextlib.suppress(BatchinferError):
                    self._run.delete([key])
        if isinstance(opened, OpenChunk) and key not in opened.segment_keys:
            opened.segment_keys.append(key)
        return opened

    def _open_help(self, ref: ChunkRef, owner: Held, owner_rate: float, *, now: float) -> Opened:
        opened = self._open_claimed(ref, Taken(""), now=now, is_help=True)
        least_rows = owner_rate * _HEARTBEATS_OF_HELP * self._lease.heartbeat_seconds
        if not isinstance(opened, OpenChunk) or opened.num_left >= least_rows:
            return opened
        opened.close()
        return HeldByOther(owner)

    def _announce(self, name: str, chunk_sha256: str) -> str:
        """Write a checkpoint segment without rows, which shows others that this worker helps. Return its key.

        The number in the key is 0; segments with rows begin with 1.
        """
        key = layout.segment_key(name, self._lease.epoch, self._lease.writer, 0, 0)
        write_segment(
            self._run,
            key,
            b"",
            chunk_sha256=chunk_sha256,
            fingerprint=self._joined,
        )
        return key

    def _helper(
        self,
        claims: Claims,
        name: str,
        owner_id: str,
        gone: set[tuple[str, int]],
        number: int,
        *,
        has_announced: bool = False,
    ) -> Held | None:
        """Return a live worker that helps with a chunk, if more than `number` do. The owner and this one do not count.

        Args:
            claims: Tells whether a worker is alive.
            name: The chunk.
            owner_id: The owner's worker id.
            gone: Starts of workers, by writer and epoch, that are not alive. Further ones are added.
            number: Number of helpers that are passed over.
            has_announced: Whether this worker has announced its help. Then a helper without rows counts only if its
                name comes first.

        Returns:
            The worker, as if it held the chunk's claim.
        """
        infos = self._run.list(layout.checkpoint_prefix(name))
        most_rows: dict[tuple[str, int], int] = {}
        for segment in (layout.parse_segment(info.key) for info in infos):
            if segment is not None and segment.rows is not None:
                start = (segment.writer, segment.epoch)
                most_rows[start] = max(segment.rows, most_rows.get(start, 0))
        for start, rows in most_rows.items():
            writer, epoch = start
            worker_id, _, nonce = writer.rpartition(".")
            if start in gone or worker_id in (owner_id, self._lease.worker_id):
                continue
            if has_announced and not rows and writer > self._lease.writer:
                continue
            held = Held(Claim(worker=worker_id, epoch=epoch, nonce=nonce), "")
            if claims.look(held) is None:
                gone.add(start)
            elif number:
                number -= 1
            else:
                return held
        return None

    def look_at_others(
        self, chunk: OpenChunk, known: Collection[str]
    ) -> FoundRows | AlreadyDone | None:
        """Find out what other workers have done of an open chunk: rows in new segments, or all of it.

        None if the worker has not joined the run yet. Notes of engine deaths are left out, as `open` reads them.

        Args:
            chunk: The chunk.
            known: Keys of the segments that this worker has read or written.
        """
        if not self._joined:
            return None
        infos = {info.key: info for info in self._run.list(layout.checkpoint_prefix(chunk.name))}
        if not infos.keys() >= set(known):
            # Segments are removed once the chunk has its marker.
            marker = self._current_marker(chunk.ref, chunk.generation)
            if marker is not None:
                return AlreadyDone(marker)
        segments = self._segments_of(chunk)
        found = FoundRows([], [], is_cut=False)
        num_bytes = 0
        for key in sorted(infos.keys() - set(known)):
            name = layout.parse_segment(key)
            if name is None or name.writer == self._lease.writer:
                continue
            if num_bytes and num_bytes + infos[key].bytes > _MOST_FOUND_BYTES:
                return found._replace(is_cut=True)
            num_bytes += infos[key].bytes
            found.rows.extend(
                row for row in segments.rows_of(key) if row.ok or not chunk.generation
            )
            found.keys.append(key)
        return found

    def _segments_of(self, chunk: OpenChunk) -> Segments:
        return Segments(
            self._run,
            chunk.name,
            chunk_sha256=chunk.local.sha256,
            fingerprint=self._run_fingerprint,
            first_row=chunk.ref.first_row,
            num_lines=chunk.num_rows,
        )

    def _open_claimed(
        self, ref: ChunkRef, claim: Taken, *, now: float, is_help: bool = False
    ) -> Opened:
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
            is_help=is_help,
        )
        may_have_segments = chunk.name in self.chunks_with_checkpoints
        if claim.is_new and not may_have_segments and not chunk.generation:
            return chunk
        try:
            return self._resume(chunk)
        except _NoRun:
            chunk.close()
            return AwaitsRun()
        except BaseException:
            chunk.close()
            raise

    def _resume(self, chunk: OpenChunk) -> Opened:
        if chunk.generation:
            self._keep_good_rows(chunk)
        segments = self._segments_of(chunk)
        # Segments of the previous generation may still exist. A repair (generation above 0) does not adopt error rows
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
        """Read a chunk's marker of one generation, None if the marker is missing or damaged.

        Raises:
            InputError: the marker was written for a different file of the same name.
        """
        marker = self._publisher.current_marker(ref.name, generation)
        if marker is not None:
            check_belongs_to(ref, marker)
        return marker

    def _run_fingerprint(self) -> str:
        """Return the fingerprint of the run, from run.json as long as the worker has not joined the run.

        Raises:
            _NoRun: the worker has not joined the run, and there is no run.json.
            RunMismatch: run.json cannot be used. That is no fault of the chunk, so it ends the worker.
        """
        if not self._joined and not self._read:
            try:
                run = read_run(self._run)
            except InputError as error:
                raise RunMismatch(error.message, hint=error.hint) from error
            if run is not None:
                self._read = run.fingerprint
            elif not self._joined:
                raise _NoRun
        return self._joined or self._read

    def _keep_good_rows(self, chunk: OpenChunk) -> None:
        """Adopt the rows without an error from the chunk's output of the previous generation (--retry-errors).

        Raises:
            InputError: that output or its marker is missing or changed, or the chunk itself has changed since.
            RunMismatch: the output was made with another configuration.
        """
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
        refuse_foreign({chunk.name: before.fingerprint}, self._run_fingerprint(), url=self._run.url)
        path = self._scratch.new_path(f"{chunk.name}.before")
        try:
            self._run.download(layout.output_key(before.output), path)
            with scratch_errors(path.parent), path.open("rb") as file:
                if codec.sha256_file(file) != before.output_sha256:
                    # A changed output is refused: rows are adopted by line number, and its lines may have moved.
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
                reasoning_tokens=answer.usage.reasoning_tokens or msgspec.UNSET,
                output=codec.raw(data),
            )

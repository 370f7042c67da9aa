"""One open chunk: its local copy, which of its rows are done, and the spool that holds them.

Opening happens in the background and ends in an `OpenChunk`, which from then on belongs to the worker's main thread.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batchinfer import codec, layout
from batchinfer.checkpoints import FinishedRow, Segments, batches, encode_rows
from batchinfer.claims import Claims, Held, Taken
from batchinfer.errors import BatchinferError, InputError, ObjectNotFound
from batchinfer.formats import read_line
from batchinfer.manifests import ChunkRef
from batchinfer.prompts import RawRow
from batchinfer.publishing import Publisher
from batchinfer.records import Marker
from batchinfer.scratch import Scratch, Spool, scratch_errors
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 17
"""What is read of a local chunk at a time."""
_READ_ROWS = 16
DEATHS_BEFORE_ALONE = 2
DEATHS_BEFORE_ERROR = 3


class RowState(enum.IntEnum):
    """Where a row of an open chunk is."""

    TODO = 0
    TAKEN = 1
    """Handed to the prompt builder or the engine."""
    DONE = 2


class LocalChunk(NamedTuple):
    """A chunk's plain lines in the scratch folder. `sha256` is the stored object's."""

    path: Path
    num_lines: int
    sha256: str


class RowCounts:
    """What the finished rows of one chunk add up to."""

    __slots__ = ("cached_tokens", "completion_tokens", "errors", "ok", "prompt_tokens", "resumed")

    def __init__(self) -> None:
        self.ok = 0
        self.resumed = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.errors: Counter[str] = Counter()

    def add(self, rows: list[FinishedRow]) -> None:
        """Count finished rows."""
        failed = [row.code for row in rows if not row.ok]
        self.ok += len(rows) - len(failed)
        self.errors.update(failed)
        self.prompt_tokens += sum([row.prompt_tokens for row in rows])
        self.cached_tokens += sum([row.cached_tokens for row in rows])
        self.completion_tokens += sum([row.completion_tokens for row in rows])


class OpenChunk:
    """A chunk being worked on."""

    def __init__(
        self, ref: ChunkRef, local: LocalChunk, spool: Spool, *, num_rows: int, started: float
    ) -> None:
        self.ref = ref
        self.name = ref.name
        self.local = local
        self.num_rows = num_rows
        self.spool = spool
        self.started = started
        self.counts = RowCounts()
        self.state = bytearray(num_rows)
        self.num_left = num_rows
        self.deaths: dict[int, int] = {}
        self.claim_etag = ""
        self.segment_keys: list[str] = []
        self.num_segments_written = 0
        self.checkpointed_bytes = 0
        self.generation = ref.generation
        self.is_backup = False
        self._reader: BinaryIO | None = None
        self._cursor = 0

    @property
    def num_unread(self) -> int:
        """Rows that `read_rows` has not yet passed."""
        return self.num_rows - self._cursor

    def read_rows(self, max_rows: int, max_bytes: int) -> list[RawRow]:
        """Read on to the next rows that are to do, and mark them taken. Rows known to kill engines are left out.

        One caller at a time. Reads the local copy only.
        """
        rows: list[RawRow] = []
        size = 0
        if self._reader is None:
            self._reader = self.local.path.open("rb", buffering=_READ_BYTES)
        state, todo, taken = self.state, RowState.TODO, RowState.TAKEN
        while self._cursor < self.num_rows and len(rows) < max_rows and size < max_bytes:
            first = self._cursor
            count = min(_READ_ROWS, max_rows - len(rows), self.num_rows - first)
            lines = list(itertools.islice(self._reader, count))
            self._cursor += count
            if not self.deaths and state.count(todo, first, first + count) == count:
                state[first : first + count] = bytes([taken]) * count
                rows += [RawRow(index, line) for index, line in enumerate(lines, first)]
                size += sum(map(len, lines))
                continue
            for index, line in enumerate(lines, first):
                if state[index] == todo and self.deaths.get(index, 0) < DEATHS_BEFORE_ALONE:
                    state[index] = taken
                    rows.append(RawRow(index, line))
                    size += len(line)
        return rows

    def read_row(self, index: int) -> RawRow:
        """Read one row, wherever it is. Slow: for the few that run alone."""
        with self.local.path.open("rb") as file:
            for number, line in enumerate(codec.lines(file)):
                if number == index:
                    return RawRow(index, line)
        raise InputError(f"{self.name}: has no line {index}")

    def rows_to_run_alone(self) -> list[int]:
        """Rows that were in flight at two engine deaths, in order."""
        return [
            line
            for line, deaths in sorted(self.deaths.items())
            if deaths >= DEATHS_BEFORE_ALONE and self.state[line] == RowState.TODO
        ]

    def finish(self, rows: list[FinishedRow]) -> list[FinishedRow]:
        """Keep finished rows; return those that were not finished before. The first copy of a row stays."""
        fresh: list[FinishedRow] = []
        state, done = self.state, RowState.DONE
        for row in rows:
            line = row.line
            if state[line] != done:
                state[line] = done
                fresh.append(row)
        if fresh:
            self.spool.append(*encode_rows(fresh))
            self.counts.add(fresh)
            self.num_left -= len(fresh)
        return fresh

    def marker(self, *, fingerprint: str, worker: str, epoch: int, start: str, end: str) -> Marker:
        """The chunk's marker, but for what publishing fills in."""
        counts = self.counts
        return Marker(
            output="",
            output_bytes=0,
            output_sha256="",
            chunk=self.ref.key,
            chunk_sha256=self.local.sha256,
            generation=self.generation,
            rows_ok=counts.ok,
            rows_error=sum(counts.errors.values()),
            rows_resumed=counts.resumed,
            fingerprint=fingerprint,
            worker=worker,
            epoch=epoch,
            start=start,
            end=end,
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=counts.cached_tokens,
            errors=dict(counts.errors),
            nonce="",
        )

    def close(self) -> None:
        """Remove the local files. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        self.spool.close()
        self.local.path.unlink(missing_ok=True)


class AlreadyDone(NamedTuple):
    """Opening found a marker."""

    marker: Marker


class HeldByOther(NamedTuple):
    """Opening found another worker's claim."""

    held: Held


Opened = OpenChunk | AlreadyDone | HeldByOther


class Opener:
    """Opens chunks: claim, marker, local copy, finished rows. Runs in the background; holds no chunk's state.

    `claims` is None where the store cannot keep them.
    """

    def __init__(
        self,
        *,
        run: Store,
        sources: dict[str, Store],
        claims: Claims | None,
        publisher: Publisher,
        scratch: Scratch,
    ) -> None:
        self._run = run
        self._sources = sources
        self._claims = claims
        self._publisher = publisher
        self._scratch = scratch
        self.begun: set[str] | None = None
        """Chunks that had segments when the worker started; None: not known. Who has worked on a chunk since then has
        left a claim, so a new claim on any other chunk needs no look for segments."""

    def open(self, ref: ChunkRef, *, now: float, take_over: Held | None = None) -> Opened:
        """Claim a chunk, fetch it and take up the finished rows that others left.

        `take_over` is a claim seen to have lapsed. The marker is looked for after the claim: between the worker's one
        listing and now somebody may have published.

        Raises:
            InputError: the chunk is missing, damaged, or not the one that job.json describes.
        """
        if ref.generation:
            # Most chunks of a finished run have nothing to repair: that is seen without a claim.
            before = self._publisher.standing_marker(ref.name, ref.generation - 1)
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
            # Kept, it would keep everybody else from the chunk for as long as this worker lives.
            with contextlib.suppress(BatchinferError):
                self._claims.release(ref.name, claim.etag)
            raise
        if isinstance(opened, AlreadyDone):
            with contextlib.suppress(BatchinferError):
                self._run.delete([layout.claim_key(ref.name)])
        return opened

    def open_backup(self, ref: ChunkRef, *, now: float) -> Opened:
        """Open a chunk that a slower worker holds, without its claim: the first of the two to publish wins."""
        opened = self._open_claimed(ref, Taken(""), now=now)
        if isinstance(opened, OpenChunk):
            opened.is_backup = True
        return opened

    def _open_claimed(self, ref: ChunkRef, claim: Taken, *, now: float) -> Opened:
        marker = self._publisher.standing_marker(ref.name, ref.generation)
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
        )
        chunk.claim_etag = claim.etag
        is_known = self.begun is not None and chunk.name not in self.begun
        if claim.is_new and is_known and not chunk.generation:
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
            num_lines=chunk.num_rows,
        )
        # Segments of the generation before may still lie about; its error rows are what this one does again.
        _take_up(chunk, (row for row in segments.rows() if row.ok or not chunk.generation))
        if segments.has_vanished:
            marker = self._publisher.standing_marker(chunk.name, chunk.generation)
            if marker is not None:
                chunk.close()
                return AlreadyDone(marker)
        chunk.segment_keys.extend(segments.keys)
        chunk.deaths = segments.deaths
        if not segments.has_vanished:
            # What was read from storage is safe there until the marker: no segment repeats it.
            chunk.checkpointed_bytes = chunk.spool.size_bytes
        return chunk

    def _keep_good_rows(self, chunk: OpenChunk) -> None:
        """Take the rows that are fine from the generation before (``--retry-errors``)."""
        before = self._publisher.standing_marker(chunk.name, chunk.generation - 1)
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
        self._run.download(layout.output_key(before.output), path)
        try:
            with path.open("rb") as file:
                _take_up(chunk, good_rows(file, chunk.num_rows))
        finally:
            path.unlink(missing_ok=True)

    @staticmethod
    def _take(claims: Claims, name: str, take_over: Held | None) -> Taken | Held:
        if take_over is not None:
            taken = claims.take_over(name, take_over.etag)
            if taken is not None:
                return taken
        return claims.take(name)


def _take_up(chunk: OpenChunk, rows: Iterable[FinishedRow]) -> None:
    """Keep rows that were finished elsewhere, a few at a time: a chunk may be larger than memory."""
    for batch in batches(rows):
        chunk.counts.resumed += len(chunk.finish(batch))


def good_rows(file: BinaryIO, num_rows: int) -> Iterator[FinishedRow]:
    """The ok rows of a published output, as finished rows."""
    for index, data in enumerate(codec.lines(file)):
        if index >= num_rows:
            return
        summary = read_line(data)
        if summary.is_ok:
            yield FinishedRow(
                line=index,
                ok=True,
                finish_reason=summary.finish_reasons[0] if summary.finish_reasons else "",
                prompt_tokens=summary.prompt_tokens,
                cached_tokens=summary.cached_tokens,
                completion_tokens=summary.completion_tokens,
                output=codec.raw(data),
            )


def fetch(store: Store, ref: ChunkRef, scratch: Scratch) -> LocalChunk:
    """Copy a chunk to scratch as plain lines and check it against job.json.

    Raises:
        InputError: it is missing, cannot be decompressed, or differs from what job.json says.
    """
    name = f"{ref.root}/{ref.key}"
    stored = scratch.new_path(ref.name)
    try:
        with scratch_errors(stored.parent):
            store.download(ref.key, stored)
    except ObjectNotFound:
        raise InputError(f"{name}: the chunk is gone", hint="split again, or restore it") from None
    is_compressed = ref.key.endswith((".zst", ".zstd"))
    digest, num_lines = _scan(stored)
    if ref.sha256 is not None and digest != ref.sha256:
        stored.unlink()
        raise InputError(
            f"{name}: sha256 {digest[:12]}…, job.json says {ref.sha256[:12]}…",
            hint="the chunk was changed after the split; split again with --overwrite, or restore it",
        )
    if is_compressed:
        plain = scratch.new_path(ref.name)
        try:
            _decompress(stored, plain, name)
        finally:
            stored.unlink()
        stored = plain
        _, num_lines = _scan(plain)
    if ref.rows is not None and num_lines != ref.rows:
        stored.unlink()
        raise InputError(
            f"{name}: {num_lines} rows, job.json says {ref.rows}",
            hint="split again with --overwrite",
        )
    return LocalChunk(stored, num_lines, digest)


def _scan(path: Path) -> tuple[str, int]:
    """Return (sha256, number of lines)."""
    digest = hashlib.sha256()
    num_lines = 0
    last = b"\n"
    buffer = bytearray(_READ_BYTES)  # one for all, small enough for the processor's cache
    with path.open("rb", buffering=0) as file, memoryview(buffer) as view:
        while size := file.readinto(buffer):
            digest.update(view[:size])
            # find() leaps from newline to newline; count() looks at every byte, a third of the hash's time.
            at = buffer.find(b"\n", 0, size)
            while at >= 0:
                num_lines += 1
                at = buffer.find(b"\n", at + 1, size)
            last = bytes(view[size - 1 : size])
    return digest.hexdigest(), num_lines + (last != b"\n")


def _decompress(source: Path, target: Path, name: str) -> None:
    import zstandard

    try:
        with scratch_errors(target.parent), source.open("rb") as packed, target.open("wb") as plain:
            reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
            while block := reader.read(_BLOCK_BYTES):
                plain.write(block)
    except zstandard.ZstdError as error:
        raise InputError(
            f"{name}: not readable as zstd ({error})", hint="split again with --overwrite"
        ) from error

"""Read a run's rows in input order. The checksum of an output is compared before a row of the output is used.

Nothing in the run is changed. Only outputs that the newest marker of a chunk names are read. At any time, memory holds
a few small outputs and blocks of lines, and the scratch folder holds a few large outputs and chunks.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from batchinfer.collect.files import Rows
from batchinfer.collect.picking import Picking, RowPicker
from batchinfer.collect.selection import Gap, Selection, format_of
from batchinfer.collect.source_rows import SourceRow, make_row_reader
from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound, RunUnsound
from batchinfer.core.records import Marker
from batchinfer.formats import OutputLine, find_format
from batchinfer.formats.arrow_lines import ArrowBlock, can_read
from batchinfer.formats.columns import OutputBlock, Shape
from batchinfer.ledger.audit import CORRUPT
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.inventory import in_parallel
from batchinfer.ledger.jobs import ChunkRef, OpenStore
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
"""Bytes of a block of lines. Larger blocks would be slower, because they do not fit into the processor's caches."""
_SOURCE_BYTES = 8 << 20
"""Bytes of the source's rows after which a block ends. It limits memory where rows are longer than their answers."""
_FETCHERS = 2
_LOG_SECONDS = 10.0
_ASK_VERIFY = "`batchinfer verify` says how to fix it"
_MEMORY_BYTES = 8 << 20
"""Size in bytes up to which an output is kept in memory. Larger outputs are copied to the scratch folder."""
CHUNKS, OUTPUTS = "chunks", "outputs"
"""Places from which the source's columns can be read: the job's chunks, or the outputs.

Outputs have only the columns that the worker's option --keep has copied into them.
"""


class Block(NamedTuple):
    """Rows of one chunk, in input order: their answers, and their columns in the source.

    `source` is None if not wanted. `run` is the name of the run; empty if only one run is read.
    """

    chunk: str
    lines: OutputBlock | ArrowBlock
    source: list[SourceRow] | None
    run: str = ""

    @property
    def num_rows(self) -> int:
        """Number of rows in the block."""
        return self.lines.num_rows

    def part(self, start: int, stop: int) -> Block:
        """Return the rows from `start` up to `stop`, exclusive."""
        source = None if self.source is None else self.source[start:stop]
        return self._replace(lines=self.lines.part(start, stop), source=source)

    def take(self, indices: Sequence[int]) -> Block:
        """Return the rows at `indices`, which count from 0."""
        source = None if self.source is None else [self.source[index] for index in indices]
        return self._replace(lines=self.lines.take(indices), source=source)


class _Fetched(NamedTuple):
    """A fetched output: its bytes, or the path of its local copy. The checksum has been compared with the marker's.

    If the output cannot be used, `problem` says why.
    """

    ref: ChunkRef
    output: Path | bytes
    blocks: list[ArrowBlock | OutputBlock] | None = None
    """The output's decoded lines; None if the fetching thread has not decoded them."""
    chunk: Path | None = None
    problem: str = ""

    def pieces(self) -> Iterator[bytes]:
        """Yield the output in pieces of about _BLOCK_BYTES. Each piece ends at the end of a line."""
        with self._open() as output:
            while data := output.read(_BLOCK_BYTES) + output.readline():
                yield data

    def _open(self) -> BinaryIO:
        return io.BytesIO(self.output) if isinstance(self.output, bytes) else self.output.open("rb")

    def remove(self) -> None:
        """Delete the local copies of the output and the chunk."""
        for path in (self.output, self.chunk):
            if isinstance(path, Path):
                path.unlink(missing_ok=True)


_Decode = Callable[[_Fetched], Iterable[ArrowBlock | OutputBlock]]


class Reader:
    """Reads the rows of a selection in input order, and logs its progress. Rows can be read several times.

    Args:
        selection: The outputs to read.
        store: Store of the run.
        open_store: Opens the stores of the chunks.
        scratch: Folder for local copies of a few outputs and chunks at a time.
        is_partial: Whether damaged chunks are left out. If not, the first damaged chunk raises RunUnsound.
        picking: The rows to take. All rows are read and counted, whichever are taken.
        name: Name of the run; empty if it is the only one.
    """

    def __init__(
        self,
        selection: Selection,
        store: Store,
        open_store: OpenStore,
        scratch: Scratch,
        *,
        is_partial: bool,
        picking: Picking | None = None,
        name: str = "",
    ) -> None:
        self.selection = selection
        self.name = name
        self._picking = picking or Picking()
        self._num_fitting: int | None = None
        self._store = store
        self._open_store = open_store
        self._scratch = scratch
        self._is_partial = is_partial
        roots = {ref.root for ref, _ in selection.sound}
        self._sources = {root: open_store(root) for root in roots}
        self.damaged: dict[str, Gap] = {}
        """Chunks whose damage was found so far, by name. Damage is found only while outputs are read."""

    def around(self, rows: range) -> tuple[Reader, int]:
        """Return a reader of the chunks that hold these rows, counted from the run's first one; and its first row.

        All rows must be taken, and none may be damaged, so that they can be counted by markers.
        """
        first = row = 0
        sound: list[tuple[ChunkRef, Marker]] = []
        for ref, marker in self.selection.sound:
            stop = row + marker.rows_ok + marker.rows_error
            if row < rows.stop and stop > rows.start:
                first = first if sound else row
                sound.append((ref, marker))
            row = stop
        reader = Reader(
            self.selection._replace(sound=sound),
            self._store,
            self._open_store,
            self._scratch,
            is_partial=False,
            name=self.name,
        )
        return reader, first

    def name_of(self, chunk: str) -> str:
        """Return a chunk's name for messages, which names the run too if there are several."""
        return f"{self.name}/{chunk}" if self.name else chunk

    def missing(self) -> list[str]:
        """Return the names of the chunks that are not there or damaged, as far as known."""
        return [
            *(self.name_of(gap.chunk) for gap in self.selection.gaps),
            *map(self.name_of, self.damaged),
        ]

    def num_missing(self) -> int:
        """Return the number of rows of chunks that are not there or damaged. It is 0 without a job.json."""
        job = self.selection.job
        if job is None:
            return 0
        limit = self.selection.run.config.get("limit") or job.rows
        found = sum(marker.rows_ok + marker.rows_error for marker in self.used())
        return min(job.rows, limit) - found

    def dimension(self, shape: Shape) -> int:
        """Return the length of the run's first embedding, whether its row is taken or not; 0 if there is none."""
        for block in self._all_blocks(shape, "", None, (), "read"):
            if block.lines.dimension:
                return block.lines.dimension
        return 0

    def used(self) -> list[Marker]:
        """Return the markers of all selected chunks except those found damaged so far."""
        return [marker for ref, marker in self.selection.sound if ref.name not in self.damaged]

    def blocks(
        self,
        shape: Shape,
        source_from: str = "",
        columns: Sequence[str] | None = None,
        *,
        as_text: Container[str] = (),
        doing: str = "read",
    ) -> Iterator[Block]:
        """Yield every row to take once, in input order. Rows of damaged chunks are left out.

        Args:
            shape: Columns of the answers.
            source_from: Place of the source's columns: CHUNKS, OUTPUTS, or "" to read none.
            columns: Names of the source's columns to read; None reads all of them.
            as_text: Columns of the source that are read as JSON text, see `make_row_reader`.
            doing: Word for the log lines, as in "500 of 1000 rows written".

        Raises:
            InputError: an output has a line that cannot be read or too few or many lines, although its checksum is
                right; or a chunk of the job is missing or damaged.
            RunUnsound: a chunk is damaged, and `is_partial` is not set.
        """
        picker = self._make_picker()
        blocks = self._all_blocks(shape, source_from, columns, as_text, doing)
        if picker is None:
            yield from blocks
            return
        for block in blocks:
            lines = block.lines.lines if isinstance(block.lines, OutputBlock) else ()
            yield block.take(picker.pick(block.num_rows, lines))

    def _all_blocks(
        self,
        shape: Shape,
        source_from: str,
        columns: Sequence[str] | None,
        as_text: Container[str],
        doing: str,
    ) -> Iterator[Block]:
        """Yield every row, see `blocks`. With conditions, the blocks' lines are Python objects."""
        is_plain = can_read(shape) and source_from != OUTPUTS and not self._picking.conditions
        decode = partial(_decode, shape=shape, make=ArrowBlock if is_plain else OutputBlock)
        bring = partial(
            self._fetch, decode=decode if is_plain else None, with_chunk=source_from == CHUNKS
        )
        read = make_row_reader(columns, as_text) if source_from else None
        progress = _RowCounter(self.selection.num_rows, doing)
        for fetched, marker in self._outputs(bring):
            blocks = fetched.blocks or decode(fetched)
            for block in self._read(fetched, marker, blocks, read):
                yield block._replace(run=self.name)
                progress.add(block.num_rows)

    def _make_picker(self) -> RowPicker | None:
        """Return a picker for one pass over the rows; None if all are taken.

        A sample needs the number of rows to draw from. Where markers do not tell it, all outputs are read once.
        """
        if self._picking.is_all:
            return None
        if self._num_fitting is None and self._picking.sample is not None:
            self._num_fitting = self.selection.num_rows
            if self._picking.conditions or self._is_partial:
                picker = RowPicker(msgspec.structs.replace(self._picking, sample=None))
                self._num_fitting = sum(
                    len(picker.pick(len(found), self._looked_at(found)))
                    for found in self._all_lines("looked at")
                )
        return RowPicker(self._picking, self._num_fitting or 0)

    def _looked_at(self, lines: list[bytes]) -> list[OutputLine]:
        """Decode output lines if there are conditions, which look at them."""
        return self.parse(lines) if self._picking.conditions else []

    def parse(self, lines: list[bytes]) -> list[OutputLine]:
        """Decode output lines of the run, each with its newline.

        Raises:
            InputError: a line does not have the run's format.
        """
        return find_format(format_of(self.selection.run)).read_lines(b"".join(lines))

    def raw_lines(self) -> Iterator[list[bytes]]:
        """Yield the output lines of the rows to take, unchanged and in input order, in lists of some lines.

        Each line keeps its newline.

        Raises:
            InputError: as `_all_lines`; or a line that a condition looks at cannot be read.
            RunUnsound: a chunk is damaged, and `is_partial` is not set.
        """
        picker = self._make_picker()
        for found in self._all_lines("written"):
            if picker is None:
                yield found
            else:
                yield [found[index] for index in picker.pick(len(found), self._looked_at(found))]

    def _all_lines(self, doing: str) -> Iterator[list[bytes]]:
        """Yield every output line once, in lists of some lines.

        Raises:
            InputError: the number of lines of an output is not the number of rows in its marker, or a last line is cut
                off.
            RunUnsound: a chunk is damaged, and `is_partial` is not set.
        """
        progress = _RowCounter(self.selection.num_rows, doing)
        for fetched, marker in self._outputs(partial(self._fetch, decode=None, with_chunk=False)):
            done = 0
            for data in fetched.pieces():
                if not data.endswith(b"\n"):
                    raise InputError(
                        f"{fetched.ref.name}: the last line of its output is cut off",
                        hint=_ASK_VERIFY,
                    )
                found = io.BytesIO(data).readlines()
                done += len(found)
                yield found
                progress.add(len(found))
            _check_count(fetched, marker, done)

    def _outputs(
        self, bring: Callable[[tuple[ChunkRef, Marker]], _Fetched]
    ) -> Iterator[tuple[_Fetched, Marker]]:
        """Fetch the outputs with `bring`. Yield those without a problem, with their markers, in input order.

        The local copies of an output are removed when the caller asks for the next output.
        """
        sound = self.selection.sound
        waiting = in_parallel(bring, sound, _FETCHERS)
        for fetched, (ref, marker) in zip(waiting, sound, strict=True):
            if fetched.problem:
                self._note_damage(Gap(ref.name, CORRUPT, fetched.problem))
                continue
            try:
                yield fetched, marker
            finally:
                fetched.remove()

    def _note_damage(self, gap: Gap) -> None:
        self.damaged[gap.chunk] = gap
        if not self._is_partial:
            raise RunUnsound(
                f"{gap.chunk}: {gap.problem}",
                hint="`batchinfer verify --deep` says how to fix it; --partial leaves it out",
            )

    def _fetch(
        self, pair: tuple[ChunkRef, Marker], *, decode: _Decode | None, with_chunk: bool
    ) -> _Fetched:
        """Fetch an output and compare its checksum with the marker's. With `with_chunk`, do the same for the chunk.

        This method runs in a thread. If `decode` is given, the thread also decodes an output that is in memory.
        Callers give only Arrow's decoder, which releases the GIL, so that other threads can run meanwhile.
        """
        ref, marker = pair
        key = layout.output_key(marker.output)
        try:
            fetched, digest = self._bring(ref, marker, key)
        except ObjectNotFound:
            return _Fetched(ref, b"", problem=f"{key}: vanished while the run was read")
        if digest != marker.output_sha256:
            fetched.remove()
            problem = (
                f"{key}: has sha256 {digest[:12]}…, its marker says {marker.output_sha256[:12]}…"
            )
            return _Fetched(ref, b"", problem=problem)
        if decode is not None and isinstance(fetched.output, bytes):
            fetched = fetched._replace(output=b"", blocks=list(decode(fetched)))
        if not with_chunk:
            return fetched
        local = fetch(self._sources[ref.root], ref, self._scratch)
        fetched = fetched._replace(chunk=local.path)
        if local.sha256 != marker.chunk_sha256:
            fetched.remove()
            return _Fetched(ref, b"", problem=f"{ref.key}: was changed since it was answered")
        return fetched

    def _bring(self, ref: ChunkRef, marker: Marker, key: str) -> tuple[_Fetched, str]:
        """Fetch an output and return it with its sha256.

        A small output is kept in memory, which saves writing and reading a local file.
        """
        if marker.output_bytes <= _MEMORY_BYTES:
            data = self._store.get(key).data
            return _Fetched(ref, data), codec.sha256(data)
        path = self._scratch.new_path(f"{ref.name}.output")
        self._store.download(key, path)
        with path.open("rb") as file:
            return _Fetched(ref, path), codec.sha256_file(file)

    @staticmethod
    def _read(
        fetched: _Fetched,
        marker: Marker,
        blocks: Iterable[ArrowBlock | OutputBlock],
        read: Callable[[bytes], SourceRow] | None,
    ) -> Iterator[Block]:
        done, name = 0, fetched.ref.name
        with contextlib.ExitStack() as stack:
            chunk = stack.enter_context(fetched.chunk.open("rb")) if fetched.chunk else None
            for block in blocks:
                done += block.num_rows
                if read is None:
                    yield Block(name, block, None)
                elif chunk is not None:
                    yield from _join(Block(name, block, None), chunk, read)
                elif isinstance(block, OutputBlock):
                    yield Block(name, block, list(map(read, block.sources())))
        _check_count(fetched, marker, done)


B = TypeVar("B", bound=Rows)


def cut(blocks: Iterable[B], rows: range) -> Iterator[B]:
    """Yield the parts of blocks that hold these rows, counted from the first block's first row. Then stop reading."""
    first = 0
    for block in blocks:
        stop = first + block.num_rows
        if stop > rows.start:
            yield block.part(max(0, rows.start - first), min(block.num_rows, rows.stop - first))
        first = stop
        if first >= rows.stop:
            return


def around_all(readers: Sequence[Reader], rows: range | None) -> Iterator[tuple[Reader, range]]:
    """Yield readers for these rows of several runs, one run after the other; each with its rows to take.

    If `rows` is None, all rows are taken.
    """
    first = 0
    for reader in readers:
        count = reader.selection.num_rows
        if rows is None:
            yield reader, range(count)
        elif rows.start < first + count and rows.stop > first:
            wanted = range(max(0, rows.start - first), min(count, rows.stop - first))
            narrow, start = reader.around(wanted)
            yield narrow, range(wanted.start - start, wanted.stop - start)
        first += count


def _join(block: Block, chunk: BinaryIO, read: Callable[[bytes], SourceRow]) -> Iterator[Block]:
    """Add the source's columns to a block. `chunk` is at the block's first row.

    The block is cut into parts if its rows of the source have more than _SOURCE_BYTES.
    """
    start, size = 0, 0
    source: list[SourceRow] = []
    for stop in range(1, block.num_rows + 1):
        line = chunk.readline()
        size += len(line)
        source.append(read(line))
        if size >= _SOURCE_BYTES:
            yield block.part(start, stop)._replace(source=source)
            start, size, source = stop, 0, []
    if source:
        yield (block.part(start, block.num_rows) if start else block)._replace(source=source)


def _check_count(fetched: _Fetched, marker: Marker, done: int) -> None:
    if done != marker.rows_ok + marker.rows_error:
        raise InputError(
            f"{fetched.ref.name}: its output has {done} lines, the marker counts "
            f"{marker.rows_ok + marker.rows_error} rows",
            hint=_ASK_VERIFY,
        )


class _RowCounter:
    """Counts rows, and logs at most every ten seconds how many rows are done."""

    def __init__(self, total: int, doing: str) -> None:
        self._total = total
        self._doing = doing
        self._seen = 0
        self._shown = time.monotonic()

    def add(self, num_rows: int) -> None:
        self._seen += num_rows
        if time.monotonic() - self._shown >= _LOG_SECONDS:
            self._shown = time.monotonic()
            logger.info("%d of %d rows %s", self._seen, self._total, self._doing)


def _decode(
    fetched: _Fetched, shape: Shape, make: type[ArrowBlock | OutputBlock]
) -> Iterator[ArrowBlock | OutputBlock]:
    """Decode the lines of an output, and yield them in blocks made by `make`."""
    row = fetched.ref.first_row
    for data in fetched.pieces():
        block = make(data, shape, row)
        row += block.num_rows
        yield block

"""The way of rows from a worker's open chunks through its engine and back; a `RowStream` owns all rows on this way.

    open chunks -> building (calls) -> fetching (media) -> waiting -> in flight -> finished

A row that was in the engine at two of its deaths is a suspect. Suspects run when the open chunks have no other row
left: in groups, one group after the other, without other rows. The groups get smaller with every death, until the row
that kills the engine runs alone. If the engine dies then, the row becomes an error row. The rows that were in the
engine at a death are noted on storage at once, so the search goes on after a restart, and on other machines.

Rows of many chunks are in the engine at once. A finished row goes back to its chunk. All methods of `RowStream` are
called on the main thread, by two callers that take turns:

* the engine calls `take`, which only hands out rows that are ready, and `wait`, the only method that blocks;
* the worker's loop (main_loop.py) gives replies back with `handle` and keeps the books, in this order:
  `collect`, `num_built`, `prepare`.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from statistics import fmean
from typing import NamedTuple

import msgspec

from batchinfer.core import units
from batchinfer.core.records import Call, EngineInfo, Failure, FinishedRow, Reply, RowKey
from batchinfer.core.row_codes import Code
from batchinfer.engines.replies import failure_of
from batchinfer.formats.lines import encode_row
from batchinfer.prompts.builder import PromptBuilder, finish_call
from batchinfer.prompts.types import Prepared, RawRow
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.media_fetching import NUM_THREADS, MediaFetcher
from batchinfer.worker.open_chunks import OpenChunks
from batchinfer.worker.worker_config import Environment, Limits

logger = logging.getLogger(__name__)


class _Flight(msgspec.Struct, frozen=True, gc=False):
    """A row on its way to the engine, with its call once its media were fetched."""

    chunk: OpenChunk
    prepared: Prepared
    num_bytes: int
    """Bytes of memory that the row takes, about."""


_Finished = defaultdict[str, list[FinishedRow]]
"""Finished rows by the name of their chunk."""


class _Building(NamedTuple):
    """Calls of so many rows that are being built in the background. The result is the rows by chunk."""

    pending: Future[list[tuple[OpenChunk, list[Prepared]]]]
    num_rows: int


class RowStream:
    """Implements `engines.RequestSource` over the open chunks."""

    def __init__(
        self,
        environment: Environment,
        open_chunks: OpenChunks,
        builder: PromptBuilder,
        limits: Limits,
        *,
        info: EngineInfo,
    ) -> None:
        self._background = environment.background
        self._open_chunks = open_chunks
        self._builder = builder
        self._limits = limits
        self.max_in_flight = info.max_in_flight
        self._max_bytes = (limits.max_row_memory * info.num_replicas) << 20
        self._num_bytes = 0
        """Bytes of memory of all rows that wait or are in flight, about."""
        self._building: _Building | None = None
        self._media = MediaFetcher(limits, environment.open_store, environment.background)
        self._to_fetch: deque[_Flight] = deque()
        """Rows whose media are not asked for yet."""
        self._fetching: list[tuple[_Flight, Future[list[bytes] | Failure]]] = []
        self._ready: deque[_Flight] = deque()
        self._in_flight: dict[RowKey, _Flight] = {}
        self._is_isolating = False
        """Whether a group of suspects is built or runs. No other row is built meanwhile."""

    # -- the engine

    def take(self, max_calls: int) -> list[Call] | None:
        """Hand out the calls of rows that are ready; see engines.RequestSource."""
        if self._open_chunks.is_closing:
            return None
        return [self._send(self._ready.popleft()) for _ in range(min(max_calls, len(self._ready)))]

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a call may be ready, or the time is up; see engines.RequestSource.

        Returns at once if rows wait for the engine already, or if no more rows will come.
        """
        if not self._ready and not self._open_chunks.is_closing:
            self._background.wait(timeout_seconds)

    # -- the worker's loop

    def handle(self, replies: Iterable[Reply]) -> None:
        """Take in replies from the engine: finish their rows, or let rows wait again that were in it when it died."""
        finished: _Finished = defaultdict(list)
        killed: list[_Flight] = []
        for reply in replies:
            flight = self._in_flight.pop(reply.key)
            self._num_bytes -= flight.num_bytes
            if reply.is_engine_death:
                killed.append(flight)
            else:
                self._encode(flight.chunk, flight.prepared, failure_of(reply) or reply, finished)
        self._finish(finished)
        # A worker that is stopped may see its servers stopped, too: no row is at fault.
        if killed and not self._open_chunks.is_closing:
            self._open_chunks.note_death([flight.prepared.key for flight in killed])
        for flight in killed:
            # A suspect's call is built again when its group runs.
            if not flight.chunk.is_suspect(flight.prepared.key[1]):
                self._num_bytes += flight.num_bytes
                self._ready.appendleft(flight)

    def collect(self) -> None:
        """Take in the calls that the background has built, and the media that it has fetched."""
        finished: _Finished = defaultdict(list)
        if self._building is not None and self._building.pending.done():
            building, self._building = self._building.pending, None
            for chunk, prepared_rows in building.result():
                for prepared in prepared_rows:
                    self._take(chunk, prepared, finished)
        fetching, self._fetching = self._fetching, []
        for flight, pending in fetching:
            if pending.done():
                self._num_bytes -= flight.num_bytes
                prepared = _with_media(flight.prepared, pending.result())
                if prepared.call is not None:
                    self._media.body_sizes.append(len(prepared.call.body))
                self._take(flight.chunk, prepared, finished)
            else:
                self._fetching.append((flight, pending))
        self._finish(finished)

    @property
    def num_built(self) -> int:
        """Number of rows that were read from their chunks and that the engine has not taken yet."""
        return self._num_waiting + (0 if self._building is None else self._building.num_rows)

    def prepare(self) -> None:
        """Begin to build the calls of the next rows.

        When no other row is left, prepare the next group of suspects. When no suspect is left and no chunk can be
        opened any more, end the stream.
        """
        if self._open_chunks.is_closing:
            return
        is_empty = not self._in_flight and not self._num_waiting and self._building is None
        if is_empty:
            self._is_isolating = False
        self._build_more()
        self._fetch_more()
        if not is_empty or self._building is not None or self._open_chunks.num_unread:
            return
        if not self._build_suspects() and not self._open_chunks.may_grow:
            # After `close`, `take` returns None, which tells the engine to end. `close` also stops the opening of
            # chunks, because no engine would process their rows.
            self._open_chunks.close()

    @property
    def num_in_flight(self) -> int:
        """Number of rows that are in the engine."""
        return len(self._in_flight)

    @property
    def num_pending(self) -> int:
        """Number of rows that have a call and have not finished."""
        return len(self._in_flight) + self._num_waiting

    @property
    def is_complete(self) -> bool:
        """Whether no row is in the engine and no chunk is left to open or to publish."""
        return not self._in_flight and self._open_chunks.is_drained

    # -- inside

    @property
    def _num_waiting(self) -> int:
        return len(self._ready) + len(self._to_fetch) + len(self._fetching)

    def _send(self, flight: _Flight) -> Call:
        call = flight.prepared.call
        assert call is not None, "only rows with a call are ready"
        self._in_flight[call.key] = flight
        return call

    def _take(self, chunk: OpenChunk, prepared: Prepared, finished: _Finished) -> None:
        """Let a row wait for its media, or for the engine. One that must not go there is added to `finished`."""
        line = prepared.key[1]
        if prepared.failure is not None:
            self._encode(chunk, prepared, prepared.failure, finished)
        elif chunk.is_culprit(line):
            message = (
                f"the engine died {chunk.deaths[line].number} times with this row in flight, "
                "at least once with it alone"
            )
            failure = Failure(code=Code.ENGINE_CRASH, message=message, status=500)
            self._encode(chunk, prepared, failure, finished)
        else:
            call = prepared.call
            num_bytes = _size(prepared.draft) if call is None else len(call.body)
            self._num_bytes += num_bytes
            waiting = self._to_fetch if call is None else self._ready
            waiting.append(_Flight(chunk, prepared, num_bytes))

    def _encode(
        self,
        chunk: OpenChunk,
        prepared: Prepared,
        result: Reply | Failure,
        finished: _Finished,
    ) -> None:
        row, failure = encode_row(prepared, result)
        if failure is not None:
            self._open_chunks.telemetry.row_failed(*prepared.key, failure)
        finished[chunk.name].append(row)

    def _finish(self, finished: _Finished) -> None:
        for name, rows in finished.items():
            self._open_chunks.finish(name, rows)

    def _build_more(self) -> None:
        num_bytes_left = self._max_bytes - self._num_bytes
        chunks = [chunk for chunk in self._open_chunks.open.values() if chunk.num_unread]
        is_full = num_bytes_left <= 0 or self._num_waiting >= self.max_in_flight
        if self._building is not None or self._is_isolating or is_full or not chunks:
            return
        max_rows = self._limits.max_build_rows
        max_bytes = min(self._limits.max_build_bytes, num_bytes_left)

        def read() -> Iterator[tuple[OpenChunk, list[RawRow]]]:
            rows_left, bytes_left = max_rows, max_bytes
            for chunk in chunks:
                if rows_left > 0 and bytes_left > 0:
                    rows = chunk.read_rows(rows_left, bytes_left)
                    yield chunk, rows
                    rows_left -= len(rows)
                    bytes_left -= sum(len(row.data) for row in rows)

        self._build(read, min(max_rows, sum(chunk.num_unread for chunk in chunks)))

    def _build_suspects(self) -> bool:
        """Begin to build the calls of the next group of suspects, once the engine has no row at all.

        Rows that count as the cause of engine deaths come before all groups; they become error rows once they are
        built. Returns False if no suspect is left.
        """
        found = [
            (chunk, suspect)
            for chunk in self._open_chunks.open.values()
            for suspect in chunk.suspects()
        ]
        if not found:
            return False
        group = [each for each in found if each[0].is_culprit(each[1].line)]
        if not group:
            # Large groups come first. An engine died with these rows only among many others, so most of them finish.
            limit = max(suspect.group_limit for _, suspect in found)
            group = [each for each in found if each[1].group_limit == limit][:limit]
        most = min(self._limits.max_build_bytes, self._max_bytes)
        sizes = itertools.accumulate(chunk.bytes_per_line for chunk, _ in group)
        group = group[: max(1, sum(size <= most for size in sizes))]
        wanted: defaultdict[str, set[int]] = defaultdict(set)
        for chunk, suspect in group:
            wanted[chunk.name].add(suspect.line)
        parts = [(self._open_chunks.open[name], lines) for name, lines in wanted.items()]
        for chunk, lines in parts:
            chunk.take_suspects(lines)
        logger.warning(
            "%s with which the engine died at least twice, the first is %s line %d; running %s apart from the others",
            units.many(len(found), "row"),
            group[0][0].name,
            group[0][1].line,
            units.many(len(group), "row"),
        )
        self._is_isolating = True
        self._build(
            lambda: ((chunk, chunk.read_lines(lines)) for chunk, lines in parts), len(group)
        )
        return True

    def _build(
        self, read: Callable[[], Iterable[tuple[OpenChunk, list[RawRow]]]], num_rows: int
    ) -> None:
        """Begin to build the calls of rows, which `read` reads on a background thread."""
        builder = self._builder
        building = self._background.submit(
            lambda: [
                (chunk, builder.build(chunk.name, chunk.ref.first_row, rows))
                for chunk, rows in read()
                if rows
            ]
        )
        self._building = _Building(building, num_rows)

    def _fetch_more(self) -> None:
        """Begin to fetch media of the next rows.

        How much memory they will take is not known before. Each row counts as much as the mean of the last ones, and
        before the first as much as a file may, as base64. If rows take all the memory that they may, none is fetched,
        unless the engine would have nothing to do.
        """
        # Not the largest of them: after one huge row, the engine would get the next ones singly.
        each = fmean(self._media.body_sizes or [self._limits.max_media_bytes * 4 / 3])
        while self._to_fetch and len(self._fetching) < NUM_THREADS:
            is_idle = not (self._fetching or self._in_flight or self._ready)
            expected = each * (len(self._fetching) + 1)
            if self._num_bytes + expected > self._max_bytes and not is_idle:
                break
            flight = self._to_fetch.popleft()
            self._fetching.append((flight, self._media.fetch(flight.prepared.media)))


def _with_media(prepared: Prepared, found: list[bytes] | Failure) -> Prepared:
    """Return a row with the fetched media in its call, or with the reason why it has none."""
    if isinstance(found, Failure):
        return msgspec.structs.replace(prepared, failure=found, draft=None, media=[])
    return finish_call(prepared, found)


def _size(value: object) -> int:
    """Return the characters of the texts in a body that is not encoded yet."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8

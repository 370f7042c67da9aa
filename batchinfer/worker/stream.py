"""The way of rows from a worker's open chunks through its engine and back; a `RowStream` owns all rows on this way.

    open chunks -> building (calls) -> fetching (media) -> waiting -> in flight -> finished

A row that was in the engine at two of its deaths is a suspect. Suspects run when the open chunks have no other row
left: in groups, one group after the other, without other rows. The groups get smaller with every death, until the row
that kills the engine runs alone. If the engine dies then, the row becomes an error row. The rows that were in the
engine at a death are noted on storage at once, so the search goes on after a restart, and on other machines.

Rows of many chunks are in the engine at once. A finished row goes back to its chunk. All methods of `RowStream` are
called on the main thread, by two callers that take turns:

* the engine calls `take`, which only hands out rows that are ready, and `wait`, the only method that blocks;
* the worker's loop (start.py) gives replies back with `handle` and keeps the books, in this order:
  `collect`, `demand`, `prepare`.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from batchinfer.core import units
from batchinfer.core.records import Call, EngineInfo, Failure, Reply, RowKey
from batchinfer.core.row_codes import Code
from batchinfer.engines.replies import failure_of
from batchinfer.formats.lines import encode_row
from batchinfer.ledger.checkpoints import FinishedRow
from batchinfer.prompts.builder import PromptBuilder, finish_call
from batchinfer.prompts.types import Prepared, RawRow
from batchinfer.worker.background import Pending
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.media_fetching import NUM_THREADS, MediaFetcher
from batchinfer.worker.open_chunks import Demand, OpenChunks
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import Environment, Limits

logger = logging.getLogger(__name__)

_RATE_SECONDS = 5.0


class _Flight(msgspec.Struct, frozen=True, gc=False):
    """A row with its call."""

    chunk: OpenChunk
    prepared: Prepared
    num_bytes: int
    """Bytes of memory that the row takes, about."""

    @property
    def is_suspect(self) -> bool:
        """Whether the row was in the engine at so many deaths that it may be their cause."""
        return self.chunk.is_suspect(self.prepared.key[1])


def _call_of(flight: _Flight) -> Call:
    call = flight.prepared.call
    assert call is not None, "a row without a call is finished when it is built"
    return call


class _Built(NamedTuple):
    """Rows of one chunk whose calls were built."""

    chunk: OpenChunk
    rows: list[Prepared]


class _Fetching(NamedTuple):
    """A row whose media are being fetched. `pending` is None until its turn comes."""

    flight: _Flight
    pending: Pending[list[bytes] | Failure] | None

    def is_done(self) -> bool:
        """Whether the media were fetched, or cannot be."""
        return self.pending is not None and self.pending.is_done()


class RowStream:
    """Implements `engines.RequestSource` over the open chunks."""

    def __init__(
        self,
        environment: Environment,
        open_chunks: OpenChunks,
        builder: PromptBuilder,
        telemetry: Telemetry,
        limits: Limits,
        *,
        info: EngineInfo,
    ) -> None:
        self._clock = environment.clock
        self._background = environment.background
        self._open_chunks = open_chunks
        self._builder = builder
        self._telemetry = telemetry
        self._limits = limits
        self._max_in_flight = info.max_in_flight
        self._max_bytes = (limits.max_row_memory * info.num_replicas) << 20
        self._num_bytes = 0
        """Bytes of memory of all rows that wait or are in flight, about."""
        self._building: Pending[list[_Built]] | None = None
        self._num_building = 0
        self._media = MediaFetcher(limits, environment.open_store, environment.background)
        self._fetching: list[_Fetching] = []
        """Rows with media that are not fetched yet, in order."""
        self._ready: deque[_Flight] = deque()
        self._in_flight: dict[RowKey, _Flight] = {}
        self._is_isolating = False
        """Whether a group of suspects is built or runs. No other row is built meanwhile."""
        self._num_finished = 0
        self._rate = 0.0
        self._rate_since: tuple[float, int] | None = None

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
        finished: defaultdict[str, list[FinishedRow]] = defaultdict(list)
        killed: list[_Flight] = []
        at_death: list[RowKey] = []
        for reply in replies:
            if reply.is_engine_death:
                at_death.append(reply.key)
            flight = self._in_flight.pop(reply.key)
            self._num_bytes -= flight.num_bytes
            if reply.is_engine_death:
                killed.append(flight)
            else:
                result = failure_of(reply) or reply
                finished[reply.key[0]].append(self._encode(flight.prepared, result))
        for name, rows in finished.items():
            self._finish(name, rows)
        if at_death:
            self._open_chunks.note_death(at_death)
        for flight in killed:
            # A suspect's call is built again when its group runs.
            if not flight.is_suspect:
                self._num_bytes += flight.num_bytes
                self._ready.appendleft(flight)

    def note_death(self, keys: Sequence[RowKey]) -> None:
        """Note that the worker's engine ended while it worked on the rows of these keys."""
        if keys:
            self._open_chunks.note_death(list(keys))

    def collect(self) -> None:
        """Take in the calls that the background has built, and update the rate of finished rows."""
        self._collect_built()
        self._collect_fetched()
        self._update_rate()

    @property
    def demand(self) -> Demand:
        """How many rows are ahead of the engine, and how many it needs there."""
        return Demand(
            rows_ahead=len(self._ready)
            + len(self._fetching)
            + self._num_building
            + self._open_chunks.num_unread,
            rows_wanted=self._max_in_flight,
            # Before the first rows are finished nobody knows the rate; a slow bucket must not keep the engine waiting.
            rows_per_second=self._rate or float(self._max_in_flight),
        )

    def prepare(self) -> None:
        """Begin to build the calls of the next rows.

        When no other row is left, prepare the next group of suspects. When no suspect is left and no chunk can be
        opened any more, end the stream.
        """
        if not self._in_flight and not self._ready and self._building is None:
            self._is_isolating = False
        self._build_more()
        self._fetch_more()
        if self._open_chunks.is_closing or self._in_flight or len(self._ready) or self._fetching:
            return
        if self._building is not None or self._open_chunks.num_unread:
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
        return len(self._in_flight) + len(self._ready) + len(self._fetching)

    @property
    def is_complete(self) -> bool:
        """Whether no row is in the engine and no chunk is left to open or to publish."""
        return not self._in_flight and self._open_chunks.is_drained

    # -- inside

    def _send(self, flight: _Flight) -> Call:
        call = _call_of(flight)
        self._in_flight[call.key] = flight
        return call

    def _encode(self, prepared: Prepared, result: Reply | Failure) -> FinishedRow:
        row = encode_row(prepared, result)
        if row.failure is not None:
            self._telemetry.row_failed(*prepared.key, row.failure)
        return FinishedRow.of(
            prepared.key[1],
            row.usage,
            row.line,
            ok=row.ok,
            code=row.code,
            finish_reason=row.finish_reason,
        )

    def _finish(self, name: str, rows: list[FinishedRow]) -> None:
        self._num_finished += len(rows)
        self._open_chunks.finish(name, rows)

    def _build_more(self) -> None:
        if self._building is not None or self._is_isolating or self._open_chunks.is_closing:
            return
        if len(self._ready) + len(self._fetching) >= self._max_in_flight:
            return
        num_bytes_left = self._max_bytes - self._num_bytes
        if num_bytes_left <= 0:
            return
        chunks = [chunk for chunk in self._open_chunks.open.values() if chunk.num_unread]
        if not chunks:
            return
        limits, builder = self._limits, self._builder
        num_rows = limits.max_build_rows
        self._num_building = min(num_rows, sum(chunk.num_unread for chunk in chunks))
        max_bytes = min(limits.max_build_bytes, num_bytes_left)
        self._building = self._background.submit(
            lambda: _build_next(builder, chunks, num_rows, max_bytes),
            is_urgent=True,
        )

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
        group = [each for each in found if each[0].is_culprit(each[1].line)]
        if not group:
            # Large groups come first. An engine died with these rows only among many others, so most of them finish.
            limit = max((suspect.group_limit for _, suspect in found), default=0)
            group = [each for each in found if each[1].group_limit == limit][:limit]
        if not group:
            return False
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
        builder, media = self._builder, self._media
        self._num_building = len(group)
        self._is_isolating = True
        self._building = self._background.submit(
            lambda: _build_lines(builder, parts, media), is_urgent=True
        )
        return True

    def _collect_built(self) -> None:
        if self._building is None or not self._building.is_done():
            return
        building, self._building = self._building, None
        self._num_building = 0
        for chunk, prepared_rows in building.result():
            good = [
                prepared
                for prepared in prepared_rows
                if prepared.failure is None and not chunk.is_culprit(prepared.key[1])
            ]
            flights = [_Flight(chunk, prepared, _num_bytes_of(prepared)) for prepared in good]
            self._num_bytes += sum([flight.num_bytes for flight in flights])
            self._take(flights)
            if len(good) < len(prepared_rows):
                failed = [
                    self._encode(prepared, self._failure_of(chunk, prepared))
                    for prepared in prepared_rows
                    if prepared.failure is not None or chunk.is_culprit(prepared.key[1])
                ]
                self._finish(chunk.name, failed)

    def _take(self, flights: list[_Flight]) -> None:
        """Let rows wait for the engine. Those with media that are not fetched yet wait for these first."""
        for flight in flights:
            if flight.prepared.call is None:
                self._fetching.append(_Fetching(flight, None))
            else:
                self._ready.append(flight)

    def _fetch_more(self) -> None:
        """Begin to fetch media of the next rows.

        What is not in its row takes memory that is not counted before. So none is fetched while rows take all
        the memory that they may, unless the engine would have nothing to do.
        """
        if self._open_chunks.is_closing:
            return
        num_free = NUM_THREADS - sum(each.pending is not None for each in self._fetching)
        is_idle = num_free == NUM_THREADS and not self._in_flight and not self._ready
        for index, (flight, pending) in enumerate(self._fetching):
            if num_free <= 0:
                break
            if pending is not None:
                continue
            if self._num_bytes >= self._max_bytes and not is_idle:
                break
            self._fetching[index] = _Fetching(flight, self._media.fetch(flight.prepared.media))
            num_free -= 1
            is_idle = False

    def _collect_fetched(self) -> None:
        """Take in media that were fetched. A row with one that cannot be used becomes an error row."""
        if not self._fetching:
            return
        done: list[_Fetching] = []
        left: list[_Fetching] = []
        for each in self._fetching:  # each is asked once, since its media may arrive meanwhile
            (done if each.is_done() else left).append(each)
        self._fetching = left
        fetched: list[_Flight] = []
        failed: defaultdict[str, list[FinishedRow]] = defaultdict(list)
        for flight, pending in done:
            assert pending is not None
            self._num_bytes -= flight.num_bytes
            prepared = _with_media(flight.prepared, pending.result())
            if prepared.failure is not None:
                failed[flight.chunk.name].append(self._encode(prepared, prepared.failure))
                continue
            fetched.append(_Flight(flight.chunk, prepared, _num_bytes_of(prepared)))
            self._num_bytes += fetched[-1].num_bytes
        for name, rows in failed.items():
            self._finish(name, rows)
        self._ready.extend(fetched)

    def _failure_of(self, chunk: OpenChunk, prepared: Prepared) -> Failure:
        """Return why a row does not go to the engine: its call cannot be built, or it kills engines."""
        if prepared.failure is not None:
            return prepared.failure
        num_deaths = chunk.deaths[prepared.key[1]].number
        message = f"the engine died {num_deaths} times with this row in flight, at least once with it alone"
        return Failure(code=Code.ENGINE_CRASH, message=message, status=500)

    def _update_rate(self) -> None:
        """Update the recent rate of finished rows. Time without a row in the engine does not count."""
        now = self._clock.monotonic()
        if not self._in_flight:
            self._rate_since = None
        if self._rate_since is None:
            self._rate_since = (now, self._num_finished)
        since, count = self._rate_since
        if now - since >= _RATE_SECONDS or (self._rate == 0.0 and now - since >= 1.0):
            rate = (self._num_finished - count) / (now - since)
            self._rate = rate if self._rate == 0.0 else 0.5 * (self._rate + rate)
            self._rate_since = (now, self._num_finished)


def _with_media(prepared: Prepared, found: list[bytes] | Failure) -> Prepared:
    """Return a row with the fetched media in its call, or with the reason why it has none."""
    if isinstance(found, Failure):
        return msgspec.structs.replace(prepared, failure=found, draft=None, media=[])
    return finish_call(prepared, found)


def _build_next(
    builder: PromptBuilder, chunks: list[OpenChunk], max_rows: int, max_bytes: int
) -> list[_Built]:
    """Read the next rows of the chunks and build their calls. Runs on a background thread.

    No more rows are read once `max_rows` rows or `max_bytes` bytes of rows have been read.
    """
    batch: list[_Built] = []
    for chunk in chunks:
        rows = chunk.read_rows(max_rows, max_bytes)
        if rows:
            batch.append(_build(builder, chunk, rows))
            max_rows -= len(rows)
            max_bytes -= sum(len(row.data) for row in rows)
        if max_rows <= 0 or max_bytes <= 0:
            break
    return batch


def _build_lines(
    builder: PromptBuilder, parts: list[tuple[OpenChunk, set[int]]], media: MediaFetcher
) -> list[_Built]:
    """Read the rows of these lines of each chunk and build their calls, media included. Runs on a background thread."""
    built = [_build(builder, chunk, chunk.read_lines(lines)) for chunk, lines in parts]
    return [
        _Built(
            chunk,
            [_with_media(row, media.fetch_now(row.media)) if row.media else row for row in rows],
        )
        for chunk, rows in built
    ]


def _build(builder: PromptBuilder, chunk: OpenChunk, rows: list[RawRow]) -> _Built:
    return _Built(chunk, builder.build(chunk.name, chunk.ref.first_row, rows))


def _num_bytes_of(prepared: Prepared) -> int:
    """Return the bytes of memory that a row takes while it waits and while it is in the engine, about."""
    if prepared.call is not None:
        return len(prepared.call.body)
    return _size(prepared.draft)


def _size(value: object) -> int:
    """Return the characters of the texts in a body that is not encoded yet."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8

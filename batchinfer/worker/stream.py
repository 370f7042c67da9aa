"""The way of rows from a worker's open chunks through its engine and back; a `RowStream` owns all rows on this way.

    open chunks -> building (prompts, tokens) -> fetching (images) -> waiting -> in flight -> finished

With --dedupe a row whose request equals another row's does not wait for the engine, but for that row's answer; see
`repeats`. If the other row fails, or becomes a suspect, the row goes to the engine itself.

A row that was in the engine at two of its deaths is a suspect. Suspects run when the open chunks have no other row
left: in groups, one group after the other, without other rows. The groups get smaller with every death, until the row
that kills the engine runs alone. If the engine dies then, the row becomes an error row. The rows that were in the
engine at a death are noted on storage at once, so the search goes on after a restart, and on other machines.

Rows of many chunks are in the engine at once. A finished row goes back to its chunk. All methods of `RowStream` are
called on the main thread, by two callers that take turns:

* the engine calls `take`, which only hands out rows that are ready, and `wait`, the only method that blocks;
* the worker's loop (start.py) gives completions back with `handle` and keeps the books, in this order:
  `collect`, `demand`, `drop`, `prepare`.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from batchinfer.core import units
from batchinfer.core.codec import raw
from batchinfer.core.records import Completion, EngineInfo, Failure, Media, Request, RowKey
from batchinfer.formats import Encoder
from batchinfer.ledger.checkpoints import FinishedRow
from batchinfer.prompts import Code, Prepared, PromptBuilder
from batchinfer.worker.background import Pending, Priority
from batchinfer.worker.building import BuiltRows, build, build_suspects
from batchinfer.worker.chunk import OpenChunk
from batchinfer.worker.config import Environment, Limits
from batchinfer.worker.media import NUM_THREADS, MediaFetcher
from batchinfer.worker.open_chunks import Demand, OpenChunks
from batchinfer.worker.ordering import PrefixWindow, ReplicaQueues
from batchinfer.worker.repeats import Repeats
from batchinfer.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

_RATE_SECONDS = 5.0


class _Flight(msgspec.Struct, frozen=True, gc=False):
    """A row with its request, and the number of times that the engine has failed with the row."""

    chunk: OpenChunk
    prepared: Prepared
    num_bytes: int
    """Bytes of memory that the row takes, about."""
    attempts: int = 0
    repeat_key: bytes | None = None
    """The row's key by `repeats.repeat_key`; None for a row that neither leads nor follows."""

    @property
    def is_suspect(self) -> bool:
        """Whether the row was in the engine at so many deaths that it may be their cause."""
        return self.chunk.is_suspect(self.prepared.key[1])


def _request_of(flight: _Flight) -> Request:
    request = flight.prepared.request
    assert request is not None, "a row without a request is finished when it is built"
    return request


class _Fetching(NamedTuple):
    """A row whose images are being fetched. `pending` is None until its turn comes."""

    flight: _Flight
    pending: Pending[list[Media] | Failure] | None

    def is_done(self) -> bool:
        """Whether the images were fetched, or cannot be."""
        return self.pending is not None and self.pending.is_done()


class RowStream:
    """Implements `engines.RequestSource` over the open chunks."""

    def __init__(
        self,
        environment: Environment,
        open_chunks: OpenChunks,
        builder: PromptBuilder,
        encoder: Encoder,
        telemetry: Telemetry,
        limits: Limits,
        *,
        info: EngineInfo,
    ) -> None:
        self._clock = environment.clock
        self._background = environment.background
        self._open_chunks = open_chunks
        self._builder = builder
        self._encoder = encoder
        self._telemetry = telemetry
        self._limits = limits
        self._max_in_flight = info.max_in_flight
        self._max_bytes = (limits.max_row_memory * info.num_replicas) << 20
        self._num_bytes = 0
        """Bytes of memory of all rows that wait, follow another row or are in flight, about."""
        self._building: Pending[list[BuiltRows]] | None = None
        self._is_building_suspects = False
        self._num_building = 0
        self._media = MediaFetcher(limits, environment.open_store, environment.background)
        self._fetching: list[_Fetching] = []
        """Rows with images that are not fetched yet, in order."""
        self._ready: ReplicaQueues[_Flight] = ReplicaQueues()
        self._window = PrefixWindow(limits.prefix_window, _request_of)
        self._in_flight: dict[RowKey, _Flight] = {}
        self._dropped: set[RowKey] = set()
        """Keys of rows that the engine still has although another worker has published their chunk."""
        self._suspects: ReplicaQueues[_Flight] = ReplicaQueues()
        """Waiting rows of the group of suspects that runs now. Rows with images come once these are fetched."""
        self._is_isolating = False
        """Whether a group of suspects runs. Then all rows in the engine are of this group, and others wait."""
        self._repeats: Repeats[_Flight] = Repeats(self._max_bytes)
        self._without_leader: list[_Flight] = []
        """Rows that followed a row whose chunk was closed before the engine got the row."""
        self._num_finished = 0
        self._rate = 0.0
        self._rate_since: tuple[float, int] | None = None
        self._active_seconds = 0.0
        self._ticked = self._clock.monotonic()

    # -- the engine

    def take(self, max_requests: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
        """Hand out the requests of rows that are ready; see engines.RequestSource.

        Without a prefix window, `free_slots` is ignored.
        """
        if self._open_chunks.is_closing:
            return None
        if not self._window.size or not free_slots:
            free_slots = [max_requests]
        queues = self._suspects if self._is_isolating else self._ready
        if self._is_isolating:
            queues.set_number(len(free_slots))
        else:
            self._release(free_slots)
        requests: list[Request] = []
        for index, num_free in enumerate(free_slots):
            most = min(max_requests, len(requests) + num_free)
            while queues and len(requests) < most:
                flight = queues.pop(index)
                chunk, line = flight.chunk, flight.prepared.key[1]
                # Another worker may have finished the row, or published its chunk, since the row was built.
                if self._open_chunks.open.get(chunk.name) is chunk and not chunk.is_done(line):
                    requests.append(self._send(flight))
                else:
                    self._num_bytes -= flight.num_bytes
                    self._without_leader += self._abandon(flight)
        return requests

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a request may be ready, or the time is up; see engines.RequestSource.

        Returns at once if rows wait for the engine already, or if no more rows will come.
        """
        if not self._has_takeable and not self._open_chunks.is_closing:
            self._background.wait(timeout_seconds)

    # -- the worker's loop

    def handle(self, completions: Iterable[Completion]) -> None:
        """Take in completions from the engine: finish their rows, or try rows again whose failure is transient."""
        finished: defaultdict[str, list[FinishedRow]] = defaultdict(list)
        killed: list[_Flight] = []
        at_death: list[RowKey] = []
        copies: list[tuple[_Flight, Completion]] = []
        for completion in completions:
            key, failure = completion.key, completion.failure
            is_death = failure is not None and failure.is_engine_death
            flight = self._in_flight.pop(key, None)
            if is_death:
                at_death += [key, *self._keys_behind(flight)]
            if flight is None:
                self._dropped.discard(key)
                continue
            self._num_bytes -= flight.num_bytes
            if is_death:
                killed.append(flight)
                continue
            if (
                failure is not None
                and failure.transient
                and flight.attempts + 1 < self._limits.row_attempts
            ):
                logger.info("%s line %d: %s; trying again", *key, failure.message)
                self._put_back(msgspec.structs.replace(flight, attempts=flight.attempts + 1))
                continue
            finished[key[0]].append(self._encode(flight.prepared, completion))
            if flight.repeat_key is None:
                continue
            if failure is None:
                copied, followers = self._repeats.answer(flight.repeat_key, completion)
                copies += [(follower, copied) for follower in followers]
            else:
                self._ask_followers(flight)
        for name, rows in finished.items():
            self._finish(name, rows)
        self._copy(copies)
        if at_death:
            self._open_chunks.note_death(at_death)
            self._drop_suspects_behind()
        for flight in killed:
            # A suspect's prompt is built again when its group runs.
            if flight.is_suspect:
                self._ask_followers(flight)
            else:
                self._put_back(flight)

    def note_death(self, keys: Sequence[RowKey]) -> None:
        """Note that the worker's engine ended while it worked on the rows of these keys.

        The rows that follow them count as well, since their requests are the same. Otherwise each of several equal rows
        that kill the engine would go to it, and would kill it, after the one before it became a suspect.
        """
        behind = [each for key in keys for each in self._keys_behind(self._in_flight.get(key))]
        if keys:
            self._open_chunks.note_death([*keys, *behind])

    def collect(self) -> None:
        """Take in the prompts that the background has built, and update the rates of finished rows."""
        rows, self._without_leader = self._without_leader, []
        self._take(self._without_repeats(rows))
        self._collect_built()
        self._collect_fetched()
        self._update_rate()

    @property
    def demand(self) -> Demand:
        """How many rows are ahead of the engine, and how many it needs there."""
        return Demand(
            rows_ahead=self._num_waiting
            + len(self._fetching)
            + self._num_building
            + self._open_chunks.num_unread,
            rows_wanted=self._max_in_flight + self._window.size,
            rows_per_second=self._rate,
            own_rate=self.rows_per_second,
            is_building=self._building is not None,
        )

    def drop(self, names: Collection[str]) -> None:
        """Drop all rows of the chunks with these names, because other workers have done their last rows."""
        if not names:
            return
        self._repeats.keep(lambda flight: flight.chunk.name not in names)
        fetching = [each.flight for each in self._fetching]
        under_way = itertools.chain(self._ready, self._window, fetching, self._in_flight.values())
        without_leader = [
            follower
            for flight in under_way
            if flight.chunk.name in names
            for follower in self._abandon(flight)
        ]
        self._dropped.update(key for key in self._in_flight if key[0] in names)
        self._in_flight = {
            key: flight for key, flight in self._in_flight.items() if key[0] not in names
        }
        for waiting in (self._ready, self._suspects, self._window):
            waiting.keep(lambda flight: flight.chunk.name not in names)
        self._fetching = [each for each in self._fetching if each.flight.chunk.name not in names]
        self._take(self._without_repeats(without_leader))
        fetching = [each.flight for each in self._fetching]
        rows = itertools.chain(
            *(self._ready, self._suspects, self._window, self._repeats, fetching),
            self._in_flight.values(),
        )
        self._num_bytes = sum(flight.num_bytes for flight in rows)

    def prepare(self) -> None:
        """Begin to build the prompts of the next rows.

        When no other row is left, prepare the next group of suspects. When no suspect is left and no chunk can be
        opened any more, end the stream.
        """
        if self._is_isolating and not self._in_flight and not self._suspects:
            self._is_isolating = any(each.flight.is_suspect for each in self._fetching)
        self._build_more()
        self._fetch_more()
        if self._open_chunks.is_closing or self._in_flight or self._num_waiting or self._fetching:
            return
        if self._building is not None or self._open_chunks.num_unread:
            return
        if not self._build_suspects() and not self._open_chunks.may_grow:
            # After `close`, `take` returns None, which tells the engine to end. `close` also stops the opening of
            # chunks, because no engine would process their rows.
            self._open_chunks.close()

    @property
    def rows_per_second(self) -> float:
        """Average rate of finished rows, over the time in which rows were in the engine."""
        return self._num_finished / self._active_seconds if self._active_seconds > 0 else 0.0

    @property
    def num_in_flight(self) -> int:
        """Number of rows that are in the engine."""
        return len(self._in_flight)

    @property
    def num_pending(self) -> int:
        """Number of rows that have a prompt and have not finished."""
        waiting = self._num_waiting + len(self._fetching)
        return len(self._in_flight) + waiting + len(self._repeats)

    @property
    def is_complete(self) -> bool:
        """Whether no row is in the engine and no chunk is left to open or to publish."""
        return not self._in_flight and self._open_chunks.is_drained

    # -- inside

    @property
    def _num_waiting(self) -> int:
        """Number of rows that have a request and wait until the engine takes them."""
        return len(self._ready) + len(self._window) + len(self._suspects)

    @property
    def _has_takeable(self) -> bool:
        """Whether a row waits that the engine may take now. While a group of suspects runs, only its rows count."""
        return bool(self._suspects) if self._is_isolating else self._num_waiting > 0

    def _release(self, free_slots: Sequence[int]) -> None:
        """Move the rows of the prefix window to the queues of ready rows, if the queues cannot fill all free slots.

        If the window is not full yet, its rows are moved only when the queues are empty.
        """
        self._ready.set_number(len(free_slots))
        if self._ready.has(free_slots) or not len(self._window):
            return
        if self._window.is_full or not self._ready:
            self._ready.extend(self._window.release())

    def _put_back(self, flight: _Flight) -> None:
        """Let a row wait again that came back from the engine unfinished. A suspect waits with its group."""
        self._num_bytes += flight.num_bytes
        (self._suspects if self._is_isolating else self._ready).put_back(flight)

    def _without_repeats(self, flights: list[_Flight]) -> list[_Flight]:
        """Return the rows that the engine must answer.

        A row whose request was answered before is finished with a copy of the answer. A row whose request is under way
        follows the row with that request.
        """
        asked: list[_Flight] = []
        copies: list[tuple[_Flight, Completion]] = []
        for flight in flights:
            key = flight.repeat_key
            answer = None if key is None else self._repeats.find(key)
            if answer is not None:
                copies.append((flight, answer))
            elif key is None or not self._repeats.follow(key, flight):
                asked.append(flight)
        self._copy(copies)
        return asked

    def _copy(self, copies: list[tuple[_Flight, Completion]]) -> None:
        """Finish rows with copies of other rows' answers."""
        finished: defaultdict[str, list[FinishedRow]] = defaultdict(list)
        for flight, answer in copies:
            self._num_bytes -= flight.num_bytes
            own = msgspec.structs.replace(answer, key=flight.prepared.key)
            finished[flight.chunk.name].append(self._encode(flight.prepared, own))
        for name, rows in finished.items():
            self._finish(name, rows, are_copies=True)

    def _keys_behind(self, flight: _Flight | None) -> list[RowKey]:
        """Return the keys of the rows that follow this row."""
        if flight is None or flight.repeat_key is None:
            return []
        return [each.prepared.key for each in self._repeats.followers(flight.repeat_key)]

    def _drop_suspects_behind(self) -> None:
        """Drop the followers that are suspects now. Their prompts are built again when their group runs."""
        before = sum(flight.num_bytes for flight in self._repeats)
        self._repeats.keep(lambda flight: not flight.is_suspect)
        self._num_bytes -= before - sum(flight.num_bytes for flight in self._repeats)

    def _abandon(self, flight: _Flight) -> list[_Flight]:
        """Forget this row as a leader. Returns the rows that followed it."""
        return [] if flight.repeat_key is None else self._repeats.give_up(flight.repeat_key)

    def _ask_followers(self, flight: _Flight) -> None:
        """Send the rows that follow this row to the engine, since there is no answer of this row to copy.

        They do not follow each other. So if they kill the engine, they do it together, as without --dedupe.
        """
        self._take(
            [
                msgspec.structs.replace(follower, repeat_key=None)
                for follower in self._abandon(flight)
            ]
        )

    def _send(self, flight: _Flight) -> Request:
        request = _request_of(flight)
        self._in_flight[request.key] = flight
        return request

    def _encode(self, prepared: Prepared, completion: Completion) -> FinishedRow:
        try:
            line = self._encoder.encode(prepared, completion)
        except RecursionError:
            # The output line cannot be encoded. It repeats a part of the input row, and this part is nested too deeply
            # for the JSON encoder, although the decoder could read it. The row becomes an error row.
            message = "JSON of the row is nested too deep to be written"
            completion = Completion(
                key=prepared.key, failure=Failure(code=Code.INVALID_JSON.value, message=message)
            )
            prepared = Prepared(
                key=prepared.key, row=prepared.row, id=prepared.id, url=prepared.url
            )
            line = self._encoder.encode(prepared, completion)
        failure = completion.failure
        if failure is not None:
            self._telemetry.row_failed(*prepared.key, failure)
        return FinishedRow(
            line=prepared.key[1],
            ok=failure is None,
            code="" if failure is None else failure.code,
            finish_reason=completion.choices[0].finish_reason if completion.choices else "",
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            completion_tokens=completion.completion_tokens,
            reasoning_tokens=completion.reasoning_tokens or msgspec.UNSET,
            output=raw(line),
        )

    def _finish(self, name: str, rows: list[FinishedRow], *, are_copies: bool = False) -> None:
        self._num_finished += len(rows)
        self._open_chunks.finish(name, rows, are_copies=are_copies)

    def _build_more(self) -> None:
        if self._building is not None or self._open_chunks.is_closing:
            return
        if self._window.is_full and self._num_waiting >= self._max_in_flight:
            return
        num_ahead = self._num_waiting + len(self._fetching)
        if self._fetching and num_ahead >= self._max_in_flight + self._window.size:
            return
        num_bytes_left = self._max_bytes - self._num_bytes
        if num_bytes_left <= 0:
            return
        chunks = [chunk for chunk in self._open_chunks.open.values() if chunk.num_unread]
        if not chunks:
            return
        limits, builder = self._limits, self._builder
        num_rows = min(limits.max_build_rows, builder.rows_at_once)
        self._num_building = min(num_rows, sum(chunk.num_unread for chunk in chunks))
        max_bytes = min(limits.max_build_bytes, num_bytes_left)
        self._building = self._background.submit(
            lambda: build(builder, chunks, num_rows, max_bytes, dedupe=limits.dedupe),
            priority=Priority.URGENT,
        )

    def _build_suspects(self) -> bool:
        """Begin to build the prompts of the next group of suspects, once the engine has no row at all.

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
        if self._dropped:
            return True  # such a row may be the one that kills the engine
        # With --dedupe a group may have many rows that have followed others, more than the engine holds.
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
        builder = self._builder
        self._num_building = len(group)
        self._is_building_suspects = True
        self._building = self._background.submit(
            lambda: build_suspects(builder, parts), priority=Priority.URGENT
        )
        return True

    def _collect_built(self) -> None:
        if self._building is None or not self._building.is_done():
            return
        building, self._building = self._building, None
        self._num_building = 0
        is_isolating, self._is_building_suspects = self._is_building_suspects, False
        suspects: list[_Flight] = []
        for chunk, prepared_rows, num_bytes, keys in building.result():
            flights = [
                _Flight(chunk, prepared, size, repeat_key=key)
                for prepared, size, key in zip(prepared_rows, num_bytes, keys, strict=True)
                if prepared.request is not None and not chunk.is_culprit(prepared.key[1])
            ]
            self._num_bytes += sum([flight.num_bytes for flight in flights])
            if is_isolating:
                suspects += flights
            else:
                self._take(self._without_repeats(flights))
            failed = [
                self._encode_failed(chunk, prepared)
                for prepared in prepared_rows
                if prepared.request is None or chunk.is_culprit(prepared.key[1])
            ]
            if failed:
                self._finish(chunk.name, failed)
        if suspects:
            self._is_isolating = True
            self._suspects.extend(self._queue_for_images(suspects))

    def _take(self, flights: list[_Flight]) -> None:
        """Let rows wait for the engine. Those with images that are not fetched yet wait for these first."""
        self._window.extend(self._queue_for_images(flights))

    def _queue_for_images(self, flights: list[_Flight]) -> list[_Flight]:
        """Queue the rows with images that are not fetched yet. Return the other rows."""
        with_media = [flight for flight in flights if flight.prepared.media]
        if not with_media:
            return flights
        self._fetching += [_Fetching(flight, None) for flight in with_media]
        return [flight for flight in flights if not flight.prepared.media]

    def _fetch_more(self) -> None:
        """Begin to fetch images of the next rows.

        An image that is not in its row takes memory that is not counted before. So none is fetched while rows take all
        the memory that they may, unless the engine would have nothing to do.
        """
        if self._open_chunks.is_closing:
            return
        num_free = NUM_THREADS - sum(each.pending is not None for each in self._fetching)
        is_idle = num_free == NUM_THREADS and not self._in_flight and not self._has_takeable
        for index, (flight, pending) in enumerate(self._fetching):
            if num_free <= 0:
                break
            if pending is not None:
                continue
            refs = flight.prepared.media or []
            if (
                self._num_bytes >= self._max_bytes
                and not is_idle
                and any(ref.place for ref in refs)
            ):
                break
            self._fetching[index] = _Fetching(flight, self._media.fetch(refs))
            num_free -= 1
            is_idle = False

    def _collect_fetched(self) -> None:
        """Take in images that were fetched. A row with an image that cannot be used becomes an error row."""
        if not self._fetching:
            return
        done: list[_Fetching] = []
        left: list[_Fetching] = []
        for each in self._fetching:  # each is asked once, since its image may arrive meanwhile
            (done if each.is_done() else left).append(each)
        self._fetching = left
        fetched: list[_Flight] = []
        failed: defaultdict[str, list[FinishedRow]] = defaultdict(list)
        for flight, pending in done:
            assert pending is not None
            found = pending.result()
            if isinstance(found, Failure):
                self._num_bytes -= flight.num_bytes
                self._ask_followers(flight)
                completion = Completion(key=flight.prepared.key, failure=found)
                failed[flight.chunk.name].append(self._encode(flight.prepared, completion))
            else:
                fetched.append(_with_media(flight, found))
                self._num_bytes += fetched[-1].num_bytes - flight.num_bytes
        for name, rows in failed.items():
            self._finish(name, rows)
        self._suspects.extend([flight for flight in fetched if flight.is_suspect])
        self._window.extend(flight for flight in fetched if not flight.is_suspect)

    def _encode_failed(self, chunk: OpenChunk, prepared: Prepared) -> FinishedRow:
        """Encode a row that does not go to the engine: its request cannot be built, or it kills engines."""
        failure = prepared.failure
        if failure is None and prepared.request is not None:
            num_deaths = chunk.deaths[prepared.key[1]].number
            failure = Failure(
                code="engine_crash",
                message=f"the engine died {num_deaths} times with this row in flight, at least once with it alone",
            )
        if failure is None:
            failure = Failure(code="internal_error", message="the row was not built")
        return self._encode(prepared, Completion(key=prepared.key, failure=failure))

    def _update_rate(self) -> None:
        """Update the recent and the average rate of finished rows. Time without a row in the engine does not count."""
        now = self._clock.monotonic()
        if self._in_flight:
            self._active_seconds += now - self._ticked
        else:
            self._rate_since = None
        self._ticked = now
        if self._rate_since is None:
            self._rate_since = (now, self._num_finished)
        since, count = self._rate_since
        if now - since >= _RATE_SECONDS or (self._rate == 0.0 and now - since >= 1.0):
            rate = (self._num_finished - count) / (now - since)
            self._rate = rate if self._rate == 0.0 else 0.5 * (self._rate + rate)
            self._rate_since = (now, self._num_finished)


def _with_media(flight: _Flight, media: list[Media]) -> _Flight:
    """Return a row with its images in the request, in place of what the row says about them."""
    before = flight.prepared
    request = msgspec.structs.replace(_request_of(flight), media=media or None)
    num_bytes = flight.num_bytes + sum(len(each.data) for each in media)
    if before.body is None and before.source is None:  # else they hold the row's text
        num_bytes -= sum(len(ref.base64) for ref in before.media or ())
    prepared = msgspec.structs.replace(before, request=request, media=None)
    return msgspec.structs.replace(flight, prepared=prepared, num_bytes=num_bytes)

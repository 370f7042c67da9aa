"""Deliberate mistakes in the code of worker and `clean`. Each breaks a promise, and the simulation must notice.

A defect is a context: while it lasts, the mistake is in. `DEFECTS` names them all.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import AlreadyExists, ObjectNotFound, PreconditionFailed
from batchinfer.core.records import Marker, Worker, WorkerLease
from batchinfer.formats import lines
from batchinfer.ledger import checkpoints, claims, runs
from batchinfer.ledger.checkpoints import FinishedRow, Segments
from batchinfer.ledger.claims import Claims, Held, Lease, Taken
from batchinfer.ledger.inventory import Inventory
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import Built, Published, Publisher
from batchinfer.prompts.builder import PromptBuilder
from batchinfer.prompts.types import Prepared
from batchinfer.runs import clean
from batchinfer.storage import Store
from batchinfer.worker import chunk as open_chunk
from batchinfer.worker import chunk_life, chunk_opening, joining, ring, stream
from batchinfer.worker.chunk import OpenChunk, Spool, Suspect
from batchinfer.worker.heartbeat import Heartbeat
from batchinfer.worker.joining import Membership

Defect = AbstractContextManager[Any]


def _overwrite(store: Store, key: str, data: bytes) -> None:
    """Put an object, over any that exists."""
    while True:
        try:
            store.create(key, data)
        except AlreadyExists:
            try:
                store.replace(key, data, store.stat(key).etag)
            except (PreconditionFailed, ObjectNotFound):
                continue
        return


def marker_before_output() -> Defect:
    """The marker is written first, and the output after it."""

    def publish(
        self: Publisher, built: Built, marker: Marker, *, chunk: str, leftovers: Sequence[str]
    ) -> Published:
        file = layout.output_file(chunk, self._nonce + "0")
        marker = msgspec.structs.replace(
            marker,
            output=file,
            output_bytes=built.bytes,
            output_sha256=built.sha256,
            nonce=self._nonce,
        )
        standing = self._put_marker(marker, chunk)
        self._store.put_file(layout.output_key(file), built.path)
        self._store.delete(leftovers)
        return Published(standing, True)

    return mock.patch.object(Publisher, "publish", publish)


def no_fence() -> Defect:
    """The last marker wins instead of the first."""

    def put_marker(self: Publisher, marker: Marker, chunk: str) -> Marker:
        key = layout.marker_key(chunk, marker.generation)
        _overwrite(self._store, key, codec.encode(marker))
        return marker

    return mock.patch.object(Publisher, "_put_marker", put_marker)


def no_fence_of_starts() -> Defect:
    """A worker that finds its record changed takes it back."""

    return mock.patch.object(Lease, "confirm", lambda self: self._own.look()[1])


def dropped_segment() -> Defect:
    """The last segment of a chunk is not read."""

    def shortened(store: Store, name: str, **of: Any) -> Segments:
        class Shortened:
            def list(self, prefix: str) -> list[Any]:
                return list(store.list(prefix))[:-1]

            def get(self, key: str) -> Any:
                return store.get(key)

        return Segments(Shortened(), name, **of)  # type: ignore[arg-type]

    return mock.patch.object(chunk_opening, "Segments", shortened)


def changed_segment_is_adopted() -> Defect:
    """Nobody compares a segment's bytes with the checksum in its first line."""
    return mock.patch.object(checkpoints, "_is_whole", return_value=True)


def segments_deleted_first() -> Defect:
    """Segments go when the chunk is complete, before its marker is there."""
    real = Publisher.publish

    def publish(self: Publisher, *made: Any, chunk: str, leftovers: Sequence[str]) -> Published:
        self._store.delete(leftovers)
        return real(self, *made, chunk=chunk, leftovers=())

    return mock.patch.object(Publisher, "publish", publish)


def adopted_orphan() -> Defect:
    """All outputs of a chunk have the same name, and one that exists already is taken for one's own."""

    def put_output(self: Publisher, built: Built, chunk: str) -> str:
        file = layout.output_file(chunk, "0")
        with suppress(AlreadyExists):
            self._store.create(layout.output_key(file), built.path.read_bytes())
        return file

    return mock.patch.object(Publisher, "_put_output", put_output)


def reused_output_name() -> Defect:
    """Every output of a chunk goes to the same name, over any that exists."""

    def put_output(self: Publisher, built: Built, chunk: str) -> str:
        file = layout.output_file(chunk, "0")
        self._store.put_file(layout.output_key(file), built.path)
        return file

    return mock.patch.object(Publisher, "_put_output", put_output)


def output_name_given_again() -> Defect:
    """An output takes the chunk's usual name where no other has it just then. An earlier one may be gone since."""
    real = Publisher._put_output

    def put_output(self: Publisher, built: Built, chunk: str) -> str:
        file = layout.output_file(chunk, "0")
        try:
            self._store.create(layout.output_key(file), built.path.read_bytes())
        except AlreadyExists:
            return real(self, built, chunk)
        return file

    return mock.patch.object(Publisher, "_put_output", put_output)


def resumed_rows_off_by_one() -> Defect:
    """A row that is resumed comes one line too late."""
    real = Segments.rows

    def rows(self: Segments) -> Iterator[FinishedRow]:
        for row in real(self):
            if row.line + 1 < self._num_lines:
                yield msgspec.structs.replace(row, line=row.line + 1)

    return mock.patch.object(Segments, "rows", rows)


def claim_taken_without_asking() -> Defect:
    """A claim is taken whoever has it, without its etag."""

    def take(self: Claims, name: str) -> Taken:
        _overwrite(self._store, layout.claim_key(name), self._body(self._lease.worker_id))
        return Taken(self._store.stat(layout.claim_key(name)).etag)

    return mock.patch.object(Claims, "take", take)


def claims_lapse_at_once() -> Defect:
    """Nobody's heart beats. It costs work; see test_claims_only_save_work for what it must not cost."""
    return mock.patch.object(Claims, "look", return_value=None)


def wrong_generation_rows() -> Defect:
    """The error rows of the generation before are taken over as they are."""

    def good_rows(file: Any, num_rows: int) -> Iterator[FinishedRow]:
        for index, data in enumerate(itertools.islice(codec.lines(file), num_rows)):
            yield FinishedRow(line=index, ok=True, output=codec.raw(data))

    return mock.patch.object(chunk_opening, "good_rows", good_rows)


def published_too_early() -> Defect:
    """A chunk is published when all its rows but one are done."""

    class Hasty(OpenChunk):
        num_missing = 0

        @property
        def num_left(self) -> int:
            return max(0, self.num_missing - 1)

        @num_left.setter
        def num_left(self, number: int) -> None:
            self.num_missing = number

    return mock.patch.object(chunk_opening, "OpenChunk", Hasty)


def heart_beats_by_itself() -> Defect:
    """The heart beats whether or not the main loop turns."""
    real = Heartbeat.beat

    def beat(self: Heartbeat) -> None:
        self.turned()
        real(self)

    return mock.patch.object(Heartbeat, "beat", beat)


def other_configuration_let_in() -> Defect:
    """A worker with another configuration joins the run."""
    return mock.patch.object(runs, "check_same", lambda _run, _config, *, url: url)


def done_before_all_is_done() -> Defect:
    """A worker does not wait for its chunks that others hold."""
    return mock.patch.object(ring.Ring, "waiting_for", property(lambda _self: set()))


def loser_deletes_the_winner() -> Defect:
    """The second publisher removes the output that the marker names."""
    real = Publisher.publish

    def publish(self: Publisher, *made: Any, **of: Any) -> Published:
        published = real(self, *made, **of)
        if not published.is_ours:
            self._store.delete([layout.output_key(published.marker.output)])
        return published

    return mock.patch.object(Publisher, "publish", publish)


def answers_swapped() -> Defect:
    """Two rows that finish together get each other's answer."""
    real = stream.RowStream.handle

    def handle(self: stream.RowStream, replies: list[Any]) -> None:
        keys = [reply.key for reply in reversed(replies)]
        pairs = zip(replies, keys, strict=True)
        real(self, [msgspec.structs.replace(reply, key=key) for reply, key in pairs])

    return mock.patch.object(stream.RowStream, "handle", handle)


def segments_of_all_starts_have_the_same_names() -> Defect:
    """The names of segments do not tell two starts of a worker apart."""
    return mock.patch.object(Lease, "writer", property(lambda self: self.worker_id))


def torn_segment() -> Defect:
    """A checkpoint that does not begin where the last one ended."""
    real = Spool.read

    def read(self: Spool, start: int, end: int) -> bytes:
        data = real(self, start, end)
        return data[:-1].rpartition(b"\n")[0] + b"\n" if data.endswith(b"\n") else data

    return mock.patch.object(Spool, "read", read)


def stop_forgets_rows() -> Defect:
    """A worker that is asked to stop writes no last checkpoint."""
    real = chunk_life.Life.save

    def save(self: chunk_life.Life) -> bool:
        return self._hall.is_closing or real(self)

    return mock.patch.object(chunk_life.Life, "save", save)


def another_seed_formula() -> Defect:
    """Seeds are lowered to 62 bits. All workers agree on them, so that only a formula of one's own shows it."""
    real = codec.row_seeds

    def row_seeds(run_seed: int, chunk: str) -> Callable[[int], int]:
        seed_of = real(run_seed, chunk)
        return lambda line: seed_of(line) >> 1

    return mock.patch.object(codec, "row_seeds", row_seeds)


def no_checkpoint_on_time() -> Defect:
    """Checkpoints are written at the end of a worker, and never in between."""
    real = chunk_life.Life.save

    def save(self: chunk_life.Life) -> bool:
        return not self._hall.is_closing or real(self)

    return mock.patch.object(chunk_life.Life, "save", save)


def row_condemned_in_company() -> Defect:
    """A row becomes an error after three engine deaths, though it never ran alone."""

    def is_culprit(self: OpenChunk, line: int) -> bool:
        return line in self.deaths and self.deaths[line].number >= 3

    return mock.patch.object(OpenChunk, "is_culprit", is_culprit)


def lost_reply_is_a_loss() -> Defect:
    """A renewal whose reply was lost counts as somebody else's."""

    def confirm(self: Lease) -> None:
        self._superseded = True
        self.require()

    return mock.patch.object(Lease, "confirm", confirm)


def clean_takes_every_orphan() -> Defect:
    """`clean` removes outputs without a marker, however young, and whether or not their chunk is done."""
    real = clean.find_removals

    def find_removals(inventory: Inventory, config: clean.CleanConfig) -> Iterator[clean.Removal]:
        yield from real(inventory, config)
        for _, info in inventory.orphans():
            yield clean.Removal("orphan outputs", info, clean.ANY_AGE)

    return mock.patch.object(clean, "find_removals", find_removals)


def clean_goes_by_its_own_clock() -> Defect:
    """`clean` compares the store's times with a clock that is an hour ahead."""
    real = clean._time_of
    return mock.patch.object(clean, "_time_of", lambda store: real(store) + 3600.0)


def first_sighting_from_asking() -> Defect:
    """A record counts as seen when its request was sent, although the answer may be much younger."""
    real = Claims.look

    def look(self: Claims, held: Held) -> WorkerLease | None:
        asked = self._clock.monotonic()
        asking = copy.copy(self)
        asking._clock = SimpleNamespace(monotonic=lambda: asked)  # type: ignore[assignment]
        return real(asking, held)

    return mock.patch.object(Claims, "look", look)


def vanished_segments_count_as_safe() -> Defect:
    """The rows of a segment that was read count as checkpointed, although other segments of the chunk have vanished."""
    real = OpenChunk.adopt_segments

    def adopt_segments(self: OpenChunk, *arguments: Any, holds_every_row: bool) -> None:
        del holds_every_row
        real(self, *arguments, holds_every_row=True)

    return mock.patch.object(OpenChunk, "adopt_segments", adopt_segments)


def lease_renewed_as_of_the_end() -> Defect:
    """A heartbeat counts from when it was answered, although others saw it long before."""
    real = Lease.renew

    def renew(self: Lease, record: Worker) -> bool:
        is_renewed = real(self, record)
        if is_renewed:
            self._renewed = self._clock.monotonic()
        return is_renewed

    return mock.patch.object(Lease, "renew", renew)


def clean_ignores_chunks_at_work() -> Defect:
    """`clean` removes outputs and segments of chunks that a live worker has claimed."""
    real = clean.find_removals

    def find_removals(inventory: Inventory, config: clean.CleanConfig) -> Iterator[clean.Removal]:
        yield from real(inventory, config)
        unclaimed = copy.copy(inventory)
        unclaimed.claims = {}
        for removal in real(unclaimed, config):
            if removal.what in ("orphan outputs", "segments of done chunks"):
                yield removal

    return mock.patch.object(clean, "find_removals", find_removals)


def replaced_run_is_not_noticed() -> Defect:
    """A worker does not look at its end whether run.json is still the one that it joined."""
    return mock.patch.object(Membership, "confirm", return_value=None)


def lease_is_not_asked() -> Defect:
    """Outputs and markers are written whether or not the lease is held."""
    real = Publisher.__init__

    def init(self: Publisher, store: Any, *, nonce: str, require_lease: Any) -> None:
        del require_lease
        real(self, store, nonce=nonce, require_lease=lambda: None)

    return mock.patch.object(Publisher, "__init__", init)


def deaths_are_not_noted() -> Defect:
    """Nobody writes which rows were in an engine that died, so the next start begins its search anew."""
    return mock.patch.object(chunk_life.Life, "note_death", return_value=None)


def heart_stands_still() -> Defect:
    """A worker writes its record at its start and at its end, and never in between."""
    return mock.patch.object(Heartbeat, "beat", return_value=None)


def leases_lapse_early() -> Defect:
    """An owner counts as gone after half of its lease."""
    return mock.patch.object(
        claims, "has_lapsed", lambda silent, *leases: silent >= 0.5 * max(leases)
    )


def ages_by_two_clocks() -> Defect:
    """The time of a heartbeat, by its writer's clock, is compared with the clock of whoever looks."""
    real = Claims.look

    def look(self: Claims, held: Held) -> WorkerLease | None:
        found = real(self, held)
        is_gone = found and self._clock.now() - found.heartbeat > found.lease_seconds
        return None if is_gone else found

    return mock.patch.object(Claims, "look", look)


def chunks_are_not_given_back() -> Defect:
    """A worker that ends keeps its claims, until its lease has lapsed."""
    return mock.patch.object(Claims, "release", return_value=True)


def output_upside_down() -> Defect:
    """An output has its rows in another order than the chunk."""
    real = chunk_life.build_output
    return mock.patch.object(
        chunk_life, "build_output", lambda path, lines: real(path, reversed(list(lines)))
    )


def errors_are_not_counted() -> Defect:
    """A marker does not say which errors there are."""
    real = open_chunk.count_rows
    return mock.patch.object(
        open_chunk, "count_rows", lambda rows: msgspec.structs.replace(real(rows), errors={})
    )


def repair_has_no_generation() -> Defect:
    """The marker of a repair is the one that it repairs."""
    real = Publisher.publish

    def publish(self: Publisher, built: Built, marker: Marker, **of: Any) -> Published:
        return real(self, built, msgspec.structs.replace(marker, generation=0), **of)

    return mock.patch.object(Publisher, "publish", publish)


def rows_are_numbered_by_chunk() -> Defect:
    """Every chunk begins with row 0."""
    real = PromptBuilder.build

    def build(self: PromptBuilder, name: str, _first_row: int, rows: Any) -> list[Prepared]:
        return real(self, name, 0, rows)

    return mock.patch.object(PromptBuilder, "build", build)


def edited_chunk_is_answered() -> Defect:
    """Nobody compares a chunk with its checksum in job.json."""
    real = chunk_opening.fetch

    def fetch(store: Store, ref: ChunkRef, scratch: Any) -> Any:
        return real(store, ref._replace(sha256=None, rows=None), scratch)

    return mock.patch.object(chunk_opening, "fetch", fetch)


def ids_of_the_server_stay() -> Defect:
    """Bodies keep the ids and times that the server gave them."""
    return mock.patch.object(lines, "settle", lambda body, _key: codec.encode(body))


def greedy_rows_have_seeds() -> Defect:
    """A row has a seed although nothing is drawn."""
    return mock.patch.object(PromptBuilder, "_is_sampled", return_value=True)


def limit_is_forgotten() -> Defect:
    """Workers go on beyond --limit."""
    real = joining.job_chunks
    return mock.patch.object(joining, "job_chunks", lambda job, url, _limit=None: real(job, url))


def suspects_run_together() -> Defect:
    """Rows that were in the engine when it died are never tried without each other."""
    real = OpenChunk.suspects

    def suspects(self: OpenChunk) -> list[Suspect]:
        return [each._replace(group_limit=1000) for each in real(self)]

    return mock.patch.object(OpenChunk, "suspects", suspects)


def rows_of_a_dead_engine_are_lost() -> Defect:
    """Rows that an engine had when it died are not given to the next one."""
    real = stream.RowStream.handle

    def handle(self: stream.RowStream, replies: list[Any]) -> None:
        real(self, [reply for reply in replies if not reply.is_engine_death])

    return mock.patch.object(stream.RowStream, "handle", handle)


def late_claims_are_kept() -> Defect:
    """A worker that has failed with a chunk for good keeps what its late writes hold of it."""
    return mock.patch.object(Claims, "release_ours")


def given_up_is_for_all_chunks() -> Defect:
    """A worker that has failed with a chunk for good waits for no chunk that others have."""
    real = ring.Ring.ended

    def ended(self: ring.Ring, name: str, *, is_given_up: bool = False, **how: bool) -> None:
        real(self, name, is_given_up=is_given_up, **how)
        if is_given_up:
            self._own_left.clear()

    return mock.patch.object(ring.Ring, "ended", ended)


DEFECTS: dict[str, Callable[[], Defect]] = {
    name: make
    for name, make in list(globals().items())
    if getattr(make, "__annotations__", {}).get("return") == "Defect"
}
"""Every function of this module that makes a defect, by its name."""

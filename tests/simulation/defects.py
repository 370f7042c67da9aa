"""Deliberate mistakes in the code of worker and `clean`. Each breaks a promise, and the simulation must notice.

A defect is a context: while it lasts, the mistake is in. `DEFECTS` makes them, by name.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import AlreadyExists
from batchinfer.core.records import FinishedRow, Marker, Worker
from batchinfer.formats import lines
from batchinfer.ledger import checkpoints, publishing, runs
from batchinfer.ledger.checkpoints import Segments
from batchinfer.ledger.claims import Claims, Held, Lease, Taken
from batchinfer.ledger.inventory import Inventory
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import Built, Published
from batchinfer.prompts.builder import PromptBuilder
from batchinfer.runs import clean
from batchinfer.storage import Store
from batchinfer.worker import chunk as open_chunk
from batchinfer.worker import chunk_life, chunk_opening, joining, ring
from batchinfer.worker.chunk import OpenChunk, Spool, Suspect
from batchinfer.worker.chunk_life import Life
from batchinfer.worker.heartbeat import Heartbeat
from batchinfer.worker.joining import Membership
from batchinfer.worker.ring import Ring
from batchinfer.worker.stream import RowStream
from making import put_raw

DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a defect: it stands in for a function of a class or module, which is its first argument."""
    real = getattr(owner, name)

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*arguments: Any, **named: Any) -> Any:
            return function(real, *arguments, **named)

        new = property(broken) if isinstance(real, property) else broken
        DEFECTS[function.__name__] = partial(mock.patch.object, owner, name, new)
        return function

    return make


@instead_of(chunk_life, "publish")
def marker_before_output(
    _real: Any,
    store: Store,
    lease: Lease,
    built: Built,
    marker: Marker,
    *,
    chunk: str,
    leftovers: Any,
) -> Published:
    """The marker is written first, and the output after it."""
    file = layout.output_file(chunk, lease.nonce + "0")
    made = {"output": file, "output_bytes": built.bytes, "output_sha256": built.sha256}
    marker = msgspec.structs.replace(marker, nonce=lease.nonce, **made)
    standing = publishing._put_marker(store, lease, marker, chunk)
    store.put_file(layout.output_key(file), built.path)
    store.delete(leftovers)
    return Published(standing, True)


@instead_of(publishing, "_put_marker")
def no_fence(_real: Any, store: Store, _lease: Lease, marker: Marker, chunk: str) -> Marker:
    """The last marker wins instead of the first."""
    put_raw(store, layout.marker_key(chunk, marker.generation), codec.encode(marker))
    return marker


@instead_of(Lease, "confirm")
def no_fence_of_starts(_real: Any, self: Lease) -> str:
    """A worker that finds its record changed takes it back."""
    return self._own.look()[1]


@instead_of(chunk_opening, "Segments")
def dropped_segment(real: Any, store: Store, name: str, **of: Any) -> Segments:
    """The last segment of a chunk is not read."""
    shortened = SimpleNamespace(list=lambda prefix: list(store.list(prefix))[:-1], get=store.get)
    return cast("Segments", real(shortened, name, **of))


@instead_of(checkpoints, "_is_whole")
def changed_segment_is_adopted(_real: Any, *_given: object) -> bool:
    """Nobody compares a segment's bytes with the checksum in its first line."""
    return True


@instead_of(chunk_life, "publish")
def segments_deleted_first(
    real: Any, store: Store, *made: Any, leftovers: Sequence[str], **of: Any
) -> Any:
    """Segments go when the chunk is complete, before its marker is there."""
    store.delete(leftovers)
    return real(store, *made, leftovers=(), **of)


@instead_of(publishing, "_put_output")
def adopted_orphan(_real: Any, store: Store, _lease: Lease, built: Built, chunk: str) -> str:
    """All outputs of a chunk have the same name, and one that exists already is taken for one's own."""
    file = layout.output_file(chunk, "0")
    with suppress(AlreadyExists):
        store.create(layout.output_key(file), built.path.read_bytes())
    return file


@instead_of(publishing, "_put_output")
def reused_output_name(_real: Any, store: Store, _lease: Lease, built: Built, chunk: str) -> str:
    """Every output of a chunk goes to the same name, over any that exists."""
    file = layout.output_file(chunk, "0")
    store.put_file(layout.output_key(file), built.path)
    return file


@instead_of(publishing, "_put_output")
def output_name_given_again(real: Any, store: Store, lease: Lease, built: Built, chunk: str) -> str:
    """An output takes the chunk's usual name where no other has it just then. An earlier one may be gone since."""
    file = layout.output_file(chunk, "0")
    try:
        store.create(layout.output_key(file), built.path.read_bytes())
    except AlreadyExists:
        return cast("str", real(store, lease, built, chunk))
    return file


@instead_of(Segments, "rows")
def resumed_rows_off_by_one(real: Any, self: Segments) -> Iterator[FinishedRow]:
    """A row that is resumed comes one line too early."""
    for row in real(self):
        if row.line:
            yield msgspec.structs.replace(row, line=row.line - 1)


@instead_of(ring, "look_at_block")
def block_noted_before_it_is_complete(real: Any, store: Store, *look: Any, **block: Any) -> Any:
    """A worker tells the others that a block is done when it has looked at it, and they believe it of their chunks."""
    put_raw(store, block["key"], b"complete")
    return real(store, *look[:2], (), **block)


@instead_of(Claims, "take")
def claim_taken_without_asking(_real: Any, self: Claims, name: str) -> Taken:
    """A claim is taken whoever has it, without its etag."""
    put_raw(self._store, layout.claim_key(name), self._body(self._lease.worker_id))
    return Taken(self._store.stat(layout.claim_key(name)).etag)


@instead_of(Claims, "look")
def claims_lapse_at_once(_real: Any, *_given: object) -> None:
    """Nobody's heart beats. It costs work; see test_claims_only_save_work for what it must not cost."""


@instead_of(chunk_opening, "good_rows")
def wrong_generation_rows(_real: Any, file: Any, num_rows: int) -> Iterator[FinishedRow]:
    """The error rows of the generation before are taken over as they are."""
    for index, data in enumerate(itertools.islice(codec.lines(file), num_rows)):
        yield FinishedRow(line=index, ok=True, output=codec.raw(data))


class _Hasty(OpenChunk):
    num_missing = 0

    @property
    def num_left(self) -> int:
        return max(0, self.num_missing - 1)

    @num_left.setter
    def num_left(self, number: int) -> None:
        self.num_missing = number


@instead_of(chunk_opening, "OpenChunk")
def published_too_early(_real: Any, *given: Any, **named: Any) -> OpenChunk:
    """A chunk is published when all its rows but one are done."""
    return _Hasty(*given, **named)


@instead_of(Heartbeat, "beat")
def heart_beats_by_itself(real: Any, self: Heartbeat) -> None:
    """The heart beats whether or not the main loop turns."""
    self.turned()
    real(self)


@instead_of(runs, "check_same")
def other_configuration_let_in(_real: Any, _run: Any, _config: Any, *, url: str) -> str:
    """A worker with another configuration joins the run."""
    return url


@instead_of(Ring, "waiting_for")
def done_before_all_is_done(_real: Any, _self: Ring) -> set[str]:
    """A worker does not wait for its chunks that others hold."""
    return set()


@instead_of(chunk_life, "publish")
def loser_deletes_the_winner(real: Any, store: Store, *made: Any, **of: Any) -> Any:
    """The second publisher removes the output that the marker names."""
    published = real(store, *made, **of)
    if not published.is_ours:
        store.delete([layout.output_key(published.marker.output)])
    return published


@instead_of(RowStream, "handle")
def answers_swapped(real: Any, self: RowStream, replies: list[Any]) -> None:
    """Two rows that finish together get each other's answer."""
    keys = [reply.key for reply in reversed(replies)]
    pairs = zip(replies, keys, strict=True)
    real(self, [msgspec.structs.replace(reply, key=key) for reply, key in pairs])


@instead_of(Lease, "writer")
def segments_of_all_starts_have_the_same_names(_real: Any, self: Lease) -> str:
    """The names of segments do not tell two starts of a worker apart."""
    return self.worker_id


@instead_of(Spool, "read")
def torn_segment(real: Any, self: Spool, start: int, end: int) -> bytes:
    """A checkpoint that does not begin where the last one ended."""
    data: bytes = real(self, start, end)
    return data[:-1].rpartition(b"\n")[0] + b"\n" if data.endswith(b"\n") else data


@instead_of(Life, "save")
def stop_forgets_rows(real: Any, self: Life) -> bool:
    """A worker that is asked to stop writes no last checkpoint."""
    return self._hall.is_closing or real(self)


@instead_of(codec, "row_seeds")
def another_seed_formula(real: Any, run_seed: int, chunk: str) -> Callable[[int], int]:
    """Seeds are lowered to 62 bits. All workers agree on them, so that only a formula of one's own shows it."""
    seed_of = real(run_seed, chunk)
    return lambda line: seed_of(line) >> 1


@instead_of(Life, "save")
def no_checkpoint_on_time(real: Any, self: Life) -> bool:
    """Checkpoints are written at the end of a worker, and never in between."""
    return not self._hall.is_closing or real(self)


@instead_of(OpenChunk, "is_culprit")
def row_condemned_in_company(_real: Any, self: OpenChunk, line: int) -> bool:
    """A row becomes an error after three engine deaths, though it never ran alone."""
    return line in self.deaths and self.deaths[line].number >= 3


@instead_of(Lease, "confirm")
def lost_reply_is_a_loss(_real: Any, self: Lease) -> None:
    """A renewal whose reply was lost counts as somebody else's."""
    self._superseded = True
    self.require()


@instead_of(clean, "find_removals")
def clean_takes_every_orphan(
    real: Any, inventory: Inventory, config: clean.CleanConfig
) -> Iterator[clean.Removal]:
    """`clean` removes outputs without a marker, however young, and whether or not their chunk is done."""
    yield from real(inventory, config)
    for _, info in inventory.orphans():
        yield clean.Removal("orphan outputs", info, clean.ANY_AGE)


@instead_of(clean, "_time_of")
def clean_goes_by_its_own_clock(real: Any, store: Store) -> float:
    """`clean` compares the store's times with a clock that is an hour ahead."""
    return float(real(store)) + 3600.0


@instead_of(Claims, "look")
def first_sighting_from_asking(real: Any, self: Claims, held: Held) -> Any:
    """A record counts as seen when its request was sent, although the answer may be much younger."""
    asked = self._clock.monotonic()
    asking = copy.copy(self)
    asking._clock = SimpleNamespace(monotonic=lambda: asked)  # type: ignore[assignment]
    return real(asking, held)


@instead_of(OpenChunk, "adopt_segments")
def vanished_segments_count_as_safe(
    real: Any, self: OpenChunk, *arguments: Any, holds_every_row: bool
) -> None:
    """The rows of a segment that was read count as checkpointed, although other segments of the chunk have vanished."""
    del holds_every_row
    real(self, *arguments, holds_every_row=True)


@instead_of(Lease, "renew")
def lease_renewed_as_of_the_end(real: Any, self: Lease, record: Worker) -> bool:
    """A heartbeat counts from when it was answered, although others saw it long before."""
    is_renewed: bool = real(self, record)
    if is_renewed:
        self._renewed = self._clock.monotonic()
    return is_renewed


@instead_of(clean, "find_removals")
def clean_ignores_chunks_at_work(
    real: Any, inventory: Inventory, config: clean.CleanConfig
) -> Iterator[clean.Removal]:
    """`clean` removes outputs and segments of chunks that a live worker has claimed."""
    yield from real(inventory, config)
    unclaimed = copy.copy(inventory)
    unclaimed.claims = {}
    for removal in real(unclaimed, config):
        if removal.what in ("orphan outputs", "segments of done chunks"):
            yield removal


@instead_of(Membership, "confirm")
def replaced_run_is_not_noticed(_real: Any, *_given: object) -> None:
    """A worker does not look at its end whether run.json is still the one that it joined."""


@instead_of(Lease, "require")
def lease_is_not_asked(_real: Any, _self: Lease) -> None:
    """Segments, outputs and markers are written whether or not the lease is held."""


@instead_of(Life, "note_death")
def deaths_are_not_noted(_real: Any, *_given: object) -> None:
    """Nobody writes which rows were in an engine that died, so the next start begins its search anew."""


@instead_of(Heartbeat, "beat")
def heart_stands_still(_real: Any, _self: Heartbeat) -> None:
    """A worker writes its record at its start and at its end, and never in between."""


@instead_of(Claims, "__init__")
def leases_lapse_early(real: Any, self: Claims, store: Store, lease: Lease, clock: Any) -> None:
    """An owner counts as gone after half of its lease."""
    real(self, store, lease, SimpleNamespace(monotonic=lambda: 2 * clock.monotonic()))


@instead_of(Claims, "look")
def ages_by_two_clocks(real: Any, self: Claims, held: Held) -> Any:
    """The time of a heartbeat, by its writer's clock, is compared with the clock of whoever looks."""
    found = real(self, held)
    is_gone = found and self._clock.now() - found.heartbeat > found.lease_seconds
    return None if is_gone else found


@instead_of(Claims, "release")
def chunks_are_not_given_back(_real: Any, *_given: object) -> bool:
    """A worker that ends keeps its claims, until its lease has lapsed."""
    return True


@instead_of(chunk_life, "build_output")
def output_upside_down(real: Any, path: Any, lines: Any) -> Any:
    """An output has its rows in another order than the chunk."""
    return real(path, reversed(list(lines)))


@instead_of(open_chunk, "count_rows")
def errors_are_not_counted(real: Any, rows: Any) -> Any:
    """A marker does not say which errors there are."""
    return msgspec.structs.replace(real(rows), errors={})


@instead_of(chunk_life, "publish")
def repair_has_no_generation(
    real: Any, store: Store, lease: Lease, built: Built, marker: Marker, **of: Any
) -> Any:
    """The marker of a repair is the one that it repairs."""
    return real(store, lease, built, msgspec.structs.replace(marker, generation=0), **of)


@instead_of(PromptBuilder, "build")
def rows_are_numbered_by_chunk(
    real: Any, self: PromptBuilder, name: str, _first_row: int, rows: Any
) -> Any:
    """Every chunk begins with row 0."""
    return real(self, name, 0, rows)


@instead_of(chunk_opening, "fetch")
def edited_chunk_is_answered(real: Any, store: Store, ref: ChunkRef, scratch: Any) -> Any:
    """Nobody compares a chunk with its checksum in job.json."""
    return real(store, ref._replace(sha256=None, rows=None), scratch)


@instead_of(lines, "settle")
def ids_of_the_server_stay(_real: Any, body: Any, _key: str) -> bytes:
    """Bodies keep the ids and times that the server gave them."""
    return codec.encode(body)


@instead_of(PromptBuilder, "_is_sampled")
def greedy_rows_have_seeds(_real: Any, *_given: object) -> bool:
    """A row has a seed although nothing is drawn."""
    return True


@instead_of(joining, "job_chunks")
def limit_is_forgotten(real: Any, job: Any, url: str, _limit: Any = None) -> Any:
    """Workers go on beyond --limit."""
    return real(job, url)


@instead_of(OpenChunk, "suspects")
def suspects_run_together(real: Any, self: OpenChunk) -> list[Suspect]:
    """Rows that were in the engine when it died are never tried without each other."""
    return [each._replace(group_limit=1000) for each in real(self)]


@instead_of(RowStream, "handle")
def rows_of_a_dead_engine_are_lost(real: Any, self: RowStream, replies: list[Any]) -> None:
    """Rows that an engine had when it died are not given to the next one."""
    real(self, [reply for reply in replies if not reply.is_engine_death])


@instead_of(RowStream, "prepare")
def end_is_said_too_early(real: Any, self: RowStream) -> None:
    """The engine is told that no row comes any more while it has some. Its answer may be that it died with them."""
    in_flight, self._in_flight = self._in_flight, {}
    real(self)
    self._in_flight = in_flight

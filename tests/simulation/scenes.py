"""The shortest scenes that show those deliberate defects that seeds meet seldom. Each asserts what must hold."""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from batchinfer.core import codec, layout
from batchinfer.core.errors import Interrupted, Superseded
from batchinfer.core.records import Claim, WorkerLease
from batchinfer.ledger import publishing
from batchinfer.ledger.claims import Claims, Held, Lease
from batchinfer.storage import Object
from fakes import FakeClock, HeldLease, MemoryStore, worker_record

from .oracle import RUN
from .scheduler import Process
from .stage import Stage

CHUNK = "part-00000"
LEASE_SECONDS = 6.0


class _Slow(MemoryStore):
    """A store in which everything takes long, and happens at its end or, if it is a write, at its beginning."""

    seconds = 0.0

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.clock = FakeClock()

    def get(self, key: str) -> Object:
        self.clock.sleep(self.seconds)
        return super().get(key)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        written = super().replace(key, data, etag)
        self.clock.sleep(self.seconds)
        return written


def _start(store: MemoryStore, clock: FakeClock, nonce: str) -> tuple[Lease, Claims]:
    lease = Lease(store, "w0", clock, lease_seconds=LEASE_SECONDS, nonce=nonce)
    lease.take(lambda _: worker_record())
    return lease, Claims(store, lease, clock)


def an_owner_seen_by_a_slow_answer_keeps_its_claim() -> None:
    """The answer took two leases, and showed the owner's newest heartbeat."""
    store = _Slow("memory://scene-sighting")
    _, claims = _start(store, store.clock, "watcher")
    record = worker_record(id="w9", nonce="n", lease_seconds=LEASE_SECONDS)
    store.create(layout.worker_key("w9"), codec.encode(record))
    held = Held(Claim(worker="w9", nonce="n"), "")
    store.seconds = 2 * LEASE_SECONDS
    assert claims.look(held) is not None
    store.seconds = 0.0
    assert claims.look(held) is not None


def a_heartbeat_counts_from_when_it_was_sent() -> None:
    """Its answer took two leases, and others have seen it all that time ago."""
    store = _Slow("memory://scene-heartbeat")
    lease, _ = _start(store, store.clock, "slow")
    store.seconds = 2 * LEASE_SECONDS
    lease.renew(worker_record())
    assert not lease.is_held()


def an_output_gets_a_name_that_none_has_had() -> None:
    """The first one is gone again when the second one comes."""
    store = MemoryStore("memory://scene-names")
    names = []
    for nonce in (16 * "a", 16 * "b"):
        with tempfile.TemporaryDirectory() as folder:
            built = publishing.build_output(Path(folder) / "output", [nonce.encode()])
            names.append(publishing._put_output(store, HeldLease(nonce), built, CHUNK))
        store.delete([layout.output_key(names[-1])])
    assert names[0] != names[1]


def a_renewal_leaves_the_record_of_another_start_alone() -> None:
    """The worker's record was lost between them."""
    store, clock = MemoryStore("memory://scene-nonce"), FakeClock()
    earlier, _ = _start(store, clock, "earlier")
    key = layout.worker_key("w0")
    store.delete([key])
    later, _ = _start(store, clock, "later")
    assert earlier.nonce != later.nonce
    with suppress(Superseded):
        earlier.renew(worker_record())
    assert codec.decode(store.get(key).data, WorkerLease, name=key).nonce == "later"


def _stopped_half_way() -> Stage:
    """A chunk of which segments hold some rows."""
    stage = Stage([[f"say {index}" for index in range(40)]])
    stage.engine.max_in_flight = 2
    stage.scheduler.after(8.0, lambda: stage.stop(Interrupted("stopped")))
    return stage


def rows_beside_vanished_segments_are_saved_again() -> None:
    """Somebody removes the segments of a chunk while a worker reads them; the first one had been read by then."""
    with _stopped_half_way() as stage:
        stage.run(checkpoint_seconds=0.2)
        first, second, *_ = stage.server.keys(RUN + layout.CHECKPOINTS)
        adopted = _lines(stage.server.objects[first].data)

        def hook(_number: int, method: str, key: str, _process: Process) -> None:
            if method == "get_object" and key == second and second in stage.server.objects:
                for each in stage.server.keys(RUN + layout.CHECKPOINTS):
                    stage.server.delete(each)

        stage.scheduler.after(6.0, lambda: stage.stop(Interrupted("stopped")))
        stage.run(hook=hook)
        saved = {
            line for data in stage.objects(layout.CHECKPOINTS).values() for line in _lines(data)
        }
        assert adopted
        assert adopted <= saved


def a_segment_that_was_changed_on_storage_is_left_out() -> None:
    """One digit of each answer is another one."""
    with _stopped_half_way() as stage:
        stage.run(checkpoint_seconds=0.2)
        assert stage.objects(layout.CHECKPOINTS)
        for key, data in stage.objects(layout.CHECKPOINTS).items():
            stage.put(key, data.replace(b"|0.5|", b"|0.7|"))
        assert stage.run().is_success
        (output,) = (data for key, data in stage.objects().items() if layout.chunk_of_output(key))
        assert b"|0.7|" not in output


def _lines(segment: bytes) -> set[int]:
    return {codec.decode(text, dict, name="a row")["line"] for text in segment.splitlines()[1:]}


def what_a_living_worker_repairs_is_not_cleaned_away() -> None:
    """A chunk that is done has a claim again, and an output whose marker may follow."""
    with Stage([["mine"]]) as stage:
        assert stage.run().is_success
        orphan = layout.output_key(layout.output_file(CHUNK, 16 * "a"))
        stage.put(orphan, b"the next generation's")
        stage.scheduler.run(stage.scheduler.now + 20_000.0)
        record = worker_record(id="w9", nonce="n", lease_seconds=LEASE_SECONDS)
        stage.put(layout.worker_key("w9"), codec.encode(record))
        stage.put(layout.claim_key(CHUNK), codec.encode(Claim(worker="w9", nonce="n")))
        stage.scheduler.run(stage.scheduler.now + 1.0)
        stage.clean()
        assert orphan in stage.objects()


def _owners(stage: Stage) -> dict[str, str]:
    claims = stage.objects(layout.CLAIMS).items()
    return {key: codec.decode(data, Claim, name=key).worker for key, data in claims}


def others_get_the_chunks_of_a_worker_that_stops_at_once() -> None:
    """Else they wait for its lease to lapse."""
    with Stage([[f"say {index}" for index in range(40)], ["theirs"]]) as stage:
        stage.engine.max_in_flight = 1
        stage.scheduler.after(5.0, lambda: stage.stop(Interrupted("stopped")))
        assert isinstance(stage.run().error, Interrupted)
        assert set(_owners(stage).values()) == {""}


SCENES: dict[str, Callable[[], None]] = {
    "first_sighting_from_asking": an_owner_seen_by_a_slow_answer_keeps_its_claim,
    "vanished_segments_count_as_safe": rows_beside_vanished_segments_are_saved_again,
    "no_fence_of_starts": a_renewal_leaves_the_record_of_another_start_alone,
    "lease_renewed_as_of_the_end": a_heartbeat_counts_from_when_it_was_sent,
    "output_name_given_again": an_output_gets_a_name_that_none_has_had,
    "chunks_are_not_given_back": others_get_the_chunks_of_a_worker_that_stops_at_once,
    "changed_segment_is_adopted": a_segment_that_was_changed_on_storage_is_left_out,
    "clean_ignores_chunks_at_work": what_a_living_worker_repairs_is_not_cleaned_away,
    "clean_goes_by_its_own_clock": what_a_living_worker_repairs_is_not_cleaned_away,
}
"""By the name of the defect."""

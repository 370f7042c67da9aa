"""`batchinfer clean` removes what dead workers left, and keeps whatever a worker may still need."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError
from batchinfer.core.records import Claim
from batchinfer.ledger.claims import decode_claim
from batchinfer.runs import clean as clean_module
from batchinfer.runs.clean import CleanConfig, run_clean
from batchinfer.runs.verify import Verdict, VerifyConfig, run_verify
from batchinfer.storage import Store
from batchinfer.storage.memory import MemoryStore, forget
from batchinfer.storage.opening import open_store
from making import (
    change_marker,
    finish_process,
    make_job,
    overwrite,
    put_raw,
    read_marker,
    run_worker_here,
    start_process,
    worker_arguments,
)

CHUNK = "part-00001"
UNDONE = "part-00002"
HOUR = 3600.0

ORPHAN = layout.output_key(layout.output_file(CHUNK, "aaaa"))
UNDONE_ORPHAN = layout.output_key(layout.output_file(UNDONE))
SEGMENT = layout.segment_key(CHUNK, 1, "gone", 1)
UNDONE_SEGMENT = layout.segment_key(UNDONE, 1, "gone", 1)
CLAIM = layout.claim_key(CHUNK)
UNDONE_CLAIM = layout.claim_key(UNDONE)
PROBE = f"{layout.PROBES}0123456789abcdef"


class LaterClock(SystemClock):
    """The system's clock, moved ahead by some seconds."""

    def __init__(self, ahead_seconds: float) -> None:
        self.ahead_seconds = ahead_seconds

    def now(self) -> float:
        return super().now() + self.ahead_seconds


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[str]:
    url = f"memory://{request.node.name}"
    make_job(url, rows=30, per_chunk=10, workers=3)
    yield url
    forget(url)


@pytest.fixture
def run(job: str) -> Store:
    """A run with two of three chunks done, whose workers have ended."""
    for index in (0, 1):
        run_worker_here(job, f"{job}/runs/a", "--no-steal", "--worker-id", f"w{index}", index=index)
    return open_store(f"{job}/runs/a")


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list("")}


def clean(store: Store, *, after_seconds: float = 2 * HOUR, **options: Any) -> dict[str, Any]:
    """Clean after some time has passed on the store's clock and on our own, which counts only in a dry run."""
    clock = LaterClock(after_seconds)
    if isinstance(store, MemoryStore):
        store = MemoryStore(store.url, clock=clock.now)
    return run_clean(
        CleanConfig(run=store.url, **{"yes": True, **options}), store=store, clock=clock
    )


def verify(run: Store) -> Verdict:
    config = VerifyConfig(run=run.url, is_deep=True)
    return run_verify(config, open_store=open_store, clock=SystemClock())


def claim_of(worker: str, epoch: int = 1) -> bytes:
    return codec.encode(Claim(worker=worker, epoch=epoch, nonce="n"))


def leave_everything(store: Store, worker: str = "gone") -> set[str]:
    """Write the objects that a worker leaves when it is killed at the worst moments."""
    left = {
        ORPHAN: b"{}\n",
        UNDONE_ORPHAN: b"{}\n",
        SEGMENT: b"{}\n",
        UNDONE_SEGMENT: b"{}\n",
        CLAIM: claim_of(worker),
        UNDONE_CLAIM: claim_of(worker),
        PROBE: b"x",
    }
    for key, data in left.items():
        store.create(key, data)
    return set(left)


def make_alive(store: Store, worker: str) -> None:
    """Let a worker's record say that it runs."""
    key = layout.worker_key(worker)
    data, etag = store.get(key)
    store.replace(key, data.replace(b'"state":"done"', b'"state":"running"'), etag)


# --------------------------------------------------------------------------- what goes


def test_what_the_dead_left_goes_and_the_rest_stays(run: Store) -> None:
    before = keys(run)
    leave_everything(run)
    result = clean(run)
    # The rows of an unfinished chunk are kept, and its claim is released instead of being deleted.
    assert keys(run) == before | {UNDONE_SEGMENT, UNDONE_CLAIM, UNDONE_ORPHAN}
    assert decode_claim(run.get(UNDONE_CLAIM).data, UNDONE_CLAIM).worker == ""
    assert sum(result["removed"].values()) == 4
    assert result["claims_released"] == 1


def test_without_yes_nothing_changes(run: Store) -> None:
    leave_everything(run)
    before = {info.key: info.etag for info in run.list("")}
    planned = clean(run, yes=False)
    assert planned["is_dry_run"]
    assert {info.key: info.etag for info in run.list("")} == before
    done = clean(run)
    assert done["removed"] == planned["removed"]
    assert done["claims_released"] == planned["claims_released"]


def test_after_it_the_run_is_finished_as_if_nothing_had_been(run: Store, job: str) -> None:
    leave_everything(run)
    overwrite(run, UNDONE_SEGMENT, b"not a record\n")
    clean(run)
    run_worker_here(job, run.url)
    assert UNDONE_ORPHAN in keys(
        run
    )  # no marker rules it out yet: the other worker's output has another name
    clean(run)
    assert not verify(run).findings


def test_records_that_cannot_be_read_go_once_they_are_old(run: Store) -> None:
    """A live worker had just written its damaged record anew when `clean` removed it (simulation)."""
    damaged = {UNDONE_CLAIM: b"", layout.worker_key("w9"): b"{"}
    for key, data in damaged.items():
        put_raw(run, key, data)
    clean(run, after_seconds=0)
    assert keys(run) >= set(damaged)
    clean(run)
    assert not keys(run) & set(damaged)


# --------------------------------------------------------------------------- what stays


def test_records_that_are_mended_while_it_looks_stay(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inventory of a large run takes minutes."""
    record = layout.worker_key("w9")
    for key in (UNDONE_CLAIM, record):
        put_raw(run, key, b"{")
    real = clean_module.take_inventory

    def take(*args: Any, **values: Any) -> Any:
        found = real(*args, **values)
        overwrite(run, record, run.get(layout.worker_key("w0")).data)
        overwrite(run, UNDONE_CLAIM, claim_of("w9"))
        return found

    monkeypatch.setattr(clean_module, "take_inventory", take)
    clean(run)
    assert keys(run) >= {UNDONE_CLAIM, record}


def test_what_is_young_stays(run: Store) -> None:
    left = leave_everything(run) - {UNDONE_CLAIM}
    result = clean(run, after_seconds=HOUR / 2)
    assert left <= keys(run)
    assert result["kept_young"] == 4


def test_a_probe_under_way_stays_whatever_is_asked(run: Store) -> None:
    run.create(PROBE, b"x")
    clean(run, after_seconds=0, older_than_seconds=0)
    assert PROBE in keys(run)


def test_what_a_marker_of_any_generation_names_stays(run: Store) -> None:
    marker = read_marker(run, CHUNK)
    newer = layout.output_file(CHUNK, "bbbb")
    run.create(layout.output_key(newer), run.get(layout.output_key(marker.output)).data)
    run.create(layout.marker_key(CHUNK, 1), run.get(layout.marker_key(CHUNK)).data)
    change_marker(run, CHUNK, 1, output=newer, generation=1)
    before = keys(run)
    clean(run)
    assert keys(run) == before


@pytest.mark.parametrize("key", [UNDONE_ORPHAN, UNDONE_CLAIM])
def test_what_a_live_worker_has_in_hand_stays(run: Store, key: str) -> None:
    """An output whose marker is about to follow looks like an orphan."""
    leave_everything(run, worker="w0")
    make_alive(run, "w0")
    clean(run, after_seconds=0, older_than_seconds=0)
    assert key in keys(run)
    assert decode_claim(run.get(UNDONE_CLAIM).data, UNDONE_CLAIM).worker == "w0"
    assert {ORPHAN, SEGMENT, CLAIM} <= keys(
        run
    )  # the worker may be making the chunk's next generation


def test_an_orphan_of_a_chunk_that_is_not_done_stays(run: Store) -> None:
    """A worker that helps a slow one publishes without a claim, and a worker that slept for a day publishes late."""
    leave_everything(run)
    clean(run, after_seconds=1000 * HOUR)
    assert UNDONE_ORPHAN in keys(run)
    clean(run, after_seconds=0, older_than_seconds=0)
    assert UNDONE_ORPHAN in keys(run)
    assert ORPHAN not in keys(run)


def test_an_orphan_that_the_next_generation_may_name_stays(run: Store) -> None:
    """Error rows may be done again by a worker that has read their marker before it makes its own output."""
    before, after = (layout.output_key(layout.output_file(CHUNK, nonce)) for nonce in ("aa", "bb"))
    change_marker(run, CHUNK, rows_ok=9, rows_error=1)
    for key, seconds in ((before, -HOUR), (after, HOUR)):
        MemoryStore(run.url, clock=LaterClock(seconds).now).create(key, b"{}\n")
    clean(run, after_seconds=1000 * HOUR)
    assert after in keys(run)
    assert before not in keys(run)


def test_a_clock_that_is_ahead_makes_nothing_old(run: Store) -> None:
    left = leave_everything(run, worker="w0")
    make_alive(run, "w0")
    config = CleanConfig(run=run.url, yes=True)
    run_clean(config, store=run, clock=LaterClock(1000 * HOUR))
    assert left <= keys(run)
    assert decode_claim(run.get(UNDONE_CLAIM).data, UNDONE_CLAIM).worker == "w0"
    assert keys(run) & {PROBE} == {key for key in keys(run) if key.startswith(layout.PROBES)}


def test_a_worker_that_fell_silent_long_ago_counts_as_gone(run: Store) -> None:
    leave_everything(run, worker="w0")
    make_alive(run, "w0")
    clean(run)
    assert not keys(run) & {ORPHAN, SEGMENT, CLAIM}


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_claim_of_another_epoch_is_released(run: Store, epoch: int) -> None:
    """A higher epoch is that of a start whose record was lost."""
    run.create(UNDONE_CLAIM, claim_of("w0", epoch=epoch))
    make_alive(run, "w0")
    clean(run, after_seconds=0)
    assert decode_claim(run.get(UNDONE_CLAIM).data, UNDONE_CLAIM).worker == ""


def test_a_claim_that_changes_hands_meanwhile_is_left_alone(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.create(UNDONE_CLAIM, claim_of("gone"))
    original = MemoryStore.get

    def get(self: MemoryStore, key: str) -> Any:
        found = original(self, key)
        if key == UNDONE_CLAIM and taken:
            taken.pop()
            self.replace(key, claim_of("w0"), found.etag)
        return found

    taken = [True]
    original_take = clean_module.take_inventory

    def take(*args: Any, **values: Any) -> Any:
        found = original_take(*args, **values)
        # The inventory reads the claim first; the second read is the one before the release.
        monkeypatch.setattr(MemoryStore, "get", get)
        return found

    monkeypatch.setattr(clean_module, "take_inventory", take)
    clean(run)
    assert decode_claim(run.get(UNDONE_CLAIM).data, UNDONE_CLAIM).worker == "w0"


def test_strangers_and_the_stop_request_are_not_ours_to_remove(run: Store) -> None:
    for key in ("outputs/notes.txt", "notes.txt", layout.STOP_KEY):
        run.create(key, b"{}")
    before = keys(run)
    clean(run)
    assert keys(run) == before


# --------------------------------------------------------------------------- doing chunks again


def test_redo_makes_a_chunk_as_if_it_had_never_been_done(run: Store, job: str) -> None:
    run.create(SEGMENT, b"{}\n")
    clean(run, after_seconds=0, redo=[CHUNK])
    assert not keys(run) & {layout.marker_key(CHUNK), SEGMENT}
    assert layout.marker_key("part-00000") in keys(run)
    assert run_worker_here(job, run.url)["chunks_done"] == 2
    # The old output has become an orphan, and the new one has a name of its own or the same bytes.
    clean(run)
    assert not verify(run).findings


def test_checkpoints_of_a_repair_stay(run: Store, job: str) -> None:
    """The chunk counts as done meanwhile; once, `clean` removed the segments of its repair, which began anew."""
    before = keys(run)
    marker = json.loads(run.get(layout.marker_key(CHUNK)).data)
    overwrite(
        run,
        layout.marker_key(CHUNK),
        json.dumps({**marker, "rows_ok": 9, "rows_error": 1}).encode(),
    )
    run.create(SEGMENT, b"{}\n")
    clean(run)
    assert keys(run) >= before | {SEGMENT}
    clean(run, older_than_seconds=0.0)
    assert SEGMENT not in keys(run)


def test_redo_leaves_what_a_late_marker_may_come_to_name(run: Store) -> None:
    """Without the current marker a sleeping worker could publish its own, whose output had been removed."""
    orphan = f"{layout.OUTPUTS}{CHUNK}.{16 * 'b'}.jsonl"
    run.create(orphan, b"the sleeper's")
    clean(run, redo=[CHUNK])
    assert layout.marker_key(CHUNK) not in keys(run)
    assert orphan in keys(run)


def test_redo_of_what_is_not_done_is_a_mistake(run: Store) -> None:
    with pytest.raises(InputError, match="no chunk of this name"):
        clean(run, redo=[UNDONE])


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run there"):
        clean(open_store(str(tmp_path / "nowhere")))
    assert not (tmp_path / "nowhere").exists()


# --------------------------------------------------------------------------- what stores leave


def test_a_run_of_a_newer_format_version_is_not_touched(run: Store) -> None:
    overwrite(run, layout.RUN_KEY, b'{"format_version": 2}')
    before = keys(run)
    with pytest.raises(InputError, match="format version 2"):
        clean(run, yes=True)
    assert keys(run) == before


def test_old_temporary_files_of_a_folder_go(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=10, per_chunk=10)
    run = open_store(f"{job}/runs/a")
    run_worker_here(job, run.url)
    old, young = (Path(run.url, "outputs", f".part.{name}.tmp") for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 2 * HOUR,) * 2)
    assert clean(run, yes=False)["temps_removed"] == 1
    assert old.exists()
    clean(run)
    assert (old.exists(), young.exists()) == (False, True)


# --------------------------------------------------------------------------- among live workers


def test_cleaning_again_and_again_does_not_disturb_a_worker(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=1500, per_chunk=50)
    run = open_store(f"{job}/runs/a")
    options = ["--echo-latency-seconds", "0.3", "--checkpoint-seconds", "0.1"]
    process = start_process(worker_arguments(job, run.url, *options))
    while process.poll() is None and not any(run.list(layout.OUTPUTS)):
        time.sleep(0.02)
    num_cleanings = 0
    while process.poll() is None:
        clean(run, after_seconds=0, older_than_seconds=0)
        num_cleanings += 1
    finished = finish_process(process)
    assert finished.status == 0, finished.stderr
    assert num_cleanings
    assert finished.result["request_count"] == 1500
    assert verify(run).is_sound

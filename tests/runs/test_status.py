"""`batchinfer status`, from a bucket that may hold anything."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from batchinfer.cli import main
from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError
from batchinfer.core.records import Worker
from batchinfer.ledger.looks import RunReader
from batchinfer.runs.overview import Overview
from batchinfer.runs.status import Status, StatusConfig, render, run_status, watch
from batchinfer.storage import Store
from big_run import Shape, make_run, make_workers, write_big_run, write_local
from counting_store import CountingStore
from fakes import FakeClock, MemoryStore, put_worker
from making import overwrite, put_raw

NOW = 1_790_000_000.0
SMALL = Shape(num_chunks=20, rows_per_chunk=10, num_workers=3, now=NOW)


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name}"


def opener(now: float = NOW) -> Callable[[str], Store]:
    """Opens memory stores whose objects were written at `now`."""
    return lambda url: MemoryStore(url, clock=lambda: now)


def write(root: str, shape: Shape = SMALL) -> str:
    run = f"{root}/runs/a"
    write_big_run(opener(shape.now)(root), opener(shape.now)(run), shape)
    put_run(run, opener()(run).get(layout.RUN_KEY).data, shape.now - 3600.0)
    return run


def put_run(run: str, data: bytes, now: float) -> None:
    overwrite(opener(now)(run), layout.RUN_KEY, data)


def change_worker(run: str, name: str, *, at: float = NOW, **values: Any) -> None:
    key = layout.statistics_key(name)
    data = opener()(run).get(key).data
    put_worker(
        opener(at)(run), msgspec.structs.replace(codec.decode(data, Worker, name=key), **values)
    )


def look(run: str, *, job: str = "", now: float = NOW) -> Overview:
    config = StatusConfig(run=run, job=job)
    return run_status(config, open_store=opener(), clock=FakeClock(now))


def shown(seen: Overview, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(seen, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------- what it finds


def test_a_run_is_found_with_its_job_below_it_or_elsewhere(root: str) -> None:
    seen = look(write(root))
    assert (seen.chunks.done, seen.chunks.total, seen.job) == (12, 20, root)
    assert (seen.state, len(seen.workers)) == ("running", 3)
    elsewhere = f"{root}/other/place"
    run = make_run(opener()(root).get(layout.JOB_KEY).data)
    run = msgspec.structs.replace(run, recorded={"job": root})
    opener()(elsewhere).create(layout.RUN_KEY, codec.encode_pretty(run))
    assert look(elsewhere).chunks.total == 20


def test_a_job_that_is_not_the_runs_is_not_taken_for_it(root: str) -> None:
    run = write(root)
    store = opener()(root)
    data, etag = store.get(layout.JOB_KEY)
    store.replace(layout.JOB_KEY, data.replace(b'"num_workers": 3', b'"num_workers": 4'), etag)
    seen = look(run)
    assert seen.chunks.total is None
    assert any("job.json was not found" in note for note in seen.notes)
    with pytest.raises(InputError, match="is another job than the run's"):
        look(run, job=root)


def test_requests_are_listing_pages_and_workers_not_markers(root: str) -> None:
    shape = Shape(num_chunks=3000, rows_per_chunk=1, num_workers=5, now=NOW, done_share=1.0)
    run = write(root, shape)
    stores: list[CountingStore] = []

    def open_store(url: str) -> Store:
        stores.append(CountingStore(opener()(url)))
        return stores[-1]

    run_status(StatusConfig(run=run), open_store=open_store, clock=FakeClock(NOW))
    requests = sum((store.requests for store in stores), start=stores[0].requests.__class__())
    assert requests["get"] == 2 * 5 + 2  # leases and statistics, run.json, job.json
    # 3002 objects in outputs/, one page each of checkpoints, workers and launches
    assert requests["list"] == 4 + 1 + 1 + 1
    assert requests["stat"] <= 2
    assert set(requests) <= {"get", "list", "stat"}, "status changes nothing"


def test_a_second_look_reads_only_workers_that_moved_and_knows_them_alive(root: str) -> None:
    run = write(root)
    store = CountingStore(opener()(run))
    clock = FakeClock(NOW + 5 * 3600)
    status = Status(StatusConfig(run=run), open_store=lambda _: store, clock=clock)
    status._reader = RunReader(store, opener(), clock)
    assert {view.state for view in status.look().workers} == {"gone"}, "our clock is ahead"
    gets = store.requests["get"]
    change_worker(run, "sky-2026-000", rows_ok=5)
    clock.seconds += 7
    ages = {view.id: view.state for view in status.look().workers}
    assert store.requests["get"] == gets + 2
    assert (ages["sky-2026-000"], ages["sky-2026-001"]) == ("running", "gone")


def test_what_is_strange_is_noted_and_left_out(root: str) -> None:
    run = write(root)
    store = opener()(run)
    for key in ("outputs/.DS_Store", "outputs/notes.txt", "workers/readme.md"):
        store.create(key, b"x")
    put_raw(store, "outputs/part-00019.succeed", b"")
    store.create("workers/broken.json", b'{"id": 3}')
    key = "workers/sky-2026-002.stats.json"
    odd = store.get(key).data.replace(b'"prompt_tokens":', b'"prompt_tokens":1' + b"0" * 400)
    overwrite(store, key, odd)
    seen = look(run)
    assert (len(seen.workers), seen.chunks.done) == (3, 12)
    notes = "\n".join(seen.notes)
    assert "4 foreign files, left alone" in notes
    assert "broken.json" in notes
    assert "sky-2026-002.stats.json" in notes, "a number that no sum can hold"


def test_a_job_json_that_cannot_be_read_is_noted_until_it_can(root: str) -> None:
    run = write(root)
    store = opener()(root)
    data = store.get(layout.JOB_KEY).data
    overwrite(store, layout.JOB_KEY, b"{")
    status = Status(StatusConfig(run=run), open_store=opener(), clock=FakeClock(NOW))
    seen = status.look()
    assert seen.rows.total is None
    assert any("job.json: not a readable job record" in note for note in seen.notes)
    overwrite(store, layout.JOB_KEY, data)
    assert status.look().rows.total == 200


def test_a_run_that_changes_while_it_is_read(root: str) -> None:
    """Records vanish and are renewed between the listing and their reading."""
    run = write(root)

    class Moving(MemoryStore):
        def get(self, key: str):
            if key == layout.worker_key("sky-2026-000"):
                self.delete([key])
            if key == layout.worker_key("sky-2026-001"):
                change_worker(run, "sky-2026-001", heartbeat=NOW + 20)
            return super().get(key)

    def open_store(url: str) -> Store:
        return Moving(url, clock=lambda: NOW) if url == run else opener()(url)

    seen = run_status(StatusConfig(run=run), open_store=open_store, clock=FakeClock(NOW + 20))
    assert [view.id for view in seen.workers] == ["sky-2026-001", "sky-2026-002"]
    assert seen.workers[0].heartbeat_age_seconds == 0
    assert seen.workers[0].clock_offset_seconds == 0


def test_a_run_whose_first_worker_still_loads_has_no_run_json(root: str) -> None:
    record = msgspec.structs.replace(
        make_workers(SMALL)[0], state="loading", minutes=[], open_chunks={}
    )
    put_worker(opener()(root), record)
    seen = look(root)
    assert (seen.state, seen.model) == ("loading", "meta-llama/Llama-3.1-8B-Instruct")


# --------------------------------------------------------------------------- the screen


def test_the_screen_has_every_worker_and_says_who_needs_a_look(root: str) -> None:
    run = write(root, SMALL._replace(num_workers=5))
    change_worker(run, "sky-2026-001", at=NOW - 300, heartbeat=NOW - 300)
    text = shown(look(run))
    for word in ("sky-2026-004", "gcp/us-central1", "12 of 20 done", "1 gone (sky-2026-001)"):
        assert word in text
    assert max(map(len, shown(look(run), width=80).splitlines())) <= 80
    assert "and 40 more" in shown(look(write(f"{root}/b", SMALL._replace(num_workers=100))))


@pytest.mark.parametrize(
    ("state", "why"),
    [("stopped", "no worker is at work"), ("loading", "the engine is loading")],
    ids=["stopped", "loading"],
)
def test_between_two_starts_the_rows_of_the_last_one_are_not_denied(
    root: str, state: str, why: str
) -> None:
    """It said that no row was finished lately, right after hundreds were."""
    run = write(root)
    for record in make_workers(SMALL):
        change_worker(run, record.id, state=state, heartbeat=NOW, starts=[NOW], minutes=[])
    text = shown(look(run))
    assert "lately" not in text
    assert text.count(why) == 2


def test_watching_ends_when_the_run_is_done_or_with_ctrl_c(root: str) -> None:
    run = write(root)

    class Publishing(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            for index in range(12, 20):
                opener()(run).create(layout.marker_key(f"part-{index:05d}"), b"{}")

    class Impatient(FakeClock):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    for clock, state in ((Impatient(NOW), "running"), (Publishing(NOW), "done")):
        status = Status(StatusConfig(run=run), open_store=opener(), clock=clock)
        assert watch(status, Console(file=io.StringIO(), width=120), clock, 5.0).state == state


# --------------------------------------------------------------------------- the command


def test_the_last_line_of_stdout_is_one_object_and_json_is_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_local(tmp_path, SMALL))
    assert main.main(["status", run, "--price-per-hour", "2"]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert json.loads(line)["chunks"]["done"] == 12
    assert "sky-2026-000" in err
    assert main.main(["status", run, "--json", "--price-per-hour", "2"]) == 0
    out, err = capsys.readouterr()
    seen = codec.decode(out.encode(), Overview, name="stdout")
    assert (seen.cost.source, len(seen.workers), err) == ("--price-per-hour", 3, "")


def test_what_is_no_run_is_said_with_what_to_give_instead(root: str) -> None:
    with pytest.raises(InputError, match="no run there"):
        look(root)
    run = write(root)
    with pytest.raises(InputError, match="is a job, expected one of its runs") as caught:
        look(root)
    assert caught.value.hint == f"give {run}"
    put_run(run, b'{"format_version": 99}', NOW)
    with pytest.raises(InputError, match="format version 99"):
        look(run)


@pytest.mark.s3
def test_on_s3_a_record_that_stands_still_ages_by_storages_clock(
    s3_url: Callable[..., str],
) -> None:
    """The etag of a listing and that of a read must be the same text, or every worker would look alive."""
    from batchinfer.storage.opening import open_store

    job = s3_url("job")
    run = f"{job}/runs/a"
    write_big_run(open_store(job), open_store(run), SMALL._replace(num_chunks=4))
    reader = RunReader(open_store(run), open_store, FakeClock(NOW))
    seen = reader.read()
    assert (len(seen.workers), len(seen.markers)) == (3, 2)
    for worker in seen.workers:
        assert worker.age_seconds is None
        assert worker.modified > NOW, "storage's own time"
    counting = CountingStore(open_store(run))
    reader._store = counting
    reader.read()
    assert counting.requests["get"] == 0, "nothing moved, nothing is read again"

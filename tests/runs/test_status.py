"""`batchinfer status`, from a bucket that may hold anything."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from batchinfer.cli import main
from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError
from batchinfer.core.records import Run, Worker
from batchinfer.ledger.inventory import RunReader
from batchinfer.runs.overview import Overview
from batchinfer.runs.status import Status, StatusConfig, render, run_status, watch
from batchinfer.storage import Store
from batchinfer.storage.memory import MemoryStore
from big_run import Shape, make_run, make_workers, write_big_run, write_local
from counting_store import CountingStore
from fakes import FakeClock
from making import overwrite

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
    put_run_again(run, shape.now - 3600.0)
    return run


def put_run_again(run: str, now: float) -> None:
    """Write run.json as it is, at this time."""
    store = opener(now)(run)
    overwrite(store, layout.RUN_KEY, store.get(layout.RUN_KEY).data)


def look(run: str, *, job: str = "", now: float = NOW) -> Overview:
    config = StatusConfig(run=run, job=job)
    return run_status(config, open_store=opener(), clock=FakeClock(now))


# --------------------------------------------------------------------------- what it finds


def test_a_run_below_its_job_is_found_with_totals(root: str) -> None:
    seen = look(write(root))
    assert (seen.chunks.done, seen.chunks.total) == (12, 20)
    assert seen.job == root
    assert seen.state == "running"
    assert len(seen.workers) == 3


def test_run_json_leads_to_a_job_elsewhere(root: str) -> None:
    write(root)
    elsewhere = opener()(f"{root}/other/place")
    run = make_run(opener()(root).get(layout.JOB_KEY).data)
    run = msgspec.structs.replace(run, recorded={"job": root})
    elsewhere.create(layout.RUN_KEY, codec.encode_pretty(run))
    assert look(f"{root}/other/place").chunks.total == 20


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
    assert requests["get"] == 5 + 2  # workers, run.json, job.json
    # 3002 objects in outputs/, one page each of checkpoints, workers and launches
    assert requests["list"] == 4 + 1 + 1 + 1
    assert requests["stat"] <= 2
    assert set(requests) <= {"get", "list", "stat"}, "status changes nothing"


def test_a_second_look_reads_only_workers_that_moved(root: str) -> None:
    run = write(root)
    store = CountingStore(opener()(run))
    clock = FakeClock(NOW)
    reader = RunReader(store, opener(), clock)
    reader.read()
    gets = store.requests["get"]
    key = layout.worker_key("sky-2026-000")
    data, etag = store.get(key)
    record = codec.decode(data, Worker, name=key)
    store.replace(key, codec.encode(msgspec.structs.replace(record, beat=5)), etag)
    clock.seconds += 7
    again = reader.read()
    assert store.requests["get"] == gets + 2, "the test's own, and one worker"
    ages = {seen.record.id: seen.age_seconds for seen in again.workers}
    assert ages["sky-2026-000"] == 0.0
    assert ages["sky-2026-001"] is None


def test_a_change_seen_keeps_a_worker_alive_though_our_clock_is_ahead(root: str) -> None:
    run = write(root)
    clock = FakeClock(NOW + 5 * 3600)
    status = Status(StatusConfig(run=run), open_store=opener(), clock=clock)
    assert {view.state for view in status.look().workers} == {"gone"}
    store = opener()(run)
    for info in store.list(layout.WORKERS):
        data, etag = store.get(info.key)
        record = codec.decode(data, Worker, name=info.key)
        store.replace(info.key, codec.encode(msgspec.structs.replace(record, beat=9)), etag)
    clock.seconds += 30
    assert {view.state for view in status.look().workers} == {"running"}


# --------------------------------------------------------------------------- bad input


def test_a_run_that_does_not_exist_is_a_clear_error(root: str) -> None:
    with pytest.raises(InputError, match="no run there") as caught:
        look(root)
    assert "--output" in caught.value.hint


def test_a_job_given_as_a_run_names_its_runs(root: str) -> None:
    write(root)
    with pytest.raises(InputError, match="is a job, expected one of its runs \\(a\\)") as caught:
        look(root)
    assert caught.value.hint == f"give {root}/runs/a"


def test_a_job_without_runs_says_so(root: str) -> None:
    opener()(root).create(layout.JOB_KEY, b"{}")
    with pytest.raises(InputError, match="is a job without runs"):
        look(root)


def test_a_run_without_workers_is_empty(root: str) -> None:
    store = opener()(root)
    store.create(layout.RUN_KEY, codec.encode_pretty(make_run(b"")))
    seen = look(root)
    assert seen.state == "empty"
    shown(seen)


def test_a_run_whose_first_worker_still_loads_has_no_run_json(root: str) -> None:
    record = make_workers(SMALL)[0]
    record = msgspec.structs.replace(record, state="loading", minutes=[], spans=[], open_chunks=[])
    opener()(root).create(layout.worker_key(record.id), codec.encode(record))
    seen = look(root)
    assert seen.state == "loading"
    assert seen.model == "meta-llama/Llama-3.1-8B-Instruct"


def test_a_newer_format_version_is_refused(root: str) -> None:
    run = msgspec.structs.replace(make_run(b""), format_version=99)
    opener()(root).create(layout.RUN_KEY, codec.encode_pretty(run))
    with pytest.raises(InputError, match="format version 99") as caught:
        look(root)
    assert caught.value.hint == "upgrade batchinfer"


def test_a_job_json_that_cannot_be_read_is_noted_until_it_can(root: str) -> None:
    write(root)
    store = opener()(root)
    data = store.get(layout.JOB_KEY).data
    overwrite(store, layout.JOB_KEY, b"{")
    status = Status(StatusConfig(run=f"{root}/runs/a"), open_store=opener(), clock=FakeClock(NOW))
    seen = status.look()
    assert seen.rows.total is None
    assert any("job.json: not a readable job record" in note for note in seen.notes)
    overwrite(store, layout.JOB_KEY, data)
    seen = status.look()
    assert seen.rows.total is not None
    assert not any("job.json" in note for note in seen.notes)


def test_a_run_whose_run_json_was_replaced_is_noted(root: str) -> None:
    run = write(root)
    put_run_again(run, NOW + 60.0)
    assert not any("two configurations" in note for note in look(run).notes), "it is the same"
    store = opener(NOW + 60.0)(run)
    other = make_run(opener()(root).get(layout.JOB_KEY).data, limit=200)
    overwrite(store, layout.RUN_KEY, codec.encode_pretty(other))
    [note] = [note for note in look(run).notes if "two configurations" in note]
    assert "at least 12 chunks" in note
    assert "part-00000, part-00001, part-00002, …" in note
    assert "batchinfer verify" in note


def test_foreign_and_damaged_files_are_noted_and_left_out(root: str) -> None:
    run = write(root)
    store = opener()(run)
    store.create("outputs/.DS_Store", b"x")
    store.create("outputs/notes.txt", b"x")
    store.create("workers/readme.md", b"x")
    store.create("workers/broken.json", b'{"id": 3}')
    seen = look(run)
    assert len(seen.workers) == 3
    notes = "\n".join(seen.notes)
    assert "3 foreign files, left alone" in notes
    assert "broken.json" in notes


def test_an_empty_marker_is_no_marker(tmp_path: Path) -> None:
    run = write_local(tmp_path, SMALL)
    (run / "outputs" / "part-00019.succeed").write_bytes(b"")
    seen = run_status(
        StatusConfig(run=str(run)),
        open_store=__import__("batchinfer.storage.opening", fromlist=["x"]).open_store,
        clock=FakeClock(NOW),
    )
    assert seen.chunks.done == 12
    assert any("foreign" in note for note in seen.notes)


def test_a_worker_with_a_clock_hours_off_shows_as_any_other(tmp_path: Path) -> None:
    from batchinfer.storage.opening import open_store

    run = write_local(tmp_path, SMALL._replace(clock_off_seconds=-5 * 3600.0))
    seen = run_status(StatusConfig(run=str(run)), open_store=open_store, clock=FakeClock(NOW))
    view = seen.workers[1]
    assert view.state == "running"
    assert view.clock_offset_seconds == pytest.approx(5 * 3600, abs=1)
    assert any("clocks of 1 worker are off" in note for note in seen.notes)


def test_a_run_that_changes_while_it_is_read(root: str) -> None:
    """Records vanish and are renewed between the listing and their reading."""
    run = write(root)

    class Moving(MemoryStore):
        def get(self, key: str):
            if key == layout.worker_key("sky-2026-000"):
                self.delete([key])
            if key == layout.worker_key("sky-2026-001"):
                data, etag = super().get(key)
                record = codec.decode(data, Worker, name=key)
                later = msgspec.structs.replace(record, heartbeat=NOW + 20, beat=record.beat + 1)
                self.replace(key, codec.encode(later), etag)
            return super().get(key)

    def open_store(url: str) -> Store:
        return Moving(url, clock=lambda: NOW) if url == run else opener()(url)

    seen = run_status(StatusConfig(run=run), open_store=open_store, clock=FakeClock(NOW + 20))
    assert [view.id for view in seen.workers] == ["sky-2026-001", "sky-2026-002"]
    assert seen.workers[0].heartbeat_age_seconds == 0
    assert seen.workers[0].clock_offset_seconds == 0


def test_reading_while_markers_appear_never_fails(root: str) -> None:
    run = write(root)
    store = opener()(run)
    is_over = threading.Event()

    def publish() -> None:
        for index in range(300):
            store.create(f"outputs/extra-{index:05d}.succeed", b"{}")
        is_over.set()

    thread = threading.Thread(target=publish)
    thread.start()
    while not is_over.is_set():
        look(run)
    thread.join()
    assert any("300 markers are of no chunk" in note for note in look(run).notes)


# --------------------------------------------------------------------------- the screen


def shown(seen: Overview, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(seen))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_every_worker_and_the_figures(root: str) -> None:
    text = shown(look(write(root)))
    for word in (
        "sky-2026-000",
        "sky-2026-002",
        "gcp/us-central1",
        "12 of 20 done",
        "time left",
        "per million output tokens",
        "list prices of",
        "failed rows",
    ):
        assert word in text


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
        now_ended = msgspec.structs.replace(
            record, state=state, heartbeat=NOW, starts=[NOW], minutes=[]
        )
        overwrite(opener()(run), layout.worker_key(record.id), codec.encode(now_ended))
    text = shown(look(run))
    assert "lately" not in text
    assert text.count(why) == 2


def test_names_from_the_bucket_are_no_markup(root: str) -> None:
    run = write(root)
    record = msgspec.structs.replace(
        make_workers(SMALL)[0], id="x[bold red]evil[/]", errors={"[blink]code": 3}
    )
    opener()(run).create("workers/evil.json", codec.encode(record))
    text = shown(look(run))
    assert "x[bold red]evil[/]" in text
    assert "3 invalid" in text


def test_a_worker_that_lost_a_replica_is_warned_of(root: str) -> None:
    run = write(root)
    for index in range(12):
        record = msgspec.structs.replace(
            make_workers(SMALL)[0],
            id=f"x{index:02d}",
            engine={"model": "m", "num_replicas": 8},
            replicas_lost=1,
        )
        opener()(run).create(f"workers/x{index:02d}.json", codec.encode(record))
    text = shown(look(run))
    assert "warning: worker x00: 1 of 8 replicas lost" in text
    assert "warning: … and 2 more (--json has all)" in text


def test_a_hundred_workers_do_not_fill_the_screen_for_ever(root: str) -> None:
    run = write(root, SMALL._replace(num_workers=100))
    assert "and 40 more" in shown(look(run))


def test_watching_ends_when_the_run_is_done(root: str) -> None:
    run = write(root)
    store = opener()(run)

    class Publishing(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            for index in range(12, 20):
                store.create(layout.marker_key(f"part-{index:05d}"), b"{}")

    clock = Publishing(NOW)
    status = Status(StatusConfig(run=run), open_store=opener(), clock=clock)
    console = Console(file=io.StringIO(), width=120)
    assert watch(status, console, clock, 5.0).state == "done"
    assert clock.seconds == NOW + 5


def test_ctrl_c_ends_watching_with_the_last_look(root: str) -> None:
    class Impatient(FakeClock):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    status = Status(StatusConfig(run=write(root)), open_store=opener(), clock=Impatient(NOW))
    assert watch(status, Console(file=io.StringIO()), Impatient(NOW), 5.0).state == "running"


# --------------------------------------------------------------------------- the command


def test_the_last_line_of_stdout_is_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_local(tmp_path, SMALL)
    assert main.main(["status", str(run), "--price-per-hour", "2"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["chunks_done"] == 12
    assert out.count("\n") == 1
    assert "sky-2026-000" in err


def test_json_is_everything_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_local(tmp_path, SMALL)
    assert main.main(["status", str(run), "--json", "--price-per-hour", "2"]) == 0
    out, err = capsys.readouterr()
    seen = codec.decode(out.encode(), Overview, name="stdout")
    assert seen.cost.source == "--price-per-hour"
    assert err == ""


def test_no_run_is_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status", str(tmp_path / "nothing")]) == 2
    assert "no run there" in capsys.readouterr().err


def test_a_run_record_survives_a_round_trip() -> None:
    run = make_run(b"x")
    assert codec.decode(codec.encode(run), Run, name="run") == run


# --------------------------------------------------------------------------- a real bucket


@pytest.mark.s3
def test_on_s3_a_record_that_stands_still_ages_by_storages_clock(
    s3_url: Callable[..., str],
) -> None:
    """The etag of a listing and that of a read must be the same text, or every worker would look alive."""
    from batchinfer.storage.opening import open_store

    job = s3_url("job")
    run = f"{job}/runs/a"
    write_big_run(open_store(job), open_store(run), SMALL._replace(num_chunks=4))
    clock = FakeClock(NOW)
    reader = RunReader(open_store(run), open_store, clock)
    seen = reader.read()
    assert len(seen.workers) == 3
    assert len(seen.markers) == 2
    for worker in seen.workers:
        assert worker.age_seconds is None
        assert worker.modified > NOW, "storage's own time"
    counting = CountingStore(open_store(run))
    reader._store = counting
    reader.read()
    assert counting.requests["get"] == 0, "nothing moved, nothing is read again"


@pytest.mark.s3
def test_a_report_can_be_written_to_the_bucket(s3_url: Callable[..., str]) -> None:
    from batchinfer.runs.report import ReportConfig, run_report
    from batchinfer.storage.opening import open_store

    job = s3_url("job")
    run = f"{job}/runs/a"
    write_big_run(open_store(job), open_store(run), SMALL._replace(num_chunks=4))
    config = ReportConfig(run=run, output=f"{run}/report.html", price_per_hour=1.0)
    for _ in range(2):  # the second one replaces the first
        result = run_report(config, open_store=open_store, clock=FakeClock(NOW))
    page = open_store(run).get("report.html").data
    assert len(page) == result["bytes"]

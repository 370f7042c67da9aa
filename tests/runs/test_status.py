"""`batchinfer status`, from a bucket that may hold anything."""

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest
from rich.console import Console

from batchinfer.core import codec, layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError
from batchinfer.core.records import Run, Worker
from batchinfer.runs.overview import Overview
from batchinfer.runs.status import RunConfig, render, run_status, watch
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from big_run import NOW, Shape, in_memory, make_workers, write_in_memory
from counting_store import CountingStore
from fakes import FakeClock, MemoryStore, put_worker
from making import make_job, overwrite, run_worker_here

SMALL = Shape()


def change_worker(run: str, name: str, *, at: float = NOW, **values: Any) -> None:
    key = layout.statistics_key(name)
    record = codec.decode(in_memory(run).get(key).data, Worker, name=key)
    put_worker(MemoryStore(run, clock=lambda: at), msgspec.structs.replace(record, **values))


def look(run: str, *, open_store: Callable[[str], Store] = in_memory, **options: Any) -> Overview:
    return run_status(RunConfig(run=run, **options), open_store=open_store, clock=FakeClock(NOW))


def shown(seen: Overview, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(seen, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------- what it finds


def test_a_run_is_found_with_its_own_job(memory_url):
    run = write_in_memory(memory_url, SMALL)
    seen = look(run)
    assert (seen.chunks.done, seen.chunks.total, seen.job) == (12, 20, memory_url)
    assert (seen.state, len(seen.workers)) == ("running", 3)
    elsewhere = f"{memory_url}/other/place"
    record = codec.decode(in_memory(run).get(layout.RUN_KEY).data, Run, name="run.json")
    record = msgspec.structs.replace(record, recorded={"job": memory_url})
    in_memory(elsewhere).create(layout.RUN_KEY, codec.encode_pretty(record))
    assert look(elsewhere).chunks.total == 20


def test_requests_are_listing_pages_and_workers_not_markers(memory_url):
    shape = Shape(num_chunks=1200, rows_per_chunk=1, num_workers=5, done_share=1.0)
    run = write_in_memory(memory_url, shape)
    of_run, of_job = CountingStore(in_memory(run)), CountingStore(in_memory(memory_url))
    look(run, open_store={run: of_run, memory_url: of_job}.__getitem__)
    requests = of_run.requests + of_job.requests
    assert requests["get"] == 2 * 5 + 2  # leases and statistics, run.json, job.json
    # 2400 objects in outputs/, one page each of checkpoints/, workers/, launches/, and of stop.json
    assert requests["list"] == 3 + 1 + 1 + 1 + 1
    assert set(requests) <= {"get", "list"}, "status changes nothing"


@pytest.mark.parametrize("limit", [[], ["--limit", "10"]])
def test_rows_that_were_repaired_have_not_failed(tmp_path, limit):
    """They went on to count as failed, and were repaired again. Of a run with a limit, they counted twice."""
    job, run = tmp_path / "job", str(tmp_path / "run")
    rows = 15 if limit else 10
    make_job(job, rows=rows, per_chunk=5, make_row=lambda row: {"prompt": "x" if row % 5 else ""})
    run_worker_here(job, run, *limit)
    run_worker_here(job, run, *limit, "--retry-errors")
    config = RunConfig(run=run, job=str(job))
    seen = run_status(config, open_store=open_store, clock=SystemClock())
    assert (seen.totals.rows_ok, seen.totals.rows_error) == (8, 2)
    open_store(run).delete([layout.marker_key("part-00000", n) for n in (0, 1)])
    with mock.patch("batchinfer.runs.status.read_markers") as read:
        run_status(config, open_store=open_store, clock=SystemClock())
    read.assert_not_called()  # an unfinished run is looked at often


def test_what_cannot_be_read_or_vanishes_meanwhile_is_left_out(
    memory_url,
):
    run = write_in_memory(memory_url, SMALL)
    store = in_memory(run)
    store.create("outputs/part-00019.succeed", b"{")
    store.create("workers/broken.json", b'{"id": 3}')
    for key in ("outputs/part-00020.0.jsonl", layout.marker_key("part-00020")):
        store.create(key, b" " * 500)
    key = "workers/sky-2026-002.stats.json"
    odd = store.get(key).data.replace(b'"prompt_tokens":', b'"prompt_tokens":1' + b"0" * 400)
    overwrite(store, key, odd)

    class Moving(MemoryStore):
        def get(self, key: str):
            if key == layout.worker_key("sky-2026-000"):
                self.delete([key])
            return super().get(key)

    seen = look(run, open_store=lambda url: Moving(url, clock=lambda: NOW))
    assert [view.id for view in seen.workers] == ["sky-2026-001", "sky-2026-002"]
    assert seen.chunks.done == 12
    notes = "\n".join(seen.notes)
    assert "broken.json" in notes
    assert "1 markers are of no chunk of the job (part-00020)" in notes
    assert "sky-2026-002.stats.json" in notes, "a number that no sum can hold"


def test_a_run_whose_first_worker_still_loads_has_no_run_json(memory_url):
    run = write_in_memory(memory_url, SMALL._replace(done_share=0.0))
    in_memory(run).delete([layout.RUN_KEY])
    for record in make_workers(SMALL):
        change_worker(run, record.id, state="loading")
    seen = look(run)
    assert (seen.state, seen.model) == ("loading", "meta-llama/Llama-3.1-8B-Instruct")
    put_worker(in_memory(f"{memory_url}/else"), make_workers(SMALL)[0])
    assert look(f"{memory_url}/else", job=memory_url).chunks.total == 20
    with pytest.raises(InputError, match="no engine has loaded yet"):
        look(f"{memory_url}/else")


# --------------------------------------------------------------------------- the screen


def test_the_screen_has_every_worker_and_says_who_needs_a_look(memory_url):
    run = write_in_memory(memory_url, SMALL._replace(num_workers=5))
    change_worker(run, "sky-2026-001", at=NOW - 300, heartbeat=NOW - 300)
    text = shown(look(run, price_per_hour=2.0))
    words = ("sky-2026-004", "gcp/us-central1", "12 of 20 done", "1 gone (sky-2026-001)")
    for word in (*words, "$8.00 an hour"):
        assert word in text
    assert max(map(len, shown(look(run), width=80).splitlines())) <= 80
    assert "and 40 more" in shown(
        look(write_in_memory(f"{memory_url}/b", SMALL._replace(num_workers=100, num_chunks=100)))
    )


WHY_NOT = {"stopped": "no worker is at work", "loading": "the engine is loading"}


@pytest.mark.parametrize("state", WHY_NOT)
def test_between_two_starts_the_rows_of_the_last_one_are_not_denied(memory_url, state):
    """It said that no row was finished lately, right after hundreds were."""
    run = write_in_memory(memory_url, SMALL)
    for record in make_workers(SMALL):
        change_worker(run, record.id, state=state, heartbeat=NOW, last_start=NOW, minutes=[])
    seen = look(run)
    assert seen.rows.in_progress == 30, "those in checkpoints"
    assert "lately" not in (text := shown(seen))
    assert text.count(WHY_NOT[state]) == 2


def test_watching_ends_when_the_run_is_done_or_with_ctrl_c(memory_url):
    run = write_in_memory(memory_url, SMALL)

    def publish(_: float) -> None:
        for name in (f"part-{index:05d}" for index in range(12, 20)):
            in_memory(run).create(layout.output_key(layout.output_file(name, "0")), b"{}")
            in_memory(run).create(layout.marker_key(name), b" " * 500)

    for asleep, state in ((KeyboardInterrupt, "running"), (publish, "done")):
        clock = mock.Mock(sleep=mock.Mock(side_effect=asleep))
        console = Console(file=io.StringIO(), width=120)
        assert watch(lambda: look(run), console, clock, 5.0).state == state


# --------------------------------------------------------------------------- the command


def test_the_last_line_of_stdout_is_one_object_and_json_is_everything(memory_url, call):
    run = write_in_memory(memory_url, SMALL)
    done = call("status", run)
    assert (done.status, done.out.count("\n"), done.result["chunks"]["done"]) == (0, 1, 12)
    assert "sky-2026-000" in done.err
    done = call("status", run, "--json", "--price-per-hour", "2")
    assert (done.result["cost"]["source"], len(done.result["workers"])) == ("--price-per-hour", 3)
    assert done.err == ""

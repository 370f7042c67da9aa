"""`batchinfer status`, from a bucket that may hold anything."""

import io
from typing import Any
from unittest import mock

import msgspec
import pytest
from rich.console import Console

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError
from batchinfer.core.records import Worker
from batchinfer.ledger.looks import look_at, read_workers
from batchinfer.runs.overview import Overview
from batchinfer.runs.status import RunConfig, render, run_status, watch
from batchinfer.storage.opening import open_store
from big_run import NOW, Shape, in_memory, make_workers, write_in_memory
from fakes import FakeClock, MemoryStore, put_worker
from making import make_job, run_worker_here

SMALL = Shape()


def change_worker(run: str, name: str, *, at: float = NOW, **values: Any) -> None:
    key = layout.statistics_key(name)
    record = codec.decode(in_memory(run).get(key).data, Worker, name=key)
    put_worker(MemoryStore(run, clock=lambda: at), msgspec.structs.replace(record, **values))


def look(run: str, **options: Any) -> Overview:
    return run_status(RunConfig(run=run, **options), open_store=in_memory, clock=FakeClock(NOW))


def shown(seen: Overview, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(seen, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------- what it finds


@pytest.mark.parametrize("limit", [[], ["--limit", "10"]])
def test_rows_that_were_repaired_have_not_failed(tmp_path, limit):
    """They went on to count as failed, and were repaired again. Of a run with a limit, they counted twice."""
    job, run = tmp_path / "job", str(tmp_path / "run")
    rows = 15 if limit else 10
    make_job(job, rows=rows, per_chunk=5, make_row=lambda row: {"prompt": "x" if row % 5 else ""})
    run_worker_here(job, run, *limit)
    run_worker_here(job, run, *limit, "--retry-errors")
    config = RunConfig(run=run, job=str(job))
    seen = run_status(config, open_store=open_store, clock=Clock())
    assert (seen.totals.rows_ok, seen.totals.rows_error) == (8, 2)
    store = open_store(run)
    store.delete([key.key for key in store.list(layout.OUTPUTS) if "succeed" in key.key][1::2])
    seen = run_status(config, open_store=open_store, clock=Clock())
    assert seen.totals.rows_done == seen.rows.total, "also while they are asked again"
    store.delete([layout.marker_key("part-00000", n) for n in (0, 1)])
    with mock.patch("batchinfer.runs.status.read_markers") as read:
        run_status(config, open_store=open_store, clock=Clock())
    read.assert_not_called()  # an unfinished run is looked at often


def test_a_run_whose_first_worker_still_loads_has_no_run_json(memory_url):
    run = write_in_memory(memory_url, SMALL._replace(done_share=0.0))
    in_memory(run).delete([layout.RUN_KEY])
    for record in make_workers(SMALL):
        change_worker(run, record.id, state="loading")
    seen = look(run)
    assert (seen.state, seen.model) == ("loading", "meta-llama/Llama-3.1-8B-Instruct")
    put_worker(in_memory(f"{memory_url}/else"), make_workers(SMALL)[0])
    assert look(f"{memory_url}/else", job=memory_url).chunks.total == 20
    with pytest.raises(InputError, match="where its job lies"):
        look(f"{memory_url}/else")


def test_a_chunk_that_is_done_during_a_look_does_not_vanish_from_it(memory_url):
    """Its checkpoints go once its marker is there: so these are listed first, and markers after them."""
    store = in_memory(write_in_memory(memory_url, SMALL))
    with mock.patch.object(store, "list", wraps=store.list) as listed:
        look_at(store, in_memory, Clock())
    prefixes = [call.args[0] for call in listed.mock_calls if call.args]
    assert prefixes.index(layout.CHECKPOINTS) < prefixes.index(layout.OUTPUTS)


def test_a_worker_that_ends_during_a_look_is_not_seen_without_its_reason(memory_url):
    """It closes its lease, and then writes why into its statistics: so leases are read first."""
    store = in_memory(write_in_memory(memory_url, SMALL))
    with mock.patch.object(store, "get", wraps=store.get) as read:
        read_workers(store)
    keys = [call.args[0] for call in read.mock_calls if call.args]
    are_statistics = [key.endswith(layout.STATISTICS_SUFFIX) for key in keys]
    assert are_statistics == sorted(are_statistics)
    assert {*are_statistics} == {False, True}


# --------------------------------------------------------------------------- the screen


def test_the_screen_has_every_worker_and_says_who_needs_a_look(memory_url):
    run = write_in_memory(memory_url, SMALL._replace(num_workers=5))
    change_worker(run, "sky-2026-001", at=NOW - 300, heartbeat=NOW - 300)
    text = shown(look(run, price_per_hour=2.0))
    words = ("sky-2026-004", "gcp/us-central1", "12 of 20 done", "1 gone (sky-2026-001)")
    for word in (*words, "$8.00 an hour"):
        assert word in text
    long = "20261128-101112-7f3a-0000"
    change_worker(run, "sky-2026-000", id=f"{long}1", state="stopped", rows_ok=1_234_567)
    text = shown(look(run), width=120)
    assert text.index("sky-2026-004") < text.index(long), "those at work come first"
    assert "1,234,574" in text
    narrow = shown(look(run), width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow, "nothing is cut"


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
    assert console.file.getvalue().count("meta-llama") == 2, "a log has every look"


# --------------------------------------------------------------------------- the command


def test_the_last_line_of_stdout_is_one_object_and_json_is_everything(memory_url, call):
    run = write_in_memory(memory_url, SMALL)
    done = call("status", run)
    assert (done.status, done.out.count("\n"), done.result["chunks"]["done"]) == (0, 1, 12)
    assert "sky-2026-000" in done.err
    done = call("status", run, "--json", "--price-per-hour", "2")
    assert (done.result["cost"]["source"], len(done.result["workers"])) == ("--price-per-hour", 3)
    assert done.err == ""

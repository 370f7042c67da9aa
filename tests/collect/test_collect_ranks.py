"""`collect --rank I --of N`: many processes write the files of one, whatever is killed, repeated or done twice."""

from __future__ import annotations

import random
import secrets
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.cli import main
from batchinfer.collect import destinations
from batchinfer.collect.command import run_collect
from batchinfer.collect.table import CollectConfig
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError, RunUnsound
from batchinfer.storage.opening import open_store
from making import (
    finish_process,
    make_job,
    overwrite,
    read_marker,
    run_worker_here,
    start_killed_on_s3,
    start_process,
)
from rank_cases import MISTAKES, Killed, assert_refused, shuffled_ranks, statuses_at_once

ROWS = 53


def make_row(index: int) -> dict[str, Any]:
    row = {"prompt": f"hello {index} " + "x " * (index % 7), "mixed": index if index % 3 else "t"}
    if index % 10 == 7:
        del row["prompt"]  # becomes an error row
    return row


@pytest.fixture(scope="module")
def run() -> str:
    url = f"memory://ranks-{secrets.token_hex(4)}"
    make_job(f"{url}/job", rows=ROWS, per_chunk=10, make_row=make_row)
    for name in ("a", "b"):
        run_worker_here(f"{url}/job", f"{url}/job/runs/{name}", "--keep", "mixed")
    return f"{url}/job/runs/a"


def collect(run: str, dest: str, **options: Any) -> dict[str, Any]:
    config = CollectConfig(run=run, dest=dest, **options)
    return run_collect(config, open_store=open_store, clock=SystemClock())


def contents(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {info.key: store.get(info.key).data for info in store.list()}


def fresh() -> str:
    return f"memory://out-{secrets.token_hex(8)}/table"


def alone(run: str, **options: Any) -> dict[str, bytes]:
    dest = fresh()
    collect(run, dest, **options)
    return contents(dest)


@settings(max_examples=25)
@given(
    st.sampled_from(["parquet", "jsonl", "csv", "lines"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 30),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_ranks_in_any_order_write_the_files_of_one_process(
    run: str,
    kind: str,
    with_source: bool,
    is_double: bool,
    shard_rows: int,
    of: int,
    chance: random.Random,
) -> None:
    options: dict[str, Any] = {"format": kind, "shard_rows": shard_rows}
    options |= {"more_runs": [f"{run[:-1]}b"]} if is_double else {}
    options |= {"with_source": with_source and kind != "lines"}
    order = shuffled_ranks(of, chance)
    dest = fresh()
    results = [collect(run, dest, rank=rank, num_ranks=of, **options) for rank in order]
    assert contents(dest) == alone(run, **options)
    statuses = [result["status"] for result in results]
    end = statuses.index("SUCCESS")
    assert set(statuses[:end]) <= {"PART"}
    assert set(statuses[end + 1 :]) <= {"UNCHANGED"}
    assert results[end]["rows"] == ROWS * (1 + is_double)
    assert results[end]["rows_error"] == 5 * (1 + is_double)


def test_a_rank_may_be_killed_after_any_write(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"shard_rows": 10}
    expected = alone(run, **options)
    for point in range(20):
        dest = fresh()
        collect(run, dest, rank=0, num_ranks=2, **options)
        store = open_store(dest)
        left = point

        def count(write: Callable[..., str], *arguments: Any) -> str:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return write(*arguments)

        def opened(url: str, dest: str = dest, store: Any = store) -> Any:
            return store if url == dest else open_store(url)

        with monkeypatch.context() as patch:
            for name in ("create", "create_file"):
                write = getattr(store, name)
                patch.setattr(store, name, lambda *a, w=write: count(w, *a))
            config = CollectConfig(run=run, dest=dest, rank=1, num_ranks=2, **options)
            try:
                run_collect(config, open_store=opened, clock=SystemClock())
            except Killed:
                was_killed = True
            else:
                was_killed = False
        collect(run, dest, rank=1, num_ranks=2, **options)
        assert contents(dest) == expected, f"killed after {point} writes"
        if not was_killed:
            break
    assert point == 7  # a rank has three files and their records; the last one writes _COLLECTED


def test_ranks_at_once_and_twice_write_one_collection(run: str) -> None:
    options: dict[str, Any] = {"shard_rows": 4}
    expected = alone(run, **options)
    for _ in range(3):
        dest = fresh()
        work = partial(collect, run, dest, num_ranks=4, **options)
        assert "SUCCESS" in statuses_at_once(lambda rank: work(rank=rank))  # noqa: B023
        assert contents(dest) == expected


def test_a_rank_that_comes_late_leaves_nothing(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began before the collection was complete, and writes its record after the records were removed."""
    dest = fresh()
    put = destinations.FolderDestination.put_shared

    def others_first(*arguments: Any) -> str:
        monkeypatch.setattr(destinations.FolderDestination, "put_shared", put)
        for rank in (0, 1):
            collect(run, dest, rank=rank, num_ranks=2, shard_rows=30)
        return put(*arguments)

    monkeypatch.setattr(destinations.FolderDestination, "put_shared", others_first)
    assert collect(run, dest, rank=1, num_ranks=2, shard_rows=30)["status"] == "SUCCESS"
    assert contents(dest) == alone(run, shard_rows=30)


def test_files_of_another_collection_are_not_replaced(run: str) -> None:
    dest = fresh()
    collect(run, dest, rank=0, num_ranks=2, shard_rows=20)
    with pytest.raises(InputError, match="is there with other bytes") as raised:
        collect(run, dest, rank=0, num_ranks=2, shard_rows=10)
    assert "start all ranks again" in raised.value.hint
    collect(run, dest, rank=1, num_ranks=2, shard_rows=20)
    assert contents(dest) == alone(run, shard_rows=20)


def test_ranks_that_would_wait_for_each_other_in_vain_say_so(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    dest = fresh()
    collect(run, dest, rank=0, num_ranks=2, shard_rows=20)
    assert "all ranks must have the same" not in caplog.text
    other = collect(run, dest, rank=1, num_ranks=2, shard_rows=20, format="jsonl")
    assert other["status"] == "PART"
    assert "is of ranks with other options, another run or another version" in caplog.text


def test_damage_ends_the_rank_that_finds_it(run: str) -> None:
    place = f"memory://damaged-{secrets.token_hex(4)}"
    make_job(f"{place}/job", rows=30, per_chunk=10)
    run_worker_here(f"{place}/job", f"{place}/run")
    store = open_store(f"{place}/run")
    key = f"outputs/{read_marker(store, 'part-00002').output}"
    data = store.get(key).data
    overwrite(store, key, data.replace(b"hello", b"HELLO", 1))
    dest = fresh()
    assert collect(f"{place}/run", dest, rank=0, num_ranks=3, shard_rows=10)["status"] == "PART"
    with pytest.raises(RunUnsound, match="part-00002"):
        collect(f"{place}/run", dest, rank=2, num_ranks=3, shard_rows=10)
    assert destinations.RECORD_KEY not in contents(dest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *MISTAKES,
        (["--rank", "0", "--of", "2", "--partial"], "--partial: not together with --rank"),
        (["--rank", "0", "--of", "2", "--where", "status=ok"], "--where: not together with --rank"),
        (["--rank", "0", "--of", "2", "--sample", "3"], "--sample: not together with --rank"),
        (["--rank", "0", "--of", "2", "-o", "out.parquet"], "is no folder of a disk or bucket"),
        (["--rank", "0", "--of", "2", "-o", "hf://datasets/a/b"], "is no folder of a disk"),
    ],
)
def test_options_that_ranks_cannot_have_are_refused(
    options: list[str], message: str, run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dest = [] if "-o" in options else [str(tmp_path / "out")]
    assert_refused(["collect", run, *dest, *options], message, tmp_path / "out", capfd)


@pytest.mark.s3
def test_ranks_killed_on_s3_write_the_files_of_one_process(s3_url: Callable[[str], str]) -> None:
    """Two processes at once, killed by SIGKILL after some writes, until one of them has completed the folder."""
    job = s3_url("job")
    make_job(job, rows=ROWS, per_chunk=10, make_row=make_row)
    run_worker_here(job, f"{job}/runs/a")
    one, many = s3_url("one"), s3_url("many")
    options = ["--shard-rows", "7", "--with-source"]
    assert main.main(["collect", f"{job}/runs/a", one, *options]) == 0

    def start(rank: int, writes: int | None = None) -> subprocess.Popen[str]:
        words = ["collect", f"{job}/runs/a", many, *options, "--rank", str(rank), "--of", "2"]
        return start_process(words) if writes is None else start_killed_on_s3(words, writes)

    # Each rank has four files, and writes a file and a record in turn.
    processes = [start(rank, 5) for rank in (0, 1)]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
    assert destinations.RECORD_KEY not in contents(many)
    ended = [finish_process(process) for process in [start(rank) for rank in (1, 0)]]
    assert {each.status for each in ended} == {0}, ended
    assert "SUCCESS" in {each.result["status"] for each in ended}
    assert contents(many) == contents(one)

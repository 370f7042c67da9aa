"""`split --rank I --of N`: the job of many processes is that of one, whatever is killed, repeated or done twice."""

from __future__ import annotations

import random
import secrets
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.cli import main
from batchinfer.core import layout
from batchinfer.core.errors import InputError
from batchinfer.split import ranks
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.storage import Store
from batchinfer.storage.memory import MemoryStore
from batchinfer.storage.opening import open_store
from making import finish_process, start_killed_on_s3, start_process
from rank_cases import MISTAKES, Killed, assert_refused, shuffled_ranks, statuses_at_once


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 rows in two files of small row groups, with NaN, equal ids and a column that a job names itself."""
    folder = tmp_path_factory.mktemp("data")
    for index, rows in enumerate((range(60), range(60, 100))):
        columns = {
            "text": [f"row {row} " * (row % 7) for row in rows],
            "score": [float("nan") if row % 9 == 0 else row / 3 for row in rows],
            "name": [f"id {row % 90}" for row in rows],
            "_row": list(rows),
        }
        pq.write_table(pa.table(columns), folder / f"{index}.parquet", row_group_size=7)
    return folder


def fresh_store() -> MemoryStore:
    return MemoryStore(secrets.token_hex(8))


def split(
    source: Path, store: Store, *, rank: int | None = None, of: int | None = None, **options: Any
) -> dict[str, Any]:
    config = SplitConfig(
        sources=[str(source)],
        output=store.url,
        rank=rank,
        num_ranks=of,
        id_column="name",
        **options,
    )
    return run_split(config, store=store)


def contents(store: Store) -> dict[str, bytes]:
    return {info.key: store.get(info.key).data for info in store.list()}


def alone(source: Path, **options: Any) -> dict[str, bytes]:
    store = fresh_store()
    split(source, store, **options)
    return contents(store)


@settings(max_examples=25)
@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(["none", "zstd"]),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_ranks_in_any_order_make_the_job_of_one_process(
    source: Path,
    num_chunks: int,
    of: int,
    compression: str,
    most_slices: int,
    chance: random.Random,
) -> None:
    options = {"num_chunks": num_chunks, "compression": compression, "num_workers": 1}
    store = fresh_store()
    order = shuffled_ranks(of, chance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_SLICES_PER_RANK", most_slices)
        results = [split(source, store, rank=rank, of=of, **options) for rank in order]
    assert contents(store) == alone(source, **options)
    statuses = [result["status"] for result in results]
    assert statuses.count("done") == 1
    every = next(place for place in range(len(order)) if len(set(order[: place + 1])) == of)
    # A rank without chunks of its own may be missing when the job is complete.
    assert statuses.index("done") <= every
    assert set(statuses[statuses.index("done") + 1 :]) <= {"unchanged"}
    done = results[statuses.index("done")]
    assert (done["rows"], done["duplicate_ids"], done["null_floats"]) == (100, 10, 12)


def test_a_rank_may_be_killed_after_any_write(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_chunks": 6, "num_workers": 2}
    expected = alone(source, **options)
    point = 0
    while True:
        store = fresh_store()
        split(source, store, rank=0, of=2, **options)
        writes = 0

        def count(key: str, write: Callable[..., str], *arguments: Any, **more: Any) -> str:
            nonlocal writes
            writes += 1
            if writes > point:  # noqa: B023 - used in this turn of the loop
                raise Killed
            return write(key, *arguments, **more)

        with monkeypatch.context() as patch:
            for name in ("create", "put_file"):
                write = getattr(store, name)
                patch.setattr(store, name, lambda key, *a, w=write, **m: count(key, w, *a, **m))
            try:
                split(source, store, rank=1, of=2, **options)
            except Killed:
                was_killed = True
            else:
                was_killed = False
        split(source, store, rank=1, of=2, **options)
        assert contents(store) == expected, f"killed after {point} writes"
        if not was_killed:
            break
        point += 1
    assert point > 10  # chunks, ids and records of three slices, manifests, job.json


def test_ranks_at_once_and_twice_make_one_job(source: Path) -> None:
    options: dict[str, Any] = {"num_chunks": 12, "num_workers": 3}
    expected = alone(source, **options)
    for _ in range(3):
        store = fresh_store()
        work = partial(split, source, store, of=4, **options)
        assert "done" in statuses_at_once(lambda rank: work(rank=rank))  # noqa: B023
        assert contents(store) == expected


def test_a_rank_that_comes_late_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began before the job was complete, and writes its record after the records were removed."""
    options: dict[str, Any] = {"num_chunks": 4}
    store = fresh_store()
    record = ranks._record_slice

    def others_first(*arguments: Any) -> None:
        monkeypatch.setattr(ranks, "_record_slice", record)
        for rank in (0, 1):
            split(source, store, rank=rank, of=2, **options)
        record(*arguments)

    monkeypatch.setattr(ranks, "_record_slice", others_first)
    assert split(source, store, rank=1, of=2, **options)["status"] == "done"
    assert contents(store) == alone(source, **options)


def test_ranks_with_other_options_are_refused(source: Path) -> None:
    store = fresh_store()
    split(source, store, rank=0, of=2, num_chunks=4)
    with pytest.raises(InputError, match="is there with other bytes") as raised:
        split(source, store, rank=0, of=2, num_chunks=5)
    assert "start all ranks again" in raised.value.hint
    assert not [key for key in contents(store) if key == layout.JOB_KEY]
    split(source, store, rank=1, of=2, num_chunks=4)
    assert contents(store) == alone(source, num_chunks=4)


@pytest.mark.parametrize(
    ("of", "options"),
    [(2, {"num_workers": 2}), (2, {"limit": 99}), (3, {}), (2, {"id_column": ""})],
)
def test_ranks_that_would_wait_for_each_other_in_vain_say_so(
    of: int, options: dict[str, Any], source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 differs from rank 0, but no object has the same key and other bytes."""
    store = fresh_store()
    split(source, store, rank=0, of=2, num_chunks=4)
    assert "all ranks must have the same" not in caplog.text
    options = {"num_chunks": 4, "id_column": "name"} | options
    config = SplitConfig(sources=[str(source)], output=store.url, rank=1, num_ranks=of, **options)
    assert run_split(config, store=store)["status"] == "part"
    assert "is of ranks with another --of, other options or other sources" in caplog.text


def test_a_rank_does_not_call_the_job_of_other_ranks_its_own(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with other options complete a job of the same chunks while it works."""
    store = fresh_store()
    record = ranks._record_slice

    def others_first(*arguments: Any) -> None:
        monkeypatch.setattr(ranks, "_record_slice", record)
        for rank in (0, 1):
            split(source, store, rank=rank, of=2, num_chunks=4, num_workers=2)
        record(*arguments)

    monkeypatch.setattr(ranks, "_record_slice", others_first)
    with pytest.raises(InputError, match="differs in num_workers"):
        split(source, store, rank=1, of=2, num_chunks=4)
    assert contents(store) == alone(source, num_chunks=4, num_workers=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *MISTAKES,
        (["--rank", "0", "--of", "2", "--append"], "--append: not together with --rank"),
    ],
)
def test_options_that_ranks_cannot_have_are_refused(
    options: list[str],
    message: str,
    source: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["split", str(source), "--output", str(tmp_path / "job"), *options]
    assert_refused(words, message, tmp_path / "job", capfd)


@pytest.mark.s3
def test_ranks_killed_on_s3_make_the_job_of_one_process(
    s3_url: Callable[[str], str], source: Path
) -> None:
    """Two processes at once, killed by SIGKILL after some writes, until one of them has completed the job."""
    one, many = s3_url("one"), s3_url("many")
    options = ["--num-chunks", "8", "--num-workers", "2", "--id-column", "name"]
    assert main.main(["split", str(source), "--output", one, *options]) == 0

    def start(rank: int, writes: int | None = None) -> subprocess.Popen[str]:
        words = ["split", str(source), "--output", many, *options, "--rank", str(rank), "--of", "2"]
        return start_process(words) if writes is None else start_killed_on_s3(words, writes)

    # Each rank has four slices of three writes: a chunk, ids, a record. A job has three manifests, and then job.json.
    for writes in (7, 9):
        processes = [start(rank, writes) for rank in (0, 1)]
        for process in processes:
            process.communicate(timeout=120)
        assert -signal.SIGKILL in {process.returncode for process in processes}
        assert layout.JOB_KEY not in contents(open_store(many))
    last = finish_process(start(1))
    assert (last.status, last.result["status"]) == (0, "done"), last.stderr
    assert contents(open_store(many)) == contents(open_store(one))

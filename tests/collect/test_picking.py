"""`collect` of some rows only (--where, --sample), and of several runs over one job."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli import main
from batchinfer.collect.command import run_collect, run_names
from batchinfer.collect.picking import Picking, RowPicker, parse_condition
from batchinfer.collect.table import CollectConfig
from batchinfer.core import codec, layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import ConfigError, InputError, RunUnsound
from batchinfer.storage.opening import open_store
from fake_hub_upload import UploadHub
from making import (
    change_marker,
    finish_process,
    make_job,
    overwrite,
    read_marker,
    run_worker_here,
    start_process,
)
from peft_adapter import write_adapter

ROWS = 60
FAILED = {5, 17, 30, 44}
CUT = {number for number in range(ROWS) if number % 3 == 0} - FAILED


def make_row(index: int) -> dict[str, Any]:
    """Rows in `FAILED` have no prompt; with --max-tokens 4, the answers to the rows in `CUT` are cut."""
    row = {"prompt": "a b c d e f" if index % 3 == 0 else f"row {index}", "n": index}
    if index in FAILED:
        del row["prompt"]
    return row


def collect(run: str, dest: str | Path, **options: Any) -> dict[str, Any]:
    config = CollectConfig(run=run, dest=str(dest), **options)
    return run_collect(config, open_store=open_store, clock=SystemClock())


def read_rows(dest: str | Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import csv, parquet

    path = Path(dest)
    paths = sorted(path.glob("part-*")) if path.is_dir() else [path]
    if paths[0].suffix == ".jsonl":
        return [json.loads(line) for one in paths for line in one.read_text().splitlines()]
    read = parquet.read_table if paths[0].suffix == ".parquet" else csv.read_csv
    found: list[dict[str, Any]] = pa.concat_tables(map(read, paths)).to_pylist()
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("picking") / "job")
    make_job(url, rows=ROWS, per_chunk=20, make_row=make_row)
    run_worker_here(url, f"{url}/runs/short", "--max-tokens", "4")
    run_worker_here(url, f"{url}/runs/batch", "--output-format", "openai-batch")
    run_worker_here(url, f"{url}/runs/many", "--n", "2", "--max-tokens", "4")
    return url


@pytest.fixture
def run(job: str) -> str:
    return f"{job}/runs/short"


# --------------------------------------------------------------------------- conditions


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        (["status=error"], FAILED),
        (["status!=error"], set(range(ROWS)) - FAILED),
        (["status = ok, error"], set(range(ROWS))),
        (["finish_reason=length"], CUT),
        (["finish_reason!=stop"], CUT | FAILED),
        (["finish_reason!=stop", "status=ok"], CUT),
        (["error_code=missing_column,prompt_too_long"], FAILED),
        (["error_code!=missing_column"], set(range(ROWS)) - FAILED),
        (["error_code=prompt_too_long"], set()),
    ],
)
@pytest.mark.parametrize("name", ["answers.parquet", "answers.jsonl"])
def test_only_rows_that_fulfil_all_conditions_are_collected(
    where: list[str], rows: set[int], name: str, run: str, tmp_path: Path
) -> None:
    result = collect(run, tmp_path / name, where=where, with_source=True)
    found = read_rows(tmp_path / name)
    assert [row["row"] for row in found] == sorted(rows)
    assert [row["n"] for row in found] == sorted(rows)
    assert (result["rows"], result["file_rows"]) == (len(rows), len(rows))
    assert result["rows_error"] == len(rows & FAILED)
    assert result["missing_chunks"] == 0


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "lines"])
@pytest.mark.parametrize("name", ["short", "batch"])
def test_every_format_takes_conditions(kind: str, name: str, job: str, tmp_path: Path) -> None:
    result = collect(
        f"{job}/runs/{name}", tmp_path / "out", format=kind, where=["status=error"], shard_rows=3
    )
    assert (result["rows"], result["rows_error"], result["files"]) == (4, 4, 2)
    found = read_rows(tmp_path / "out")
    key = {"lines": {"short": "_id", "batch": "custom_id"}[name]}.get(kind, "id")
    assert [str(row[key]) for row in found] == ["5", "17", "30", "44"]


def test_lines_that_are_taken_are_unchanged(run: str, tmp_path: Path) -> None:
    collect(run, tmp_path / "all.jsonl", format="lines")
    collect(run, tmp_path / "some.jsonl", format="lines", where=["finish_reason=length"])
    lines = (tmp_path / "all.jsonl").read_bytes().splitlines()
    assert (tmp_path / "some.jsonl").read_bytes().splitlines() == [
        line for line in lines if b'"length"' in line
    ]


def test_one_answer_that_fits_takes_the_whole_row(job: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"where": ["finish_reason=length"], "explode": True}
    collect(f"{job}/runs/many", tmp_path / "rows", **options)
    assert Counter(row["row"] for row in read_rows(tmp_path / "rows")) == dict.fromkeys(CUT, 2)


def test_no_row_that_fits_makes_a_table_without_rows(run: str, tmp_path: Path) -> None:
    collect(run, tmp_path / "all.parquet")
    result = collect(run, tmp_path / "none.parquet", where=["error_code=none_such"])
    assert (result["status"], result["rows"], result["files"]) == ("SUCCESS", 0, 1)
    from pyarrow import parquet

    schema = parquet.read_schema(tmp_path / "all.parquet")
    assert parquet.read_table(tmp_path / "none.parquet").schema == schema
    for kind in ("csv", "jsonl"):
        collect(run, tmp_path / f"none.{kind}", where=["error_code=none_such"])
    assert (tmp_path / "none.csv").read_text().startswith('"row","id","status"')
    assert (tmp_path / "none.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("text=a", r"no condition on 'text', expected one of status, error_code, finish_reason$"),
        ("finish_reasons=stop", r"did you mean 'finish_reason'\?"),
        ("status", r"is no condition, expected COLUMN=VALUE"),
        ("status>3", r"is no condition"),
        ("error_code==x", r"is no condition"),
        ("error_code!==x", r"is no condition"),
        ("status == error", r"is no condition"),
        ("status=failed", r"has the value 'failed', expected one of ok, error"),
        ("finish_reason=", r"has the value '', expected values separated by commas"),
    ],
)
def test_other_conditions_are_refused_with_what_there_is(
    where: str, message: str, run: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        collect(run, tmp_path / "out", where=[where])
    import re

    assert re.search(message, error.value.message), error.value.message
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------- samples


def test_a_sample_has_its_size_its_order_and_repeats(run: str, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        result = collect(run, tmp_path / f"{name}.parquet", sample=20, seed=seed, with_source=True)
        assert (result["rows"], result["file_rows"]) == (20, 20)
    a, b, c = ((tmp_path / f"{name}.parquet").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    rows = read_rows(tmp_path / "a.parquet")
    numbers = [row["row"] for row in rows]
    assert numbers == sorted(set(numbers))
    assert [row["n"] for row in rows] == numbers
    result = collect(run, tmp_path / "all.parquet", sample=ROWS + 1)
    assert result["rows"] == ROWS


def test_lines_and_tables_have_the_same_sample(run: str, tmp_path: Path) -> None:
    collect(run, tmp_path / "table.jsonl", sample=15)
    result = collect(run, tmp_path / "lines.jsonl", format="lines", sample=15)
    numbers = [row["row"] for row in read_rows(tmp_path / "table.jsonl")]
    assert [row["_row"] for row in read_rows(tmp_path / "lines.jsonl")] == numbers
    assert result["rows_error"] == len(FAILED.intersection(numbers))


def test_a_sample_is_drawn_from_the_rows_that_fit(run: str, tmp_path: Path) -> None:
    collect(run, tmp_path / "some.jsonl", where=["finish_reason=length"], sample=7)
    numbers = {row["row"] for row in read_rows(tmp_path / "some.jsonl")}
    assert len(numbers) == 7
    assert numbers < CUT


def test_every_row_has_the_same_chance() -> None:
    drawn: Counter[int] = Counter()
    for seed in range(2000):
        picker = RowPicker(Picking(sample=3, seed=seed), 10)
        found = [*picker.pick(4, ()), *(4 + index for index in picker.pick(6, ()))]
        assert len(found) == 3
        drawn.update(found)
    assert all(500 < drawn[row] < 700 for row in range(10))


def test_a_damaged_chunk_does_not_shrink_the_sample_of_a_part(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=ROWS, per_chunk=20, make_row=make_row)
    run_worker_here(job, f"{job}/runs/a")
    store = open_store(f"{job}/runs/a")
    key = layout.output_key(read_marker(store, "part-00001").output)
    overwrite(store, key, store.get(key).data.replace(b"row", b"wor"))
    with pytest.raises(RunUnsound):
        collect(f"{job}/runs/a", tmp_path / "out", sample=40)
    result = collect(f"{job}/runs/a", tmp_path / "out", sample=40, partial=True)
    assert (result["status"], result["rows"], result["missing"]) == ("PARTIAL", 40, ["part-00001"])


def test_all_rows_are_counted_whichever_are_taken(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=6, per_chunk=3)
    run_worker_here(job, f"{job}/runs/a")
    store = open_store(f"{job}/runs/a")
    key = layout.output_key(read_marker(store, "part-00001").output)
    data = b"".join(store.get(key).data.splitlines(keepends=True)[:2])
    overwrite(store, key, data)
    digest = codec.sha256(data)
    change_marker(store, "part-00001", output_sha256=digest, output_bytes=len(data))
    for kind in ("parquet", "lines"):
        with pytest.raises(InputError, match="2 lines, the marker counts 3 rows"):
            collect(f"{job}/runs/a", tmp_path / kind, format=kind, where=["status=error"])


def test_a_collection_of_other_rows_is_another_collection(run: str, tmp_path: Path) -> None:
    collect(run, tmp_path / "out", where=["status=ok"], sample=3)
    again = collect(run, tmp_path / "out", where=["status=ok"], sample=3)
    assert again["status"] == "UNCHANGED"
    for options in ({}, {"where": ["status=ok"]}, {"where": ["status=ok"], "sample": 4}):
        with pytest.raises(InputError, match="holds another collection"):
            collect(run, tmp_path / "out", **options)


# --------------------------------------------------------------------------- several runs


@pytest.mark.parametrize("name", ["answers.parquet", "answers.jsonl", "answers.csv"])
def test_runs_follow_each_other_and_have_their_names(name: str, job: str, tmp_path: Path) -> None:
    result = collect(
        f"{job}/runs/short", tmp_path / name, more_runs=[f"{job}/runs/batch"], with_source=True
    )
    assert (result["rows"], result["rows_error"], result["chunks"]) == (2 * ROWS, 8, 6)
    assert result["runs"] == [f"{job}/runs/short", f"{job}/runs/batch"]
    found = read_rows(tmp_path / name)
    assert list(found[0])[:3] == ["run", "row", "id"]
    assert [(row["run"], row["row"], row["n"]) for row in found] == [
        (run, number, number) for run in ("short", "batch") for number in range(ROWS)
    ]
    assert (found[3]["text"], found[ROWS + 3]["text"]) == ("a b c d", "a b c d e f")


def test_runs_with_other_columns_share_the_columns_of_both(job: str, tmp_path: Path) -> None:
    collect(f"{job}/runs/short", tmp_path / "out", more_runs=[f"{job}/runs/many"])
    found = read_rows(tmp_path / "out")
    assert [len(row["texts"]) for row in (found[0], found[ROWS])] == [1, 2]
    options: dict[str, Any] = {"more_runs": [f"{job}/runs/many"], "explode": True}
    collect(f"{job}/runs/short", tmp_path / "rows", **options)
    counts = Counter((row["run"], row["choice_index"]) for row in read_rows(tmp_path / "rows"))
    answered = ROWS - len(FAILED)
    assert counts == {
        ("short", 0): answered,
        ("many", 0): answered,
        ("many", 1): answered,
        ("short", None): 4,
        ("many", None): 4,
    }


@pytest.mark.parametrize("has_first", [True, False])
def test_a_run_with_adapters_beside_one_without_has_the_models_of_both(
    has_first: bool, job: str, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    tuned = f"{tmp_path}/tuned"
    run_worker_here(job, tuned, "--lora", f"tuned={adapter}", "--lora-column", "lora")
    first, second = (tuned, f"{job}/runs/short") if has_first else (f"{job}/runs/short", tuned)
    collect(first, tmp_path / "out", more_runs=[second])
    models = Counter((row["run"], row["model"]) for row in read_rows(tmp_path / "out"))
    failed = len(FAILED)
    assert models == {
        ("tuned", "echo"): ROWS - failed,
        ("tuned", None): failed,
        ("short", None): ROWS,
    }


def test_each_run_gives_the_same_rows_to_a_sample(job: str, tmp_path: Path) -> None:
    collect(f"{job}/runs/short", tmp_path / "out", more_runs=[f"{job}/runs/batch"], sample=9)
    rows: dict[str, list[int]] = {}
    for row in read_rows(tmp_path / "out"):
        rows.setdefault(row["run"], []).append(row["row"])
    assert rows["short"] == rows["batch"]
    assert len(rows["short"]) == 9


def test_lines_of_several_runs_need_one_format(job: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"format": "lines"}
    with pytest.raises(ConfigError, match=r"lines of the format native, .* of openai-batch"):
        collect(
            f"{job}/runs/short", tmp_path / "x.jsonl", more_runs=[f"{job}/runs/batch"], **options
        )
    collect(f"{job}/runs/short", tmp_path / "a.jsonl", more_runs=[f"{job}/runs/many"], **options)
    collect(f"{job}/runs/many", tmp_path / "b.jsonl", **options)
    assert (tmp_path / "a.jsonl").read_bytes().endswith((tmp_path / "b.jsonl").read_bytes())


def test_runs_that_do_not_go_together_are_refused(job: str, tmp_path: Path) -> None:
    make_job(tmp_path / "other", rows=3, per_chunk=3)
    run_worker_here(tmp_path / "other", tmp_path / "other/runs/a")
    run = f"{job}/runs/short"
    with pytest.raises(InputError, match="over different jobs"):
        collect(run, tmp_path / "out", more_runs=[str(tmp_path / "other/runs/a")])
    (tmp_path / "link").symlink_to(run)
    for same in (run, f"{job}/runs/../runs/short", str(tmp_path / "link")):
        with pytest.raises(ConfigError, match="named twice"):
            collect(run, tmp_path / "out", more_runs=[same])
    with pytest.raises(InputError, match="no run there"):
        collect(run, tmp_path / "out", more_runs=[str(tmp_path / "none")])
    assert not (tmp_path / "out").exists()


def test_a_missing_chunk_is_named_with_its_run(job: str, tmp_path: Path) -> None:
    run_worker_here(job, f"{tmp_path}/runs/part", "--job", job, "--limit", "20", "--n", "1")
    store = open_store(f"{tmp_path}/runs/part")
    key = layout.output_key(read_marker(store, "part-00000").output)
    overwrite(store, key, store.get(key).data.replace(b"row", b"wor"))
    options: dict[str, Any] = {"more_runs": [f"{tmp_path}/runs/part"], "job": job}
    with pytest.raises(RunUnsound, match="part-00000"):
        collect(f"{job}/runs/short", tmp_path / "out", **options)
    result = collect(f"{job}/runs/short", tmp_path / "out", partial=True, **options)
    assert (result["status"], result["missing"]) == ("PARTIAL", ["part/part-00000"])
    assert result["rows"] == ROWS


def test_names_are_urls_where_the_last_parts_are_equal() -> None:
    assert run_names(["x/a", "y/b"]) == ["a", "b"]
    assert run_names(["x/a", "y/a"]) == ["x/a", "y/a"]
    assert parse_condition("status=ok").column == "status"


@pytest.mark.parametrize("form", ["last", "option"])
def test_the_command_takes_runs_and_a_place(
    form: str, job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dest = str(tmp_path / "out.jsonl")
    places = [dest] if form == "last" else ["-o", dest]
    runs = [f"{job}/runs/short", f"{job}/runs/batch/"]
    options = [
        "--where",
        "status=error",
        "--where",
        "error_code!=x",
        "--sample",
        "2",
        "--seed",
        "3",
    ]
    assert main.main(["collect", *runs, *places, *options]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["rows"], result["dest"]) == (4, dest)
    assert main.main(["collect", runs[0]]) == 2
    assert "expected a run and a DEST" in capfd.readouterr().err
    for seed in ("3", "0"):
        assert main.main(["collect", runs[0], dest, "--seed", seed]) == 2
        assert "--seed: needs --sample" in capfd.readouterr().err
    # Without DEST, the last run is taken for it, and is refused.
    assert main.main(["collect", *runs]) == 2


@pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")  # huggingface_hub's own
def test_a_data_set_of_several_runs_has_a_card_of_each(job: str, hub: UploadHub) -> None:
    options: dict[str, Any] = {"more_runs": [f"{job}/runs/many"], "where": ["status=ok"]}
    collect(f"{job}/runs/short", "hf://datasets/org/answers", **options)
    folder = hub.repos["org/answers"]["main"]
    card = (folder / "README.md").read_text()
    assert "## How it was made: short" in card
    assert "## How it was made: many" in card
    assert "| rows | status is ok |" in card
    assert "| rows | 112 |" in card
    assert "missing" not in card
    assert len(read_rows(folder / "data")) == 2 * (ROWS - len(FAILED))


def test_a_killed_collect_is_done_again(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=1000, per_chunk=500)
    for name in ("a", "b"):
        run_worker_here(job, f"{job}/runs/{name}", "--max-tokens", str(len(name) + ord(name)))
    options = ["--where", "status=ok", "--sample", "800", "--shard-rows", "20"]
    arguments = ["collect", f"{job}/runs/a", f"{job}/runs/b"]
    killed = start_process([*arguments, str(tmp_path / "out"), *options])
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "part-00002.parquet").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.kill()
    assert finish_process(killed).status == -9
    assert not (tmp_path / "out" / "_COLLECTED").exists()
    for name in ("out", "other"):
        assert main.main([*arguments, str(tmp_path / name), *options]) == 0
    names = sorted(path.name for path in (tmp_path / "other").iterdir())
    # The killed process may have left one hidden file, as storage/local.py says.
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*")) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()

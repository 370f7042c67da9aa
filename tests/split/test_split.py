"""`split` makes a job of data sets, goes on after a kill, appends, and takes files by reference."""

import json
import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError
from batchinfer.core.records import Job
from batchinfer.ledger.jobs import chunk_key, load_job
from batchinfer.split import writer
from batchinfer.split.sources import count_sources
from batchinfer.split.splitting import SplitConfig, run_split
from batchinfer.storage.local import LocalStore
from batchinfer.storage.opening import open_store
from fakes import meanwhile
from making import python, run_worker_here, split


def make_source(path: Path, *numbers: int) -> Path:
    rows = [{"prompt": f"say {n}", "n": n} for n in numbers]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "a.parquet", *range(100))


def job_at(output: Any) -> Job:
    return load_job(str(output), open_store)[0]


def rows_at(output: Any) -> list[dict[str, Any]]:
    """All rows of a job, in order, after a look that job.json and the manifests tell the truth of its chunks."""
    job, store, rows = job_at(output), open_store(str(output)), []
    for chunk in job.chunks:
        data = store.get(chunk_key(job, chunk)).data
        assert (chunk.bytes, chunk.sha256) == (len(data), codec.sha256(data))
        if job.compression == "zstd":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        lines = data.split(b"\n")[:-1]
        assert (chunk.first_row, chunk.rows) == (len(rows), len(lines))
        rows += map(json.loads, lines)
    assert [row["_row"] for row in rows] == list(range(job.rows))
    keys = [chunk_key(job, chunk) for chunk in job.chunks]
    listed = [store.get(item.key).data.decode().split() for item in store.list(layout.MANIFESTS)]
    everything, *workers = listed
    assert everything == keys == [key for each in workers for key in each]
    sizes = [len(each) for each in workers]
    assert len(sizes) == job.num_workers
    assert max(sizes) - min(sizes) <= 1
    return rows


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(what: str, source: Any, output: Path, **options: Any) -> str:
    """The hint of a refusal that says this."""
    with pytest.raises(InputError, match=what) as caught:
        split(source, output, **options)
    return str(caught.value.hint)


def test_a_column_id_names_the_rows_and_repeats_are_told(tmp_path, caplog):
    lines = [json.dumps({"id": n % 8, "key": n, "prompt": "x"}) for n in range(10)] + ["broken"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    result = split(tmp_path / "a.jsonl", tmp_path / "job")
    assert (result["duplicate_ids"], result["broken_lines"]) == (2, 1)
    (tmp_path / "b.jsonl").write_text("\n".join(lines[:1] * 3))
    assert split(tmp_path / "b.jsonl", tmp_path / "job", append=True)["duplicate_ids"] == 4
    assert "2 of 11 rows have an _id (column 'id') that an earlier row has" in caplog.text
    assert split(tmp_path / "a.jsonl", tmp_path / "other", id_column="key")["duplicate_ids"] == 0
    assert job_at(tmp_path / "other").id_column == "key"


def test_the_same_split_again_changes_nothing_wherever_the_files_lie(source, tmp_path):
    split(source, tmp_path / "job", num_chunks=5)
    before = tree(tmp_path / "job")
    moved = source.rename(tmp_path / "moved.parquet")
    for options in ({}, {"num_chunks": 5}):
        assert split(moved, tmp_path / "job", **options)["status"] == "unchanged"
    assert tree(tmp_path / "job") == before


def test_another_split_is_refused_with_the_difference(source, tmp_path):
    split(source, tmp_path / "job", num_chunks=5)
    others: dict[str, Any] = {"columns": ["n"], "limit": 50, "id_column": "n"}
    others["compression"] = "zstd"
    for name, value in others.items():
        what = f"holds a finished job that differs in {name}"
        assert "--overwrite" in refused(what, source, tmp_path / "job", **{name: value})
    make_source(source, *range(1, 101))
    refused("differs in the sources' files", source, tmp_path / "job")
    split(source, tmp_path / "job", overwrite=True, **others)
    assert len(rows_at(tmp_path / "job")) == 50


@pytest.mark.parametrize("key", ["runs/a/claims/x", "tests/b/run.json", "x/outputs/part-0.succeed"])
def test_a_job_with_runs_is_never_split_anew(source, tmp_path, key):
    split(source, tmp_path / "job")
    open_store(str(tmp_path / "job")).create(key, b"{}")
    before = tree(tmp_path / "job")
    for has_job in (True, False):
        if not has_job:
            (tmp_path / "job/job.json").unlink()
        refused("has runs", source, tmp_path / "job", overwrite=has_job)
    assert tree(tmp_path / "job") == {k: v for k, v in before.items() if k != "job.json"}


def test_overwrite_removes_job_json_first_and_mends_a_damaged_one(source, tmp_path, monkeypatch):
    job = tmp_path / "job"
    split(source, job, num_chunks=5)
    (job / "job.json").write_text("{")
    assert "--overwrite" in refused("job.json: not a readable job", source, job)
    put = LocalStore.put_file

    def checked(*arguments: Any) -> Any:
        assert not (job / "job.json").exists()
        return put(*arguments)

    monkeypatch.setattr(LocalStore, "put_file", checked)
    split(make_source(source, *range(60)), job, num_chunks=3, overwrite=True)
    assert len(rows_at(job)) == 60
    assert len(list((job / "chunks").iterdir())) == 3


@pytest.mark.parametrize("again", [{"overwrite": True, "num_chunks": 2}, {"append": True}])
def test_files_of_others_beside_chunks_and_manifests_stay(source, tmp_path, again):
    store, others = open_store(str(tmp_path / "job")), ("chunks/mine.jsonl", "manifests/app.yaml")
    for key in (*others, "manifests/worker-00001.txt", "manifests/first-5.txt"):
        store.create(key, b"mine")
    split(source, tmp_path / "job", num_chunks=5)
    split(make_source(tmp_path / "b.parquet", 1, 2), tmp_path / "job", **again)
    own = [chunk_key(job, chunk) for job in [job_at(tmp_path / "job")] for chunk in job.chunks]
    manifests = ["manifests/all.txt", "manifests/worker-00000.txt"]
    assert {*tree(tmp_path / "job")} == {*others, *own, *manifests, "job.json"}


def finish_another(folder: Path) -> None:
    split(make_source(folder / "b.parquet", *range(50)), folder / "job", num_chunks=3)


def replace_a_chunk(folder: Path) -> None:
    (folder / "job/chunks/part-00000.jsonl").write_text("{}\n")


@pytest.mark.parametrize(
    ("step", "act", "num_rows"),
    [
        ("write_chunks", finish_another, 50),
        ("complete_job", finish_another, 50),
        ("write_manifests", replace_a_chunk, 0),
    ],
)
def test_what_others_write_meanwhile_makes_no_mixed_job(
    source, tmp_path, monkeypatch, step, act, num_rows
):
    meanwhile(monkeypatch, writer, step, lambda: act(tmp_path))
    refused("another split wrote here at the", source, tmp_path / "job", num_chunks=2)
    assert (tmp_path / "job/job.json").exists() == bool(num_rows)
    assert not num_rows or len(rows_at(tmp_path / "job")) == num_rows


def test_a_source_that_changes_meanwhile_makes_no_job(source, tmp_path, monkeypatch):
    meanwhile(monkeypatch, LocalStore, "put_file", lambda: os.utime(source, ns=(1, 1)))
    refused("changed while it was being split", source, tmp_path / "job", num_chunks=2)
    assert not (tmp_path / "job/job.json").exists()


def test_a_source_that_fails_late_leaves_no_job(source, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"n":1}\n' * 2000 + '{"_id":1}')
    sources = [source, tmp_path / "b.jsonl"]
    refused(r"b\.jsonl, line 2001: column '_id' is there twice", sources, tmp_path / "job")
    assert not (tmp_path / "job/job.json").exists()


# --------------------------------------------------------------------------- append


@pytest.fixture
def grown(source, tmp_path):
    """A job of `source` with the 9 rows of b.parquet appended."""
    split(source, tmp_path / "job", num_chunks=5, num_workers=2, compression="zstd")
    make_source(tmp_path / "b.parquet", *range(100, 109))
    result = split([source, tmp_path / "b.parquet"], tmp_path / "job", append=True)
    assert (result["rows_appended"], result["chunks_appended"], result["generation"]) == (9, 8, 1)
    return tmp_path / "job"


def test_appended_rows_go_on_where_the_job_ended_and_its_identity_stays(grown, tmp_path):
    assert [row["n"] for row in rows_at(grown)] == list(range(109))
    first = load_job(str(grown), open_store)
    more = make_source(tmp_path / "c.parquet", 109)
    assert split(more, grown, append=True)["generation"] == 2
    for options in ({"append": True}, {"num_workers": 2, "compression": "zstd"}):
        again = more if "append" in options else tmp_path / "a.parquet"
        assert split(again, grown, **options)["status"] == "unchanged"
    assert [row["n"] for row in rows_at(grown)] == list(range(110))
    last = load_job(str(grown), open_store)
    assert last[1] == first[1] == first[0].first_sha256


def test_files_of_numbers_are_told_apart_where_their_footers_are_equal(tmp_path):
    for n in range(2):
        odd = [row % 3 == n or not row for row in range(100)]
        pq.write_table(pa.table({"n": range(100), "odd": odd}), tmp_path / f"{n}.parquet")
    split(tmp_path / "0.parquet", tmp_path / "job")
    assert split(tmp_path / "1.parquet", tmp_path / "job", append=True)["rows"] == 200


def test_what_does_not_fit_the_job_is_not_appended(grown, tmp_path):
    make_source(tmp_path / "b.parquet", *range(5))
    pq.write_table(pa.table({"n": [1], "prompt": ["x"], "more": [2]}), tmp_path / "d.parquet")
    before = tree(grown)
    what = r"b\.parquet: has the name of a file of the job"
    refused(what, tmp_path / "b.parquet", grown, append=True)
    sources = [make_source(tmp_path / "c.parquet", 7), tmp_path / "d.parquet"]
    refused("lacks the column 'more', which new files have", sources, grown, append=True)
    assert tree(grown) == before
    split(tmp_path / "d.parquet", grown, append=True, columns=["prompt", "n"])
    assert split(tmp_path / "d.parquet", grown, append=True)["status"] == "unchanged"
    (tmp_path / "f.csv").write_text("prompt\nx\n")
    what = r"has no column 'n' \(from the job\)"
    assert "leave this file out" in refused(what, tmp_path / "f.csv", grown, append=True)
    split(tmp_path / "a.parquet", tmp_path / "limited", limit=5)
    what = "was made with --limit"
    refused(what, tmp_path / "b.parquet", tmp_path / "limited", append=True)


SPELLINGS = ("file://{}/data/a.parquet", "{}/x/../data/a.parquet", "link/a.parquet")


@pytest.mark.parametrize(
    ("first", "other"),
    [
        *product(("data/a.parquet", "../data/a.parquet"), SPELLINGS),
        ("link/a.parquet", "{}/x/link/a.parquet"),
    ],
)
def test_a_changed_file_is_known_by_any_spelling_of_its_path(tmp_path, monkeypatch, first, other):
    """All of its old rows were appended a second time."""
    for name in ("data", "x"):
        (tmp_path / name).mkdir()
    file = make_source(tmp_path / "data/a.parquet", *range(9))
    (tmp_path / "x/link").symlink_to(file.parent)
    monkeypatch.chdir(tmp_path if first.startswith("data") else tmp_path / "x")
    split(first, tmp_path / "job")
    make_source(file, *range(12))
    monkeypatch.chdir(tmp_path / "x" if other.startswith("link") else "/")
    what = "has the name of a file of the job and other rows"
    refused(what, other.format(tmp_path), tmp_path / "job", append=True)


def test_appended_rows_are_named_by_the_columns_of_the_job(tmp_path):
    first, more = (make_source(tmp_path / f"{n}.parquet", n) for n in (7, 8))
    split(first, tmp_path / "job", id_column="n")
    counted = count_sources([str(first), str(more)])  # as `run` does it
    config = SplitConfig(sources=counted.arguments, output=str(tmp_path / "job"), append=True)
    run_split(config, store=open_store(str(tmp_path / "job")), counted=counted)
    assert [row["_id"] for row in rows_at(tmp_path / "job")] == ["7", "8"]


def test_of_two_appends_at_once_one_wins_and_the_other_is_told(grown, tmp_path, monkeypatch):
    first, second = (make_source(tmp_path / f"{n}.parquet", n) for n in (109, 110))
    meanwhile(monkeypatch, LocalStore, "put_file", lambda: split(second, grown, append=True))
    refused("another split wrote here at the same time", first, grown, append=True)
    split(first, grown, append=True)
    assert [row["n"] for row in rows_at(grown)] == [*range(109), 110, 109]


# --------------------------------------------------------------------------- by reference


def make_list(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "b.jsonl").write_text('{"prompt":"one"}\n{"prompt":"two"}\nbroken')
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(b'{"prompt":"three","n":1}\n'))
    (folder / "list.txt").write_text("b.jsonl\n\na.jsonl.zst\n")
    return folder / "list.txt"


def test_a_job_by_reference_copies_nothing_and_is_answered(tmp_path):
    place, job = make_list(tmp_path / "data"), tmp_path / "job"
    place.write_text(f"../data/b.jsonl\n\nfile://{tmp_path}/x/../data/a.jsonl.zst\n")
    options = {"by_reference": str(place), "num_workers": 2}
    result = split([], job, **options)
    assert (result["rows"], result["chunks"], result["columns"]) == (4, 2, ["prompt", "n"])
    assert split([], job, **options)["status"] == "unchanged"
    answered = run_worker_here(job, tmp_path / "run")
    assert (answered["request_count"], answered["error_count"]) == (4, 1)
    chunks = {chunk.name: chunk.file for chunk in job_at(job).chunks}
    files = f"{tmp_path}/data/b.jsonl", f"{tmp_path}/data/a.jsonl.zst"
    assert chunks == dict(zip(["part-00000", "part-00001"], files, strict=True))
    (tmp_path / "data/c.jsonl").write_text('{"prompt":"four","n":2}')
    assert split(tmp_path / "data/c.jsonl", job, append=True)["rows"] == 5
    assert split([], job, **options)["status"] == "unchanged"
    (tmp_path / "data/b.jsonl").write_text('{"prompt":"other"}')
    refused("holds a finished job that differs in the sources' files", [], job, **options)


def test_what_fails_by_reference_leaves_the_job_that_was_to_be_replaced(tmp_path, monkeypatch):
    place, job = make_list(tmp_path / "data"), tmp_path / "job"
    split([], job, by_reference=str(place))
    listed = tmp_path / "data/b.jsonl"
    for harm in (partial(listed.write_text, '{"prompt":"other"}'), listed.unlink):
        meanwhile(monkeypatch, writer, "refer_to", harm)
        refused(r"b\.jsonl", [], job, by_reference=str(place), overwrite=True)
    assert job_at(job).rows == 4


def test_files_that_cannot_be_chunks_are_refused(tmp_path):
    place = make_list(tmp_path / "data")
    place.write_text("list.txt\n")
    refused("cannot be a chunk", [], tmp_path / "job", by_reference=str(place))
    place.write_text("b.jsonl\n./b.jsonl\n")
    refused("twice", [], tmp_path / "job", by_reference=str(place))
    assert not (tmp_path / "job").exists()


def test_files_where_a_job_puts_its_own_are_no_chunks_by_reference(tmp_path):
    make_list(tmp_path / "chunks")
    (tmp_path / "list.txt").write_text("chunks/b.jsonl\n")
    (tmp_path / "job/manifests").mkdir(parents=True)
    own = tmp_path / "job/manifests/first-1.txt"
    own.write_text(f"{tmp_path}/chunks/b.jsonl\n")
    refused("is not apart from", [], tmp_path / "job", by_reference=str(own))
    refused("no such file", [], tmp_path / "job", by_reference=str(tmp_path))
    for place in (make_list(tmp_path / "manifests"), tmp_path / "list.txt"):
        refused("is not apart from", [], tmp_path, by_reference=str(place))


# --------------------------------------------------------------------------- S3 and memory


@pytest.mark.s3
def test_from_s3_to_s3_by_copy_and_by_reference(source, tmp_path, s3_url):
    bucket = s3_url()
    store = open_store(bucket)
    store.create("data/a.parquet", source.read_bytes())
    split(f"{bucket}/data", f"{bucket}/job", num_chunks=3)
    assert len(rows_at(f"{bucket}/job")) == 100
    make_list(tmp_path / "data")
    for path in (tmp_path / "data").iterdir():
        store.create(f"lines/{path.name}", path.read_bytes())
    split([], f"{bucket}/referred", by_reference=f"{bucket}/lines/list.txt")
    assert run_worker_here(f"{bucket}/referred", tmp_path / "run")["status"] == "SUCCESS"


def test_memory_is_bounded_by_a_row_group(tmp_path):
    program = (
        "import resource, sys; from batchinfer.cli.main import main; assert main(sys.argv[1:]) == 0;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    )
    table = pa.table({"prompt": [f"{row} " + "x" * 10_000 for row in range(200)]})
    peaks = []
    for count in (20, 160):
        path, job = str(tmp_path / f"{count}.parquet"), str(tmp_path / f"job{count}")
        with pq.ParquetWriter(path, table.schema, compression="none") as writer:
            for _ in range(count):
                writer.write_table(table)
        out = python(program, "split", path, "--output", job, "--num-chunks", "2")
        peaks.append(int(out.splitlines()[-1]))
    assert peaks[1] - peaks[0] < 100, peaks

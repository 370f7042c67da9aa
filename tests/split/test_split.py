"""From sources to a finished job: where chunks start, manifests, repetition, crashes, and every refusal."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core import codec, layout
from batchinfer.core.errors import ConfigError, InputError, StorageError
from batchinfer.core.records import Job
from batchinfer.split import chunk_files, command
from batchinfer.split.blocks import ColumnChoice, CountedFile
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.split.source_files import FoundFile
from batchinfer.split.sources import CountedSources
from batchinfer.storage.local import LocalStore
from batchinfer.storage.memory import MemoryStore


@pytest.fixture
def source(tmp_path) -> Path:
    """1000 rows in three files with row groups of 70."""
    folder = tmp_path / "data"
    folder.mkdir()
    for index, rows in enumerate((range(500), range(500, 501), range(501, 1000))):
        table = pa.table({"n": list(rows), "text": [f"row {row} " * (row % 7) for row in rows]})
        pq.write_table(table, folder / f"{index}.parquet", row_group_size=70)
    return folder


def config_for(source: Path, output: object, **options) -> SplitConfig:
    if "num_chunks" not in options and "chunk_rows" not in options:
        options["num_chunks"] = 7
    return SplitConfig(sources=[str(source)], output=str(output), **options)


def run(source: Path, output: Path, **options) -> dict:
    return run_split(config_for(source, output, **options), store=LocalStore(output))


def read_job(folder: Path) -> Job:
    return codec.decode((folder / "job.json").read_bytes(), Job, name="job.json")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def chunk_lines(folder: Path) -> list[list[bytes]]:
    names = (folder / "manifests/all.txt").read_text().splitlines()
    return [(folder / name).read_bytes().split(b"\n")[:-1] for name in names]


# --------------------------------------------------------------------------- what a job is


def test_a_job_holds_every_row_once_in_order(source, tmp_path):
    result = run(source, tmp_path / "job", num_chunks=7, num_workers=3)
    chunks = chunk_lines(tmp_path / "job")
    rows = [json.loads(line) for line in itertools.chain(*chunks)]
    assert [row["_row"] for row in rows] == [row["n"] for row in rows] == list(range(1000))
    assert {len(lines) for lines in chunks} == {142, 143}
    assert result["status"] == "done"
    assert (result["rows"], result["chunks"], result["workers"]) == (1000, 7, 3)
    assert result["bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "job/chunks").iterdir()
    )


def test_job_json_describes_every_chunk_truly(source, tmp_path):
    run(source, tmp_path / "job", chunk_rows=300)
    job = read_job(tmp_path / "job")
    assert [chunk.rows for chunk in job.chunks] == [300, 300, 300, 100]
    assert [chunk.first_row for chunk in job.chunks] == [0, 300, 600, 900]
    for chunk in job.chunks:
        data = (tmp_path / "job" / layout.chunk_file(chunk.name, job.compression)).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (chunk.bytes, chunk.sha256)
        assert data.count(b"\n") == chunk.rows
        assert json.loads(data.split(b"\n")[0])["_row"] == chunk.first_row
    assert (job.rows, job.columns, job.shape) == (1000, ["n", "text"], {"chunk_rows": 300})
    assert [file.rows for file in job.sources[0].files] == [500, 1, 499]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_chunks_are_even_whatever_the_numbers(rows, num_chunks, chunk_rows):
    if num_chunks <= rows:
        found = chunk_files.even_chunk_starts(rows, num_chunks=num_chunks)
        sizes = [end - start for start, end in itertools.pairwise(found)]
        assert len(sizes) == num_chunks
        assert sum(sizes) == rows
        assert max(sizes) - min(sizes) <= 1
    found = chunk_files.even_chunk_starts(rows, chunk_rows=chunk_rows)
    sizes = [end - start for start, end in itertools.pairwise(found)]
    assert sum(sizes) == rows
    assert set(sizes[:-1]) <= {chunk_rows}
    assert 0 < sizes[-1] <= chunk_rows


@pytest.mark.parametrize(
    ("rows", "row_bytes", "num_workers", "expected"),
    [
        (1, 100, 1, 1),
        (3, 100, 1, 3),
        (1000, 100, 1, 50),
        (999, 100, 1, 49),  # at least 20 rows a chunk, where that gives each worker four
        (1000, 100, 16, 64),
        (40, 100, 16, 40),
        (100_000, 100, 1, 50),
        (100_001, 100, 1, 51),
        (1_000_000, 1500, 16, 800),
        (1_000, 1 << 20, 1, 250),  # 4 rows of a megabyte
        (1_000, 1 << 30, 1, 1000),
        (10**9, 100, 16, 100_000),
    ],
)
def test_chunks_have_a_good_size_if_nothing_is_said(rows, row_bytes, num_workers, expected):
    found = FoundFile("a.csv", rows * row_bytes, "")
    item = CountedFile(found=found, format="csv", rows=rows, columns=[], marks=[], digest="")
    counted = CountedSources(
        sources=[], files=[item], bases=[], choice=ColumnChoice(), rows=rows, columns=[]
    )
    assert chunk_files.usual_num_chunks(counted, rows, num_workers) == expected


def test_without_a_size_the_same_split_makes_the_same_job(source, tmp_path):
    config = SplitConfig(sources=[str(source)], output=str(tmp_path / "job"), num_workers=3)
    store = LocalStore(tmp_path / "job")
    assert run_split(config, store=store)["chunks"] == 12
    assert {len(lines) for lines in chunk_lines(tmp_path / "job")} == {83, 84}
    assert read_job(tmp_path / "job").shape == {"num_chunks": 12}
    assert run_split(config, store=store)["status"] == "unchanged"
    assert run(source, tmp_path / "job", num_chunks=12, num_workers=3)["status"] == "unchanged"
    run(source, tmp_path / "job", num_chunks=5, num_workers=3, overwrite=True)
    assert run_split(config, store=store)["chunks"] == 5  # the size was left open
    store = LocalStore(tmp_path / "many")
    with pytest.raises(ConfigError, match="--num-workers 1001: more than the 1,000 chunks"):
        run_split(msgspec.structs.replace(config, num_workers=1001), store=store)


@pytest.mark.parametrize("num_workers", [1, 2, 5, 16])
def test_manifests_are_even_and_make_up_all(source, tmp_path, num_workers):
    run(source, tmp_path / "job", num_chunks=16, num_workers=num_workers)
    folder = tmp_path / "job/manifests"
    parts = [
        (folder / f"worker-{index:05d}.txt").read_text().splitlines()
        for index in range(num_workers)
    ]
    assert list(itertools.chain(*parts)) == (folder / "all.txt").read_text().splitlines()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(list(folder.iterdir())) == num_workers + 1
    assert parts[0][0] == "chunks/part-00000.jsonl"


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_processes_and_row_groups_change_no_byte(source, tmp_path, compression, monkeypatch):
    from batchinfer.split import chunk_files

    monkeypatch.setattr(chunk_files, "_TURN_ROWS", 100)
    more = tmp_path / "more.jsonl"
    more.write_text('{"n": 1}\n{broken\n' * 50)
    for name, processes in (("one", 1), ("three", 3)):
        config = SplitConfig(
            sources=[str(source), str(more)],
            output=str(tmp_path / name),
            num_chunks=23,
            compression=compression,
            processes=processes,
        )
        run_split(config, store=LocalStore(tmp_path / name))
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_zstd_frames_of_a_thousand_rows_stand_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n":{row}}}\n' for row in range(2500)))
    run(path, tmp_path / "job", num_chunks=1, compression="zstd")
    data = (tmp_path / "job/chunks/part-00000.jsonl.zst").read_bytes()
    counts = []
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        counts.append(frame.decompress(data).count(b"\n"))
        data = frame.unused_data
    assert counts == [1000, 1000, 500]
    assert (tmp_path / "job/manifests/all.txt").read_text() == "chunks/part-00000.jsonl.zst\n"


def test_broken_lines_stay_and_count(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n1\n\xff\n{"a":2}')
    result = run(path, tmp_path / "job", num_chunks=2)
    assert result["rows"] == 5
    assert chunk_lines(tmp_path / "job") == [
        [b'{"a":1,"_row":0,"_id":"0"}', b'{"a":'],
        [b"1", b"\xff", b'{"a":2,"_row":4,"_id":"4"}'],
    ]


def test_blank_lines_and_another_encoding_are_warned_of(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n\n{"a":"\xe9"}\n\n{"a":NaN}\n')
    result = run(path, tmp_path / "job", num_chunks=3)
    assert (result["rows"], result["blank_lines"], result["broken_lines"]) == (3, 2, 1)
    assert result["null_floats_by_column"] == {"a": 1}
    assert "blank lines of the sources, which are no rows: 2" in caplog.text
    assert "1 of these lines are not UTF-8, but perhaps LATIN1; the first is" in caplog.text
    assert read_job(tmp_path / "job").blank_lines == 2
    again = run(path, tmp_path / "job", num_chunks=3)
    assert (again["status"], again["blank_lines"]) == ("unchanged", 2)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_broken_lines_are_counted_and_the_first_is_named(
    tmp_path, caplog, monkeypatch, processes, suffix
):
    from batchinfer.split import chunk_files

    monkeypatch.setattr(chunk_files, "_TURN_ROWS", 10)
    folder, job = tmp_path / "data", tmp_path / "job"
    folder.mkdir()
    opener = gzip.open if suffix else open
    for name, broken in (("a", ()), ("b", (3, 97)), ("c", (99,))):
        with opener(folder / f"{name}.jsonl{suffix}", "wb") as file:
            for line in range(100):
                file.write(b"[1]\n" if line in broken else b'{"a":1}\n')
    result = run(folder, job, num_chunks=30, processes=processes)
    assert result["broken_lines"] == read_job(job).broken_lines == 3
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "each of which becomes an error row: 3;" in warning
    assert f"{folder}/b.jsonl{suffix}, line 4" in warning
    again = run(folder, job, num_chunks=30)
    assert (again["status"], again["broken_lines"]) == ("unchanged", 3)


def test_duplicate_ids_are_counted_over_all_chunks(tmp_path, monkeypatch, caplog):
    from batchinfer.split import chunk_files

    monkeypatch.setattr(chunk_files, "_SORTED_HASHES", 16)
    ids = [f"id {number % 37}" for number in range(100)]
    pq.write_table(pa.table({"key": ids}), tmp_path / "a.parquet")
    result = run(tmp_path / "a.parquet", tmp_path / "job", num_chunks=9, id_column="key")
    assert result["duplicate_ids"] == read_job(tmp_path / "job").duplicate_ids == 100 - 37
    assert (
        "63 of 100 rows have an _id (of OpenAI requests the custom_id) that an earlier row has"
        in caplog.text
    )
    assert json.loads(chunk_lines(tmp_path / "job")[8][-1])["_id"] == ids[-1]


def test_null_floats_are_reported_by_column(tmp_path, caplog):
    pq.write_table(pa.table({"x": [1.0, float("nan")], "y": [0.5, 0.5]}), tmp_path / "a.parquet")
    result = run(tmp_path / "a.parquet", tmp_path / "job", num_chunks=1)
    assert result["null_floats_by_column"] == {"x": 1}
    assert read_job(tmp_path / "job").null_floats == 1
    assert "column 'x': 1 NaN" in caplog.text


@pytest.mark.parametrize("processes", [1, 2])
def test_renamed_columns_are_named_and_recorded(tmp_path, caplog, monkeypatch, processes):
    monkeypatch.setattr(chunk_files, "_TURN_ROWS", 10)
    (tmp_path / "a.jsonl").write_text('{"x":1}\n' * 150 + '{"x":1,"_id":{"$oid":"5f"}}\n')
    run(tmp_path / "a.jsonl", tmp_path / "job", processes=processes)
    job = read_job(tmp_path / "job")
    assert job.renamed == {"_id": "_source_id"}
    assert job.source_names == {"_source_id": "_id"}
    assert chunk_lines(tmp_path / "job")[-1][-1] == (
        b'{"x":1,"_source_id":{"$oid":"5f"},"_row":150,"_id":"150"}'
    )
    assert "column '_id': " in caplog.text
    assert "is kept as '_source_id'" in caplog.text
    assert run(tmp_path / "a.jsonl", tmp_path / "job")["status"] == "unchanged"


def test_a_job_without_renamed_columns_says_nothing_of_them(source, tmp_path, caplog):
    run(source, tmp_path / "job")
    assert "renamed" not in json.loads((tmp_path / "job/job.json").read_bytes())
    assert caplog.text == ""


def test_groups_of_neighbouring_rows_stay_in_one_chunk(tmp_path):
    documents = ["a"] * 5 + ["b"] + ["c"] * 10 + [None, None] + ["a"] * 2
    pq.write_table(pa.table({"doc": documents}), tmp_path / "a.parquet", row_group_size=3)
    run(tmp_path / "a.parquet", tmp_path / "job", chunk_rows=4, group_by="doc")
    chunks = [
        [json.loads(line)["doc"] for line in lines] for lines in chunk_lines(tmp_path / "job")
    ]
    assert chunks == [["a"] * 5, ["b"] + ["c"] * 10, [None, None, "a", "a"]]
    assert read_job(tmp_path / "job").group_by == "doc"
    with pytest.raises(InputError, match="no column 'dox'"):
        run(tmp_path / "a.parquet", tmp_path / "job2", chunk_rows=4, group_by="dox")


# --------------------------------------------------------------------------- again, and after a crash


def test_a_finished_job_is_left_alone(source, tmp_path, caplog):
    caplog.set_level("INFO", "batchinfer")
    run(source, tmp_path / "job")
    before = {path: path.stat() for path in (tmp_path / "job").rglob("*") if path.is_file()}
    result = run(source, tmp_path / "job")
    assert result["status"] == "unchanged"
    assert result["chunks"] == 7
    assert {path: path.stat() for path in before} == before
    assert "nothing changed" in caplog.text


def test_the_same_files_at_another_path_are_the_same_source(source, tmp_path):
    run(source, tmp_path / "job")
    source.rename(tmp_path / "moved")
    assert run(tmp_path / "moved", tmp_path / "job")["status"] == "unchanged"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_chunks": 8}, "shape"),
        ({"chunk_rows": 100}, "shape"),
        ({"columns": ["n"]}, r'columns \(\["n","text"\] there, \["n"\] here\)'),
        ({"limit": 900}, r"rows \(1000 there, 900 here\)"),
        ({"num_workers": 2}, "num_workers"),
        ({"compression": "zstd"}, "compression"),
        ({"id_column": "n"}, "id_column"),
    ],
)
def test_another_shape_is_refused_with_the_difference(source, tmp_path, options, what):
    run(source, tmp_path / "job")
    before = contents(tmp_path / "job")
    with pytest.raises(InputError, match=f"differs in .*{what}") as caught:
        run(source, tmp_path / "job", **options)
    assert "--overwrite" in caught.value.hint
    assert contents(tmp_path / "job") == before


def test_a_source_of_the_same_size_with_other_bytes_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n{"a":2}\n')
    run(path, tmp_path / "job", num_chunks=1)
    path.write_text('{"a":1}\n{"a":3}\n')
    with pytest.raises(InputError, match="differs in the source's files"):
        run(path, tmp_path / "job", num_chunks=1)


def test_overwrite_leaves_nothing_of_the_old_job(source, tmp_path):
    run(source, tmp_path / "job", num_chunks=30, num_workers=4, compression="zstd")
    result = run(source, tmp_path / "job", num_chunks=3, overwrite=True)
    assert result["status"] == "done"
    run(source, tmp_path / "fresh", num_chunks=3)
    assert contents(tmp_path / "job") == contents(tmp_path / "fresh")


def test_overwrite_removes_job_json_first(source, tmp_path):
    run(source, tmp_path / "job")
    removed = []

    class Watched(LocalStore):
        def delete(self, keys):
            keys = list(keys)
            removed.extend(keys)
            super().delete(keys)

    run_split(config_for(source, tmp_path / "job", overwrite=True), store=Watched(tmp_path / "job"))
    assert removed[0] == "job.json"
    assert len(removed) > 7


@pytest.mark.parametrize("has_job", [True, False])
@pytest.mark.parametrize(
    "key",
    [
        "runs/default/run.json",
        "runs/other.txt",
        "run/run.json",
        "a/b/run.json",
        "run.json",
        "run/outputs/part-00000.succeed",
        "run/outputs/part-00000.succeed.3",
        "outputs/part-00000.succeed",
        "chunks/run/checkpoints/part-00000/000001-w0-000001.jsonl",
    ],
)
def test_a_job_with_runs_is_never_split_anew(source, tmp_path, has_job, key):
    run(source, tmp_path / "job")
    run_file = tmp_path / "job" / key
    run_file.parent.mkdir(parents=True, exist_ok=True)
    run_file.write_text("{}")
    if not has_job:
        (tmp_path / "job/job.json").unlink()
    before = contents(tmp_path / "job")
    with pytest.raises(InputError, match=rf"has runs \({key}\)") as caught:
        run(source, tmp_path / "job", num_chunks=3, overwrite=True)
    assert contents(tmp_path / "job") == before
    folder = "runs/" if key.startswith("runs/") else key.partition("run.json")[0]
    folder = folder.partition("outputs/")[0].partition("checkpoints/")[0]
    removal = f", or remove {tmp_path}/job/{folder} first" if folder else ""
    assert caught.value.hint == f"name another --output{removal}"


def test_a_run_elsewhere_keeps_nobody_from_splitting_anew(source, tmp_path):
    run(source, tmp_path / "job")
    for key in ("runs-of-last-year.txt", "outputs/readme.txt", "run.json.bak"):
        (tmp_path / "job" / key).parent.mkdir(exist_ok=True)
        (tmp_path / "job" / key).write_text("x")
    (tmp_path / "run.json").write_text("{}")
    assert run(source, tmp_path / "job", num_chunks=3, overwrite=True)["status"] == "done"


class Dying(LocalStore):
    """A store whose process dies at the n-th create."""

    def __init__(self, root: Path, creates: int) -> None:
        super().__init__(root)
        self.left = creates

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageError("died")

    def create(self, key, data):
        self._spend()
        return super().create(key, data)

    def put_file(self, key, path):
        self._spend()
        return super().put_file(key, path)


@pytest.mark.parametrize("creates", range(0, 11, 2))
def test_wherever_it_dies_the_next_run_ends_identical(source, tmp_path, creates):
    run(source, tmp_path / "fresh", num_workers=2)
    store = Dying(tmp_path / "job", creates)
    with pytest.raises(StorageError):
        run_split(config_for(source, tmp_path / "job", num_workers=2), store=store)
    assert not (tmp_path / "job/job.json").exists()
    assert run(source, tmp_path / "job", num_workers=2)["status"] == "done"
    assert contents(tmp_path / "job") == contents(tmp_path / "fresh")


def test_what_another_unfinished_split_left_is_not_adopted(source, tmp_path):
    run(source, tmp_path / "job", num_chunks=20, num_workers=5, columns=["n"])
    run(source, tmp_path / "fresh")
    (tmp_path / "job/job.json").unlink()
    run(source, tmp_path / "job")
    assert contents(tmp_path / "job") == contents(tmp_path / "fresh")


def test_a_split_that_meets_a_finished_one_gives_way(source, tmp_path):
    """Two at once: the one that finds the other's job.json must not touch its chunks."""

    class Late(LocalStore):
        def list(self, prefix=""):
            if prefix == layout.RUNS:  # asked once, after the look at job.json
                run(source, tmp_path / "job", num_chunks=5)
            return super().list(prefix)

    with pytest.raises(InputError, match="another split wrote here"):
        run_split(config_for(source, tmp_path / "job", num_chunks=7), store=Late(tmp_path / "job"))
    assert run(source, tmp_path / "job", num_chunks=5)["status"] == "unchanged"
    assert len(read_job(tmp_path / "job").chunks) == 5
    verify(tmp_path / "job")


def verify(folder: Path) -> None:
    job = read_job(folder)
    for chunk in job.chunks:
        data = (folder / layout.chunk_file(chunk.name, job.compression)).read_bytes()
        assert hashlib.sha256(data).hexdigest() == chunk.sha256


def test_killed_half_way_it_can_be_run_again(source, tmp_path):
    command = [
        sys.executable,
        "-m",
        "batchinfer.split",
        str(source),
        "--output",
        str(tmp_path / "job"),
    ]
    command += ["--chunk-rows", "2", "--processes", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "job").glob("chunks/*")):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "job/job.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "done"
    run(source, tmp_path / "fresh", chunk_rows=2)
    assert {
        key: data for key, data in contents(tmp_path / "job").items() if "/." not in key
    } == contents(tmp_path / "fresh")


def test_a_failing_source_leaves_no_job(source, tmp_path):
    damaged = bytearray((source / "2.parquet").read_bytes())
    damaged[100:600] = b"\xff" * 500
    (source / "2.parquet").write_bytes(damaged)
    for processes in (1, 2):
        with pytest.raises(InputError, match=r"2\.parquet: corrupt or truncated"):
            run(source, tmp_path / "job", processes=processes)
        assert not (tmp_path / "job/job.json").exists()
        assert not (tmp_path / "job/manifests").exists()


def test_scratch_is_left_empty(source, tmp_path):
    run(source, tmp_path / "job", scratch_dir=str(tmp_path / "scratch"), id_column="n")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_memory_stores_and_memory_sources_work_together():
    import fsspec

    fsspec.filesystem("memory").pipe("/split-in/a.jsonl", b'{"a":1}\n{"a":2}\n')
    config = SplitConfig(
        sources=["memory://split-in"], output="memory://split-out", num_chunks=2, processes=4
    )
    store = MemoryStore(config.output)
    assert run_split(config, store=store)["chunks"] == 2
    assert store.get("chunks/part-00001.jsonl").data == b'{"a":2,"_row":1,"_id":"1"}\n'


@pytest.mark.s3
def test_from_s3_to_s3(source, s3_url):
    import boto3

    from batchinfer.storage.opening import open_store

    bucket = s3_url()
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    for path in source.iterdir():
        client.upload_file(str(path), bucket.removeprefix("s3://"), f"in/{path.name}")
    client.close()
    config = config_for(
        f"{bucket}/in", f"{bucket}/job", num_workers=2, compression="zstd", processes=2
    )
    store = open_store(config.output)
    assert run_split(config, store=store)["status"] == "done"
    assert run_split(config, store=store)["status"] == "unchanged"
    job = codec.decode(store.get("job.json").data, Job, name="job.json")
    for chunk in job.chunks:
        assert codec.sha256(store.get(layout.chunk_file(chunk.name, "zstd")).data) == chunk.sha256
    with pytest.raises(InputError, match="lies inside the source"):
        run_split(
            config_for(f"{bucket}/in", f"{bucket}/in/job"), store=open_store(f"{bucket}/in/job")
        )


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_chunks": 1001}, "more than the 1000 rows"),
        ({"num_chunks": 5, "num_workers": 6}, "more than the 5 chunks"),
        ({"num_chunks": 5, "chunk_rows": 5}, "both are given"),
        ({"columns": []}, "names no column"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_written(
    source, tmp_path, options, what
):
    with pytest.raises(ConfigError, match=what) as caught:
        run(source, tmp_path / "job", **options)
    assert caught.value.exit_status == 2
    assert caught.value.hint
    assert not (tmp_path / "job").exists()


def test_an_empty_source_is_not_the_present_folder(source, tmp_path, monkeypatch):
    monkeypatch.chdir(source)
    with pytest.raises(ConfigError, match="names nothing"):
        run_split(config_for("", tmp_path / "job"), store=LocalStore(tmp_path / "job"))
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_group_column_that_is_not_there_is_refused_by_its_option(tmp_path, kind):
    text = {"csv": "doc\na\n", "jsonl": '{"doc": "a"}\n'}[kind]
    (tmp_path / f"a.{kind}").write_text(text)
    with pytest.raises(InputError, match="no column 'dok' \\(from --group-by\\)") as caught:
        run(tmp_path / f"a.{kind}", tmp_path / "job", num_chunks=1, group_by="dok")
    assert caught.value.hint == "did you mean doc?"


def test_output_and_source_must_lie_apart(source, tmp_path):
    for output in (source, source / "job"):
        with pytest.raises(InputError, match="lies inside the source"):
            run(source, output)
    with pytest.raises(InputError, match="lies inside the source"):
        run(f"{tmp_path}/**/*.parquet", source / "job")
    with pytest.raises(InputError, match="this source lies inside the output"):
        run(source / "0.parquet", source)
    assert sorted(path.name for path in source.iterdir()) == ["0.parquet", "1.parquet", "2.parquet"]
    assert run(f"{source}/*.parquet", source / "job")["status"] == "done"


def test_a_damaged_job_json_is_named_and_overwrite_mends_it(source, tmp_path):
    run(source, tmp_path / "job")
    (tmp_path / "job/job.json").write_text('{"rows"')
    with pytest.raises(InputError, match=r"job\.json: not a readable job record") as caught:
        run(source, tmp_path / "job", columns=["n", "text"], num_workers=2, num_chunks=3)
    program, command, *arguments = shlex.split(caught.value.hint)
    assert (program, command) == ("batchinfer", "split")
    assert arguments == [
        *(str(source), "--output", str(tmp_path / "job"), "--num-chunks", "3"),
        *("--num-workers", "2", "--columns", "n,text", "--overwrite"),
    ]
    assert run(source, tmp_path / "job", overwrite=True)["status"] == "done"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("looks_different", [False, True])
def test_a_job_of_a_newer_version_is_named_as_such_and_kept(
    source, tmp_path, looks_different, overwrite
):
    run(source, tmp_path / "job")
    path = tmp_path / "job/job.json"
    newer = {} if looks_different else json.loads(path.read_bytes())
    path.write_text(json.dumps(newer | {"format_version": 2}))
    before = contents(tmp_path / "job")
    with pytest.raises(InputError, match=r"job\.json: format version 2, .* up to 1") as caught:
        run(source, tmp_path / "job", overwrite=overwrite)
    assert caught.value.hint == "upgrade batchinfer"
    assert contents(tmp_path / "job") == before


# --------------------------------------------------------------------------- the command


def invoke(*arguments: str):
    return CliRunner().invoke(command.command, list(arguments), standalone_mode=False)


def test_the_command_passes_its_options_on(source, tmp_path):
    result = invoke(
        str(source), "--output", str(tmp_path / "job"), "--chunk-rows", "400", "--columns", "text, n",
        "--num-workers", "2", "--limit", "999", "--id-column", "n", "--compression", "zstd",
    )  # fmt: skip
    assert result.exception is None
    assert result.return_value["rows"] == 999
    job = read_job(tmp_path / "job")
    assert (job.columns, job.num_workers, job.id_column) == (["text", "n"], 2, "n")
    assert (job.limit, job.compression, job.shape) == (999, "zstd", {"chunk_rows": 400})


@pytest.mark.parametrize(
    ("text", "delimiter"), [(";", ";"), ("tab", "\t"), (r"\t", "\t"), ("\t", "\t")]
)
def test_a_delimiter_is_one_character_or_tab(tmp_path, text, delimiter):
    (tmp_path / "a.csv").write_text(f"a,b{delimiter}c\n1,2{delimiter}3\n")
    arguments = [str(tmp_path / "a.csv"), "--output", str(tmp_path / "job"), "--num-chunks", "1"]
    result = invoke(*arguments, "--delimiter", text)
    assert result.exception is None
    assert read_job(tmp_path / "job").columns == ["a,b", "c"]
    (tmp_path / "job/job.json").write_text("{")
    again = invoke(*arguments, "--delimiter", text)
    name = "tab" if delimiter == "\t" else "';'"
    assert f"--delimiter {name} --overwrite" in again.exception.hint
    for wrong in (";;", '"', "\n"):
        assert isinstance(invoke(*arguments, "--delimiter", wrong).exception, click.BadParameter)


@pytest.mark.parametrize(
    "option", ["--num-chunks", "--chunk-rows", "--num-workers", "--limit", "--processes"]
)
@pytest.mark.parametrize("value", ["0", "-3", "x"])
def test_counts_below_one_are_refused(source, tmp_path, option, value):
    result = CliRunner().invoke(
        command.command, [str(source), "--output", str(tmp_path / "job"), option, value]
    )
    assert result.exit_code == 2
    assert option in result.output
    assert not (tmp_path / "job").exists()


def test_as_a_module_it_prints_one_json_line_and_exits_with_the_status(source, tmp_path):
    command = [sys.executable, "-m", "batchinfer.split"]
    done = subprocess.run(
        [*command, str(source), "--output", str(tmp_path / "job"), "--num-chunks", "3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["chunks"] == 3
    failed = subprocess.run(
        [
            *command,
            str(tmp_path / "nothing"),
            "--output",
            str(tmp_path / "job2"),
            "--num-chunks",
            "3",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert "error: " in failed.stderr
    assert "hint: " in failed.stderr
    assert "Traceback" not in failed.stderr


def test_help_loads_nothing_heavy():
    probe = (
        "import sys\nfrom batchinfer.cli.main import main\nmain(['split', '--help'])\n"
        "print([name for name in ('pyarrow', 'numpy', 'fsspec', 's3fs', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_memory_is_that_of_a_row_group_not_of_the_file(tmp_path):
    """Peak memory of the process with 8 times the rows stays about the same."""
    probe = (
        "import resource, sys\nfrom batchinfer.split.command import SplitConfig, run_split\n"
        "from batchinfer.storage.local import LocalStore\n"
        "run_split(SplitConfig(sources=[sys.argv[1]], output=sys.argv[2], num_chunks=4, id_column='key'),"
        " store=LocalStore(sys.argv[2]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    peaks = []
    for groups in (2, 16):
        path = tmp_path / f"{groups}.parquet"
        with pq.ParquetWriter(
            path, pa.schema([("key", pa.int64()), ("text", pa.string())])
        ) as writer:
            for group in range(groups):
                keys = list(range(group * 1000, group * 1000 + 1000))
                writer.write_table(
                    pa.table({"key": keys, "text": [f"{key} " * 1000 for key in keys]})
                )
        done = subprocess.run(
            [sys.executable, "-c", probe, str(path), str(tmp_path / f"job-{groups}")],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert peaks[1] < peaks[0] + 60

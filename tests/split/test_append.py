"""`split --append`: new chunks after the old ones, killed at any write, by two at once, and runs that go on with it."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core import codec, layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import ConfigError, InputError, StorageError
from batchinfer.core.records import Append, Chunk, Job
from batchinfer.ledger.inventory import RunReader
from batchinfer.ledger.jobs import chunk_key, load_job, manifest_chunks, read_assignment
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.storage import Object, Store
from batchinfer.storage.local import LocalStore
from batchinfer.storage.opening import open_store
from making import (
    finish_process,
    overwrite,
    run_process,
    run_worker_here,
    start_process,
    worker_arguments,
)
from tiny_model import DEMO_MODEL

Rows = list[dict[str, Any]]


def rows_of(name: str, count: int) -> Rows:
    return [
        {"prompt": f"{name} {index} " + "x " * (index % 5), "n": index} for index in range(count)
    ]


def parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return parquet(tmp_path / "old.parquet", rows_of("old", 40))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return parquet(tmp_path / "new.parquet", rows_of("new", 23))


def split(
    source: Path, output: Path | str, store: Store | None = None, **options: Any
) -> dict[str, Any]:
    config = SplitConfig(sources=[str(source)], output=str(output), **options)
    return run_split(config, store=store or open_store(str(output)))


def append(
    *sources: Path, to: Path | str, store: Store | None = None, **options: Any
) -> dict[str, Any]:
    config = SplitConfig(sources=[*map(str, sources)], output=str(to), append=True, **options)
    return run_split(config, store=store or open_store(str(to)))


def read_job(folder: Path | str) -> Job:
    return codec.decode(open_store(str(folder)).get("job.json").data, Job, name="job.json")


def contents(folder: Path | str) -> dict[str, bytes]:
    store = open_store(str(folder))
    return {
        info.key: store.get(info.key).data
        for info in store.list()
        if not info.key.startswith(layout.RUNS)
    }


def chunk_rows(folder: Path | str) -> Rows:
    store = open_store(str(folder))
    lines = store.get(layout.ALL_MANIFEST).data.decode().split()
    return [json.loads(line) for key in lines for line in store.get(key).data.splitlines()]


# --------------------------------------------------------------------------- the longer job


class TestALongerJob:
    def test_rows_and_ids_go_on_where_they_ended(
        self, old: Path, new: Path, tmp_path: Path
    ) -> None:
        job = tmp_path / "job"
        split(old, job, num_chunks=4)
        before = contents(job)
        result = append(new, to=job)
        assert {name: result[name] for name in ("status", "rows", "chunks", "generation")} == {
            "status": "done",
            "rows": 63,
            "chunks": 7,
            "generation": 1,
        }
        assert (result["rows_appended"], result["chunks_appended"]) == (23, 3)
        wanted = [*rows_of("old", 40), *rows_of("new", 23)]
        assert chunk_rows(job) == [
            {**row, "_row": index, "_id": str(index)} for index, row in enumerate(wanted)
        ]
        after = contents(job)
        assert all(after[key] == data for key, data in before.items() if key.startswith("chunks/"))
        found = read_job(job)
        assert [source.url for source in found.sources] == [str(old), str(new)]
        assert [chunk.name for chunk in found.chunks] == [f"part-{i:05d}" for i in range(7)]
        assert found.chunks[4].first_row == 40

    def test_the_identity_stays_over_several_appends(
        self, old: Path, new: Path, tmp_path: Path
    ) -> None:
        job = tmp_path / "job"
        split(old, job)
        first = load_job(str(job), open_store)
        append(new, to=job)
        append(parquet(tmp_path / "third.parquet", rows_of("third", 5)), to=job)
        last = load_job(str(job), open_store)
        assert first is not None
        assert last is not None
        assert first[1] == last[1] == read_job(job).first_sha256
        assert (last[0].generation, last[0].rows) == (2, 68)
        assert last[0].appends == [
            Append(first_source=1, first_chunk=4, first_row=40),
            Append(first_source=2, first_chunk=7, first_row=63),
        ]

    @given(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=6))
    def test_each_worker_gets_its_share_and_loses_nothing(
        self, workers: int, sizes: list[int]
    ) -> None:
        sizes = [max(sizes[0], workers), *sizes[1:]]
        chunks = [
            Chunk(name=f"part-{i:05d}", first_row=i, rows=1, bytes=1, sha256="")
            for i in range(sum(sizes))
        ]
        before: dict[str, list[Chunk]] = {}
        for number in range(1, len(sizes) + 1):
            ends = [sum(sizes[:index]) for index in range(1, number)]
            job = Job(
                format_version=1,
                sources=[],
                columns=[],
                rows=sum(sizes[:number]),
                chunks=chunks[: sum(sizes[:number])],
                num_workers=workers,
                appends=[Append(first_source=0, first_chunk=end, first_row=end) for end in ends],
            )
            found = manifest_chunks(job)
            assert found.pop(layout.ALL_MANIFEST) == job.chunks
            assert len(found) == workers
            counts = [len(own) for own in found.values()]
            assert max(counts) - min(counts) <= 1
            assert sorted(chunk.name for own in found.values() for chunk in own) == [
                chunk.name for chunk in job.chunks
            ]
            for key, own in found.items():
                assert own[: len(before.get(key, []))] == before.get(key, [])
            before = found

    def test_types_of_the_sources_stay_known_where_they_agree(self, tmp_path: Path) -> None:
        first = pa.table({"a": pa.array([1], pa.int32()), "b": ["x"], "c": pa.nulls(1), "d": [1.0]})
        second = pa.table(
            {"a": pa.array([2], pa.int64()), "b": ["y"], "c": [b"z"], "d": pa.nulls(1)}
        )
        pq.write_table(first, tmp_path / "1.parquet")
        pq.write_table(second, tmp_path / "2.parquet")
        split(tmp_path / "1.parquet", tmp_path / "job")
        append(tmp_path / "2.parquet", to=tmp_path / "job")
        split(tmp_path / "[12].parquet", tmp_path / "both")
        types = read_job(tmp_path / "job").schema
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(types)))
        assert schema == pa.schema({"b": pa.string(), "c": pa.binary(), "d": pa.float64()})
        assert types == read_job(tmp_path / "both").schema

    @pytest.mark.parametrize("processes", [1, 2])
    def test_compression_ids_and_counts_are_the_jobs(
        self, tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("batchinfer.split.chunk_files._TURN_ROWS", 2)
        lines = ['{"k": "a", "v": 1}', '{"k": "b", "v": NaN}', "broken", "", '{"k": "b", "_id": 7}']
        (tmp_path / "1.jsonl").write_text("\n".join(lines))
        (tmp_path / "2.jsonl").write_text("\n".join(['{"v": 1, "k": "c", "_id": 3}', *lines[1:]]))
        job = tmp_path / "job"
        options: dict[str, Any] = {"compression": "zstd", "id_column": "k"}
        split(tmp_path / "1.jsonl", job, **options)
        before = read_job(job)
        append(tmp_path / "2.jsonl", to=job, chunk_rows=1, processes=processes)
        found = read_job(job)
        assert all(chunk.rows == 1 for chunk in found.chunks[len(before.chunks) :])
        assert (found.broken_lines, found.blank_lines, found.null_floats) == (2, 2, 2)
        assert found.duplicate_ids == 2
        assert found.renamed == {"_id": "_source_id"}
        ids = []
        for ref in read_assignment(
            [f"{job}/{layout.ALL_MANIFEST}"],
            job_url=None,
            allow_absolute=False,
            open_store=open_store,
        ).chunks:
            assert ref.key.endswith(".jsonl.zst")
            import zstandard

            data = (
                zstandard.ZstdDecompressor()
                .decompressobj()
                .decompress((job / ref.key).read_bytes())
            )
            ids += [json.loads(line)["_id"] for line in data.splitlines() if line.startswith(b"{")]
        assert ids == ["a", "b", "b", "c", "b", "b"]


# --------------------------------------------------------------------------- what is refused, what is left out


class TestWhatCannotBeAppended:
    @pytest.mark.parametrize(
        ("columns", "what"),
        [
            ({"prompt": ["x"]}, "lacks columns of the job: n"),
            ({"prompt": ["x"], "n": [1], "m": [1]}, "has columns that the job lacks: m"),
            ({"question": ["x"]}, "lacks columns of the job: n, prompt"),
        ],
    )
    @pytest.mark.parametrize("kind", ["parquet", "jsonl"])
    def test_other_columns_are_refused_and_named(
        self, old: Path, tmp_path: Path, columns: dict[str, list[Any]], what: str, kind: str
    ) -> None:
        other = tmp_path / f"other.{kind}"
        table = pa.table(columns)
        if kind == "parquet":
            pq.write_table(table, other)
            source = old
        else:
            source = tmp_path / "old.jsonl"
            source.write_text("".join(json.dumps(row) + "\n" for row in rows_of("old", 40)))
            other.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        split(source, tmp_path / "job")
        before = contents(tmp_path / "job")
        with pytest.raises(InputError, match=what) as caught:
            append(other, to=tmp_path / "job")
        assert str(other) in caught.value.message
        assert contents(tmp_path / "job") == before

    def test_columns_besides_the_jobs_may_be_left_out(self, old: Path, tmp_path: Path) -> None:
        job = tmp_path / "job"
        split(old, job, columns=["prompt"])
        with pytest.raises(InputError, match="job lacks: n") as caught:
            append(parquet(tmp_path / "new.parquet", rows_of("new", 3)), to=job)
        assert "--columns prompt" in caught.value.hint
        append(tmp_path / "new.parquet", to=job, columns=["prompt"])
        assert [set(row) for row in chunk_rows(job)] == [{"prompt", "_row", "_id"}] * 43
        with pytest.raises(InputError, match="lacks columns"):
            append(parquet(tmp_path / "3.parquet", rows_of("3", 3)), to=job, columns=["n"])

    def test_another_format_is_refused(self, old: Path, tmp_path: Path) -> None:
        split(old, tmp_path / "job")
        (tmp_path / "new.jsonl").write_text('{"prompt": "x", "n": 1}\n')
        with pytest.raises(InputError, match=r"new.jsonl: is jsonl, the job's sources are parquet"):
            append(tmp_path / "new.jsonl", to=tmp_path / "job")

    @pytest.mark.parametrize(
        ("made", "given", "what"),
        [
            ({"group_by": "n"}, {}, "was made with --group-by n"),
            ({"limit": 20}, {}, "was made with --limit 20"),
            ({}, {"group_by": "n"}, "--group-by: not together with --append"),
            ({}, {"limit": 3}, "--limit: not together"),
            ({}, {"overwrite": True}, "--overwrite: not together"),
            ({}, {"num_workers": 2}, r"--num-workers 2 \(the job has 1\)"),
            ({}, {"id_column": "n"}, r'--id-column n \(the job has ""\)'),
            ({}, {"compression": "zstd"}, r'--compression zstd \(the job has "none"\)'),
            ({}, {"num_chunks": 24}, "more than the 23 rows"),
        ],
    )
    def test_options_that_the_job_contradicts_are_refused(
        self,
        old: Path,
        new: Path,
        tmp_path: Path,
        made: dict[str, Any],
        given: dict[str, Any],
        what: str,
    ) -> None:
        split(old, tmp_path / "job", **made)
        before = contents(tmp_path / "job")
        with pytest.raises((ConfigError, InputError), match=what):
            append(new, to=tmp_path / "job", **given)
        assert contents(tmp_path / "job") == before

    def test_without_a_job_nothing_is_written(self, new: Path, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"no job\.json there"):
            append(new, to=tmp_path / "job")
        assert not (tmp_path / "job").exists()

    def test_files_that_the_job_has_are_left_out(
        self, old: Path, new: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = tmp_path / "job"
        split(old, job)
        append(new, to=job)
        before = contents(job)
        caplog.set_level("INFO")
        result = append(old, new, to=job)
        assert (result["status"], result["files_left_out"], result["rows"]) == ("unchanged", 2, 63)
        assert contents(job) == before
        assert "2 files in the job already, and left out" in caplog.text
        copy = tmp_path / "copy.parquet"
        copy.write_bytes(new.read_bytes())
        third = parquet(tmp_path / "third.parquet", rows_of("third", 2))
        result = append(copy, third, to=job)
        assert (result["rows_appended"], result["files_left_out"]) == (2, 1)
        assert f"{copy}: has the same content as {new} in the job" in caplog.text
        assert chunk_rows(job)[-1]["_row"] == 64

    def test_a_value_of_the_same_length_is_a_change(self, tmp_path: Path) -> None:
        """Size and footer of such a parquet file are the same as before."""
        words = ["apple", "grape", "lemon", "zebra"]
        rows = [{"prompt": words[index % 4], "n": index} for index in range(40)]
        source = parquet(tmp_path / "a.parquet", rows)
        split(source, tmp_path / "job", num_chunks=4)
        before = contents(tmp_path / "job")
        assert split(source, tmp_path / "job", num_chunks=4)["status"] == "unchanged"
        rows[5]["prompt"], rows[6]["prompt"] = rows[6]["prompt"], rows[5]["prompt"]
        size = source.stat().st_size
        footer = pq.read_metadata(source).to_dict()
        parquet(source, rows)
        assert (source.stat().st_size, pq.read_metadata(source).to_dict()) == (size, footer)
        with pytest.raises(InputError, match="differs in the source's files"):
            split(source, tmp_path / "job", num_chunks=4)
        with pytest.raises(InputError, match="has changed since its rows became a part"):
            append(source, to=tmp_path / "job")
        assert contents(tmp_path / "job") == before
        other = source.rename(tmp_path / "b.parquet")
        assert append(other, to=tmp_path / "job")["rows_appended"] == 40

    def test_a_job_of_an_earlier_version_has_footers_only(self, old: Path, tmp_path: Path) -> None:
        job = tmp_path / "job"
        split(old, job, num_chunks=4)
        text = (job / "job.json").read_text()
        plain = re.sub(r',\s*"crc32": "[0-9a-f]{8}"|"crc32": "[0-9a-f]{8}",\s*', "", text)
        assert plain != text
        overwrite(LocalStore(job), layout.JOB_KEY, plain.encode())
        assert split(old, job, num_chunks=4)["status"] == "unchanged"
        assert append(old, to=job)["rows_appended"] == 0

    def test_a_file_that_has_changed_is_refused(self, old: Path, tmp_path: Path) -> None:
        split(old, tmp_path / "job")
        parquet(old, rows_of("old", 41))
        with pytest.raises(InputError, match="has changed since its rows became a part of the job"):
            append(old, to=tmp_path / "job")

    def test_the_first_split_and_the_whole_are_the_same_job(
        self, old: Path, new: Path, tmp_path: Path
    ) -> None:
        """A script that splits and then appends can run again."""
        job = tmp_path / "job"
        split(old, job)
        append(new, to=job)
        before = contents(job)
        assert split(old, job)["status"] == "unchanged"
        both = SplitConfig(sources=[str(old), str(new)], output=str(job))
        assert run_split(both, store=open_store(str(job)))["status"] == "unchanged"
        with pytest.raises(InputError, match="differs in the source's files"):
            split(new, job)
        assert contents(job) == before


# --------------------------------------------------------------------------- killed, or two at once


class Dying(LocalStore):
    """A store whose process dies before or after the n-th write."""

    def __init__(self, root: Path, writes: int, *, after: bool) -> None:
        super().__init__(root)
        self._left = writes
        self._after = after

    def _write(self, write: Callable[[], str]) -> str:
        self._left -= 1
        if self._left < 0 and not self._after:
            raise StorageError("died")
        result = write()
        if self._left < 0:
            raise StorageError("died")
        return result

    def create(self, key: str, data: bytes) -> str:
        return self._write(lambda: super(Dying, self).create(key, data))

    def put_file(self, key: str, path: Path) -> None:
        return self._write(lambda: super(Dying, self).put_file(key, path))

    def replace(self, key: str, data: bytes, etag: str) -> str:
        return self._write(lambda: super(Dying, self).replace(key, data, etag))


class TestKilledOrTwoAtOnce:
    def test_an_append_between_a_workers_look_at_job_json_and_at_the_manifest_is_seen(
        self, old: Path, new: Path, tmp_path: Path
    ) -> None:
        job = tmp_path / "job"
        split(old, job, num_chunks=4)
        before = LocalStore(job).get(layout.JOB_KEY)
        append(new, to=job)
        looks = 0

        class Early(LocalStore):
            def get(self, key: str) -> Object:
                nonlocal looks
                looks += key == layout.JOB_KEY
                return before if key == layout.JOB_KEY and looks == 1 else super().get(key)

        for manifest in (layout.ALL_MANIFEST, layout.worker_manifest(0, 1)):
            looks = 0
            found = read_assignment(
                [f"{job}/{manifest}"],
                job_url=None,
                allow_absolute=False,
                open_store=lambda url: Early(Path(url)),
            )
            assert (len(found.chunks), found.job, looks) == (7, read_job(job), 2)

    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("writes", range(7))
    def test_killed_at_any_write_the_same_command_ends_identical(
        self, old: Path, new: Path, tmp_path: Path, writes: int, after: bool
    ) -> None:
        """Three chunks, job.json and three manifests. A worker that starts meanwhile has the old chunks, or all."""
        for name in ("fresh", "job"):
            split(old, tmp_path / name, num_chunks=4, num_workers=2)
        append(new, to=tmp_path / "fresh")
        before = contents(tmp_path / "job")
        store = Dying(tmp_path / "job", writes, after=after)
        with pytest.raises(StorageError):
            append(new, to=tmp_path / "job", store=store)
        names = []
        for index in range(2):
            manifest = f"{tmp_path}/job/{layout.worker_manifest(index, 2)}"
            names += read_assignment(
                [manifest], job_url=None, allow_absolute=False, open_store=open_store
            ).chunks
        is_appended = read_job(tmp_path / "job").rows == 63
        assert is_appended == (writes + after > 3)
        assert len(names) == (7 if is_appended else 4)
        if not is_appended:
            assert {key: contents(tmp_path / "job")[key] for key in before} == before
        append(new, to=tmp_path / "job")
        assert contents(tmp_path / "job") == contents(tmp_path / "fresh")

    def test_of_two_at_once_one_wins_and_the_other_is_told(
        self, old: Path, new: Path, tmp_path: Path
    ) -> None:
        third = parquet(tmp_path / "third.parquet", rows_of("third", 30))
        job = tmp_path / "job"
        split(old, job, num_chunks=4)

        class Overtaken(LocalStore):
            """Another command appends after all chunks are written, just before job.json is replaced."""

            def replace(self, key: str, data: bytes, etag: str) -> str:
                if key == layout.JOB_KEY:
                    append(third, to=job)
                return super().replace(key, data, etag)

        with pytest.raises(InputError, match="another command changed the job meanwhile") as caught:
            append(new, to=job, store=Overtaken(job))
        assert caught.value.hint == "run the same command again"
        self.check(job, [*rows_of("old", 40), *rows_of("third", 30)])
        append(new, to=job)
        self.check(job, [*rows_of("old", 40), *rows_of("third", 30), *rows_of("new", 23)])

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_a_slower_append_leaves_no_older_manifest(
        self, old: Path, new: Path, tmp_path: Path, is_lost: bool
    ) -> None:
        """The first append writes its manifest while the second is about to write its own."""
        third = parquet(tmp_path / "third.parquet", rows_of("third", 30))
        job = tmp_path / "job"
        split(old, job, num_chunks=4)
        store = LocalStore(job)
        with pytest.raises(StorageError):
            append(new, to=job, store=Dying(job, 4, after=False))  # before its first manifest
        keys = [chunk_key(read_job(job), chunk) for chunk in read_job(job).chunks]
        older = "".join(f"{key}\n" for key in keys).encode()
        if is_lost:
            store.delete([layout.ALL_MANIFEST])

        class Overtaken(LocalStore):
            is_over = False

            def _overtake(self, key: str) -> None:
                """The first append has looked at job.json before it was replaced, and writes only now."""
                if key == layout.ALL_MANIFEST and not self.is_over:
                    self.is_over = True
                    overwrite(store, key, older)

            def create(self, key: str, data: bytes) -> str:
                self._overtake(key)
                return super().create(key, data)

            def replace(self, key: str, data: bytes, etag: str) -> str:
                self._overtake(key)
                return super().replace(key, data, etag)

        append(third, to=job, store=Overtaken(job))
        self.check(job, [*rows_of("old", 40), *rows_of("new", 23), *rows_of("third", 30)])

    def test_leftovers_of_another_are_neither_used_nor_touched(
        self, old: Path, new: Path, tmp_path: Path
    ) -> None:
        """They may belong to a command that is still running."""
        third = parquet(tmp_path / "third.parquet", rows_of("third", 30))
        job = tmp_path / "job"
        split(old, job, num_chunks=4)
        with pytest.raises(StorageError):
            append(third, to=job, store=Dying(job, 2, after=False))
        left = {key: data for key, data in contents(job).items() if key.startswith(layout.CHUNKS)}
        assert "chunks/part-00005.jsonl" in left
        append(new, to=job)
        self.check(job, [*rows_of("old", 40), *rows_of("new", 23)])
        assert left.items() <= contents(job).items()
        assert run_worker_here(job, job / "runs/echo")["request_count"] == 63

    @staticmethod
    def check(job: Path, rows: Rows) -> None:
        assert chunk_rows(job) == [
            {**row, "_row": index, "_id": str(index)} for index, row in enumerate(rows)
        ]
        for chunk in read_job(job).chunks:
            key = layout.chunk_file(chunk.name, "none", chunk.nonce or "")
            assert codec.sha256((job / key).read_bytes()) == chunk.sha256


# --------------------------------------------------------------------------- runs that go on


class TestRuns:
    def test_a_finished_run_becomes_incomplete_and_goes_on(
        self, old: Path, new: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from batchinfer.cli.main import main

        def call(*arguments: object) -> tuple[int, dict[str, Any]]:
            status = main([*map(str, arguments)])
            return status, json.loads(capsys.readouterr().out.splitlines()[-1])

        job, run = tmp_path / "job", tmp_path / "job/runs/echo"
        split(old, job, num_chunks=4, num_workers=2)
        fingerprint = run_worker_here(job, run)["fingerprint"]
        watching = RunReader(LocalStore(run), open_store, SystemClock())
        assert [watching.read().job, watching.read().job] == [read_job(job)] * 2
        assert call("verify", run)[0] == 0
        outputs = {path.name: path.read_bytes() for path in (run / "outputs").iterdir()}

        append(new, to=job)
        assert watching.read().job == read_job(job)
        status, found = call("verify", run)
        assert (status, found["missing"], found["chunks_sound"], found["chunks_total"]) == (
            1,
            3,
            4,
            7,
        )
        status, found = call("status", run)
        assert (found["rows_done"], found["rows_total"]) == (40, 63)
        assert main(["collect", str(run), str(tmp_path / "gaps.jsonl")]) == 1
        assert call("collect", run, tmp_path / "part.jsonl", "--partial")[1]["rows"] == 40

        result = run_worker_here(job, run, index=0)
        assert (result["status"], result["fingerprint"]) == ("SUCCESS", fingerprint)
        run_worker_here(job, run, index=1)
        assert (
            outputs.items() <= {p.name: p.read_bytes() for p in (run / "outputs").iterdir()}.items()
        )
        status, found = call("verify", run, "--deep")
        assert (status, found["rows_ok"], found["chunks_sound"]) == (0, 63, 7)
        assert call("clean", run)[0] == 0
        assert call("report", run)[0] == 0
        assert call("collect", run, tmp_path / "all.parquet", "--with-source")[0] == 0
        table = pq.read_table(tmp_path / "all.parquet")
        assert table["_row"].to_pylist() == list(range(63))
        assert table["prompt"].to_pylist() == [
            r["prompt"] for r in [*rows_of("old", 40), *rows_of("new", 23)]
        ]
        assert table.schema.field("n").type == pa.int64()

    def test_a_worker_from_before_ends_its_old_list_with_success(
        self, old: Path, new: Path, tmp_path: Path
    ) -> None:
        job, run = tmp_path / "job", tmp_path / "job/runs/echo"
        split(old, job, num_chunks=4)
        slow = ("--echo-latency-seconds", "0.3", "--max-num-seqs", "8")
        worker = start_process(worker_arguments(job, run, *slow))
        try:
            until((run / "run.json").exists)
            append(new, to=job)
            finished = finish_process(worker)
        finally:
            worker.kill()
        assert finished.status == 0, finished.stderr
        assert finished.result["status"] == "SUCCESS"
        assert (finished.result["chunks_total"], finished.result["request_count"]) == (4, 40)
        assert run_process(["verify", str(run)]).result["missing"] == 3
        again = run_worker_here(job, run)
        assert (again["chunks_total"], again["request_count"]) == (7, 23)
        assert run_process(["verify", "--deep", str(run)]).result["rows_ok"] == 63

    def test_a_worker_without_new_chunks_helps_with_them(self, old: Path, tmp_path: Path) -> None:
        job, run = tmp_path / "job", tmp_path / "job/runs/echo"
        split(old, job, num_chunks=4, num_workers=2)
        run_worker_here(job, run)
        append(parquet(tmp_path / "one.parquet", rows_of("one", 1)), to=job)
        found = manifest_chunks(read_job(job))
        assert sorted(map(len, found.values())) == [2, 3, 5]
        index = 0 if len(found[layout.worker_manifest(0, 2)]) == 2 else 1
        assert run_worker_here(job, run, index=index)["request_count"] == 1


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.s3
def test_on_s3_one_of_two_at_once_wins_and_the_other_is_told(
    s3_url: Callable[[str], str],
    old: Path,
    new: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = s3_url("job")
    third = parquet(tmp_path / "third.parquet", rows_of("third", 30))
    split(old, job, num_chunks=4)
    store = open_store(job)
    replace = store.replace

    def overtaken(key: str, data: bytes, etag: str) -> str:
        if key == layout.JOB_KEY:
            append(third, to=job)
        return replace(key, data, etag)

    monkeypatch.setattr(store, "replace", overtaken)
    with pytest.raises(InputError, match="another command changed the job meanwhile"):
        append(new, to=job, store=store)
    assert append(new, to=job)["generation"] == 2
    wanted = [*rows_of("old", 40), *rows_of("third", 30), *rows_of("new", 23)]
    assert [row["prompt"] for row in chunk_rows(job)] == [row["prompt"] for row in wanted]


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.chaos
def test_killed_on_s3_while_workers_run_every_row_is_answered_once(
    s3_url: Callable[[str], str], old: Path, tmp_path: Path
) -> None:
    """Real kills of `split --append`, each at another number of chunks, with workers before, during and after."""
    chance = random.Random(4)
    job, fresh = s3_url("job"), s3_url("fresh")
    for url in (job, fresh):
        split(old, url, num_chunks=4, num_workers=2)
    new = parquet(tmp_path / "new.parquet", rows_of("new", 120))
    store = open_store(job)
    run = f"{job}/runs/echo"
    slow = ("--echo-latency-seconds", "1.5", "--max-num-seqs", "8")
    before = start_process(worker_arguments(job, run, *slow, index=0))
    command = ["split", "--append", str(new), "--output", job, "--chunk-rows", "6"]
    try:
        until(lambda: any(True for _ in store.list("runs/echo/run.json")))
        for wanted in (1, chance.randrange(3, 15)):
            killed = start_process(command)
            until(lambda: sum(1 for _ in store.list(layout.CHUNKS)) >= 4 + wanted)  # noqa: B023
            os.kill(killed.pid, signal.SIGKILL)
            killed.communicate()
        assert run_worker_here(job, run, "--no-steal", index=1)["chunks_total"] == 2
        done = run_process(command)
        assert done.status == 0, done.stderr
        first = finish_process(before)
        assert first.status == 0, first.stderr
    finally:
        before.kill()
    append(new, to=fresh, chunk_rows=6)
    assert contents(job) == contents(fresh)
    assert run_worker_here(job, run, index=1)["status"] == "SUCCESS"
    verified = run_process(["verify", "--deep", run])
    assert (verified.status, verified.result["rows_ok"]) == (0, 160), verified.stderr


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_with_a_real_model_goes_on_with_appended_rows(
    old: Path, new: Path, tmp_path: Path
) -> None:
    job, run = tmp_path / "job", tmp_path / "job/runs/demo"
    split(old, job, num_workers=2)
    options = ["--job", str(job), "--output", str(run), "--model", str(DEMO_MODEL)]
    options += ["--prompt-column", "prompt", "--max-tokens", "8", "--temperature", "0.8"]
    everything = ["--manifest", f"{job}/{layout.ALL_MANIFEST}"]
    first = run_process(["worker", *options, *everything])
    assert (first.status, first.result["request_count"]) == (0, 40), first.stderr
    append(new, to=job)
    second = run_process(
        ["worker", *options, "--manifest", f"{job}/{layout.worker_manifest(1, 2)}"]
    )
    assert (second.status, second.result["request_count"]) == (0, 23), second.stderr
    assert second.result["fingerprint"] == first.result["fingerprint"]
    assert run_process(["verify", "--deep", str(run)]).result["rows_ok"] == 63

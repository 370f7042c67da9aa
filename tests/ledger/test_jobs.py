"""Manifests: whose chunks, where they lie, and that no line leaves its root."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import FORMAT_VERSION, Job, Source
from batchinfer.ledger import jobs
from batchinfer.ledger.jobs import (
    Assignment,
    check_columns,
    job_chunks,
    load_job,
    rank_manifests,
    read_assignment,
)
from batchinfer.prompts import PromptConfig
from batchinfer.storage.memory import MemoryStore
from batchinfer.storage.opening import open_store
from making import make_job


def read(
    *manifests: str, job: str | None = None, allow_absolute: bool = False, limit: int | None = None
) -> Assignment:
    return read_assignment(
        manifests, job_url=job, allow_absolute=allow_absolute, limit=limit, open_store=open_store
    )


@pytest.fixture
def job(tmp_path: Path) -> str:
    make_job(tmp_path / "job", rows=95, per_chunk=10, workers=3)
    return str(tmp_path / "job")


def test_lines_of_a_jobs_manifest_are_its_chunks(job: str) -> None:
    found = read(f"{job}/manifests/worker-00001.txt")
    assert [ref.name for ref in found.chunks] == ["part-00003", "part-00004", "part-00005"]
    assert [(ref.first_row, ref.rows) for ref in found.chunks] == [(30, 10), (40, 10), (50, 10)]
    assert found.job_url == job


def test_a_copied_manifest_needs_its_job(job: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.txt").write_text("chunks/part-00009.jsonl\n")
    found = read(str(tmp_path / "manifest.txt"), job=job)
    assert [(ref.root, ref.rows) for ref in found.chunks] == [(job, 5)]


def test_several_manifests_are_one_list(job: str) -> None:
    names = [
        ref.name
        for ref in read(
            f"{job}/manifests/worker-00000.txt", f"{job}/manifests/worker-00002.txt"
        ).chunks
    ]
    assert names == [
        "part-00000",
        "part-00001",
        "part-00002",
        *(f"part-0000{i}" for i in (6, 7, 8, 9)),
    ]


def test_a_limit_cuts_the_job_not_the_manifest(job: str) -> None:
    assert [
        (r.name, r.row_limit) for r in read(f"{job}/manifests/worker-00000.txt", limit=15).chunks
    ] == [
        ("part-00000", 10),
        ("part-00001", 5),
    ]
    assert read(f"{job}/manifests/worker-00001.txt", limit=15).chunks == []


def test_every_chunk_has_one_rank(job: str) -> None:
    loaded = load_job(job, open_store)
    assert loaded is not None
    for num_ranks in (1, 2, 3):
        keys = [
            key for rank in range(num_ranks) for key in rank_manifests(loaded[0], rank, num_ranks)
        ]
        names = [ref.name for key in keys for ref in read(f"{job}/{key}").chunks]
        assert sorted(names) == list(job_chunks(loaded[0], job))


def test_more_ranks_than_manifests_is_a_mistake_that_says_what_to_do(job: str) -> None:
    loaded = load_job(job, open_store)
    assert loaded is not None
    with pytest.raises(InputError, match="only 3 worker manifests") as caught:
        rank_manifests(loaded[0], 3, 4)
    assert "--num-workers 4" in caught.value.hint


@pytest.mark.parametrize("line", ["../secret.jsonl", "a/../../b.jsonl", "chunks/../../x.jsonl"])
def test_no_line_leaves_its_folder(tmp_path: Path, line: str) -> None:
    (tmp_path / "list.txt").write_text(f"{line}\n")
    with pytest.raises(InputError, match="leaves its folder"):
        read(str(tmp_path / "list.txt"), allow_absolute=True)


@pytest.mark.parametrize(
    "line", ["/etc/passwd.jsonl", "s3://elsewhere/x.jsonl", "file:///etc/x.jsonl"]
)
def test_a_remote_manifest_names_nothing_absolute_unless_allowed(line: str) -> None:
    MemoryStore("memory://lists").create(f"{len(line)}.txt", f"{line}\n".encode())
    with pytest.raises(InputError, match="is absolute") as caught:
        read(f"memory://lists/{len(line)}.txt")
    assert "--allow-absolute" in caught.value.hint


def test_a_local_list_may_name_absolute_paths(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_bytes(b"{}\n")
    (tmp_path / "list.txt").write_text(f"{tmp_path}/data/a.jsonl\n")
    assert [(ref.name, ref.first_row) for ref in read(str(tmp_path / "list.txt")).chunks] == [
        ("a", 0)
    ]


def test_two_chunks_of_one_output_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a/x.jsonl\nb/x.jsonl\n")
    with pytest.raises(InputError, match=r"both write the output x\.jsonl"):
        read(str(tmp_path / "list.txt"))


def test_a_missing_chunk_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("there.jsonl\ngone.jsonl\n")
    (tmp_path / "there.jsonl").write_bytes(b"{}\n")
    with pytest.raises(InputError, match=r"gone\.jsonl: named in the manifest, but not there"):
        read(str(tmp_path / "list.txt"))


def test_an_unfinished_split_is_told_apart(job: str) -> None:
    open_store(job).delete(["job.json"])
    with pytest.raises(InputError, match="did not finish"):
        read(f"{job}/manifests/all.txt")


def test_an_empty_manifest_a_missing_one_and_one_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("empty", "no chunk in it"),
        ("gone", "no such manifest"),
        ("binary", "not a text file"),
    ):
        with pytest.raises(InputError, match=message):
            read(str(tmp_path / f"{name}.txt"))


def test_a_job_of_a_newer_format_is_refused(job: str) -> None:
    path = Path(job) / "job.json"
    path.write_text(
        path.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99')
    )
    with pytest.raises(InputError, match="format version 99"):
        read(f"{job}/manifests/all.txt")


def test_a_damaged_job_is_named(job: str) -> None:
    (Path(job) / "job.json").write_text('{"format_version": 1')
    with pytest.raises(InputError, match=r"job\.json: not a readable job record"):
        read(f"{job}/manifests/all.txt")


def test_a_limit_without_a_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    (tmp_path / "list.txt").write_text("a.jsonl\n")
    with pytest.raises(InputError, match="--limit"):
        read(str(tmp_path / "list.txt"), limit=3)


@pytest.mark.parametrize("source_format", ["parquet", "csv"])
def test_a_column_that_no_row_has_is_refused_with_the_nearest(source_format: str) -> None:
    job = job_of(source_format)
    with pytest.raises(ConfigError, match="--prompt-column promt: no column of the job") as caught:
        check_columns(job, PromptConfig(prompt_column="promt").columns_by_option)
    assert "--prompt-column prompt" in caught.value.hint
    with pytest.raises(ConfigError, match="--blank-columns anwser: no column of the job"):
        check_columns(job, {"--prompt-column": ["prompt"], "--blank-columns": ["anwser"]})
    check_columns(job, {"--messages-column": [""], "--keep": ["*"], "--blank-columns": ["answer"]})


def test_rows_of_json_lines_may_have_columns_that_the_job_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(jobs.logger, "warning", lambda text, *values: said.append(text % values))
    config = PromptConfig(prompt_column="promt", keep=["answer", "_id"], blank_columns=["x"])
    check_columns(job_of("jsonl"), config.columns_by_option)
    start, seen = "in none of the rows that split looked at", "(prompt, answer)"
    assert said == [
        f"--prompt-column promt: {start} {seen}; did you mean --prompt-column prompt?",
        f"--blank-columns x: {start} {seen}",
    ]


def job_of(source_format: str) -> Job:
    return Job(
        format_version=1,
        sources=[Source(url="data", format=source_format, files=[])],
        columns=["prompt", "answer"],
        rows=0,
        chunks=[],
        num_workers=1,
    )


def test_a_relative_job_is_known_by_its_whole_path(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.json records it, and commands in other folders read that."""
    monkeypatch.chdir(Path(job).parent)
    name = Path(job).name
    for found in (
        read(f"{name}/manifests/all.txt"),
        read(f"{name}/manifests/all.txt", job=name),
    ):
        assert found.job_url == job
        assert {ref.root for ref in found.chunks} == {job}


def test_a_job_given_as_a_manifest_is_named_as_one(job: str) -> None:
    with pytest.raises(InputError, match="no such manifest") as caught:
        read(job)
    assert f"--job {job}" in caught.value.hint


def test_a_chunk_given_as_a_manifest_is_named_as_one(job: str) -> None:
    with pytest.raises(InputError, match="holds JSON Lines"):
        read(f"{job}/chunks/part-00000.jsonl")

"""Manifests: whose chunks, where they lie, and that no line leaves its root."""

from pathlib import Path

import msgspec
import pytest

from batchinfer.core import codec
from batchinfer.core.errors import InputError
from batchinfer.ledger.jobs import (
    Assignment,
    job_chunks,
    load_job,
    rank_manifests,
    read_assignment,
)
from batchinfer.storage.opening import open_store
from fakes import MemoryStore
from making import make_job, overwrite, put_job


def read(*manifests: str, job: str | None = None) -> Assignment:
    return read_assignment(manifests, job_url=job, open_store=open_store)


@pytest.fixture
def job(tmp_path):
    make_job(tmp_path / "job", rows=95, per_chunk=10, workers=3)
    return str(tmp_path / "job")


def test_the_jobs_own_manifests_follow_from_it_and_others_are_read(job, tmp_path):
    """`split --append` may be killed between job.json and the manifests."""
    (Path(job) / "manifests/worker-00000.txt").write_text("chunks/part-00000.jsonl\n")
    assert len(read(f"{job}/manifests/worker-00000.txt").chunks) == 3
    copy = tmp_path / "worker-00000.txt"
    copy.write_text("chunks/part-00000.jsonl\n" * 2)
    assert len(read(str(copy), job=job).chunks) == 1
    assert len(read(f"{job}/manifests/all.txt", str(copy), job=job).chunks) == 10


def test_a_job_in_a_bucket_names_no_file_elsewhere():
    """Who wrote it may not have the right to read them."""
    url = "memory://references"
    job = msgspec.structs.replace(make_job(url, rows=1, per_chunk=1), num_workers=1)
    chunks = [msgspec.structs.replace(each, file="/etc/passwd") for each in job.chunks]
    changed = msgspec.structs.replace(job, chunks=chunks)
    overwrite(MemoryStore(url), "job.json", codec.encode(changed))
    with pytest.raises(InputError, match="/etc/passwd, which is not in the job's bucket"):
        read(f"{url}/manifests/all.txt")


def test_every_chunk_has_one_rank_and_more_ranks_than_manifests_are_refused(job):
    [loaded, _] = load_job(job, open_store) or ()
    for num_ranks in (1, 2, 3):
        keys = [key for rank in range(num_ranks) for key in rank_manifests(loaded, rank, num_ranks)]
        names = [ref.name for key in keys for ref in read(f"{job}/{key}").chunks]
        assert sorted(names) == list(job_chunks(loaded, job))
    with pytest.raises(InputError, match="only 3 worker manifests") as caught:
        rank_manifests(loaded, 3, 4)
    assert "--num-workers 4" in caught.value.hint


@pytest.mark.parametrize(
    ("chunk", "change", "what"),
    [
        (None, {"rows": 4}, "its chunks have 3 rows together, expected the 4 rows of the job"),
        (None, {"num_workers": 4}, "4 workers for 3 chunks"),
        (None, {"limit": 0}, "limit"),
        (0, {"first_row": 1}, "part-00000 begins at row 1, expected 0"),
        (2, {"name": "part-00000"}, "lists the chunk part-00000 twice"),
        (2, {"name": "../evil"}, "'../evil' is no name of a chunk"),
        (2, {"file": "chunks/../../evil"}, "'chunks/../../evil' leaves the job"),
    ],
)
def test_a_job_that_contradicts_itself_or_does_not_hold_each_row_once_is_refused(
    chunk, change, what
):
    content = msgspec.to_builtins(put_job(lambda *_: None, [b"{}\n"] * 3, workers=2))
    (content if chunk is None else content["chunks"][chunk]).update(change)
    store = MemoryStore("memory://numbers")
    overwrite(store, "job.json", codec.encode(content))
    with pytest.raises(InputError, match=what):
        load_job(store.url, open_store)

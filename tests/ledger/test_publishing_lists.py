"""Lists of files: a marker counts for the file that it answers, and for no other that has its name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, StorageError
from batchinfer.core.records import Claim
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.publishing import Publisher, build_output, check_belongs_to
from fakes import MemoryStore, marker_record, worker_record
from simulation.scenario import JOB, good_row
from simulation.stage import Stage


@pytest.fixture
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def put(stage: Stage, key: str, *prompts: str) -> None:
    rows = [good_row(index, text).line for index, text in enumerate(prompts)]
    stage.server.put(JOB + key, b"".join(row + b"\n" for row in rows))


def put_lists(stage: Stage) -> None:
    """Two lists whose files have one name."""
    put(stage, "a/x.jsonl", "a 0", "a 1")
    put(stage, "b/x.jsonl", "b 0", "b 1", "b 2")
    put(stage, "b/y.jsonl", "y 0")
    stage.server.put(f"{JOB}one.txt", b"a/x.jsonl\n")
    stage.server.put(f"{JOB}two.txt", b"b/x.jsonl\nb/y.jsonl\n")


OTHER_FILE = r"/b/x\.jsonl: this run has the answers to \S+/a/x\.jsonl under its name, and none"


@pytest.mark.usefixtures("_quiet")
def test_a_file_is_not_done_because_another_of_its_name_is() -> None:
    """The second worker ended with 0 as if all were done, and no start ever generated its rows."""
    with Stage([["unused"]]) as stage:
        put_lists(stage)
        assert stage.run("w1", manifest="one.txt").is_success
        for _ in range(2):
            ending = stage.run("w2", manifest="two.txt")
            assert isinstance(ending.error, StorageError)
            assert ending.error.exit_status == 34
            with pytest.raises(StorageError, match=OTHER_FILE):
                raise ending.error
            assert "another --output" in ending.error.message
        markers = [key for key in stage.objects(layout.OUTPUTS) if key.endswith(".succeed")]
        assert markers == ["outputs/x.succeed", "outputs/y.succeed"]
        assert json.loads(stage.objects(layout.CLAIMS)[layout.claim_key("x")])["worker"] == ""
        assert stage.run("w1", manifest="one.txt").is_success


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("retry_errors", [False, True])
def test_a_file_that_was_replaced_since_it_was_done_is_refused(*, retry_errors: bool) -> None:
    with Stage([["unused"]]) as stage:
        put_lists(stage)
        assert stage.run(manifest="one.txt").is_success
        put(stage, "a/x.jsonl", "a 0", "a 1", "and more")
        ending = stage.run(manifest="one.txt", retry_errors=retry_errors)
        assert ending.error is not None
        assert "x: was changed after it was done" in str(ending.error)


@pytest.mark.usefixtures("_quiet")
def test_a_file_whose_claim_another_of_its_name_holds_is_not_done_with_that() -> None:
    """The worker waited for the claim's owner, saw a marker, and took it for its own file's."""
    with Stage([["unused"]]) as stage:
        put_lists(stage)
        assert stage.run("w1", manifest="one.txt").is_success
        published = stage.objects(layout.OUTPUTS)
        run_json = stage.objects()[layout.RUN_KEY]
    with Stage([["unused"]]) as stage:
        put_lists(stage)
        stage.put(layout.RUN_KEY, run_json)
        owner = worker_record(id="w1", nonce="n", lease_seconds=60.0)
        stage.put(layout.worker_key("w1"), codec.encode(owner))
        stage.put(layout.claim_key("x"), codec.encode(Claim(worker="w1", nonce="n")))

        def publish() -> None:
            for key, data in published.items():
                stage.put(key, data)
            stage.server.delete(f"run/{layout.claim_key('x')}")

        stage.scheduler.after(4.0, publish)
        ending = stage.run("w2", manifest="two.txt")
        with pytest.raises(StorageError, match=OTHER_FILE):
            raise ending.error or AssertionError("it was taken for done")


# --------------------------------------------------------------------------- what a marker says


def test_files_of_two_folders_are_told_apart_whatever_root_they_are_named_from() -> None:
    marker = marker_record(chunk="x.jsonl", chunk_root="s3://b/a", chunk_bytes=7)
    same = ChunkRef(name="x", root="s3://b", key="a/x.jsonl", listed_bytes=7)
    check_belongs_to(same, marker)
    check_belongs_to(same._replace(root="s3://b/a", key="x.jsonl"), marker)
    with pytest.raises(InputError, match=r"s3://b/b/x\.jsonl: .* the answers to s3://b/a/x\.jsonl"):
        check_belongs_to(same._replace(root="s3://b/b", key="x.jsonl"), marker)
    with pytest.raises(InputError, match="had 7 bytes, and has 0 now"):
        check_belongs_to(same._replace(listed_bytes=0), marker)
    check_belongs_to(same._replace(sha256="a" * 64, root="elsewhere"), marker)


def test_a_marker_that_names_no_root_is_told_by_its_key() -> None:
    marker = marker_record(chunk="a/x.jsonl")
    check_belongs_to(ChunkRef(name="x", root="r", key="a/x.jsonl", listed_bytes=7), marker)
    with pytest.raises(InputError, match=r"answers to r/a/x\.jsonl"):
        check_belongs_to(ChunkRef(name="x", root="r", key="b/x.jsonl"), marker)


def test_markers_hold_no_password_of_a_url() -> None:
    with_secret = ChunkRef(name="x", root="http://me:secret@host/a", key="x.jsonl")
    marker = marker_record(chunk="x.jsonl", chunk_root="http://…@host/a")
    check_belongs_to(with_secret, marker)


def test_who_comes_second_with_another_text_is_not_done(tmp_path: Path) -> None:
    """It counted as done by the first one, whose answers are to another file."""
    store = MemoryStore("memory://second")
    store.create("checkpoints/x/1-w1-1.jsonl", b"rows")
    for nonce, sha256, folder in (("n1", "a" * 64, "r/a"), ("n2", "b" * 64, "r/b")):
        publisher = Publisher(store, nonce=nonce, require_lease=lambda: None)
        built = build_output(tmp_path / nonce, [folder.encode()])
        marker = marker_record(chunk="x.jsonl", chunk_root=folder, chunk_sha256=sha256)
        if nonce == "n1":
            publisher.publish(built, marker, chunk="x", leftovers=[])
        else:
            with pytest.raises(StorageError, match=r"while r/b/x\.jsonl was .* to r/a/x\.jsonl"):
                publisher.publish(
                    built, marker, chunk="x", leftovers=["checkpoints/x/1-w1-1.jsonl"]
                )
    assert store.get("checkpoints/x/1-w1-1.jsonl").data == b"rows"
    (marker_key,) = [info.key for info in store.list(layout.OUTPUTS) if ".succeed" in info.key]
    assert json.loads(store.get(marker_key).data)["chunk_root"] == "r/a"

"""`batchinfer verify` finds every kind of damage to a run, and the commands that it names fix it."""

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError
from batchinfer.core.records import Claim
from batchinfer.runs.clean import DEFAULT_AGE_SECONDS
from batchinfer.runs.verify import NUM_COMPARISONS, Verdict, VerifyConfig, run_verify
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from batchinfer.storage.scratch import Scratch
from counting_store import CountingStore
from making import (
    change_marker,
    make_job,
    output_key,
    output_lines,
    overwrite,
    put_raw,
    run_worker_here,
)

CHUNK = "part-00001"
MARKER = layout.marker_key(CHUNK)
NO_CHUNK = "part-00077"


@pytest.fixture
def job(tmp_path):
    make_job(tmp_path / "job", rows=25, per_chunk=10, workers=2)
    return str(tmp_path / "job")


@pytest.fixture
def run(job):
    """A finished run."""
    run_worker_here(job, f"{job}/runs/a")
    return open_store(f"{job}/runs/a")


def verify(
    run: str | Store, opened: Callable[[str], Store] = open_store, **options: Any
) -> Verdict:
    config = VerifyConfig(run=run if isinstance(run, str) else run.url, **options)
    return run_verify(config, open_store=opened, clock=Clock())


def kinds(verdict: Verdict) -> set[tuple[str, str]]:
    return {(finding.kind, finding.subject) for finding in verdict.findings}


# --------------------------------------------------------------------------- damages


def with_output(
    change: Callable[[bytes], bytes], *, is_vouched: bool = False
) -> Callable[[Store], None]:
    """Change the output. With `is_vouched`, the marker gets its checksum: only reading it finds the damage."""

    def act(store: Store) -> None:
        key = output_key(store, CHUNK)
        data = change(store.get(key).data)
        overwrite(store, key, data)
        if is_vouched:
            change_marker(store, CHUNK, output_bytes=len(data), output_sha256=codec.sha256(data))

    return act


def with_lines(change: Callable[[list[bytes]], object]) -> Callable[[Store], None]:
    """Change lines of an output for which its marker vouches."""

    def changed(data: bytes) -> bytes:
        lines = data.split(b"\n")[:-1]
        change(lines)
        return b"".join(line + b"\n" for line in lines)

    return with_output(changed, is_vouched=True)


def with_marker(**values: Any) -> Callable[[Store], None]:
    return lambda store: change_marker(store, CHUNK, **values)


def put(key: str, data: bytes) -> Callable[[Store], None]:
    return lambda store: put_raw(store, key, data)


def add_foreign_marker(store: Store) -> None:
    store.create(layout.marker_key(NO_CHUNK), store.get(MARKER).data)


CLAIM = codec.encode(Claim(worker="w", nonce="n"))
CORRUPT: dict[str, Callable[[Store], object]] = {
    "empty marker": put(MARKER, b""),
    "half a marker": put(MARKER, b'{"outp'),
    "no output": lambda store: store.delete([output_key(store, CHUNK)]),
    "cut output": with_output(lambda data: data[:-10]),
    "longer output": with_output(lambda data: data + b"{}\n"),
    "too few rows": with_marker(rows_ok=9),
    "too many rows": with_marker(rows_ok=11),
    "uncounted errors": with_marker(rows_ok=8, rows_error=2, errors={"x": 1}),
    "empty marker of a repair": put(layout.marker_key(CHUNK, 1), b"{}"),
}
FOREIGN: dict[str, Callable[[Store], object]] = {
    "another run": with_marker(fingerprint="f" * 32),
    "another chunk": with_marker(chunk_sha256="0" * 64),
    "another name": with_marker(chunk="chunks/part-00002.jsonl"),
    "another generation": with_marker(generation=1),
    "another's output": with_marker(output="part-00000.aaaa.jsonl"),
    "an output elsewhere": with_marker(output="../run.json"),
}
DEEP: dict[str, Callable[[Store], object]] = {
    "flipped byte": with_output(lambda data: data.replace(b"hello", b"hallo", 1)),
    "swapped lines": with_lines(lambda lines: lines.insert(2, lines.pop(3))),
    "doubled line": with_lines(lambda lines: lines.__setitem__(2, lines[3])),
    "dropped line": with_lines(lambda lines: lines.pop()),
    "added line": with_lines(lambda lines: lines.append(lines[0])),
    "changed row": with_lines(lambda it: it.__setitem__(4, it[4].replace(b":14,", b":41,", 1))),
    "changed id": with_lines(lambda it: it.__setitem__(4, it[4].replace(b'"14"', b'"41"'))),
    "cut last newline": with_output(lambda data: data[:-1], is_vouched=True),
    "broken line": with_lines(lambda lines: lines.__setitem__(4, lines[4][:-5])),
    "wrong counts": with_marker(rows_ok=9, rows_error=1),
}
LEFT = {
    "orphan output": (f"outputs/{CHUNK}.aaaa.jsonl", b"{}\n"),
    "segment": (layout.segment_key(CHUNK, "w", 1, 1), b"{}\n"),
    "claim": (layout.claim_key(CHUNK), CLAIM),
    "stop request": (layout.STOP_KEY, b"{}"),
}
DAMAGES = {
    # what `verify` calls a damage and where it is, and what does it
    "no marker": ("missing", CHUNK, lambda store: store.delete([MARKER])),
    "a marker of no chunk": ("foreign", NO_CHUNK, add_foreign_marker),
    **{name: ("corrupt", CHUNK, act) for name, act in (CORRUPT | DEEP).items()},
    **{name: ("foreign", CHUNK, act) for name, act in FOREIGN.items()},
    **{name: ("leftover", key, put(key, data)) for name, (key, data) in LEFT.items()},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_found_and_the_commands_named_mend_it(run, name, call):
    kind, subject, act = DAMAGES[name]
    act(run)
    for path in filter(Path.is_file, Path(run.url).rglob("*")):  # `clean` leaves the young alone
        os.utime(path, (time.time() - 2 * DEFAULT_AGE_SECONDS,) * 2)
    if name in DEEP:
        assert verify(run).is_sound
    verdict = verify(run, deep=name in DEEP)
    assert (kind, subject) in kinds(verdict)
    assert verdict.is_sound == (kind == "leftover")
    is_lost = kind != "leftover" and subject == CHUNK
    assert verdict.result["chunks_sound"] == 3 - is_lost
    for text in re.findall(r"^  fix: (.*)", "\n".join(verdict.lines()), re.MULTILINE):
        if text.startswith("batchinfer "):
            assert call(*shlex.split(text, comments=True)[1:]).status == 0
    mended = verify(run, deep=True)
    assert mended.is_sound, mended.findings
    assert mended.result["rows_ok"] == 25
    assert kind != "leftover" or not mended.findings


# --------------------------------------------------------------------------- sound runs, and parts of them


@pytest.mark.parametrize(("compression", "column"), [("none", "k"), ("zstd", "_id")])
def test_rows_that_failed_are_counted_and_sound(tmp_path, compression, column):
    def make_row(index: int) -> dict[str, Any]:
        return {"prompt": "hello", "k": f"k{index}"} if index % 5 else {"text": "\ud800"}

    job, run = str(tmp_path / "job"), str(tmp_path / "job/runs/a")
    make_job(job, rows=25, per_chunk=10, make_row=make_row, compression=compression)
    options = ("--limit", "23", "--column", f"id={column}")
    run_worker_here(job, run, *options)
    run_worker_here(job, run, *options, "--retry-errors")
    assert output_lines(run)[4]["_id"] == ("k4" if column == "k" else "4")
    verdict = verify(run, deep=True)
    assert not verdict.findings
    result = verdict.result
    assert (result["chunks_total"], result["rows_ok"], result["rows_error"]) == (3, 18, 5)
    assert sum(result["errors"].values()) == 5


def test_an_output_without_its_marker_is_no_leftover_before_its_chunk_is_done(run):
    """`clean` was named first, and removes no output of a chunk that is not done."""
    run.delete([MARKER])
    found = verify(run).as_json()
    assert [one["mend"] for one in found["findings"]] == [*found["mends"]] == ["worker"]
    assert found["mends"]["worker"].startswith("batchinfer worker ")


# --------------------------------------------------------------------------- what cannot be verified


def edit(place: Path, key: str, old: bytes, new: bytes) -> None:
    store = open_store(str(place))
    overwrite(store, key, store.get(key).data.replace(old, new, 1))


def test_a_chunk_that_was_edited_is_found(run, tmp_path):
    edit(tmp_path / "job", f"chunks/{CHUNK}.jsonl", b"hello", b"hallo")
    verdict = verify(run, deep=True)
    assert kinds(verdict) == {("corrupt", CHUNK)}
    assert "restore the chunk" in verdict.error().hint
    assert "batchinfer" not in "".join(verdict.lines())


@pytest.mark.parametrize(
    ("place", "key", "old", "new", "what", "hint"),
    [
        ("job/runs/a", layout.RUN_KEY, b'"seed": 0', b'"seed": 7', "was edited", "put run.json"),
        ("job", layout.JOB_KEY, b"{", b"{ ", "is another job", "--job"),
    ],
)
def test_nothing_is_judged_by_a_run_json_or_a_job_that_was_edited(
    run, tmp_path, place, key, old, new, what, hint
):
    edit(tmp_path / place, key, old, new)
    with pytest.raises(InputError, match=what) as caught:
        verify(run)
    assert hint in caught.value.hint


def test_the_command_ends_with_0_or_1_and_what_to_do_also_where_the_job_has_moved(
    job, tmp_path, call
):
    run = tmp_path / "run"
    run_worker_here(job, run)
    moved = Path(job).rename(tmp_path / "moved")
    done = call("verify", run)
    assert (done.status, "where its job lies" in done.err) == (2, True)
    done = call("verify", run, "--job", moved, "--deep")
    assert (done.status, done.result["status"]) == (0, "SOUND")
    (run / MARKER).write_bytes(b"")
    done = call("verify", run, "--job", moved)
    assert (done.status, done.result["status"], done.result["corrupt"]) == (1, "UNSOUND", 1)
    assert "2 of 3 chunks are done and sound; 1 corrupt" in done.err
    assert f"hint: batchinfer clean {run} --redo={CHUNK} --yes" in done.err


def test_many_chunks_are_verified_by_one_listing_in_one_scratch_folder_that_does_not_fill(
    tmp_path, monkeypatch
):
    """To make a folder looks through the place of all scratch folders. Of many findings a few are shown."""
    make_job(tmp_path, rows=40, per_chunk=1)
    run_worker_here(tmp_path, tmp_path / "runs/a")
    store = CountingStore(open_store(f"{tmp_path}/runs/a"))
    folders, num_files, new_path = set[Path](), list[int](), Scratch.new_path

    def watched(scratch: Scratch, name: str) -> Path:
        folders.add(scratch.folder)
        num_files.append(len(list(scratch.folder.iterdir())))
        return new_path(scratch, name)

    monkeypatch.setattr(Scratch, "new_path", watched)
    places = {store.url: store, str(tmp_path): open_store(str(tmp_path))}
    opened = Mock(side_effect=places.__getitem__)
    assert verify(store, opened, deep=True).result["chunks_sound"] == 40
    assert store.requests["list"] == 1
    assert store.requests["get"] < 2 * 40, "each marker is read once"
    assert opened.call_count < 10, "a store is opened for all chunks"
    assert len(folders) == 1
    assert max(num_files) <= 1 + 2 * NUM_COMPARISONS
    store.delete([layout.marker_key(f"part-{index:05d}") for index in range(30)])
    lines = list(verify(store).lines())
    assert [line.partition(":")[0] for line in lines[:10]] == ["missing"] * 10
    assert lines[10].startswith("… and 20 more")


def test_a_chunk_with_more_error_codes_than_its_marker_names_is_sound(run):
    """A marker counts what comes after fifty codes as "other", in the order in which rows were finished."""
    with_lines(lambda lines: lines.__setitem__(slice(None), map(failed, lines)))(run)
    change_marker(run, CHUNK, rows_ok=0, rows_error=10, errors={"code17": 1, "other": 9})
    assert verify(run, deep=True).findings == []
    change_marker(run, CHUNK, errors={})  # it need not say
    assert verify(run, deep=True).findings == []


def failed(line: bytes) -> bytes:
    row = json.loads(line)
    error = {"code": f"code{row['_row']}", "message": "no"}
    row = {"_row": row["_row"], "_id": row["_id"], "status": 400, "error": error}
    return json.dumps(row).encode()

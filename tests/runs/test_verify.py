"""`batchinfer verify` finds every kind of damage to a run, and the command that it names fixes it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError, RunUnsound
from batchinfer.core.records import Claim
from batchinfer.runs.clean import DEFAULT_AGE_SECONDS
from batchinfer.runs.verify import Verdict, VerifyConfig, run_verify
from batchinfer.storage import Store
from batchinfer.storage.memory import forget
from batchinfer.storage.opening import open_store
from batchinfer.worker.command import command as worker_command
from making import (
    ECHO,
    change_marker,
    make_job,
    overwrite,
    put_raw,
    read_marker,
    run_process,
    run_worker_here,
    worker_arguments,
)

CHUNK = "part-00001"
OUTPUT = layout.output_key(layout.output_file(CHUNK))
MARKER = layout.marker_key(CHUNK)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[str]:
    url = f"memory://{request.node.name}"
    make_job(url, rows=25, per_chunk=10, workers=2)
    yield url
    forget(url)


@pytest.fixture
def run(job: str) -> Store:
    """A finished run."""
    run_worker_here(job, f"{job}/runs/a")
    return open_store(f"{job}/runs/a")


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def outer_job(request: pytest.FixtureRequest) -> str:
    """A job like those that users make."""
    if request.param == "local":
        return str(request.getfixturevalue("local_job"))
    url: str = request.getfixturevalue("s3_url")("job")
    make_job(url, rows=25, per_chunk=10, workers=2)
    return url


@pytest.fixture
def local_job(tmp_path: Path) -> str:
    url = str(tmp_path / "local-job")
    make_job(url, rows=25, per_chunk=10, workers=2)
    return url


def verify(run: str | Store, **options: Any) -> Verdict:
    url = run if isinstance(run, str) else run.url
    return run_verify(VerifyConfig(run=url, **options), open_store=open_store, clock=SystemClock())


def in_bash(text: str) -> list[str]:
    """The command as a user pastes it, with this Python's batchinfer."""
    python = shlex.quote(sys.executable)
    return ["bash", "-c", f'batchinfer() {{ {python} -m batchinfer "$@"; }}; {text}']


def edit_config(run: Store, **values: Any) -> str:
    """Put other values into run.json, as if the run had been made with them; return their fingerprint."""
    contents = json.loads(run.get(layout.RUN_KEY).data)
    contents["config"] |= values
    contents["fingerprint"] = codec.fingerprint(contents["config"])
    overwrite(run, layout.RUN_KEY, json.dumps(contents).encode())
    return str(contents["fingerprint"])


def kinds(verdict: Verdict) -> set[tuple[str, str]]:
    return {(finding.kind, finding.subject) for finding in verdict.findings}


def mend(verdict: Verdict, job: str) -> None:
    """Run every command that the verdict names, as a user would paste them, and nothing else."""
    from batchinfer.runs.clean import command as clean
    from batchinfer.runs.stop import command as stop

    commands = {"clean": clean, "stop": stop, "worker": worker_command}
    for line in verdict.lines():
        _, marked, text = line.partition(": batchinfer ")
        if not marked or not line.startswith("  "):
            continue
        name, *arguments = shlex.split(text, comments=True)
        commands[name].main(arguments, standalone_mode=False)


# --------------------------------------------------------------------------- sound runs


@pytest.mark.parametrize("is_deep", [False, True])
def test_a_finished_run_is_sound(run: Store, is_deep: bool) -> None:
    verdict = verify(run, is_deep=is_deep)
    assert verdict.is_sound
    assert not verdict.findings
    assert {key: verdict.result[key] for key in ("chunks_total", "chunks_sound", "rows_ok")} == {
        "chunks_total": 3,
        "chunks_sound": 3,
        "rows_ok": 25,
    }


@pytest.mark.parametrize("output_format", ["native", "openai-batch", "completions"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_every_format_and_compression_reads_deep(
    tmp_path: Path, output_format: str, compression: str
) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=25, per_chunk=10, compression=compression)
    run_worker_here(job, f"{job}/runs/a", "--output-format", output_format)
    assert not verify(f"{job}/runs/a", is_deep=True).findings


def test_rows_that_failed_are_counted_and_sound(tmp_path: Path) -> None:
    def make_row(index: int) -> dict[str, Any]:
        return {"prompt": "hello"} if index % 5 else {"other": index, "text": "\ud800"}

    job = str(tmp_path / "job")
    make_job(job, rows=25, per_chunk=10, make_row=make_row)
    run_worker_here(job, f"{job}/runs/a")
    verdict = verify(f"{job}/runs/a", is_deep=True)
    assert not verdict.findings
    assert (verdict.result["rows_ok"], verdict.result["rows_error"]) == (20, 5)
    assert sum(verdict.result["errors"].values()) == 5


def test_a_limit_asks_only_for_its_rows(job: str) -> None:
    run_worker_here(job, f"{job}/runs/a", "--limit", "13")
    verdict = verify(f"{job}/runs/a", is_deep=True)
    assert not verdict.findings
    assert (verdict.result["chunks_total"], verdict.result["rows_ok"]) == (2, 13)


def test_error_rows_done_again_make_the_newest_marker_count(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=25, per_chunk=10)
    engine = ("--echo-latency-seconds", "0")
    run_worker_here(job, f"{job}/runs/a", *engine)
    store = open_store(f"{job}/runs/a")
    # One row of the chunk failed, as the engine might have let it.
    lines = store.get(OUTPUT).data.split(b"\n")[:-1]
    failed = json.loads(lines[3]) | {"status": 400, "error": {"code": "x", "message": "y"}}
    del failed["body"]
    lines[3] = json.dumps(failed).encode()
    data = b"".join(line + b"\n" for line in lines)
    overwrite(store, OUTPUT, data)
    change_marker(
        store,
        CHUNK,
        output_bytes=len(data),
        output_sha256=codec.sha256(data),
        rows_ok=9,
        rows_error=1,
        errors={"x": 1},
    )
    assert verify(store, is_deep=True).result["rows_error"] == 1

    run_worker_here(job, store.url, "--retry-errors", *engine)

    verdict = verify(store, is_deep=True)
    assert not verdict.findings
    assert (verdict.result["rows_ok"], verdict.result["rows_error"]) == (25, 0)
    put_raw_marker = layout.marker_key(CHUNK, 1)
    overwrite(store, put_raw_marker, b"{}")
    assert kinds(verify(store)) >= {("corrupt", CHUNK)}


def test_a_list_of_chunks_from_elsewhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    manifest = tmp_path / "list.txt"
    manifest.write_text("a.jsonl\nb.jsonl\n")
    run = str(tmp_path / "run")
    worker_command.main(
        ["--manifest", str(manifest), "--output", run, *ECHO], standalone_mode=False
    )
    with pytest.raises(InputError) as caught:
        verify(run)
    assert caught.value.hint.startswith("batchinfer verify --manifest")
    verdict = verify(run, manifests=[str(manifest)], is_deep=True)
    assert not verdict.findings
    assert verdict.result["rows_ok"] == 4
    (tmp_path / "b.jsonl").write_text('{"prompt": "one"}\n')
    assert kinds(verify(run, manifests=[str(manifest)], is_deep=True)) == {("corrupt", "b")}


def test_one_manifest_can_be_verified_alone(local_job: str) -> None:
    run_worker_here(local_job, f"{local_job}/runs/a", "--no-steal", index=0)
    run = f"{local_job}/runs/a"
    assert not verify(run).is_sound
    assert verify(run, manifests=[f"{local_job}/manifests/worker-00000.txt"]).is_sound


# --------------------------------------------------------------------------- damage

Damage = Callable[[Store], None]


def _swap_two_lines(store: Store) -> None:
    lines = store.get(OUTPUT).data.split(b"\n")[:-1]
    lines[2], lines[3] = lines[3], lines[2]
    _replace_output(store, lines)


def _double_a_line(store: Store) -> None:
    lines = store.get(OUTPUT).data.split(b"\n")[:-1]
    lines[2] = lines[3]
    _replace_output(store, lines)


def _drop_a_line(store: Store) -> None:
    _replace_output(store, store.get(OUTPUT).data.split(b"\n")[:-2])


def _change_an_id(store: Store) -> None:
    lines = store.get(OUTPUT).data.split(b"\n")[:-1]
    lines[4] = lines[4].replace(b'"_id":"14"', b'"_id":"41"')
    _replace_output(store, lines)


def _break_a_line(store: Store) -> None:
    lines = store.get(OUTPUT).data.split(b"\n")[:-1]
    lines[4] = lines[4][:-5]
    _replace_output(store, lines)


def _replace_output(store: Store, lines: list[bytes]) -> None:
    """The marker has the checksum of the wrong lines, so only reading them finds the damage."""
    data = b"".join(line + b"\n" for line in lines)
    overwrite(store, OUTPUT, data)
    change_marker(store, CHUNK, output_bytes=len(data), output_sha256=codec.sha256(data))


def _flip_a_byte(store: Store) -> None:
    data = bytearray(store.get(OUTPUT).data)
    data[data.index(b"hello")] ^= 1
    overwrite(store, OUTPUT, bytes(data))


def _shorten_output(store: Store) -> None:
    overwrite(store, OUTPUT, store.get(OUTPUT).data[:-10])


SHALLOW: dict[str, tuple[str, Damage]] = {
    "no marker": ("missing", lambda store: store.delete([MARKER])),
    "empty marker": ("corrupt", lambda store: overwrite(store, MARKER, b"")),
    "half a marker": ("corrupt", lambda store: overwrite(store, MARKER, b'{"output":"par')),
    "a marker that is a list": (
        "corrupt",
        lambda store: overwrite(store, MARKER, b"[" + b"1," * 300 + b"1]"),
    ),
    "no output": ("corrupt", lambda store: store.delete([OUTPUT])),
    "empty output": ("corrupt", lambda store: overwrite(store, OUTPUT, b"")),
    "cut output": ("corrupt", _shorten_output),
    "too few rows": ("corrupt", lambda store: change_marker(store, CHUNK, rows_ok=9)),
    "uncounted errors": (
        "corrupt",
        lambda store: change_marker(store, CHUNK, rows_ok=8, rows_error=2, errors={"x": 1}),
    ),
    "another run": ("foreign", lambda store: change_marker(store, CHUNK, fingerprint="f" * 32)),
    "another chunk": ("foreign", lambda store: change_marker(store, CHUNK, chunk_sha256="0" * 64)),
    "another name": (
        "foreign",
        lambda store: change_marker(store, CHUNK, chunk="chunks/part-00002.jsonl"),
    ),
    "another's output": (
        "foreign",
        lambda store: change_marker(store, CHUNK, output="part-00000.jsonl"),
    ),
    "an output that leaves the folder": (
        "foreign",
        lambda store: change_marker(store, CHUNK, output="../run.json"),
    ),
}
DEEP: dict[str, Damage] = {
    "flipped byte": _flip_a_byte,
    "swapped lines": _swap_two_lines,
    "doubled line": _double_a_line,
    "dropped line": _drop_a_line,
    "changed id": _change_an_id,
    "broken line": _break_a_line,
    "wrong counts": lambda store: change_marker(store, CHUNK, rows_ok=9, rows_error=1),
}


@pytest.mark.parametrize("damage", SHALLOW)
def test_damage_is_found_and_its_command_mends_it(run: Store, job: str, damage: str) -> None:
    kind, act = SHALLOW[damage]
    act(run)
    verdict = verify(run)
    assert (kind, CHUNK) in kinds(verdict)
    assert verdict.result["chunks_sound"] == 2
    assert not verdict.is_sound
    mend(verdict, job)
    mended = verify(run, is_deep=True)
    assert mended.is_sound, mended.findings
    assert mended.result["rows_ok"] == 25


@pytest.mark.parametrize("damage", DEEP)
def test_what_only_reading_finds_is_found_by_deep_and_mended(
    run: Store, job: str, damage: str
) -> None:
    DEEP[damage](run)
    assert verify(run).is_sound
    verdict = verify(run, is_deep=True)
    assert ("corrupt", CHUNK) in kinds(verdict)
    assert verdict.result["chunks_sound"] == 2
    mend(verdict, job)
    assert verify(run, is_deep=True).is_sound


@pytest.mark.parametrize("damage", ["empty marker", "no output", "another run"])
def test_the_same_on_disks_and_buckets(outer_job: str, damage: str) -> None:
    run = open_store(f"{outer_job}/runs/a")
    run_worker_here(outer_job, run.url)
    assert not verify(run, is_deep=True).findings
    kind, act = SHALLOW[damage]
    act(run)
    verdict = verify(run)
    assert (kind, CHUNK) in kinds(verdict)
    mend(verdict, outer_job)
    assert verify(run, is_deep=True).is_sound


def test_an_unfinished_run_names_what_is_missing(local_job: str) -> None:
    run = f"{local_job}/runs/a"
    run_worker_here(local_job, run, "--no-steal", index=0)
    verdict = verify(run)
    assert kinds(verdict) == {("missing", "part-00001"), ("missing", "part-00002")}
    mend(verdict, local_job)
    assert verify(run).is_sound


def test_a_chunk_that_somebody_works_on_is_said_to_be(local_job: str) -> None:
    run = f"{local_job}/runs/a"
    run_worker_here(local_job, run, "--no-steal", "--worker-id", "w7", index=0)
    store = open_store(run)
    record = store.get(layout.worker_key("w7"))
    store.replace(
        layout.worker_key("w7"), record.data.replace(b'"done"', b'"running"'), record.etag
    )
    store.create(layout.claim_key(CHUNK), codec.encode(Claim(worker="w7", epoch=1, nonce="n")))
    found = {finding.subject: finding.problem for finding in verify(run).findings}
    assert "w7" in found[CHUNK]
    assert "w7" not in found["part-00002"]


class TestForeign:
    def test_a_marker_of_a_chunk_that_the_job_does_not_have(self, run: Store, job: str) -> None:
        run.create(OUTPUT.replace("00001", "00009"), b"{}\n")
        run.create(MARKER.replace("00001", "00009"), run.get(MARKER).data)
        verdict = verify(run)
        assert ("foreign", "part-00009") in kinds(verdict)
        mend(verdict, job)
        assert verify(run).is_sound

    def test_another_job_json(self, run: Store, job: str) -> None:
        store = open_store(job)
        overwrite(store, layout.JOB_KEY, store.get(layout.JOB_KEY).data + b"\n")
        verdict = verify(run)
        assert kinds(verdict) == {("foreign", layout.RUN_KEY)}
        assert "--job" in verdict.error().hint

    def test_a_changed_chunk(self, run: Store, job: str) -> None:
        store = open_store(job)
        chunk = store.get("chunks/part-00001.jsonl").data
        overwrite(store, "chunks/part-00001.jsonl", chunk.replace(b"hello", b"hallo"))
        verdict = verify(run, is_deep=True)
        assert kinds(verdict) == {("corrupt", CHUNK)}
        assert "the chunk itself" in verdict.findings[0].problem
        overwrite(store, "chunks/part-00001.jsonl", chunk)
        assert verify(run, is_deep=True).is_sound


LEFTOVERS: dict[str, tuple[str, bytes]] = {
    "orphan output": ("outputs/part-00001.aaaa.jsonl", b"{}\n"),
    "output of no chunk": ("outputs/part-00077.jsonl", b"{}\n"),
    "segment of no chunk": (layout.segment_key("part-00077", 1, "w", 1), b"{}\n"),
    "segment": (layout.segment_key(CHUNK, 1, "w", 1), b"{}\n"),
    "claim": (layout.claim_key(CHUNK), codec.encode(Claim(worker="w", epoch=1, nonce="n"))),
    "claim of no chunk": (
        layout.claim_key("part-00077"),
        codec.encode(Claim(worker="w", epoch=1, nonce="n")),
    ),
    "unreadable claim": (layout.claim_key(CHUNK), b"{"),
    "probe": (f"{layout.PROBES}abc", b"x"),
    "stop request": (layout.STOP_KEY, b"{}"),
    "stranger": ("outputs/notes.txt", b"mine"),
    "stranger at the top": ("notes.txt", b"mine"),
}


@pytest.mark.parametrize("left", LEFTOVERS)
def test_leftovers_are_named_and_do_no_harm(run: Store, left: str) -> None:
    key, data = LEFTOVERS[left]
    put_raw(run, key, data)
    verdict = verify(run)
    assert kinds(verdict) == {("leftover", key)}
    assert verdict.is_sound
    assert any("fix: " in line for line in verdict.lines())


@pytest.mark.parametrize("left", sorted(LEFTOVERS.keys() - {"probe"}))
def test_the_command_named_for_a_leftover_removes_it(local_job: str, left: str) -> None:
    run = open_store(f"{local_job}/runs/a")
    run_worker_here(local_job, run.url)
    key, data = LEFTOVERS[left]
    put_raw(run, key, data)
    old = time.time() - 2 * DEFAULT_AGE_SECONDS
    for path in Path(run.url).rglob("*.*"):
        os.utime(path, (old, old))
    for line in verify(run).lines():
        _, marked, text = line.partition("  fix: ")
        if marked:
            subprocess.run(in_bash(text), check=True, capture_output=True)
    assert not verify(run).findings


def test_an_output_whose_marker_cannot_be_read_is_no_leftover(run: Store, job: str) -> None:
    """`clean` keeps an output that an unreadable marker may name."""
    overwrite(run, MARKER, b"{")
    verdict = verify(run)
    assert kinds(verdict) == {("corrupt", CHUNK)}
    assert [line for line in verdict.lines() if line.startswith("  ")] == [
        f"  fix: batchinfer clean {run.url} --redo {CHUNK} --yes",
        f"  then: {verdict.worker}",
    ]


def test_an_edited_run_json_is_found_and_nothing_is_judged_by_it(run: Store) -> None:
    contents = json.loads(run.get(layout.RUN_KEY).data)
    contents["config"]["seed"] = 7
    overwrite(run, layout.RUN_KEY, json.dumps(contents).encode())
    run.delete([layout.marker_key("part-00000")])
    verdict = verify(run, is_deep=True)
    assert kinds(verdict) == {("corrupt", layout.RUN_KEY)}
    assert "was edited" in verdict.findings[0].problem
    assert not any("batchinfer" in line for line in verdict.lines())
    assert "put run.json back" in verdict.error().hint


def test_a_stopped_run_goes_on_before_its_workers_are_started(run: Store, job: str) -> None:
    """Workers exit at once while stop.json is there."""
    run.delete([layout.marker_key("part-00000"), layout.output_key("part-00000.jsonl")])
    put_raw(run, layout.STOP_KEY, b"{}")
    verdict = verify(run)
    assert verdict.error().hint == f"batchinfer stop --resume {run.url}"
    mend(verdict, job)
    assert verify(run).is_sound


def test_a_worker_record_that_cannot_be_read_does_matter(local_job: str) -> None:
    run = open_store(f"{local_job}/runs/a")
    run_worker_here(local_job, run.url)
    put_raw(run, layout.worker_key("w9"), b"{")
    verdict = verify(run)
    assert kinds(verdict) == {("corrupt", layout.worker_key("w9"))}
    old = time.time() - 2 * DEFAULT_AGE_SECONDS  # `clean` leaves a young one alone
    os.utime(Path(run.url) / layout.worker_key("w9"), (old, old))
    mend(verdict, local_job)
    assert not verify(run).findings


# --------------------------------------------------------------------------- no run, other runs


class TestWhatCannotBeVerified:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no run there"):
            verify(str(tmp_path / "nowhere"))

    def test_a_run_that_has_only_begun(self, local_job: str) -> None:
        run = open_store(f"{local_job}/runs/a")
        put_raw(run, layout.worker_key("w"), b"{}")
        with pytest.raises(InputError, match="nothing is done yet"):
            verify(run)

    def test_a_run_without_its_run_json(self, run: Store) -> None:
        run.delete([layout.RUN_KEY])
        with pytest.raises(InputError, match=r"no run\.json"):
            verify(run)

    def test_a_damaged_run_json(self, run: Store) -> None:
        overwrite(run, layout.RUN_KEY, b"{")
        with pytest.raises(InputError, match="not a readable run record"):
            verify(run)

        with pytest.raises(InputError) as caught:
            verify(run)
        assert "verify" not in caught.value.hint

    def test_a_newer_format(self, run: Store) -> None:
        newer = json.loads(run.get(layout.RUN_KEY).data) | {"format_version": 99}
        overwrite(run, layout.RUN_KEY, json.dumps(newer).encode())
        with pytest.raises(InputError, match="format version 99") as caught:
            verify(run)
        assert "upgrade" in caught.value.hint

    def test_a_job_that_is_nowhere(self, local_job: str, tmp_path: Path) -> None:
        run = str(tmp_path / "run")
        run_worker_here(local_job, run)
        assert verify(run).is_sound  # run.json tells
        Path(local_job).rename(tmp_path / "moved")
        with pytest.raises(InputError, match="where its job lies") as caught:
            verify(run)
        assert "--job" in caught.value.hint
        assert verify(run, job=str(tmp_path / "moved"), is_deep=True).is_sound
        with pytest.raises(InputError, match=r"no job\.json"):
            verify(run, job=str(tmp_path / "nowhere"))


# --------------------------------------------------------------------------- the command


class TestTheCommand:
    def test_a_sound_run_ends_with_0_and_a_json_line(self, local_job: str) -> None:
        run = f"{local_job}/runs/a"
        run_worker_here(local_job, run)
        done = run_process(["verify", run, "--deep"])
        assert (done.status, done.result["status"]) == (0, "SOUND")
        assert "complete and sound" in done.stderr

    def test_an_unsound_one_with_1_and_the_command_that_mends_it(self, local_job: str) -> None:
        run = f"{local_job}/runs/a"
        run_worker_here(local_job, run)
        Path(run, MARKER).write_bytes(b"")
        done = run_process(["verify", run])
        assert (done.status, done.result["status"]) == (1, "UNSOUND")
        assert done.result["corrupt"] == 1
        hint = done.stderr.strip().splitlines()[-1]
        assert hint == f"hint: batchinfer clean {run} --redo {CHUNK} --yes"
        assert run_process(shlex.split(hint.removeprefix("hint: batchinfer "))).status == 0
        run_worker_here(local_job, run)
        assert verify(run, is_deep=True).is_sound

    def test_json_has_every_finding(self, local_job: str) -> None:
        run = f"{local_job}/runs/a"
        run_worker_here(local_job, run, "--no-steal", index=0)
        done = run_process(["verify", run, "--json"])
        assert done.status == 1
        assert [finding["kind"] for finding in done.result["findings"]] == ["missing"] * 2
        assert all("batchinfer worker" in finding["mend"] for finding in done.result["findings"])

    def test_what_is_no_run_ends_with_2(self, tmp_path: Path) -> None:
        assert run_process(["verify", str(tmp_path / "nowhere")]).status == 2


def test_many_findings_are_shown_in_part(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=60, per_chunk=2)
    run = open_store(f"{job}/runs/a")
    run_worker_here(job, run.url)
    run.delete([layout.marker_key(f"part-{index:05d}") for index in range(30)])
    verdict = verify(run)
    lines = [line for line in verdict.lines() if line.startswith("missing")]
    assert len(lines) == 11
    assert "20 more" in lines[-1]
    assert verdict.result["missing"] == len(verdict.as_json()["findings"]) - 30 == 30
    assert isinstance(verdict.error(), RunUnsound)


def test_ten_thousand_chunks_are_verified_by_one_listing(tmp_path: Path) -> None:
    """Reads each marker once and lists the run once; nothing else grows with the run."""
    from batchinfer.storage.memory import MemoryStore

    job = "memory://many"
    make_job(job, rows=10_000, per_chunk=1)
    run_worker_here(job, f"{job}/runs/a", "--limit", "1")
    store = MemoryStore(f"{job}/runs/a")
    change_marker(store, "part-00000", fingerprint=edit_config(store, limit=None))
    first = read_marker(store, "part-00000")
    from batchinfer.core.records import Job

    found = codec.decode(open_store(job).get(layout.JOB_KEY).data, Job, name="job.json")
    import msgspec

    for chunk in found.chunks[1:]:
        name = layout.output_file(chunk.name)
        store.create(layout.output_key(name), b"x" * first.output_bytes)
        marker = msgspec.structs.replace(
            first,
            output=name,
            chunk=layout.chunk_file(chunk.name, "none"),
            chunk_sha256=chunk.sha256,
        )
        store.create(layout.marker_key(chunk.name), codec.encode(marker))
    listings = []
    original = MemoryStore.list

    def counting(self: MemoryStore, prefix: str = "") -> Any:
        listings.append(prefix)
        return original(self, prefix)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemoryStore, "list", counting)
        verdict = verify(store)
    assert verdict.is_sound, verdict.findings[:3]
    assert verdict.result["chunks_sound"] == 10_000
    assert listings == [""]


# --------------------------------------------------------------------------- the command that goes on with a run

HARD = "it's \"so\" $HOME `x` {{ prompt }}\nsecond, 'line' \N{SNOWMAN} "
OPTIONS: dict[str, list[str]] = {
    "none": [],
    "limit and seed": ["--limit", "13", "--seed", "none"],
    "a seed": ["--seed", "7", "--temperature", "0.5"],
    "model and length": ["--model", "an echo", "--max-model-len", "4096"],
    "a system prompt": ["--as-chat", "--system-prompt", HARD, f"--chat-template=-{HARD}"],
    "output": ["--output-format", "completions", "--keep", "prompt,_row", "--keep-prompt"],
    "more output": ["--id-column", "prompt", "--no-timing", "--strip", "--keep", "*"],
    "sampling": ["--max-tokens", "5", "--top-k", "-1", "--n", "2", "--stop", HARD, "--stop", "-"],
    "named sampling": [
        "--stop-token-ids",
        "1,2",
        "--sampling",
        'logit_bias={"5": -1.5},min_tokens=2,bad_words=["a,b=c","it\'s"]',
    ],
    "chat": ["--as-chat", "--system-prompt", HARD, "--chat-template-kwargs", '{"a": "b\'c"}'],
    "engine": [
        "--trust-remote-code",
        "--tensor-parallel-size",
        "2",
        "--engine-arg",
        "load_format=x",
    ],
}


def _undo_a_chunk(run: str) -> str:
    """Return the command that `verify` names for a run."""
    store = open_store(run)
    store.delete([layout.marker_key("part-00000"), layout.output_key("part-00000.jsonl")])
    (finding,) = verify(run).as_json()["findings"]
    return str(finding["mend"])


@pytest.mark.parametrize("options", OPTIONS)
def test_the_worker_command_goes_on_with_the_run_as_it_is(local_job: str, options: str) -> None:
    run = f"{local_job}/runs/it's a"
    run_worker_here(local_job, run, *OPTIONS[options])
    _, _, *arguments = shlex.split(_undo_a_chunk(run), comments=True)
    assert "--trust-remote-code" not in arguments
    if "--trust-remote-code" in OPTIONS[options]:
        arguments.append("--trust-remote-code")  # as the comment after the command says
    worker_command.main(arguments, standalone_mode=False)
    assert verify(run).is_sound


def test_it_goes_on_where_options_named_files(local_job: str, tmp_path: Path) -> None:
    template, system = tmp_path / "t.jinja", tmp_path / "s"
    system.write_text(f"@{HARD}")  # looks as if it named a file
    template.write_text(f"{HARD}{{{{ prompt }}}}\n")
    run = f"{local_job}/runs/a"
    arguments = worker_arguments(local_job, run, "--prompt-template", str(template))
    at = arguments.index("--prompt-column")
    del arguments[at : at + 2]
    worker_command.main(
        [
            *arguments[1:],
            *("--blank-columns", "prompt"),
            *("--as-chat", "--system-prompt", f"@{system}"),
        ],
        standalone_mode=False,
    )
    for path in (template, system):
        path.unlink()
    command = _undo_a_chunk(run)
    done = subprocess.run(in_bash(command), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert verify(run).is_sound


def test_it_goes_on_with_a_list_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "part-00000.jsonl").write_text('{"prompt": "one"}\n')
    manifest = tmp_path / "a list.txt"
    manifest.write_text("part-00000.jsonl\n")
    run = str(tmp_path / "run")
    worker_command.main(
        ["--manifest", str(manifest), "--output", run, *ECHO], standalone_mode=False
    )
    open_store(run).delete([layout.marker_key("part-00000")])
    verdict = verify(run, manifests=[str(manifest)])
    assert subprocess.run(in_bash(verdict.worker), capture_output=True, check=False).returncode == 0
    assert verify(run, manifests=[str(manifest)]).is_sound


def test_a_run_json_that_was_edited_gives_a_command_with_a_gap(run: Store) -> None:
    edit_config(run, prompt={"body": "many"})
    assert "…" in verify(run).worker

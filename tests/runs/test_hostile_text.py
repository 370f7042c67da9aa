"""Control characters in a bucket's records, markers, names and manifests reach no terminal and no JSON on stdout."""

import os
import re
from pathlib import Path

import msgspec
import pytest

from batchinfer.core import codec, layout
from batchinfer.core.records import ErrorExample, Run, Worker
from batchinfer.storage.opening import open_store
from making import change_marker, make_job, overwrite, run_worker_here

EVIL = "\x1b[2Jgone\x9b31m\x00\r\u202eevil\u2066\u200f\x07"
PATH = EVIL.replace("\x00", "")
RUN = "job/runs/a"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch):
    """A run in which every text that somebody else can write is hostile."""
    monkeypatch.chdir(tmp_path)
    make_job("job", rows=6, per_chunk=3)
    run_worker_here("job", RUN, "--worker-id", "w0")
    store = open_store(RUN)
    key = layout.statistics_key("w0")
    record = codec.decode(store.get(key).data, Worker, name=key)
    record = msgspec.structs.replace(
        record,
        id=EVIL,
        state=EVIL,
        reason=EVIL,
        host={"cloud": EVIL, "region": EVIL, "accelerator": EVIL},
        engine={"model": EVIL, "device": EVIL},
        open_chunks={EVIL: 1},
        errors={EVIL: 3, "all is well": 2},
        examples={EVIL: ErrorExample(chunk=EVIL, line=0, message=EVIL)},
        finish_reasons={EVIL: 1},
        rows_ok=0,
        rows_error=5,
    )
    overwrite(store, key, codec.encode(record))
    written = codec.decode(store.get(layout.RUN_KEY).data, Run, name="run.json")
    config = {**written.config, "model": EVIL}
    written = msgspec.structs.replace(written, config=config, fingerprint=codec.fingerprint(config))
    overwrite(store, layout.RUN_KEY, codec.encode(written))
    change_marker(store, "part-00000", fingerprint=written.fingerprint, chunk=EVIL)
    evil = {"rows_ok": 1, "rows_error": 2, "errors": {EVIL: 2}}
    change_marker(store, "part-00001", fingerprint=written.fingerprint, **evil)
    for name in (os.fsencode(PATH), b"not utf-8 \xff\x1b[2J", b"two\nlines"):
        Path(RUN, "outputs", os.fsdecode(name)).write_bytes(b"x")
    Path("list.txt").write_text(f"{EVIL}.jsonl\nchunks/part-00000.jsonl\n")


COMMANDS = (
    f"status {RUN}",
    f"status {RUN} --json",
    f"status {RUN} --log-format json",
    f"verify {RUN}",
    f"report {RUN}",
    f"compare {RUN} {RUN}",
    f"collect {RUN} dest",
    f"verify {RUN} PATH",
    "worker --engine echo --prompt-column x --manifest list.txt --job job",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_a_control_character(command, call):
    done = call(*(PATH if word == "PATH" else word for word in command.split()))
    assert done.status in (0, 1, 2, 3)
    assert done.out or done.err
    assert "Traceback" not in done.err
    assert UNSAFE.findall(done.out + done.err) == []
    result = done.result
    if command.startswith("report"):
        assert UNSAFE.findall(Path("report.html").read_text()) == []
    if command == f"status {RUN} --json":
        assert sorted(result["totals"]["errors"].values()) == [2, 3]

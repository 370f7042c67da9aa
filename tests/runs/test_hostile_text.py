"""Control characters in a bucket's records, markers, names and manifests reach no terminal and no JSON on stdout."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from batchinfer.cli import main
from batchinfer.core import codec, layout
from batchinfer.core.records import ErrorExample, Run, Worker
from batchinfer.storage.opening import open_store
from making import change_marker, make_job, overwrite, run_worker_here

EVIL = "\x1b[2Jgone\x9b31m\x00\r\u202eevil\u2066\u200f\x07"
PATH = EVIL.replace("\x00", "")
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run in which every text that somebody else can write is hostile."""
    make_job(tmp_path / "job", rows=6, per_chunk=3)
    url = str(tmp_path / "job" / "runs" / "a")
    run_worker_here(tmp_path / "job", url, "--worker-id", "w0")
    store = open_store(url)
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
        rows_error=5,
    )
    overwrite(store, key, codec.encode(record))
    written = codec.decode(store.get(layout.RUN_KEY).data, Run, name="run.json")
    config = {**written.config, "model": EVIL}
    written = msgspec.structs.replace(written, config=config, fingerprint=codec.fingerprint(config))
    overwrite(store, layout.RUN_KEY, codec.encode(written))
    change_marker(store, "part-00000", fingerprint=written.fingerprint, chunk=EVIL)
    change_marker(
        store, "part-00001", fingerprint=written.fingerprint, rows_ok=1, rows_error=2,
        errors={EVIL: 2},
    )  # fmt: skip
    names = [os.fsencode(PATH), b"not utf-8 \xff\x1b[2J", b"two\nlines"]
    for name in names:
        (Path(url) / "outputs" / os.fsdecode(name)).write_bytes(b"x")
    return url


ECHO = "worker --engine echo"
COMMANDS = {
    "status": "status RUN",
    "status as JSON": "status RUN --json",
    "log as JSON": "status RUN --log-format json",
    "verify": "verify RUN",
    "verify deep": "verify RUN --deep",
    "verify as JSON": "verify RUN --json",
    "clean": "clean RUN",
    "report": "report RUN -o PAGE",
    "compare": "compare RUN RUN",
    "stop": "stop RUN",
    "collect": "collect RUN DEST",
    "collect partial": "collect RUN DEST --partial",
    "no run": "status PATH",
    "usage": "verify RUN PATH",
    "manifest": f"{ECHO} --prompt-column x --manifest LIST --job HERE",
    "option": f"{ECHO} --prompt-column EVIL --manifest JOB",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_a_control_character(
    run: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.txt").write_text(f"{EVIL}.jsonl\nchunks/part-00000.jsonl\n")
    places = {
        "RUN": run,
        "EVIL": EVIL,
        "PATH": PATH,
        "PAGE": str(tmp_path / "page.html"),
        "DEST": str(tmp_path / "dest"),
        "LIST": str(tmp_path / "list.txt"),
        "JOB": str(tmp_path / "job" / layout.ALL_MANIFEST),
        "HERE": str(tmp_path / "job"),
    }
    status = main.main([places.get(word, word) for word in COMMANDS[name].split()])
    out, err = capfd.readouterr()
    assert status in (0, 1, 2, 3)
    assert out or err
    assert "Traceback" not in err
    assert UNSAFE.findall(out) == []
    assert UNSAFE.findall(err) == []
    if out:
        result = json.loads(out.splitlines()[-1])
    if name == "status as JSON":
        assert result["totals"]["errors"] == {"invalid": 5}
    if name == "verify":
        assert "outputs/two\\nlines" in err, "a name with a newline makes no line of its own"

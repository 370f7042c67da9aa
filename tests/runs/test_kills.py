"""`split`, `collect`, `report`, `clean`, killed at any change to files: the same command ends with the same bytes."""

import os

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from batchinfer.core import layout
from batchinfer.storage.opening import open_store
from crashing import crash_everywhere
from finished_run import finish_run
from making import make_job, put_raw, split

LEFT = (
    layout.output_key(layout.output_file("part-00001", "aaaa")),
    layout.segment_key("part-00000", "gone", 1, 1),
)
SPLIT, JOB = "split a.parquet --output new --num-chunks 3", "new/**/[!.]*"
COLLECT = "collect job/run --job job --shard-rows 10"
COMMANDS = {
    # a command, the files that it leaves, and the part of a name before whose change it is killed, among others
    "split": (f"{SPLIT} --num-workers 2", [JOB], "job.json"),
    "overwrite": (f"{SPLIT.replace('new', 'old')} --overwrite", ["old/**/[!.]*"], "job.json"),
    "append": ("split a.parquet --output old --append", ["old/**/[!.]*"], "job.json"),
    "by reference": ("split --by-reference list.txt --output new", [JOB], "job.json"),
    "collect": (f"{COLLECT} out", ["out/[!.]*"], "_COLLECTED"),
    "collect to a file": (f"{COLLECT} out.parquet", ["out.parquet"], "out.parquet"),
    "report": ("report job/run --output page.html --job job", ["page.html"], "page.html"),
    # but for the killed command's own probe, which `clean` removes when it is an hour old
    "clean": ("clean job/run --yes", ["job/chunks/*", "job/run/[!p]*/**/[!.]*"], LEFT[0]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_change_the_same_command_ends_with_the_same_files(name, tmp_path):
    start = tmp_path / "start"
    make_job(start / "job", rows=20, per_chunk=10)
    finish_run(start / "job", start / "job/run")
    store = open_store(str(start / "job/run"))
    for key in LEFT if name == "clean" else ():
        put_raw(store, key, b"x")
        os.utime(start / "job/run" / key, (1, 1))
    (start / "b.jsonl").write_text('{"prompt":"one"}\n{"prompt":"two"}\nbroken')
    (start / "c.jsonl.zst").write_bytes(zstandard.compress(b'{"prompt":"three"}\n'))
    (start / "list.txt").write_text("b.jsonl\nc.jsonl.zst\n")
    parquet.write_table(pa.table({"prompt": [f"say {n}" for n in range(23)]}), start / "a.parquet")
    split(start / "b.jsonl", start / "old", num_chunks=2)
    command, wanted, changed = COMMANDS[name]
    killed = crash_everywhere(command.split(), wanted, start)
    assert any(changed in each for each in killed), killed

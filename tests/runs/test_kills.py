"""`report` and `clean`, killed at any change to files: the same command then leaves what an undisturbed one leaves."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from batchinfer.core import layout
from batchinfer.storage.opening import open_store
from crashing import crash_everywhere
from finished_run import finish_run
from making import make_job, put_raw

MODULES = [f"batchinfer.runs.{name}" for name in ("report", "clean", "pairs", "overview")]
LEFT = (
    layout.output_key(layout.output_file("part-00001", "aaaa")),
    layout.segment_key("part-00000", "gone", 1, 1),
)


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (["report", "job/run", "--output", "page.html", "--job", "job"], ["page.html"]),
        (["clean", "job/run", "--yes"], ["job/chunks/*", "job/run/[!p]*/**/[!.]*"]),
    ],
    ids=["report", "clean"],
)
def test_killed_at_any_change_the_same_command_ends_with_the_same_files(
    command: list[str], wanted: list[str], tmp_path: Path
) -> None:
    """But for the killed command's own probe, which `clean` removes when it is an hour old."""
    start = tmp_path / "start"
    make_job(start / "job", rows=20, per_chunk=10)
    finish_run(start / "job", start / "job/run")
    store = open_store(str(start / "job/run"))
    for key in LEFT:
        put_raw(store, key, b"x")
        os.utime(start / "job/run" / key, (1, 1))
    killed = crash_everywhere(command, wanted, start, modules=MODULES)
    names = r"page\.html" if command[0] == "report" else "|".join(map(re.escape, LEFT))
    assert any(re.search(names, each) for each in killed), killed

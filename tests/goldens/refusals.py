"""The table of refusals, refusals.txt: command lines that cannot work, each with its exit status, error and hint.

`record_refusals` runs each line after ``$`` in a folder with a job, a run and files that are wrong in one way each.
Whatever is refused leaves no file behind. To add a refusal, write its command line into the table and record:
`python -m goldens` (from tests/).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
from pathlib import Path
from unittest import mock

from batchinfer.cli.main import main
from goldens import FOLDER, inside, write_lines
from models import write_adapter

TABLE = FOLDER / "refusals.txt"
ECHO = "--engine echo --prompt-column text --worker-id w0"
WRONG_SETTINGS = {
    "misspelt": "modle: x",
    "section": "sampling: {topk: 1}",
    "list": "- a\n- b",
    "unclosed": "model: [unclosed",
    "set": "stop: !!set {a, b}",
    "binary": "model: !!binary aGk=",
    "date": "model: 2026-01-02",
    "vllm": "vllm: [1]",
    "elsewhere": "vllm: {output: s3://b/run}",
}
WRONG_MANIFESTS = {
    "unknown": "chunks/part-00000.jsonl\nchunks/part-00077.jsonl\n",
    "outside": "../secret.jsonl\n",
    "twice": "chunks/part-00000.jsonl\n" * 2,
    "empty": "\n\n",
}


def make_world() -> None:
    """Make what the command lines of the table name."""
    write_lines("rows.jsonl", [{"text": f"row {index}", "n": index} for index in range(20)])
    write_lines("review.jsonl", [{"review": "good", "stars": 5}])
    Path("rows.csv").write_text("text,n\nx,1\n")
    Path("review.csv").write_text("review,n\nx,1\n")
    Path("semicolons.csv").write_text("text;n\nx;1\n")
    Path("array.jsonl").write_text('[{"text": "a"}]')
    Path("binary.txt").write_bytes(b"\xff\xfe\x00binary")
    Path("mine.jsonl").write_text("mine")
    Path("secret.txt").write_text("https://me:SECRET@host/x.jsonl\n")
    Path("file").touch()
    Path("folder.jsonl").mkdir()
    Path("circle").symlink_to("circle")
    Path("latin").mkdir()
    Path(os.fsdecode(b"latin/caf\xe9.jsonl")).write_text('{"text": "a"}\n')
    Path("model").mkdir()
    Path("rows").mkdir()
    write_lines("rows/rows.jsonl", [{"text": "a"}])
    write_lines("tools.json", ["[1]"])
    write_lines("look.json", ['[{"type": "function", "function": {"name": "look"}}]'])
    write_lines("empty.json", ["{}"])
    write_lines("ada.json", ['{"name": "Ada"}'])
    write_lines("deep.json", ["[" * 51 + "]" * 51])
    for name, text in WRONG_SETTINGS.items():
        Path(f"{name}.yaml").write_text(text + "\n")
    for name, text in WRONG_MANIFESTS.items():
        Path(f"{name}.txt").write_text(text)
    Path("no-command.sh").write_text("#!/bin/bash\n")
    Path("template.jinja").write_text("{{ txet }}")
    write_adapter(Path("adapter"))
    for command in (
        "split rows.jsonl --output job --num-chunks 3 --num-workers 2",
        "split rows.csv --output job-of-csv --num-chunks 1",
        f"worker --job job --output job/runs/first --limit 5 {ECHO}",
    ):
        _, status = _say(command)
        assert status == 0
    shutil.copytree("job", "newer")
    shutil.copytree("job", "damaged")
    Path("damaged/job.json").write_text("{")
    Path("damaged/runs/first/run.json").write_text("{")
    for place in (Path("newer/job.json"), Path("job/runs/newer/run.json")):
        place.parent.mkdir(exist_ok=True)
        place.write_text('{"format_version": 2}')
    place = Path("job/runs/deep/run.json")
    place.parent.mkdir()
    fields = '"format_version": 1, "fingerprint": "f", "nonce": "n", "config": {}'
    place.write_text(f'{{{fields}, "recorded": {{"x": {"[" * 101 + "]" * 101}}}}}')


def record_refusals(folder: Path) -> str:
    """Run every command line of the table in an empty folder, and return the table as it is now."""
    parts = []
    with inside(folder), mock.patch.dict("os.environ", {"NO_SUCH_TOKEN": ""}):
        make_world()
        before = _files()
        for command in re.findall(r"^\$ batchinfer (.*)", TABLE.read_text("utf-8"), re.MULTILINE):
            said, status = _say(command)
            assert status, command
            assert _files() == before, command
            assert "Traceback" not in said, said
            errors, hints = (
                re.findall(rf"^{word}: (.*(?:\n +.*)*)", said, re.MULTILINE | re.IGNORECASE)
                for word in ("error", "hint")
            )
            line = " / ".join(part.strip() for error in errors for part in error.splitlines())
            hint = "".join(f"  {each}\n" for each in hints)
            parts.append(f"$ batchinfer {command}\n{status} {line}\n{hint}")
    return "\n".join(parts).replace(str(folder.resolve()), "FOLDER")


def _files() -> dict[Path, bytes]:
    """Return every file and folder, but those in which a worker says how it ended."""
    there = (path for path in Path().rglob("*") if "workers" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else b"" for path in there}


def _say(command: str) -> tuple[str, int]:
    """Run a command line here, and return what it writes to stderr, and its status."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = main(shlex.split(command))
    return stderr.getvalue(), status

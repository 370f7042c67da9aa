"""The table of refusals, refusals.txt: command lines that cannot work, each with its exit status, error and hint.

`record_refusals` runs each line after ``$`` in a folder with a job, a run and files that are wrong in one way each.
Whatever is refused leaves no file behind. To add a refusal, write its command line into the table and record:
`python -m goldens` (from tests/).
"""

import contextlib
import gzip
import os
import re
import shutil
from pathlib import Path
from unittest import mock

from goldens import FOLDER, run, write_lines
from models import write_adapter

TABLE = FOLDER / "refusals.txt"
ECHO = "--engine echo --prompt-column text --worker-id w0"
FILES = {
    "misspelt.yaml": "modle: x",
    "section.yaml": "sampling: {topk: 1}",
    "list.yaml": "[]",
    "flag.yaml": "retry_errors: {a: 1}",
    "unclosed.yaml": "model: [unclosed",
    "set.yaml": "stop: !!set {a, b}",
    "binary.yaml": "model: !!binary aGk=",
    "date.yaml": "model: 2026-01-02",
    "vllm.yaml": "vllm: [1]",
    "elsewhere.yaml": "vllm: {output: s3://b/run}",
    "unknown.txt": "chunks/part-00000.jsonl\nchunks/part-00077.jsonl",
    "outside.txt": "../secret.jsonl",
    "empty.txt": "\n",
    "rows.csv": "text,n\nx,1",
    "review.csv": "review,n\nx,1",
    "semicolons.csv": "text;n\nx;1",
    "array.jsonl": '[{"text": "a"}]',
    "mine.jsonl": "mine",
    "secret.txt": "https://me:SECRET@host/x.jsonl",
    "tools.json": "[1]",
    "look.json": '[{"type": "function", "function": {"name": "look"}}]',
    "empty.json": "{}",
    "ada.json": '{"name": "Ada"}',
    "deep.json": "[" * 51 + "]" * 51,
    "no-command.sh": "#!/bin/bash",
    "template.jinja": "{{ txet }}",
}
"""Settings, manifests, rows and others that the table names, most of them wrong in one way."""


def make_world() -> None:
    """Make what the command lines of the table name."""
    for name, text in FILES.items():
        write_lines(name, [text])
    write_lines("rows.jsonl", [{"text": f"row {index}", "n": index} for index in range(20)])
    write_lines("review.jsonl", [{"review": "good", "stars": 5}])
    Path("binary.txt").write_bytes(b"\xff\xfe\x00binary")
    for name in ("packed.csv", "packed.txt"):
        Path(name).write_bytes(gzip.compress(b"text"))
    Path("file").touch()
    Path("folder.jsonl").mkdir()
    Path("circle").symlink_to("circle")
    Path("latin").mkdir()
    Path(os.fsdecode(b"latin/caf\xe9.jsonl")).write_text('{"text": "a"}\n')
    Path("model").mkdir()
    Path("rows").mkdir()
    write_lines("rows/rows.jsonl", [{"text": "a"}])
    write_adapter(Path("adapter"))
    for command in (
        "split rows.jsonl --output job --num-chunks 3 --num-workers 2",
        "split rows.csv --output job-of-csv --num-chunks 1",
        f"worker --job job --output job/runs/first --limit 5 {ECHO}",
    ):
        assert run(command)[0] == 0
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
    with contextlib.chdir(folder), mock.patch.dict("os.environ", {"NO_SUCH_TOKEN": ""}):
        make_world()
        before = _files()
        for command in re.findall(r"^\$ batchinfer (.*)", TABLE.read_text("utf-8"), re.MULTILINE):
            status, _, said = run(command)
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
    """Return every file, but those in which a worker says how it ended."""
    there = (path for path in Path().rglob("*") if "workers" not in path.parts)
    return {path: path.read_bytes() for path in there if path.is_file()}

"""Recorded runs: every byte that a dozen small runs write and print, so that a change of any of it is seen.

A scene is a list of commands, run in this process with the echo engine in an empty folder. Its recording holds each
command's exit status and last line of stdout, then every object that the commands left, with times, nonces and the
like replaced by words. `python -m goldens` (from tests/) records all scenes anew; a difference in the recording is a
change of the format and needs a line in docs/format.md.
"""

import contextlib
import hashlib
import io
import json
import re
import shlex
from pathlib import Path

import zstandard

from batchinfer.cli.main import main

FOLDER = Path(__file__).parent


def write_lines(path: str, rows: list[object]) -> None:
    """JSON Lines; text rows go as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def make_files() -> None:
    """Make what the scenes read."""
    rows = [{"prompt": f"say {index}\u2028é", "k": f"id{index}"} for index in range(10)]
    write_lines("a.jsonl", rows)
    # Quoted cells, an empty cell, a line break within a cell.
    Path("a.csv").write_text('id,text\n1,"a, b"\n2,\n3,"two\nlines"\n', encoding="utf-8")
    # Both request formats, bad lines among them.
    chat = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    bad = {**line, "custom_id": "two", "body": {**chat, "model": "m"}}
    write_lines("batch.jsonl", [line, bad, "{not json", {**line, "custom_id": "three"}])
    completion = {"prompt": "say it", "max_tokens": 3, "n": 2, "best_of": 2, "echo": True}
    write_lines("completions.jsonl", [completion, {"prompt": 5}, {**completion, "stop": ["it"]}])
    # A template that fails for one of the rows.
    Path("t.jinja").write_text("{{ prompt|upper }}{{ 1 // (k|length - 3) if k == 'id9' }}!")
    Path("run.yaml").write_text("worker:\n  max_tokens: 5\nvllm:\n  max_num_seqs: 3\n")
    # Good lines and bad ones, in files that no `split` made.
    write_lines("x.jsonl", [{"prompt": "one", "k": 1}, "", "{", {"other": 1}, {"prompt": "five"}])
    write_lines("y.jsonl", [{"prompt": "six", "k": 6}])
    Path("list.txt").write_text("x.jsonl\ny.jsonl\n")


SPLIT = "split a.jsonl --output job --num-chunks 3 --num-workers 2"
WORKER = "worker --job job --output run --engine echo --worker-id w0"
PROMPTED = f"{WORKER} --prompt-column prompt"
SAMPLED = "--temperature 0.7 --n 2 --seed 11 --max-tokens 3 --stop x --sampling top_k=5"

SCENES: dict[str, list[str]] = {
    "split-zstd": [f"{SPLIT} --compression zstd --columns prompt --id-column k"],
    "split-csv": ["split a.csv --output job --num-chunks 2"],
    "settings": [
        SPLIT,
        f"{WORKER} --prompt-template t.jinja --config run.yaml",
        "verify run --deep",
    ],
    "sampled": [SPLIT, f"{PROMPTED} {SAMPLED} --limit 4"],
    "batch": [
        "split batch.jsonl --output job --num-chunks 1",
        f"{WORKER} --request-format openai-batch",
        "collect run out.jsonl --format openai-batch",
    ],
    "completions": [
        "split completions.jsonl --output job --num-chunks 1",
        f"{WORKER} --request-format completions",
    ],
    "list": [
        "split --by-reference list.txt --output job",
        PROMPTED,
        f"{PROMPTED} --retry-errors",
    ],
    "readers": [
        SPLIT,
        PROMPTED,
        "collect run out.csv",
        "collect run rows.jsonl --with-source",
        "status run --json",
        "verify run --deep",
        "clean run",
        "stop run",
        "report run --output report.html",
    ],
    "shown": [
        SPLIT,
        f"{PROMPTED} --show-config",
        f"{PROMPTED} --config run.yaml --top-p 0.5 --show-config",
        "split a.jsonl --output job --num-chunks 3",
    ],
}

_TIMED = (
    r"nonce|host|created|started|ended|heartbeat|time|minutes|last_start"
    r"|clock_offset_seconds|\w*_?seconds|\w+_time_sec|\w+_load_sec|run_time_sec|eta_seconds"
    r"|engine_steps|beat|hours|checkpointed|rows_in_engine"
)
_VALUE = r"\[(?:[^\[\]]|\[[^\]]*\])*\]|\{[^{}]*\}|[-+.\de]+|null"
_MASKS = [
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "TIME"),
    (r"\b20\d{6}T\d{6}Z\b", "TIME"),
    (rf'("(?:{_TIMED})": ?)(?:"[^"]*"|{_VALUE})', r"\1~"),
    (r'("(?:recent|overall|tokens_per_sec)": ?)\{[^{}]*\}', r"\1~"),
    (r'("\w+_per_sec": ?)[\d.]+', r"\1~"),
    (r"\.[0-9a-f]{16,}(\.jsonl|-\d{6}(?:\.\d+)?\.jsonl)", r".NONCE\1"),
    (r'("report":"report.html","bytes":)\d+', r"\1~"),
]


def mask(text: str) -> str:
    """Replace what differs from run to run."""
    for pattern, word in _MASKS:
        text = re.sub(pattern, word, text)
    return text


def record(name: str, folder: Path) -> str:
    """Play a scene in an empty folder and return its recording."""
    parts: list[str] = []
    timed: list[str] = []  # checksums of outputs that hold a time
    with contextlib.chdir(folder):
        make_files()
        made = set(Path().rglob("*"))
        for command in SCENES[name]:
            status, out, said = run(command)
            line = (out.strip().splitlines() or [""])[-1]
            error = "".join(re.findall(r"^(?:error|hint): .*\n", said, re.MULTILINE))
            parts.append(f"$ batchinfer {command}\n# exit {status}\n{line}\n{error}")
        for path in sorted(set(Path().rglob("*")) - made):
            if path.is_file() and path.suffix != ".html":
                data = path.read_bytes()
                if path.suffix == ".zst":
                    data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
                text = data.decode()
                parts.append(f"== {path}\n{text}\n")
                if path.match("outputs/*.jsonl") and mask(text) != text:
                    timed.append(hashlib.sha256(data).hexdigest())
        timed += _checksums_of_a_place()
    text = "\n".join(parts).replace(str(folder.resolve()), "FOLDER")
    for checksum in timed:
        text = text.replace(checksum, "CHECKSUM")
    return mask(text)


def _checksums_of_a_place() -> list[str]:
    """A job by reference holds whole paths, so its checksum and its run's fingerprint differ from place to place."""
    job, run = Path("job/job.json"), Path("run/run.json")
    if not run.exists() or str(Path.cwd()) not in job.read_text():
        return []
    found = json.loads(run.read_text())
    return [found["fingerprint"], found["config"]["job_sha256"]]


def run(command: str) -> tuple[int, str, str]:
    """Run a command line here. Returns its status, and what it writes to stdout and stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = main(shlex.split(command))
    return status, stdout.getvalue(), stderr.getvalue()

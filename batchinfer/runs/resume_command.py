"""Make the command that resumes a run: `batchinfer worker` with the options from which run.json was made."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.cli.options import words_of
from batchinfer.core.printable import printable
from batchinfer.core.records import Run
from batchinfer.core.shell import quote
from batchinfer.runs.pairs import prompt_of
from batchinfer.worker.worker_config import WorkerConfig

_RUN_CODE = ("trust-remote-code", "plugin", "middleware", "processors", "server-command")
"""Parts of the names of options that make a worker run code which they name."""


def worker_command(run: Run, url: str, job_url: str) -> str:
    """Return a bash command that starts a worker for the run at `url`.

    The command has the options that decide answers, and the server's as the run's first worker had them. Other options
    (about the machine, or how often to checkpoint) are not in run.json and may differ from worker to worker. Some
    options take a file. run.json holds only the file's text, so the command passes the text as `<(printf …)`.

    Anybody who can write to the bucket can change run.json, so every value is quoted, and options that make a worker
    run code, such as --trust-remote-code, are left out. A comment after the command names them; the user decides.
    """
    values = _values_of(run)
    parts = list(words_of(WorkerConfig, values or {}))
    parts += [(str(word), quote(str(word))) for word in run.recorded.get("server_args") or ()]
    words = ["batchinfer worker", "--job", quote(job_url), "--output", quote(url)]
    left_out, is_unsafe = list[str](), False
    for word, text in parts:
        if word.startswith("-"):
            name = word.partition("=")[0].replace("_", "-")
            is_unsafe = any(part in name for part in _RUN_CODE)
            left_out += [printable(name)] * is_unsafe
        if not is_unsafe:
            words.append(text)
    if values is None:
        words.append("…")
    if left_out:
        shown = ", ".join(left_out)
        words.append(f"# {shown} left out: add it only if you trust the code that it runs")
    return " ".join(words)


def _values_of(run: Run) -> dict[str, Any] | None:
    """Return the values of options that run.json holds, by their fields; None if they cannot be read."""
    prompt, recorded = prompt_of(run), run.recorded.get("options") or {}
    if prompt is None or not isinstance(recorded, dict):
        return None
    return msgspec.structs.asdict(prompt) | {"sampling": prompt.body} | recorded

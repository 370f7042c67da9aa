"""Make the command that resumes a run: `batchinfer worker` with the options from which run.json was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.cli.options import options_of
from batchinfer.core import codec
from batchinfer.core.printable import printable
from batchinfer.core.records import Run
from batchinfer.core.shell import in_bash, quote
from batchinfer.prompts.types import PromptConfig
from batchinfer.worker.worker_config import WorkerConfig

_RUN_CODE = ("trust-remote-code", "plugin", "middleware", "processors", "server-command")
"""Parts of the names of options that make a worker run code which they name."""
_OWN = "--server-command"


def worker_command(run: Run, url: str, job_url: str) -> str:
    """Return a bash command that starts a worker for the run at `url`.

    The command has the options that decide answers, and the server's as the run's first worker had them. Other options
    (about the machine, or how often to checkpoint) are not in run.json and may differ from worker to worker. Some
    options take a file. run.json holds only the file's text, so the command passes the text as `<(printf …)`.

    Anybody who can write to the bucket can change run.json, so every value is quoted, and options that make a worker
    run code, such as --trust-remote-code, are left out. A comment after the command names them; the user decides.
    """
    words = [f"--job {quote(job_url)}", f"--output {quote(url)}"]
    values = _values_of(run)
    left_out: list[str] = []
    for option in options_of(WorkerConfig):
        is_known = values and option.field in values
        for flag, word in option.spell(values[option.field]) if values and is_known else ():
            if flag == _OWN:
                left_out.append(flag)
            else:
                words.append(flag if word is None else f"{flag} {in_bash(word)}")
    if values is None:
        words.append("…")
    safe, unsafe = _divided([str(word) for word in run.recorded.get("server_args") or ()])
    left_out += unsafe
    comment = (
        f"# {', '.join(left_out)} left out: add it only if you trust the code that it runs"
        if left_out
        else ""
    )
    return " ".join(filter(None, ["batchinfer worker", *words, *map(quote, safe), comment]))


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide options of a server into the words of those that run no code, and the names of the others."""
    safe: list[str] = []
    unsafe: list[str] = []
    is_unsafe = False
    for word in words:
        if word.startswith("-"):
            name = word.partition("=")[0].replace("_", "-")
            is_unsafe = any(part in name for part in _RUN_CODE)
            unsafe += [printable(name)] * is_unsafe
        if not is_unsafe:
            safe.append(word)
    return safe, unsafe


def _values_of(run: Run) -> dict[str, Any] | None:
    """Return the values of options that run.json holds, by their fields.

    None if somebody has edited run.json so that it cannot be read.
    """
    try:
        prompt = codec.convert(run.config.get("prompt") or {}, PromptConfig)
        recorded = codec.convert(run.recorded.get("options") or {}, dict[str, Any])
    except msgspec.ValidationError:
        return None
    return msgspec.structs.asdict(prompt) | {"sampling": prompt.body} | recorded

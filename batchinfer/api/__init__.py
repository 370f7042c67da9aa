"""The Python interface: `run`, `make_job`, `open_run`, and the errors.

    import batchinfer

    answered = batchinfer.run("reviews.parquet", model="Qwen/Qwen3-8B", prompt_column="text", max_tokens=64)
    table = answered.to_arrow()

`run` and `make_job` start the commands `run` and `split`, each as a process of its own, so the engine shares no
memory and no signal handlers with the calling program. On Linux the command also ends when that program is killed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.api.data import sources_of
from batchinfer.api.handle import RunHandle
from batchinfer.api.process import call
from batchinfer.core import errors

__all__ = ["RunHandle", "errors", "make_job", "open_run", "run"]


def run(  # noqa: PLR0913 - an editor shows the common options by name
    data: Any,
    *,
    model: str | None = None,
    output: str | Path | None = None,
    work: str | Path | None = None,
    limit: int | None = None,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    system_prompt: str | None = None,
    task: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    seed: int | None = None,
    json_schema: Any = None,
    choices: Sequence[str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    lora: Mapping[str, str] | None = None,
    engine: str | None = None,
    base_url: str | Sequence[str] | None = None,
    retry_errors: bool | None = None,
    quiet: bool = False,
    **vllm: Any,
) -> RunHandle:
    """Answer every row of some data with a model on this machine. See docs/python.md.

    The call blocks until the command has ended. Log lines go to stderr, with the progress every ten seconds. After an
    interruption or a kill, the same call goes on where it was if `output` or `work` is given.

    Args:
        data: Prompts, conversations (lists of messages) or dictionaries; a path or URL, or several; an Arrow table, a
            frame of pandas or polars, a `datasets.Dataset`, or a column of one.
        model: A name on the Hub, a local folder, or a folder in a bucket.
        output: File or folder for the answers, as `-o` of `batchinfer run`. With None, none is written.
        work: Folder or URL for the job and the run. With None, it is beside `output`, or else a new folder, whose name
            is printed.
        limit: Only the first rows for now.
        prompt_column: Column with the prompt. Default: `prompt` or `text`.
        messages_column: Column with a conversation. Default: `messages` or `conversation`.
        system_prompt: System message of every conversation.
        task: generate, embed, classify, score or another task of `batchinfer run`.
        max_tokens: Longest answer.
        temperature: How freely tokens are drawn; 0: always the likeliest.
        top_p: Draw from the likeliest tokens that have this probability.
        n: Answers a row.
        stop: Text or texts that end an answer.
        seed: Seed of the run.
        json_schema: A JSON schema as a dictionary, a class of pydantic, or a file: every answer is JSON that fits it.
        choices: Every answer is one of these texts.
        tools: Tools that answers may call, as in a request of the OpenAI API.
        lora: Adapters: their folders, URLs or names on the Hub, by name.
        engine: vllm, openai (a running endpoint) or echo (a rehearsal without a model).
        base_url: URL of an endpoint, for the engine openai.
        retry_errors: Do the error rows of a finished run again.
        quiet: Show no log lines.
        vllm: Any further option of `batchinfer run` or of vLLM's server, such as `max_model_len=8192`.

    Returns:
        The run, to read the answers from.

    Raises:
        errors.UsageError: An option, the data or the model is wrong.
        errors.PolicyStop: A rule stopped the run, such as `max_error_rate`.
        errors.EngineError: The engine failed.
        errors.StorageError: Storage failed.
        errors.Interrupted: A signal ended it; the same call goes on.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("data", "output", "work", "quiet", "vllm"):
        given.pop(name, None)
    section = vllm.pop("vllm", None) or {}  # as in a settings file
    options = given | vllm | section
    if str(output) == "-":
        raise errors.ConfigError("output: '-' is for the command line", hint="give a path")
    if "show_config" in options:
        raise errors.ConfigError("show_config: is for the command line", hint="leave it out")
    with sources_of(data) as (sources, scratch):
        kept = "" if work or output else tempfile.mkdtemp(prefix="batchinfer-run-")
        if kept and not quiet:
            from batchinfer.cli.terminal import say

            say(f"job and run are kept in {kept}; work={kept!r} goes on there")
        dest = output if output is not None else scratch / "answers.parquet"
        place = ["--work", str(work or kept)] if work or kept else []
        try:
            arguments = [*sources, "--output", str(dest), *place]
            result = call("run", arguments, options, scratch, quiet=quiet)
        except errors.BatchinferError as error:
            if kept and not any(Path(kept).iterdir()):
                Path(kept).rmdir()
            elif kept:
                text = f"finished rows are kept: work={kept!r} goes on"
                error.hint = f"{error.hint}\n{text}".strip()
                error.add_note(text)
            raise
    folder = str(result["work"])
    if "://" not in folder:  # stays true when the program changes its folder
        folder = str(Path(folder).expanduser().absolute())
    is_partial = limit is not None and result["status"] != "SUCCESS"
    return RunHandle(f"{folder}/run", result, is_partial=is_partial)


def make_job(data: Any, output: str | Path, **options: Any) -> dict[str, Any]:
    """Split data into a job at `output`, for any number of workers.

    Args:
        data: As in `run`.
        output: Folder or URL of the job.
        options: Options of `batchinfer split` by their names, such as `num_workers`, `num_chunks`.

    Returns:
        The result of the command: `job`, `rows`, `chunks` and more.

    Raises:
        errors.UsageError: An option or the data is wrong, or another job is there.
        errors.StorageError: Storage failed.
    """
    with sources_of(data) as (sources, scratch):
        return call("split", [*sources, "--output", str(output)], options, scratch, quiet=False)


def open_run(url: str | Path) -> RunHandle:
    """Return the run at a path or URL, finished or not. Reads nothing yet."""
    return RunHandle(str(url), {})

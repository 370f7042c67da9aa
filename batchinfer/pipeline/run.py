"""The command `batchinfer run`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import click
import msgspec

from batchinfer.cli.options import options as options_from
from batchinfer.cli.options import values_of
from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.core import units
from batchinfer.core.errors import RESTART_STATUSES, BatchinferError, ConfigError, LimitReached
from batchinfer.core.option_help import NO_OPTION, Count, Opt
from batchinfer.core.records import Record
from batchinfer.core.shell import quote
from batchinfer.pipeline.running import WORKER_ID, running_alone
from batchinfer.worker.command import look_options
from batchinfer.worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from batchinfer.pipeline.work_folder import WorkFolder

STDOUT = "-"
_GIVEN = {
    "worker_id": WORKER_ID,
    # Nothing starts `run` again by itself, so nothing has to bring starts to an end.
    "max_attempts": sys.maxsize,
}
"""Parameters of the worker that are no options of `run`, with `run`'s own values."""
_PLACES = ("manifests", "job", "output", "limit")
"""Parameters of the worker that `run` fills with places in its work folder."""


class PipelineConfig(Record, frozen=True, kw_only=True):
    """Options of `run` that are not the worker's."""

    SECTION: ClassVar[str] = "output"

    sources: Annotated[list[str], NO_OPTION]
    dest: Annotated[str, Opt(short="-o", flag="--output", metavar="DEST", is_first=True)]
    """File (.parquet, .jsonl, .csv) or folder; -: stdout."""
    work: Annotated[str, Opt(metavar="URL")] = ""
    """Where job and run lie, to go on from after a kill. Default: DEST.batchinfer."""
    limit: Annotated[Count | None, Opt(section="input", is_first=True)] = None
    """Only the first N rows for now; the rest later."""
    delimiter: Annotated[str, Opt(form="delimiter", section="input")] = ""
    """Character between the fields of CSV, as in split."""
    format: Literal["parquet", "jsonl", "csv", "lines"] | None = None
    """Format of DEST, as in collect. Default: as its name says."""
    with_source: bool = False
    """Join the source's columns to the answers."""
    is_plain: Annotated[bool, Opt(flag="--plain", section="prompt")] = False
    """Send the prompts of --prompt-column as they are, also to a model with a chat template."""
    as_json: Annotated[bool, Opt(flag="--json")] = False
    """End with one JSON object also at a terminal."""


@click.command("run", cls=ServerCommand)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@options_from(PipelineConfig)
@options_from(WorkerConfig, without=(*_GIVEN, *_PLACES))
@look_options
@common_options
def command(sources: tuple[str, ...], **options: Any) -> dict[str, Any] | None:
    """Answer every row of SOURCE with a model, on this machine, and write the answers to DEST.

    \b
      batchinfer run reviews.parquet -o answers.parquet --model Qwen/Qwen3-8B \\
          --prompt-column text --system-prompt "Positive?" --max-tokens 8

    SOURCE is a file, a folder or a URL of parquet, JSON Lines or CSV, a text file with a prompt a line, or - for
    standard input. A column named messages, conversation, prompt or text is found by itself; a model with a chat
    template is sent prompts as user's messages. After a kill or Ctrl-C the same command goes on (with -o - if --work is
    given).
    """  # noqa: D301 - \b keeps click from wrapping the example
    from batchinfer.core.layout import without_slash
    from batchinfer.pipeline.pipes import copy_to, with_stdin_in_a_file
    from batchinfer.storage.scratch import Scratch

    asked = PipelineConfig(**values_of(PipelineConfig, options) | {"sources": list(sources)})
    dest = asked.dest
    if not dest:
        raise ConfigError("--output: is missing", hint="say where: -o answers.parquet")
    if dest == STDOUT and asked.format not in (None, "jsonl", "lines"):
        hint = "leave --format out, or name a file"
        raise ConfigError(f"--format {asked.format}: with -o - stdout takes JSON Lines", hint=hint)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(contextlib.closing(Scratch())).folder
        answers = scratch / "answers.jsonl"
        config = msgspec.structs.replace(
            asked,
            sources=with_stdin_in_a_file(sources, scratch / "sources"),
            dest=without_slash(str(answers) if dest == STDOUT else dest),
            work=without_slash(asked.work or _default_work(dest, scratch)),
        )
        is_brief = sys.stdout.isatty() and not asked.as_json
        try:
            result = _run(config, options | _GIVEN)
        except BatchinferError as error:
            for source, place in zip(sources, config.sources, strict=True):
                if source != place:
                    error.message = error.message.replace(place, "stdin")
            if is_brief:
                error.result = None
            raise
        if dest == STDOUT:
            copy_to(answers, sys.stdout.buffer)
        if is_brief or dest == STDOUT:
            tell(result, dest)
            return None
        return result


def tell(result: dict[str, Any], dest: str) -> None:
    """Say in two lines what a run has given."""
    speed = result.get("worker", {}).get("tokens_per_sec", {}).get("output")
    rate = f"; {units.short(speed)} tokens/s" if speed else ""
    there = "stdout" if dest == STDOUT else dest
    rows, failed = result["rows"], result["rows_error"]
    say(f"{units.many(rows - failed, 'answer')} in {there}, {failed} failed{rate}")
    if dest != STDOUT:
        say(
            f"job and run are in {result['work']}: batchinfer report {quote(result['work'] + '/run')}"
        )


def _run(config: PipelineConfig, options: dict[str, Any]) -> dict[str, Any]:
    from batchinfer.check.examination import refuse_other_run
    from batchinfer.core.clock import Clock
    from batchinfer.pipeline.work_folder import WorkFolder
    from batchinfer.storage.opening import open_store
    from batchinfer.worker.command import describe_host, engine_config, price_of_machine

    price_of_machine(options, describe_host(dict(os.environ)), engine_config(options))
    work = WorkFolder(config, open_store, Clock())
    work.claim_dest()
    counted, options = work.look(options)
    with running_alone(work.folder):
        work.split(counted)
        options = work.asked_of_worker(options)
        there = work.claim_dest()
        if there and not options["retry_errors"]:
            refuse_other_run(options)
            rows = {"rows": there.rows, "rows_error": there.rows_error}
            return {"status": "UNCHANGED", "dest": config.dest, **rows, "work": config.work}
        return _generate(work, options)


def _generate(work: WorkFolder, options: dict[str, Any]) -> dict[str, Any]:
    """Answer the rows of the job and collect the answers."""
    from batchinfer.worker.command import work as run_worker

    work.prepare_dest()
    try:
        with _handlers_put_back():
            answered = run_worker(options, dict(os.environ))
    except LimitReached as error:
        if options["retry_errors"] or not work.is_answered():
            raise
        answered = error.result or {}
    except BatchinferError as error:
        if error.exit_status in RESTART_STATUSES and not error.hint:
            error.hint = "run the same command again: finished rows are kept"
        raise
    if options["max_error_rate"] is not None:
        work.refuse_errors(options["max_error_rate"], at_least=options["min_errors"])
    collected = work.collect()
    return {**collected, "work": work.config.work, "worker": answered}


@contextlib.contextmanager
def _handlers_put_back() -> Iterator[None]:
    """Put the handlers of SIGINT and SIGTERM back at the end. With the worker's, no signal would end `collect`."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _default_work(dest: str, scratch: Path) -> str:
    """Return the work folder beside DEST. For stdout it is in `scratch`, so such a run cannot be resumed.

    Raises:
        ConfigError: DEST is on the Hub or is a whole bucket, which have no place beside them.
    """
    if dest == STDOUT:
        return str(scratch / "work")
    from batchinfer.storage.opening import local_path, split_url

    scheme, path = split_url(dest)
    if scheme == "hf" or (scheme not in ("file", "memory") and "/" not in path.strip("/")):
        raise ConfigError(
            f"--output {dest}: there is no place beside it for the work folder",
            hint="say where: --work FOLDER"
            + ("" if scheme == "hf" else f"; or name a folder: {dest.rstrip('/')}/answers"),
        )
    if scheme == "file" and Path(dest).name in ("", ".."):
        dest = str(local_path(dest).resolve())  # for example "."
    return f"{dest.rstrip('/')}.batchinfer"

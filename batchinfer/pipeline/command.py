"""The command `batchinfer run`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchinfer.cli.options import FIRST, SectionCommand, SectionOption
from batchinfer.cli.run_options import run_options
from batchinfer.cli.settings import common_options
from batchinfer.cli.terminal import say
from batchinfer.clusters import RESTART_STATUSES
from batchinfer.core import units
from batchinfer.core.errors import BatchinferError, ConfigError, LimitReached
from batchinfer.pipeline.running import WORKER_ID
from batchinfer.split.command import parse_delimiter

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from batchinfer.pipeline.steps import PipelineConfig, WorkFolder

STDOUT = "-"
_UNLIMITED = sys.maxsize
"""Value of --max-attempts where it is not given. Nothing starts `run` again by itself, as launchers do with workers, so
that nothing has to bring starts to an end: a person may interrupt it however often before a row is finished."""
_OWN = ("limit", "delimiter", "is_plain", "with_source", "explode")
_GIVEN = {
    "manifests": (),
    "job": None,
    "output": None,
    "limit": None,
    "allow_absolute": False,
    "worker_id": WORKER_ID,
    "steal": True,
    "nnodes": 1,
    "node_rank": 0,
    "master_addr": "",
    "master_port": 29_501,
    "headless": False,
}
"""Parameters of the worker that are no options of `run`, or mean something else there, with `run`'s own values."""


@click.command("run", cls=SectionCommand)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "dest",
    cls=SectionOption,
    section=FIRST,
    metavar="DEST",
    required=True,
    help="File (.parquet, .jsonl, .csv) or folder of the answers; - writes JSON Lines to stdout.",
)
@click.option(
    "--limit",
    cls=SectionOption,
    section=FIRST,
    type=click.IntRange(1),
    help="Only the first N rows for now; without it later, these rows are kept.",
)
@click.option(
    "--delimiter",
    cls=SectionOption,
    section="prompt",
    callback=parse_delimiter,
    metavar="CHARACTER",
    help="As in split: the character between the fields of CSV.",
)
@click.option(
    "--work",
    cls=SectionOption,
    section="output",
    metavar="URL",
    help="Where job and run lie, to go on from after a kill.  [default: DEST.batchinfer]",
)
@click.option(
    "--format",
    cls=SectionOption,
    section="output",
    type=click.Choice(["parquet", "jsonl", "csv", "lines"]),
    help="As in collect.",
)
@click.option(
    "--plain",
    "is_plain",
    cls=SectionOption,
    section="prompt",
    is_flag=True,
    help="Send the prompts of --prompt-column as they are, also to a model with a chat template.",
)
@click.option(
    "--with-source",
    cls=SectionOption,
    section="output",
    is_flag=True,
    help="Join the source's columns to the answers.",
)
@click.option(
    "--explode",
    cls=SectionOption,
    section="output",
    is_flag=True,
    help="A table row for each answer of a row, as in collect.",
)
@click.option(
    "--max-attempts",
    cls=SectionOption,
    section="behaviour",
    type=click.IntRange(1),
    help="Starts without a new finished row before the command gives up (exit 3).  [default: never]",
)
@run_options(with_look=False, without=(*_GIVEN, "max_attempts"))
@common_options
def command(sources: tuple[str, ...], **options: Any) -> dict[str, Any] | None:
    """Answer every row of SOURCE with a model, on this machine, and write the answers to DEST.

    \b
      batchinfer run reviews.parquet -o answers.parquet --model Qwen/Qwen3-8B \\
          --prompt-column text --system-prompt "Is the review positive?" --max-tokens 8

    SOURCE is a file, a folder or a URL of parquet, JSON Lines or CSV, a text file with a prompt a line, or - for
    standard input. A column named messages, conversation, prompt or text is found by itself, and a model with a chat
    template is sent each prompt as a user's message. After a kill or Ctrl-C the same command goes on where it was
    (with -o - only if --work is given).
    """  # noqa: D301 - \b keeps click from wrapping the example
    from batchinfer.core.layout import without_slash
    from batchinfer.pipeline.sources import as_tables, copy_to
    from batchinfer.pipeline.steps import PipelineConfig
    from batchinfer.storage.scratch import Scratch

    with contextlib.ExitStack() as stack:
        stack.enter_context(_handlers_put_back())
        # SIGTERM then ends the command as Ctrl-C does, and scratch files are removed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        scratch = stack.enter_context(contextlib.closing(Scratch())).folder
        dest = options.pop("dest")
        if dest == STDOUT and options["format"] not in (None, "jsonl", "lines"):
            raise ConfigError(
                f"--format {options['format']}: with -o - standard output takes JSON Lines",
                hint="leave --format out, or name a file",
            )
        answers = scratch / "answers.jsonl" if dest == STDOUT else None
        config = PipelineConfig(
            sources=as_tables(sources, scratch / "sources"),
            dest=without_slash(str(answers or dest)),
            work=without_slash(options.pop("work") or _default_work(dest, scratch)),
            format=options.pop("format") or "",
            **{name: options.pop(name) for name in _OWN},
        )
        options["max_attempts"] = options["max_attempts"] or _UNLIMITED
        result = _run(config, {**options, **_GIVEN})
        if answers is None:
            return result
        copy_to(answers, sys.stdout.buffer)
        say(f"{units.many(result['rows'], 'row')} written to stdout")
        return None


def _run(config: PipelineConfig, options: dict[str, Any]) -> dict[str, Any]:
    from batchinfer.check.steps import CheckWorld
    from batchinfer.core.clock import SystemClock
    from batchinfer.core.prices import Prices
    from batchinfer.engines.models import describe_model
    from batchinfer.engines.tokenizers import tokenizer_for
    from batchinfer.pipeline.steps import WorkFolder
    from batchinfer.storage.opening import check_writable, open_store, probe
    from batchinfer.worker.command import describe_host, engine_config, price_of_machine

    clock = SystemClock()
    check_writable(config.work, option="--work")
    price_of_machine(options, describe_host(dict(os.environ)), engine_config(options))
    world = CheckWorld(
        open_store=open_store,
        probe=probe,
        describe_model=describe_model,
        load_tokenizer=tokenizer_for,
        prices=Prices(None),
        clock=clock,
    )
    work = WorkFolder(config, open_store, clock)
    rows_there = work.claim_dest()
    counted, options = work.look(options, world)
    with work.alone():
        work.split(counted)
        if rows_there and work.is_current() and not options["retry_errors"]:
            work.refuse_other_options(options)
            return {
                "status": "UNCHANGED",
                "dest": config.dest,
                "rows": rows_there,
                "work": config.work,
            }
        return _generate(work, options)


def _generate(work: WorkFolder, options: dict[str, Any]) -> dict[str, Any]:
    """Answer the rows of the job and collect the answers."""
    from batchinfer.worker.command import work as run_worker

    config = work.config
    work.check_hub()
    options |= {"job": work.job_url, "output": work.run_url, "manifests": (work.manifest(),)}
    options["steal"] = config.limit is None
    try:
        with _handlers_put_back():
            answered = run_worker(options, dict(os.environ))
    except LimitReached as error:
        if options["retry_errors"] or not work.is_answered():
            raise
        work.refuse_other_options(options)
        logger.warning("%s, and every row is answered", error)
        answered = error.result or {}
    except BatchinferError as error:
        if error.exit_status in RESTART_STATUSES and not error.hint:
            error.hint = "run the same command again: finished rows are kept"
        raise
    if options["max_error_rate"] is not None:
        work.refuse_errors(options["max_error_rate"], at_least=options["min_errors"])
    collected = work.collect()
    names = ("status", "run", "dest", "format", "rows", "rows_error", "files", "bytes")
    return {
        **{name: collected[name] for name in names},
        "work": config.work,
        "worker": answered,
    }


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

    if dest.startswith("hf://"):
        raise ConfigError(
            f"--output {dest}: the Hub cannot hold the work folder",
            hint="say where: --work FOLDER",
        )
    scheme, path = split_url(dest)
    if scheme not in ("file", "memory") and "/" not in path.strip("/"):
        raise ConfigError(
            f"--output {dest}: is a whole bucket, so there is no place beside it for the work folder",
            hint=f"name a folder in it: {dest.rstrip('/')}/answers",
        )
    if scheme == "file" and Path(dest).name in ("", ".."):
        dest = str(local_path(dest).resolve())  # for example "."
    return f"{dest.rstrip('/')}.batchinfer"

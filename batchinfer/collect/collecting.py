"""`batchinfer collect`: writes a run's verified answers in input order, as a table or in a form that programs know."""

from __future__ import annotations

import logging
from typing import Any

import click
import msgspec

from batchinfer import __version__
from batchinfer.cli.help import SectionCommand
from batchinfer.cli.options import options as options_from
from batchinfer.cli.options import values_of
from batchinfer.cli.settings import common_options
from batchinfer.collect.answers import sql_errors
from batchinfer.collect.card import make_card
from batchinfer.collect.collect_config import FORMATS, CollectConfig, check_options, suffix_of
from batchinfer.collect.destinations import Collected, CollectedFile, StoreDestination
from batchinfer.collect.hub_destination import HubDestination
from batchinfer.collect.selection import Selection, select
from batchinfer.collect.table import Collection
from batchinfer.collect.table_files import write_files
from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import ConfigError, RunUnsound
from batchinfer.core.shell import quote
from batchinfer.ledger.audit import MISSING
from batchinfer.ledger.jobs import OpenStore, split_name
from batchinfer.storage.opening import is_inside
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_SHOWN = 10
_LISTED = 1000
_ALL = 2**62
_DECIDING = (
    "kind",
    "where",
    "sample",
    "seed",
    "with_source",
    "columns",
    "answer_json",
    "shard_rows",
)


def run_collect(config: CollectConfig, *, open_store: OpenStore, clock: Clock) -> dict[str, Any]:
    """Collect one run. Nothing in the run is changed.

    Data at DEST is replaced only if `overwrite` is set, or if an unfinished `collect` left it there. Every file at DEST
    is whole or absent. A crash may leave finished files in a folder without `_COLLECTED`; the same command can then be
    run again. The same run, options and version give the same bytes.

    Raises:
        ConfigError: the options do not fit together, or DEST is inside the run or the job.
        InputError: there is no such run, or DEST holds other data.
        RunUnsound: chunks are missing or damaged, and `partial` is not set or no chunk is done.
    """
    started = clock.monotonic()
    check_options(config)
    store = open_store(config.run)
    selection = select(store, open_store, now=clock.now(), job_url=config.job)
    _refuse_gaps(config, selection)
    for place in filter(None, (config.run, selection.job_url)):
        if not config.dest.startswith("hf://") and is_inside(config.dest, place):
            raise ConfigError(f"{config.dest}: lies inside {place}", hint="name another DEST")
    dest = _open_dest(config, open_store)
    # What decides the bytes of the files: the outputs, the options and batchinfer's version.
    made_of = {name: getattr(config, name) for name in _DECIDING} | {
        "version": __version__,
        "run": selection.run.fingerprint,
        "outputs": [(marker.output_sha256, ref.first_row) for ref, marker in selection.sound],
    }
    key = codec.fingerprint(made_of)
    record, status = dest.prepare(key), "UNCHANGED"
    if record is None:
        scratch = Scratch(config.scratch_dir)
        try:
            with sql_errors(config.run):
                rows = Collection(config, selection, store, open_store, scratch)
                record = _write(config, selection, rows, dest, key, scratch)
        finally:
            scratch.close()
        status = "PARTIAL" if record.missing else "SUCCESS"
    seconds = clock.monotonic() - started
    counts: dict[str, Any] = msgspec.to_builtins(record)
    del counts["key"]
    return {
        "status": status,
        "run": config.run,
        "dest": config.dest,
        **counts,
        "files": len(record.files),
        "file_rows": sum(file.rows for file in record.files),
        "bytes": sum(file.bytes for file in record.files),
        "missing_chunks": len(record.missing),
        "missing": record.missing[:_LISTED],
        **({"commit": dest.commit} if isinstance(dest, HubDestination) else {}),
        "run_time_sec": round(seconds, 3),
        "rows_per_sec": round(record.rows / seconds, 1) if seconds > 0 else 0.0,
    }


def _refuse_gaps(config: CollectConfig, selection: Selection) -> None:
    """Tell of chunks that cannot be collected, and refuse the run unless a part of it is asked for."""
    gaps = selection.gaps
    for gap in [gap for gap in gaps if gap.kind != MISSING or not config.partial][:_SHOWN]:
        logger.warning("%s: %s: %s", gap.kind, gap.subject, gap.problem)
    if not selection.sound:
        raise RunUnsound(
            f"{config.run}: no chunk is done yet",
            hint=f"see how it goes: batchinfer status {quote(config.run)}",
        )
    if gaps and not config.partial:
        names = ", ".join(gap.subject for gap in gaps[:3]) + (", …" if len(gaps) > 3 else "")
        raise RunUnsound(
            f"{config.run}: {len(gaps)} of {len(gaps) + len(selection.sound)} chunks are missing or damaged ({names})",
            hint="add --partial to collect the others; `batchinfer verify` says how to fix these",
        )


def _open_dest(config: CollectConfig, open_store: OpenStore) -> StoreDestination | HubDestination:
    suffix, overwrite = FORMATS[config.kind], config.overwrite
    if config.dest.startswith("hf://"):
        is_private = not config.is_public
        return HubDestination(config.dest, suffix, overwrite=overwrite, is_private=is_private)
    folder, name = split_name(config.dest) if suffix_of(config.dest) else (config.dest, "")
    return StoreDestination(open_store(folder), name, suffix, overwrite=overwrite)


def _write(
    config: CollectConfig,
    selection: Selection,
    rows: Collection,
    dest: StoreDestination | HubDestination,
    key: str,
    scratch: Scratch,
) -> Collected:
    """Write the rows that are taken to DEST."""
    most = _ALL if suffix_of(config.dest) else config.shard_rows
    files = []
    for index, file in enumerate(write_files(rows, config.kind, most, scratch)):
        name = dest.put(file, index)
        files.append(CollectedFile(name=name, rows=file.rows, bytes=file.bytes, sha256=file.sha256))
    prompts, answers, failed = rows.answers.one(
        "sum(prompt_tokens)", "sum(completion_tokens)", "count(error_code)"
    )
    record = Collected(
        key=key,
        fingerprint=selection.run.fingerprint,
        format=config.kind,
        rows=rows.answers.num_rows,
        rows_error=failed,
        chunks=len(rows.answers.found),
        missing=[gap.subject for gap in (*selection.gaps, *rows.answers.damaged)],
        files=files,
        broken_answers=rows.num_broken,
    )
    if record.broken_answers:
        text = "%d finished answers break the run's JSON schema: answer_valid is false there"
        logger.warning(text, record.broken_answers)
    facts = {
        "rows": f"{sum(file.rows for file in files):,}",
        "condition": config.where or None,
        "drawn at random": None if config.sample is None else f"seed {config.seed}",
        "failed rows of the run": f"{failed:,} of {record.rows:,}",
        "prompt tokens": f"{prompts or 0:,}",
        "completion tokens": f"{answers or 0:,}",
        "chunks that are missing": len(record.missing) or None,
    }
    path = f"data/part-*{FORMATS[config.kind]}"
    dest.finish(record, lambda: make_card(selection.run, selection.job, config.dest, path, facts))
    return record


@click.command("collect", cls=SectionCommand)
@click.argument("run")
@click.argument("dest")
@options_from(CollectConfig)
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Collect the verified answers of the run at RUN into DEST, in input order: as a table, or in another form.

    DEST is a folder (path or URL), one file (….parquet, ….jsonl, ….csv), or hf://datasets/org/name. Only outputs that
    a marker vouches for are read, and their checksums are compared. An unfinished run is refused without --partial.
    """
    from batchinfer.storage.opening import open_store

    places = {name: layout.without_slash(options[name]) for name in ("run", "dest")}
    config = CollectConfig(**values_of(CollectConfig, options) | places)
    return run_collect(config, open_store=open_store, clock=SystemClock())

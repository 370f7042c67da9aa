"""Collect a run: its verified answers in input order, at one place and in one form."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import msgspec

from batchinfer import __version__
from batchinfer.collect.card import make_card
from batchinfer.collect.destinations import Collected, CollectedFile, StoreDestination
from batchinfer.collect.files import CsvWriter, LinesWriter, ParquetWriter, write_files
from batchinfer.collect.hub_destination import HubDestination
from batchinfer.collect.options import FORMATS, CollectConfig, check_options, suffix_of
from batchinfer.collect.selection import Selection, select
from batchinfer.collect.table import Collection
from batchinfer.core import codec
from batchinfer.core.clock import Clock
from batchinfer.core.errors import ConfigError, RunUnsound
from batchinfer.core.shell import quote
from batchinfer.ledger.audit import MISSING
from batchinfer.ledger.jobs import OpenStore, split_name
from batchinfer.storage.opening import is_inside
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_SHOWN = 10
_LISTED = 1000
_ALL_ROWS = 1 << 62

Destination = StoreDestination | HubDestination


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
    key = _key(config, selection)
    record, status = dest.prepare(key), "UNCHANGED"
    if record is None:
        scratch = Scratch(config.scratch_dir)
        try:
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
    """Tell of chunks that cannot be collected, and refuse the run unless a part of it is asked for.

    Raises:
        RunUnsound: see `run_collect`.
    """
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


def _open_dest(config: CollectConfig, open_store: OpenStore) -> Destination:
    suffix, overwrite = FORMATS[config.kind], config.overwrite
    if config.dest.startswith("hf://"):
        is_private = not config.is_public
        return HubDestination(config.dest, suffix, overwrite=overwrite, is_private=is_private)
    folder, name = split_name(config.dest) if suffix_of(config.dest) else (config.dest, "")
    return StoreDestination(open_store(folder), name, suffix, overwrite=overwrite)


def _key(config: CollectConfig, selection: Selection) -> str:
    """Return a hash of what decides the bytes of the files: the outputs, the options and batchinfer's version."""
    options = msgspec.to_builtins(config) | {"kind": config.kind, "version": __version__}
    for name in (
        "run",
        "dest",
        "format",
        "partial",
        "overwrite",
        "is_public",
        "job",
        "scratch_dir",
    ):
        del options[name]
    outputs = [(marker.output_sha256, ref.first_row) for ref, marker in selection.sound]
    return codec.fingerprint({"run": selection.run.fingerprint, "outputs": outputs, **options})


def _write(
    config: CollectConfig,
    selection: Selection,
    rows: Collection,
    dest: Destination,
    key: str,
    scratch: Scratch,
) -> Collected:
    """Write the rows that are taken to DEST."""

    def make_writer(path: Path) -> ParquetWriter | LinesWriter | CsvWriter:
        if config.kind == "parquet":
            return ParquetWriter(path, rows.schema)
        if config.kind == "csv":
            return CsvWriter(path, rows.schema)
        return LinesWriter(path, rows.json_texts)

    shard_rows = _ALL_ROWS if suffix_of(config.dest) else config.shard_rows
    files = []
    for index, file in enumerate(write_files(rows.tables(), make_writer, shard_rows, scratch)):
        name = dest.put(file, index)
        files.append(CollectedFile(name=name, rows=file.rows, bytes=file.bytes, sha256=file.sha256))
    errors = rows.errors()
    record = Collected(
        key=key,
        fingerprint=selection.run.fingerprint,
        format=config.kind,
        rows=rows.num_rows,
        rows_error=sum(errors.values()),
        chunks=rows.num_chunks,
        missing=[gap.subject for gap in (*selection.gaps, *rows.damaged)],
        files=files,
        broken_answers=rows.broken_answers,
        json_texts=dict(rows.source_texts),
    )
    if record.broken_answers:
        text = "%d finished answers break the run's JSON schema: answer_valid is false there"
        logger.warning(text, record.broken_answers)
    for name, count in record.json_texts.items():
        logger.warning("%d values of the source's column %s are their JSON text", count, name)
    dest.finish(record, functools.partial(_card, config, selection, rows, record, errors))
    return record


def _card(
    config: CollectConfig,
    selection: Selection,
    rows: Collection,
    record: Collected,
    errors: dict[str, int],
) -> str:
    """Return the card of a data set on the Hub. Of local sources it has the last parts of their URLs only."""
    prompts, answers = rows.answers.one("sum(prompt_tokens)", "sum(completion_tokens)")
    counts = {
        "rows": f"{sum(file.rows for file in record.files):,}",
        "condition": config.where or None,
        "drawn at random": None if config.sample is None else f"seed {config.seed}",
        "failed rows of the run": f"{record.rows_error:,} of {record.rows:,}",
        "prompt tokens": f"{prompts or 0:,}",
        "completion tokens": f"{answers or 0:,}",
        "chunks that are missing": len(record.missing) or None,
    }
    urls = [source.url for source in selection.job.sources]
    public = ("hf://", "https://")
    return make_card(
        selection.run,
        name=config.dest.partition("@")[0],
        path=f"data/part-*{FORMATS[config.kind]}",
        sources=[url if url.startswith(public) else url.rpartition("/")[2] for url in urls],
        tables={
            "Counts": counts,
            "Failed rows by code": errors,
            "Columns": {field.name: field.type for field in rows.schema},
        },
    )

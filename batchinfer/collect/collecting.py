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
from batchinfer.storage.hub_data_set import open_hub, parse_address
from batchinfer.storage.opening import is_inside
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_SHOWN = 10
_LISTED = 1000
_ALL_ROWS = 1 << 62

Destination = StoreDestination | HubDestination
Writer = ParquetWriter | LinesWriter | CsvWriter


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
    selection = select(
        store, open_store, now=clock.now(), job_url=config.job, manifests=config.manifests
    )
    _refuse_gaps(config, selection)
    for place in filter(None, (config.run, selection.job_url)):
        if not config.dest.startswith("hf://") and is_inside(config.dest, place):
            raise ConfigError(f"{config.dest}: lies inside {place}", hint="name another DEST")
    scratch = Scratch(config.scratch_dir)
    try:
        dest = _open_dest(config, open_store)
        key = _key(config, selection)
        record, status = dest.prepare(key), "UNCHANGED"
        if record is None:
            rows = Collection(config, selection, store, open_store, scratch)
            record = _write(config, selection, rows, dest, key, scratch)
            status = "PARTIAL" if record.missing else "SUCCESS"
    finally:
        scratch.close()
    seconds = clock.monotonic() - started
    result = {
        "status": status,
        "run": config.run,
        "dest": config.dest,
        **msgspec.to_builtins(record),
        "files": len(record.files),
        "file_rows": sum(file.rows for file in record.files),
        "bytes": sum(file.bytes for file in record.files),
        "missing_chunks": len(record.missing),
        "missing": record.missing[:_LISTED],
        "foreign_objects": selection.num_foreign,
        **({"commit": dest.commit} if isinstance(dest, HubDestination) else {}),
        "run_time_sec": round(seconds, 3),
        "rows_per_sec": round(record.rows / seconds, 1) if seconds > 0 else 0.0,
    }
    del result["key"]
    return result


def _refuse_gaps(config: CollectConfig, selection: Selection) -> None:
    """Refuse a run with chunks that cannot be collected, unless a part of it is asked for.

    Raises:
        RunUnsound: see `run_collect`.
    """
    gaps, is_part = selection.gaps, config.partial and bool(selection.sound)
    shown = [gap for gap in gaps if not is_part or gap.kind != MISSING]
    for gap in shown[:_SHOWN]:
        logger.warning("%s: %s: %s", gap.kind, gap.chunk, gap.problem)
    if not gaps or is_part:
        return
    if not selection.sound:
        raise RunUnsound(
            f"{config.run}: no chunk is done yet",
            hint=f"see how it goes: batchinfer status {quote(config.run)}",
        )
    names = ", ".join(gap.chunk for gap in gaps[:3]) + (", …" if len(gaps) > 3 else "")
    raise RunUnsound(
        f"{config.run}: {len(gaps)} of {len(gaps) + len(selection.sound)} chunks are not there or not sound ({names})",
        hint="add --partial to collect the others; `batchinfer verify` says how to fix these",
    )


def _open_dest(config: CollectConfig, open_store: OpenStore) -> Destination:
    suffix, overwrite = FORMATS[config.kind], config.overwrite
    if config.dest.startswith("hf://"):
        dataset = open_hub(config.dest, is_private=config.is_private)
        return HubDestination(dataset, suffix, overwrite=overwrite)
    folder, name = split_name(config.dest) if suffix_of(config.dest) else (config.dest, "")
    return StoreDestination(open_store(folder), name, suffix, overwrite=overwrite)


def _key(config: CollectConfig, selection: Selection) -> str:
    """Return a hash of what decides the bytes of the files: the outputs, the options and batchinfer's version."""
    options = {
        name: getattr(config, name)
        for name in ("kind", "where", "sample", "seed", "with_source", "columns", "answer_json")
    }
    outputs = [(marker.output_sha256, ref.first_row) for ref, marker in selection.sound]
    options |= {"outputs": outputs, "shard_rows": config.shard_rows, "version": __version__}
    return codec.fingerprint({"run": selection.run.fingerprint, **options})


def _write(
    config: CollectConfig,
    selection: Selection,
    rows: Collection,
    dest: Destination,
    key: str,
    scratch: Scratch,
) -> Collected:
    """Write the rows that are taken to DEST."""

    def make_writer(path: Path) -> Writer:
        if config.kind == "parquet":
            return ParquetWriter(path, rows.schema)
        if config.kind == "csv":
            return CsvWriter(path, rows.schema)
        return LinesWriter(path, rows.json_texts)

    shard_rows = _ALL_ROWS if suffix_of(config.dest) else config.shard_rows
    files = [
        CollectedFile(
            name=dest.put(file, index), rows=file.rows, bytes=file.bytes, sha256=file.sha256
        )
        for index, file in enumerate(write_files(rows.tables(), make_writer, shard_rows, scratch))
    ]
    errors = rows.errors()
    record = Collected(
        key=key,
        fingerprint=selection.run.fingerprint,
        format=config.kind,
        rows=rows.num_rows,
        rows_error=sum(errors.values()),
        chunks=rows.num_chunks,
        missing=[gap.chunk for gap in (*selection.gaps, *rows.damaged)],
        files=files,
        broken_answers=rows.broken_answers,
    )
    if record.broken_answers:
        logger.warning(
            "%d finished answers break the run's JSON schema: answer_valid is false there",
            record.broken_answers,
        )
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
    counts = {
        "rows": f"{sum(file.rows for file in record.files):,}",
        "condition": config.where or None,
        "drawn at random": None if config.sample is None else f"seed {config.seed}",
        "failed rows of the run": f"{record.rows_error:,} of {record.rows:,}",
        "prompt tokens": f"{rows.answers.one('sum(prompt_tokens)') or 0:,}",
        "completion tokens": f"{rows.answers.one('sum(completion_tokens)') or 0:,}",
        "chunks that are missing": len(record.missing) or None,
    }
    urls = [source.url for source in selection.job.sources] if selection.job else []
    return make_card(
        selection.run,
        name=parse_address(config.dest).repo,
        path=f"data/part-*{FORMATS[config.kind]}",
        sources=[
            url if url.startswith(("hf://", "https://")) else url.rstrip("/").rpartition("/")[2]
            for url in urls
        ],
        tables={
            "Counts": {name: value for name, value in counts.items() if value is not None},
            "Failed rows by code": errors,
            "Columns": {field.name: field.type for field in rows.schema},
        },
    )

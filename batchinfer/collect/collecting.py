"""`batchinfer collect`: writes a run's verified answers in input order, as a table or in a form that programs know."""

from __future__ import annotations

import logging
import re
from contextlib import closing
from typing import Any

import click
import msgspec

from batchinfer import __version__
from batchinfer.cli.config_commands import config_command
from batchinfer.collect.answers import ASK_VERIFY, Selection, select, sql_errors, text_of
from batchinfer.collect.collect_config import FORMATS, CollectConfig, check_options, suffix_of
from batchinfer.collect.destinations import Collected, HubDestination, StoreDestination
from batchinfer.collect.table import Collection
from batchinfer.collect.table_files import write_files
from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import ConfigError, RunUnsound
from batchinfer.core.shell import quote
from batchinfer.ledger.audit import RunTarget
from batchinfer.ledger.jobs import OpenStore
from batchinfer.storage.opening import is_inside
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_LISTED = 1000
_ALL = 2**62
_ASIDE = {"run", "dest", "partial", "overwrite", "is_public", "job", "scratch_dir"}
"""Options that do not decide the files' bytes."""
_LONGEST = 20_000
"""Largest number of characters that the card of a data set shows of how it was made."""
_MADE = ("model", "revision", "source", "engine", "engine_version", "batchinfer_version")


def run_collect(config: CollectConfig, *, open_store: OpenStore, clock: Clock) -> dict[str, Any]:
    """Collect one run. Nothing in the run is changed.

    Data at DEST is replaced only if `overwrite` is set, or if an unfinished `collect` left it there. Every file at DEST
    is whole or absent. A crash may leave finished files in a folder without `_COLLECTED`; the same command can then be
    run again. The same run, options and version give the same bytes.

    Raises:
        ConfigError: the options do not fit together, or DEST is inside the run or the job, or holds the source.
        InputError: there is no such run, or DEST holds other data.
        RunUnsound: chunks are missing or damaged, and `partial` is not set or no chunk is done; or an output is not
            what its marker vouches for.
    """
    started = clock.monotonic()
    check_options(config)
    selection = select(config.run, open_store, clock, job_url=config.job)
    _refuse_gaps(config, selection)
    target = selection.target
    apart = [(config.dest, config.run), (config.dest, target.job_url)]
    for inner, outer in [*apart, *((file.url, config.dest) for file in target.job.files)]:
        if is_inside(*(re.sub("^(hf://[^@]+)@[^/]+", r"\1", each) for each in (inner, outer))):
            raise ConfigError(f"{inner}: lies inside {outer}", hint="name another DEST")
    is_hub = config.dest.startswith("hf://")
    dest = HubDestination(config) if is_hub else StoreDestination(config, open_store)
    key = _key(config, selection)
    record, status = dest.prepare(key), "UNCHANGED"
    if record is None:
        with closing(Scratch(config.scratch_dir)) as scratch, sql_errors(config.run):
            record = _write(config, selection, dest, key, scratch)
        status = "PARTIAL" if selection.gaps else "SUCCESS"
    seconds = clock.monotonic() - started
    return {
        "status": status,
        "run": config.run,
        "dest": config.dest,
        **record.result,
        **_missing(selection),  # a job may have got more chunks since
        **({"commit": dest.commit} if isinstance(dest, HubDestination) else {}),
        "run_time_sec": round(seconds, 3),
        "rows_per_sec": round(record.result.get("rows", 0) / seconds, 1) if seconds > 0 else 0.0,
    }


def _key(config: CollectConfig, selection: Selection) -> str:
    """Return the hash of what decides the files' bytes: the outputs that are read, the options and the version."""
    options = msgspec.structs.asdict(config) | {"format": config.kind}
    made_of = {name: options[name] for name in options.keys() - _ASIDE} | {
        "version": __version__,
        "run": selection.target.run.fingerprint,
        "outputs": [(marker.output_sha256, ref.first_row) for ref, marker in selection.sound],
    }
    return codec.fingerprint(made_of)


def _refuse_gaps(config: CollectConfig, selection: Selection) -> None:
    """Refuse a run of which chunks cannot be collected, unless a part of it is there and asked for."""
    gaps, num_chunks = selection.gaps, len(selection.gaps) + len(selection.sound)
    if selection.sound and (config.partial or not gaps):
        return
    names = ", ".join(gap.subject for gap in gaps[:3]) + (", …" if len(gaps) > 3 else "")
    hint = f"see how it goes: batchinfer status {quote(config.run)}"
    if selection.sound:
        hint = "add --partial to collect the others"
    raise RunUnsound(
        f"{config.run}: {len(gaps)} of {num_chunks} chunks are missing or damaged ({names})",
        hint=f"{hint}; {ASK_VERIFY} what is damaged",
    )


def _missing(selection: Selection) -> dict[str, Any]:
    names = [gap.subject for gap in selection.gaps]
    return {"missing_chunks": len(names), "missing": names[:_LISTED]}


def _write(
    config: CollectConfig,
    selection: Selection,
    dest: StoreDestination | HubDestination,
    key: str,
    scratch: Scratch,
) -> Collected:
    """Write the rows that are taken to DEST."""
    rows = Collection(config, selection, scratch)
    most = _ALL if suffix_of(config.dest) else config.shard_rows
    written = write_files(rows, config.kind, most, scratch)
    files = {dest.put(file, index): file for index, file in enumerate(written)}
    markers = [marker for _, marker in selection.sound]
    result = {
        "fingerprint": selection.target.run.fingerprint,
        "format": config.kind,
        "rows": sum(marker.rows_done for marker in markers),
        "rows_error": sum(marker.rows_error for marker in markers),
        "chunks": len(markers),
        "files": len(files),
        "file_rows": sum(file.rows for file in files.values()),
        "bytes": sum(file.bytes for file in files.values()),
        **_missing(selection),
    }
    sizes = {name: file.bytes for name, file in files.items()}
    record = Collected(key=key, result=result, files=sizes)
    dest.finish(record, lambda: make_card(selection.target, config, result))
    return record


# --------------------------------------------------------------------------- the card of a data set


def make_card(target: RunTarget, config: CollectConfig, result: dict[str, Any]) -> str:
    """Return the card as Markdown, with a line for the licence, which the user fills in.

    It is the README.md of the data set's repository on the Hub, and says how the data was made. Of local sources it has
    the last parts of their URLs only. The same arguments give the same card.

    Args:
        target: The run and its job.
        config: Where the data set is, and its form.
        result: What the command says of the collection.
    """
    from huggingface_hub import DatasetCardData

    run, sources = target.run, [source.url for source in target.job.sources]
    hub = [each.removeprefix("hf://datasets/") for each in sources if each.startswith("hf://")]
    model = str(run.config.get("model") or "")
    data = {"split": "train", "path": f"data/part-*{FORMATS[config.kind]}"}
    front_matter = DatasetCardData(
        configs=[{"config_name": "default", "data_files": [data]}],
        source_datasets=["/".join(each.partition("@")[0].split("/")[:2]) for each in hub] or None,
        tags=["synthetic", "batchinfer"],
        base_model=model if model.count("/") == 1 and model[0] not in "./~" else None,
    )
    named = [each if each.startswith("hf://") else each.rpartition("/")[2] for each in sources]
    made = {"model": model, "source": ", ".join(named), **run.recorded}
    shown = {name: made.get(name) for name in _MADE} | {"prompt": run.config.get("prompt")}
    shown |= {"where": config.where, "sample": config.sample} | result
    text = codec.encode_pretty(shown).decode()
    return text_of("card.md").format(
        title=config.dest.partition("@")[0].rpartition("/")[2],
        front_matter=front_matter.to_yaml(),
        # An indented block, because the text itself could close a fenced one.
        made="\n".join(f"    {line}" for line in text[:_LONGEST].splitlines()),
    )


# --------------------------------------------------------------------------- the command line


@config_command("collect", CollectConfig, click.argument("run"), click.argument("dest"))
def command(config: CollectConfig) -> dict[str, Any]:
    """Collect the verified answers of the run at RUN into DEST, in input order: as a table, or in another form.

    DEST is a folder (path or URL), one file (….parquet, ….jsonl, ….csv), or hf://datasets/org/name. Only outputs that
    a marker vouches for are read, and their checksums are compared. An unfinished run is refused without --partial.
    """
    from batchinfer.storage.opening import open_store

    places = {name: layout.without_slash(getattr(config, name)) for name in ("run", "dest")}
    config = msgspec.structs.replace(config, **places)
    return run_collect(config, open_store=open_store, clock=Clock())

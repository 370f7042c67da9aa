"""Shows a worker's first requests (`--preview`) and named templates (`--prompt-template list`) without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from batchinfer.cli.terminal import say
from batchinfer.core import codec
from batchinfer.core.records import Record
from batchinfer.engines import longest_sequence
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef, OpenStore, check_columns, read_assignment
from batchinfer.prompts import NAMED_TEMPLATES, Prepared, PromptBuilder, RawRow
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.config import WorkerConfig, rules_of
from batchinfer.worker.media import check_media

_SHOWN_CHARACTERS = 2000


# --------------------------------------------------------------------------- --prompt-template list


def show_templates() -> dict[str, Any]:
    """Show the named templates to people on stderr. Returns their names for the command's result object."""
    for name, template in NAMED_TEMPLATES.items():
        say(f"{name}: {template.description}")
    return {"templates": list(NAMED_TEMPLATES)}


# --------------------------------------------------------------------------- --preview


class ShownRow(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One row as the engine would get it, or its error."""

    row: int
    id: str
    path: str = ""
    """Path at the server."""
    body: dict[str, Any] | None = None
    """The request's body; media that are links are not fetched."""
    media: list[str] = []
    """Where the row's media are that the worker would fetch."""
    code: str = ""
    """Code of the error of a row that cannot be sent to an engine."""
    message: str = ""


def shown(prepared: Prepared) -> ShownRow:
    """Describe one prepared row."""
    if prepared.failure is not None:
        failure = prepared.failure
        return ShownRow(
            row=prepared.row, id=prepared.id, code=failure.code, message=failure.message
        )
    body = prepared.draft
    if prepared.call is not None and prepared.call.content_type == "application/json":
        body = msgspec.json.decode(prepared.call.body)
    return ShownRow(
        row=prepared.row,
        id=prepared.id,
        path=prepared.path,
        body=body,
        media=[ref.place for ref in prepared.media],
    )


def show_rows(rows: Iterable[ShownRow]) -> None:
    """Show rows to people on stderr. The middle of a long text is left out."""
    for row in rows:
        say(f"--- row {row.row} (id {row.id}){f' to {row.path}' if row.path else ''}")
        if row.code:
            say(f"error row: {row.code}: {row.message}")
        for name, value in (row.body or {}).items():
            say(
                f"{name}: {_short(value if isinstance(value, str) else codec.encode(value).decode())}"
            )
        for place in row.media:
            say(f"media: {place}")


def _short(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} […] {text[-half:]}"


def read_first_rows(
    chunk: ChunkRef, count: int, open_store: OpenStore, scratch: Scratch
) -> list[RawRow]:
    """Read up to `count` rows from the beginning of a chunk.

    Copies the whole chunk to the scratch folder, and deletes the copy afterwards.
    """
    local = fetch(open_store(chunk.root), chunk, scratch)
    try:
        with local.path.open("rb") as file:
            most = count if chunk.row_limit is None else min(count, chunk.row_limit)
            return [RawRow(i, line) for i, line in enumerate(islice(codec.lines(file), most))]
    finally:
        local.path.unlink()


def run_preview(config: WorkerConfig, count: int, *, open_store: OpenStore) -> dict[str, Any]:
    """Show the first `count` requests of a worker's manifests. Storage is only read, and no engine is loaded.

    Raises:
        BatchinferError: the manifests, the chunks or the columns cannot be read or used.
    """
    assignment = read_assignment(
        config.manifests,
        job_url=config.job,
        limit=config.limit,
        open_store=open_store,
    )
    check_media(config.limits)
    rules = dataclasses.replace(
        rules_of(config.engine), max_model_len=longest_sequence(config.engine)
    )
    builder = PromptBuilder(config.prompt, config.run_seed, rules=rules)
    check_columns(assignment.job, builder.needed_columns, optional=config.prompt.optional_columns)
    scratch = Scratch(config.scratch_dir)
    found: list[ShownRow] = []
    try:
        for chunk in assignment.chunks:
            if len(found) >= count:
                break
            rows = read_first_rows(chunk, count - len(found), open_store, scratch)
            found += [shown(each) for each in builder.build(chunk.name, chunk.first_row, rows)]
    finally:
        scratch.close()
    show_rows(found)
    return {"preview": msgspec.to_builtins(found)}

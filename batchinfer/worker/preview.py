"""What a worker would do, without an engine: its resolved options, its first prompts, the named templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from batchinfer.core import codec
from batchinfer.core.records import Record, Sampling
from batchinfer.engines import longest_sequence
from batchinfer.engines.config import EngineConfig
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef, OpenStore, check_columns, read_assignment
from batchinfer.prompts import (
    Prepared,
    PromptBuilder,
    PromptConfig,
    RawRow,
    Tokenizer,
    list_templates,
)
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.config import WorkerConfig

F = TypeVar("F", bound=Callable[..., Any])

_SECRET_NAME = re.compile(
    r"(^|[_-])(token|secret|password|passwd|credentials?|(api|access|secret)[_-]?key)$",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+@")
_HIDDEN = "(secret)"
_SHOWN_CHARACTERS = 2000

_ORIGINS = {
    "COMMANDLINE": "command line",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "settings file",
    "DEFAULT": "default",
    "PROMPT": "command line",
}


def inspect_options(function: F) -> F:
    """Options that make a worker show something instead of working."""
    for option in (
        click.option(
            "--preview",
            type=click.IntRange(1),
            metavar="N",
            help="Render the first N prompts with their token counts and stop; loads no engine.",
        ),
        click.option(
            "--show-config",
            is_flag=True,
            help="Show every option, where its value comes from, and stop; reads no storage.",
        ),
    ):
        function = option(function)
    return function


# --------------------------------------------------------------------------- --template list


def show_templates() -> dict[str, Any]:
    """The named templates, shown to people on stderr."""
    templates = list_templates()
    for template in templates:
        click.echo(f"{template.name}: {template.description}", err=True)
    return {"templates": [template.name for template in templates]}


# --------------------------------------------------------------------------- --show-config


def is_secret(name: str) -> bool:
    """Whether a setting of this name must not be shown.

    >>> is_secret("hf_token"), is_secret("max_tokens"), is_secret("stop_token_ids")
    (True, False, False)
    """
    return _SECRET_NAME.search(name) is not None


def without_secrets(value: Any, name: str = "") -> Any:
    """The same value, with what looks like a secret taken out, however deep it lies."""
    if isinstance(value, dict):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    if value in (None, "", False):
        return value
    if is_secret(name):
        return _HIDDEN
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        key, equals, _ = value.partition("=")  # KEY=VALUE of --engine-arg
        if equals and is_secret(key):
            return f"{key}={_HIDDEN}"
        return _USER_INFO.sub("", value)
    return value


def show_config(context: click.Context, parts: dict[str, Record | int | None]) -> dict[str, Any]:
    """Every option with its value and where that came from, and what follows from them. Reads no storage.

    Args:
        context: The command's, after parsing.
        parts: The parts of the resolved configuration, by name.

    Returns:
        `options`: name to value and origin; `resolved`: the parts. Secrets are left out.
    """
    options: dict[str, dict[str, Any]] = {}
    for parameter in context.command.params:
        name = parameter.name
        if not name or name not in context.params:
            continue
        source = context.get_parameter_source(name)
        shown = max(parameter.opts, key=len).lstrip("-")
        value = without_secrets(context.params[name], shown)
        origin = _ORIGINS.get(source.name if source else "DEFAULT", "default")
        options[shown] = {"value": value, "from": origin}
        if origin != "default":
            click.echo(f"{shown}: {codec.encode(value).decode()}  # {origin}", err=True)
    defaults = sum(entry["from"] == "default" for entry in options.values())
    click.echo(f"# and {defaults} defaults", err=True)
    resolved = {name: without_secrets(msgspec.to_builtins(part)) for name, part in parts.items()}
    return {"options": options, "resolved": resolved}


# --------------------------------------------------------------------------- --preview


class RenderedRow(Record, frozen=True, kw_only=True):
    """One row as the engine would get it. `tokens` is None where there is no tokenizer."""

    row: int
    id: str
    tokens: int | None = None
    prompt: Any = None
    code: str = ""
    message: str = ""


def rendered(prepared: Prepared, *, has_tokenizer: bool) -> RenderedRow:
    """Describe one prepared row. Long prompts are cut in the middle."""
    if prepared.failure is not None:
        failure = prepared.failure
        return RenderedRow(
            row=prepared.row, id=prepared.id, code=failure.code, message=failure.message
        )
    request = prepared.request
    tokens = request.token_ids if request is not None else None
    prompt = prepared.prompt
    if isinstance(prompt, str) and len(prompt) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        prompt = f"{prompt[:half]} […] {prompt[-half:]}"
    return RenderedRow(
        row=prepared.row,
        id=prepared.id,
        tokens=len(tokens) if tokens is not None and has_tokenizer else None,
        prompt=prompt,
    )


def show_rows(rows: Iterable[RenderedRow]) -> None:
    """Show rendered rows to people."""
    for row in rows:
        tokens = "" if row.tokens is None else f", {row.tokens} tokens"
        click.echo(f"--- row {row.row} (id {row.id}){tokens}", err=True)
        if row.code:
            click.echo(f"error row: {row.code}: {row.message}", err=True)
        else:
            text = row.prompt if isinstance(row.prompt, str) else codec.encode(row.prompt).decode()
            click.echo(text, err=True)


def make_preview_builder(
    prompt: PromptConfig,
    sampling: Sampling,
    run_seed: int | None,
    tokenizer: Tokenizer | None,
    max_model_len: int | None,
) -> PromptBuilder:
    """The worker's own builder, but for keeping every prompt to show it."""
    prompt = msgspec.structs.replace(prompt, keep_prompt=True)
    return PromptBuilder(prompt, sampling, run_seed, tokenizer, max_model_len)


def read_first_rows(
    chunk: ChunkRef, count: int, open_store: OpenStore, scratch: Scratch
) -> list[RawRow]:
    """The first rows of a chunk. Copies the whole chunk to the scratch folder."""
    local = fetch(open_store(chunk.root), chunk, scratch)
    try:
        with local.path.open("rb") as file:
            most = count if chunk.row_limit is None else min(count, chunk.row_limit)
            return [RawRow(i, line) for i, line in enumerate(islice(codec.lines(file), most))]
    finally:
        local.path.unlink()


def run_preview(
    config: WorkerConfig,
    count: int,
    *,
    open_store: OpenStore,
    load_tokenizer: Callable[[EngineConfig], Tokenizer | None],
) -> dict[str, Any]:
    """Render the first `count` prompts of a worker's manifests. Read-only: nothing is claimed, no engine is loaded.

    Raises:
        BatchinferError: whatever the worker would have raised up to here.
    """
    assignment = read_assignment(
        config.manifests,
        job_url=config.job,
        allow_absolute=config.allow_absolute,
        limit=config.limit,
        open_store=open_store,
    )
    if assignment.job is not None:
        check_columns(assignment.job, config.prompt)
    tokenizer = load_tokenizer(config.engine)
    builder = make_preview_builder(
        config.prompt, config.sampling, config.run_seed, tokenizer, longest_sequence(config.engine)
    )
    scratch = Scratch(Path(config.scratch_dir) if config.scratch_dir else None)
    found: list[RenderedRow] = []
    try:
        for chunk in assignment.chunks:
            if len(found) >= count:
                break
            rows = read_first_rows(chunk, count - len(found), open_store, scratch)
            found += render(builder, chunk, rows, has_tokenizer=tokenizer is not None)
    finally:
        scratch.close()
    show_rows(found)
    return {"preview": msgspec.to_builtins(found)}


def render(
    builder: PromptBuilder, chunk: ChunkRef, rows: Sequence[RawRow], *, has_tokenizer: bool
) -> list[RenderedRow]:
    """Rows of one chunk as the engine would get them."""
    return [
        rendered(prepared, has_tokenizer=has_tokenizer)
        for prepared in builder.build(chunk.name, chunk.first_row, rows)
    ]

"""Shows a worker's first prompts (`--preview`) and the named templates (`--template list`), without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from batchinfer.cli.terminal import say
from batchinfer.core import codec, units
from batchinfer.core.errors import BatchinferError
from batchinfer.core.records import Failure, Media, Record, Sampling
from batchinfer.engines import check_engine, longest_sequence
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
from batchinfer.worker.config import WorkerConfig, check_sampling, rules_of
from batchinfer.worker.media import MediaFetcher, check_media

_SHOWN_CHARACTERS = 2000
_SHOWN_CONSTRAINT = 300


# --------------------------------------------------------------------------- --template list


def show_templates() -> dict[str, Any]:
    """Show the named templates to people on stderr. Returns their names for the command's result object."""
    templates = list_templates()
    for template in templates:
        say(f"{template.name}: {template.description}")
    return {"templates": [template.name for template in templates]}


# --------------------------------------------------------------------------- --preview


class ShownImage(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An image of a row. Of one that the endpoint fetches only `url` is known."""

    url: str = ""
    width: int = 0
    height: int = 0
    bytes: int = 0
    type: str = ""
    sha256: str = ""

    def describe(self) -> str:
        """Describe the image in a line for people."""
        if self.url:
            return f"{self.url} (the endpoint fetches it)"
        return f"{self.width} x {self.height} pixels, {self.type}, {units.count(self.bytes)} bytes"


class RenderedRow(Record, frozen=True, kw_only=True):
    """One row as the engine would get it, or its error.

    `tokens` is the number of tokens in the prompt; None if there is no tokenizer or the prompt has no token ids.
    `code` and `message` describe the error of a row that cannot be sent to an engine; else they are empty.
    """

    row: int
    id: str
    tokens: int | None = None
    prompt: Any = None
    code: str = ""
    message: str = ""
    adapter: str | msgspec.UnsetType = msgspec.UNSET
    """Adapter that answers the row; unset if the model itself does."""
    constraint: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Constraint on the row's answer; unset if there is none."""
    images: list[ShownImage] | msgspec.UnsetType = msgspec.UNSET
    """The row's images; unset if there are none. Their tokens are not among `tokens`."""


def rendered(
    prepared: Prepared,
    *,
    has_tokenizer: bool,
    media: list[Media] | Failure | None = None,
) -> RenderedRow:
    """Describe one prepared row. The middle of a long text prompt is left out.

    Args:
        prepared: The row.
        has_tokenizer: Whether token ids are the model's.
        media: The row's images, or why they cannot be used; None if there are none.
    """
    failure = prepared.failure or (media if isinstance(media, Failure) else None)
    if failure is not None:
        return RenderedRow(
            row=prepared.row, id=prepared.id, code=failure.code, message=failure.message
        )
    request = prepared.request
    prompts = request.prompts if request is not None else ()
    lengths = [len(each.token_ids) for each in prompts if each.token_ids is not None]
    prompt = prepared.prompt
    if isinstance(prompt, str) and len(prompt) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        prompt = f"{prompt[:half]} […] {prompt[-half:]}"
    return RenderedRow(
        row=prepared.row,
        id=prepared.id,
        tokens=sum(lengths) if lengths and has_tokenizer else None,
        prompt=prompt,
        adapter=(request.adapter if request is not None else None) or msgspec.UNSET,
        constraint=(request.sampling.structured if request is not None else None) or msgspec.UNSET,
        images=[_shown(image) for image in media] if isinstance(media, list) else msgspec.UNSET,
    )


def _shown(image: Media) -> ShownImage:
    return ShownImage(
        url=image.url,
        width=image.width,
        height=image.height,
        bytes=len(image.data),
        type=image.mime,
        sha256=image.digest,
    )


def show_rows(rows: Iterable[RenderedRow]) -> None:
    """Show rendered rows to people on stderr."""
    for row in rows:
        tokens = "" if row.tokens is None else f", {row.tokens} tokens"
        say(f"--- row {row.row} (id {row.id}){tokens}")
        if row.code:
            say(f"error row: {row.code}: {row.message}")
        else:
            text = row.prompt if isinstance(row.prompt, str) else codec.encode(row.prompt).decode()
            for line in text.split("\n"):
                say(line)
            for number, image in enumerate(row.images or ()):
                say(f"image {number}: {image.describe()}")
            if row.adapter:
                say(f"adapter: {row.adapter}")
            if row.constraint:
                constraint = codec.encode(row.constraint).decode()
                say(f"constraint: {constraint[:_SHOWN_CONSTRAINT]}")


def make_preview_builder(
    prompt: PromptConfig,
    sampling: Sampling,
    run_seed: int | None,
    tokenizer: Tokenizer | None,
    max_model_len: int | None,
    *,
    engine: EngineConfig,
    assumed_name: str = "",
) -> PromptBuilder:
    """Make the prompt builder that a worker would use, but let it keep every prompt, so that it can be shown."""
    prompt = msgspec.structs.replace(prompt, keep_prompt=True)
    return PromptBuilder(
        prompt, sampling, run_seed, tokenizer, max_model_len, rules=rules_of(engine, assumed_name)
    )


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


def run_preview(
    config: WorkerConfig,
    count: int,
    *,
    open_store: OpenStore,
    load_tokenizer: Callable[[EngineConfig], Tokenizer | None],
) -> dict[str, Any]:
    """Show the first `count` prompts of a worker's manifests. Storage is only read, and no engine is loaded.

    Raises:
        BatchinferError: the manifests, the chunks, the columns or the tokenizer cannot be read or used.
    """
    assignment = read_assignment(
        config.manifests,
        job_url=config.job,
        allow_absolute=config.allow_absolute,
        limit=config.limit,
        open_store=open_store,
    )
    tokenizer = load_tokenizer(config.engine)
    check_sampling(config)
    check_media(config.prompt, config.limits)
    fetcher = MediaFetcher(config.limits, open_store)
    builder = make_preview_builder(
        config.prompt,
        config.sampling,
        config.run_seed,
        tokenizer,
        longest_sequence(config.engine),
        engine=config.engine,
    )
    if assignment.job is not None:
        check_columns(
            assignment.job, builder.needed_columns, optional=config.prompt.optional_columns
        )
    scratch = Scratch(config.scratch_dir)
    found: list[RenderedRow] = []
    try:
        for chunk in assignment.chunks:
            if len(found) >= count:
                break
            rows = read_first_rows(chunk, count - len(found), open_store, scratch)
            found += render(builder, chunk, rows, fetcher, has_tokenizer=tokenizer is not None)
    finally:
        scratch.close()
    show_rows(found)
    try:
        check_engine(config.engine).look(config.engine)
    except BatchinferError as error:
        say(f"warning: {error.message} ({error.hint})")
    return {"preview": msgspec.to_builtins(found)}


def render(
    builder: PromptBuilder,
    chunk: ChunkRef,
    rows: Sequence[RawRow],
    fetcher: MediaFetcher,
    *,
    has_tokenizer: bool,
) -> list[RenderedRow]:
    """Build the prompts of some rows of one chunk, fetch their images, and describe each as the engine would get it."""
    built = builder.build(chunk.name, chunk.first_row, rows)
    found = fetcher.fetch_all([prepared.media for prepared in built])
    return [
        rendered(prepared, has_tokenizer=has_tokenizer, media=media)
        for prepared, media in zip(built, found, strict=True)
    ]

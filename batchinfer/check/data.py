"""Take sample rows for `check`: from a job, from a source that is not split yet, or made-up rows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from batchinfer.core.errors import InputError
from batchinfer.core.records import Job
from batchinfer.ledger.jobs import Assignment, ChunkRef, OpenStore
from batchinfer.prompts import PromptConfig, RawRow, find_request_format
from batchinfer.prompts.render_process import RenderProcess
from batchinfer.prompts.templates import named_template
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.preview import read_first_rows

if TYPE_CHECKING:
    from batchinfer.split.sources import CountedSources

_PLACES = 4
"""Number of places in the data, spread evenly, from which sample rows are taken.

Data sets are often sorted, so rows from a single place would be too much alike.
"""
_WORDS = (
    "the",
    "answer",
    "depends",
    "on",
    "how",
    "one",
    "looks",
    "at",
    "it",
    "and",
    "what",
    "was",
    "said",
)


class Batch(NamedTuple):
    """Consecutive rows of one chunk. Sample rows that are in no chunk yet get a chunk with a made-up name."""

    chunk: ChunkRef
    rows: list[RawRow]


class Data(NamedTuple):
    """Size of the data, and a sample of its rows.

    `rows` is None if only reading all data would tell the number of rows. `chunks` is None if the data is not in
    chunks yet.
    """

    rows: int | None
    chunks: int | None
    sample: list[Batch]
    job_sha256: str = ""
    job: Job | None = None
    counted: CountedSources | None = None
    """The sources, if the data is not in chunks yet."""


def from_assignment(
    assignment: Assignment, count: int, open_store: OpenStore, scratch: Scratch
) -> Data:
    """Take about `count` sample rows from the first chunk, the last chunk and some chunks between them.

    These chunks are copied to the scratch folder.
    """
    chunks = assignment.chunks
    each = -(-count // min(_PLACES, len(chunks)))
    sample = [
        Batch(chunks[index], read_first_rows(chunks[index], each, open_store, scratch))
        for index in _spread(len(chunks), _PLACES)
    ]
    sizes = [ref.rows if ref.row_limit is None else ref.row_limit for ref in chunks]
    known = [size for size in sizes if size is not None]
    rows = sum(known) if len(known) == len(sizes) else None
    return Data(rows, len(chunks), sample, assignment.job_sha256, assignment.job)


def from_sources(
    sources: Sequence[str], count: int, limit: int | None, *, delimiter: str = ""
) -> Data:
    """Take about `count` sample rows of sources that are not split yet, in the form in which `split` would write them.

    All rows are counted, but only the sample rows are converted.
    """
    from batchinfer.split.sources import ColumnChoice, Oddities, count_sources

    counted = count_sources(sources, choice=ColumnChoice(), limit=limit, delimiter=delimiter)
    each = max(1, -(-count // _PLACES))
    sample = []
    for start in dict.fromkeys(
        place * each for place in _spread(-(-counted.rows // each), _PLACES)
    ):
        stop = min(counted.rows, start + each)
        lines = [
            line
            for block in counted.read(range(start, stop), Oddities())
            for line in block.encode(0, block.num_rows).splitlines()
        ]
        # Each batch needs a different chunk name, because a row is identified by its chunk's name and its line.
        chunk = ChunkRef(name=f"row-{start}", root="", key="", first_row=start)
        sample.append(Batch(chunk, [RawRow(i, line) for i, line in enumerate(lines)]))
    return Data(counted.rows, None, sample, counted=counted)


def synthetic(total: int, count: int, prompt: PromptConfig) -> Data:
    """Make up rows that have the columns named in the prompt options. The median length of a text is 100 words.

    `total` is the number of rows that the data is said to have. At most `count` rows are made.
    """
    draw = random.Random(0)
    lines = [
        json.dumps(_synthetic_row(prompt, draw, number)).encode()
        for number in range(min(total, count))
    ]
    chunk = ChunkRef(name="synthetic", root="", key="")
    return Data(total, None, [Batch(chunk, [RawRow(i, line) for i, line in enumerate(lines)])])


def _spread(length: int, count: int) -> list[int]:
    """Return up to `count` indices below `length`, spread evenly from the first to the last."""
    if length <= count:
        return list(range(length))
    return [index * (length - 1) // (count - 1) for index in range(count)]


def _synthetic_row(prompt: PromptConfig, draw: random.Random, number: int) -> dict[str, Any]:
    words = max(1, round(draw.lognormvariate(0, 1) * 100))
    text = " ".join(islice(iter(lambda: draw.choice(_WORDS), None), words))
    make_row = find_request_format(prompt.request_format).make_row
    if make_row is not None:
        return make_row(f"synthetic-{number}", text)
    messages = [{"role": "user", "content": text}]
    if prompt.messages_column:
        return {prompt.messages_column: messages}
    if prompt.prompt_column:
        return {prompt.prompt_column: text}
    if prompt.template_name:
        template = named_template(prompt.template_name)
        if template.messages_column:
            return {template.messages_column: messages}
        return dict.fromkeys(template.columns, text)
    if prompt.prompt_template:
        source = RenderProcess(prompt.prompt_template, name="--prompt-template", values={})
        return dict.fromkeys(set(source.variables) - {"row", "examples", "system_prompt"}, text)
    raise InputError(
        "--synthetic: no option says what a prompt is made of",
        hint="add --prompt-column prompt",
    )

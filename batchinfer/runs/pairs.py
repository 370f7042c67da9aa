"""An output and its chunk side by side: compared line by line for `verify --deep`, or a few rows of both for `report`.

Files are read line by line, so the memory used does not grow with their size.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError, InputError, RowError
from batchinfer.core.json_text import read_object
from batchinfer.core.records import Marker, Run
from batchinfer.formats.lines import Answer, OutputLine, answer_of, read_line
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef, OpenStore, job_chunks
from batchinfer.ledger.looks import Snapshot
from batchinfer.prompts import json_lines
from batchinfer.prompts.types import PromptConfig
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 5
"""Largest number of problems that are reported of one output. That of another chunk would have one in each line."""


def prompt_of(run: Run) -> PromptConfig | None:
    """Return the run's options about prompts; None if somebody has edited run.json so that they cannot be read."""
    try:
        return codec.convert(run.config.get("prompt") or {}, PromptConfig)
    except msgspec.ValidationError:
        return None


@contextlib.contextmanager
def pair_of_files(
    ref: ChunkRef, marker: Marker, store: Store, source: Store, scratch_dir: str | None = None
) -> Iterator[tuple[Path, Path]]:
    """Copy an output and its chunk, decompressed, to a scratch folder for as long as the context lasts.

    Args:
        ref: The chunk.
        marker: The chunk's marker.
        store: The store of the run.
        source: The store that holds the chunk.
        scratch_dir: Folder in which the scratch folder is made.

    Raises:
        ObjectNotFound: The output is gone.
        InputError: The chunk cannot be read, or is not as job.json describes it.
    """
    with contextlib.closing(Scratch(scratch_dir)) as scratch:
        output = scratch.new_path("output")
        store.download(layout.output_key(marker.output), output)
        yield output, fetch(source, ref, scratch).path


def problems_of(
    output: Path, chunk: Path, ref: ChunkRef, marker: Marker, prompt: PromptConfig | None
) -> Iterator[str]:
    """Yield what is wrong with an output.

    Args:
        output: The file of the output.
        chunk: The file of the chunk's lines.
        ref: The chunk.
        marker: The chunk's newest marker.
        prompt: The run's options about prompts, which name the column of ids.
    """
    digest = hashlib.sha256()
    codes: Counter[str] = Counter()
    wanted = ref.rows if ref.row_limit is None else ref.row_limit
    num_lines = 0
    with output.open("rb") as lines, chunk.open("rb") as rows:
        for line in lines:
            digest.update(line)
            if num_lines < (wanted or 0):
                code, problems = _check_line(
                    line, rows.readline(), ref.first_row + num_lines, prompt
                )
                yield from (f"line {num_lines}: {problem}" for problem in problems)
                codes.update(() if code is None else (code,))
            num_lines += 1
    if digest.hexdigest() != marker.output_sha256:
        yield f"sha256 {digest.hexdigest()[:12]}…, the marker says {marker.output_sha256[:12]}…"
    if num_lines != wanted:
        yield f"{num_lines} lines, the chunk has {wanted} rows"
    num_ok = codes.pop("", 0)
    if (num_ok, codes.total()) != (marker.rows_ok, marker.rows_error):
        says = f"the marker says {marker.rows_ok} and {marker.rows_error}"
        yield f"{num_ok} rows ok and {codes.total()} errors, {says}"
    if marker.errors and dict(codes) != marker.errors:
        yield f"errors {dict(codes)}, the marker says {marker.errors}"


def _check_line(
    line: bytes, row: bytes, number: int, prompt: PromptConfig | None
) -> tuple[str | None, list[str]]:
    """Compare an output line with its row. Return its error code, "" for an answer, and the problems found.

    The code is None if the line cannot be read. `number` is the row's number in the job.
    """
    if not line.endswith(b"\n"):
        return None, ["is cut off"]
    try:
        answer = read_line(line[:-1])
    except InputError as error:
        return None, [error.message]
    found = []
    if answer.row != number:
        found.append(f"is of row {answer.row}, expected {number}")
    own = _id_of(row, number, prompt)
    if own is None and answer.is_ok:
        found.append("is an answer to a row that cannot be read")
    # The worker may give an error row its number as id.
    if answer.id != own and (answer.is_ok or answer.id != str(number)):
        found.append(f"has the id {answer.id!r}, expected {own or number!r}")
    return answer.code, found


def _id_of(row: bytes, number: int, prompt: PromptConfig | None) -> str | None:
    """Return the id that the worker gives to a row; None if the row cannot be read."""
    try:
        columns = json_lines.decode_object(row)
    except RowError:
        return None
    own = columns.get((prompt and prompt.column("id")) or json_lines.ID_FIELD)
    if prompt and prompt.request_format == "openai-batch":
        own = columns.get("custom_id") or own
    return str(number) if own is None else json_lines.as_id(own)


# --------------------------------------------------------------------------- rows to read


class Sample(NamedTuple):
    """One row with its answer. `line` is its line in its chunk, counted from 0; `columns` are its (name, text)."""

    chunk: str
    line: int
    columns: list[tuple[str, str]]
    output: OutputLine
    answer: Answer


def read_samples(
    store: Store, snapshot: Snapshot, open_store: OpenStore, *, num_rows: int
) -> list[Sample]:
    """Read rows of the first and of the last finished chunk, spread evenly over each, and the first failed row of each.

    A chunk that cannot be read, or whose output cannot, is left out with a warning.

    Args:
        store: The run's store.
        snapshot: What was read of the run: its markers and its job.
        open_store: Opens the job's store.
        num_rows: Largest number of rows of each chunk. A failed row may be added to them.
    """
    refs = job_chunks(snapshot.job, snapshot.job_url)
    names = [name for name in refs if name in snapshot.markers]
    found: list[Sample] = []
    for name in dict.fromkeys([*names[:1], *names[-1:]]) if num_rows else ():
        # The chunk's rows and checksum are not compared with job.json here. `verify` compares them.
        ref = refs[name]._replace(rows=None, sha256=None)
        key = layout.marker_key(name, snapshot.markers[name].generation)
        try:
            marker = codec.decode(store.get(key).data, Marker, name=key)
            found += _read_pair(ref, marker, store, open_store(ref.root), num_rows)
        except BatchinferError as error:
            logger.warning("%s: no sample of it (%s)", name, error)
    return found


def _read_pair(
    ref: ChunkRef, marker: Marker, store: Store, source: Store, num_rows: int
) -> list[Sample]:
    last = marker.rows_done - 1
    wanted = {round(index * last / max(1, num_rows - 1)) for index in range(num_rows)}
    found, has_failed = list[Sample](), False
    with (
        pair_of_files(ref, marker, store, source) as (output, chunk),
        output.open("rb") as lines,
        chunk.open("rb") as rows,
    ):
        for index, (data, row) in enumerate(zip(codec.lines(lines), rows, strict=False)):
            line = read_line(data)
            if index in wanted or not (line.is_ok or has_failed):
                found.append(Sample(ref.name, index, _columns(row), line, answer_of(line)))
            has_failed = has_failed or not line.is_ok
    return found


def _columns(line: bytes) -> list[tuple[str, str]]:
    """Return the columns of a row as texts: texts and what is hard to decode as they are, everything else as JSON."""
    row = read_object(line) or {"line": line.decode(errors="replace")}
    return [
        (name, value if isinstance(value, str) else codec.encode(value).decode())
        for name, value in row.items()
        if name not in ("_row", "_id")
    ]

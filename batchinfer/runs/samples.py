"""Read a few rows of a run with their answers, for people to look at. Only outputs that a marker names are read."""

from __future__ import annotations

import json
import logging
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError, InputError
from batchinfer.core.json_text import read_object
from batchinfer.core.records import Marker
from batchinfer.formats.lines import Answer, OutputLine, answer_of, read_line
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import OpenStore, job_chunks
from batchinfer.ledger.looks import Snapshot
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 64 << 20
"""Size in bytes up to which an output or a chunk is fetched for samples."""
MAX_TEXT = 2000
"""Largest number of characters that are shown of an answer or of a column's value."""
MAX_COLUMNS = 20
"""Largest number of a row's columns that are shown."""


class Sample(NamedTuple):
    """One row with its answer.

    `line` is the row's line in its chunk, counted from 0. `columns` are the row's (name, text); they are empty if the
    chunk could not be read.
    """

    chunk: str
    line: int
    columns: list[tuple[str, str]]
    output: OutputLine
    answer: Answer


def read_samples(
    store: Store, snapshot: Snapshot, open_store: OpenStore, *, num_rows: int
) -> list[Sample]:
    """Read rows of the first and of the last finished chunk, by name, spread evenly over each.

    The first failed row of a chunk is among them. A chunk whose output cannot be read is left out with a warning.

    Args:
        store: The run's store.
        snapshot: What was read of the run: its markers and its job.
        open_store: Opens the job's store.
        num_rows: Largest number of rows of each chunk. A failed row may be added to them.
    """
    names = sorted(snapshot.markers)
    found: list[Sample] = []
    scratch = Scratch()
    try:
        for name in dict.fromkeys([*names[:1], *names[-1:]]):
            try:
                outputs = _outputs_of(name, num_rows, store, snapshot, scratch)
            except BatchinferError as error:
                logger.warning("%s: no sample of it (%s)", name, error)
                continue
            rows = _rows_of(name, outputs, snapshot, open_store, scratch)
            found += [
                Sample(name, index, _columns(rows.get(index)), output, answer_of(output))
                for index, output in outputs.items()
            ]
    finally:
        scratch.close()
    return found


def _outputs_of(
    name: str, num_rows: int, store: Store, snapshot: Snapshot, scratch: Scratch
) -> dict[int, OutputLine]:
    """Return the wanted lines of a chunk's output by their index.

    Raises:
        BatchinferError: The output cannot be read.
    """
    key = layout.marker_key(name, snapshot.markers[name].generation)
    marker = codec.decode(store.get(key).data, Marker, name=key)
    if "/" in marker.output:
        raise InputError(f"{key}: names {marker.output!r}, expected a file in outputs/")
    output = layout.output_key(marker.output)
    if store.stat(output).bytes > MAX_OBJECT_BYTES:
        raise InputError(f"{output}: is larger than {MAX_OBJECT_BYTES >> 20} MiB")
    path = scratch.new_path(name)
    store.download(output, path)
    last = max(0, marker.rows_ok + marker.rows_error - 1)
    wanted = {round(index * last / max(1, num_rows - 1)) for index in range(num_rows)}
    found: dict[int, OutputLine] = {}
    has_failed = marker.rows_error == 0
    with path.open("rb") as file:
        for index, data in enumerate(codec.lines(file)):
            if index in wanted or not has_failed:
                line = read_line(data)
                if index in wanted or not line.is_ok:
                    found[index] = line
                has_failed = has_failed or not line.is_ok
    return found


def _rows_of(
    name: str,
    wanted: Container[int],
    snapshot: Snapshot,
    open_store: OpenStore,
    scratch: Scratch,
) -> dict[int, bytes]:
    """Return the wanted lines of a chunk by their index; none if it is too large, or cannot be read."""
    ref = job_chunks(snapshot.job, snapshot.job_url).get(name) if snapshot.job else None
    if ref is None or (ref.bytes or 0) > MAX_OBJECT_BYTES:
        return {}
    # The chunk's rows and checksum are not compared with job.json here. `verify` compares them.
    try:
        local = fetch(open_store(ref.root), ref._replace(rows=None, sha256=None), scratch)
    except BatchinferError as error:
        logger.info("%s: its answers are shown without their rows (%s)", name, error)
        return {}
    with Path(local.path).open("rb") as file:
        return {index: line for index, line in enumerate(codec.lines(file)) if index in wanted}


def _columns(line: bytes | None) -> list[tuple[str, str]]:
    """The columns to show of a row."""
    if line is None:
        return []
    row = read_object(line)
    if row is None:
        return [("line", line.decode(errors="replace"))]
    columns = [(name, value) for name, value in row.items() if name not in ("_row", "_id")]
    shown = [(name, _readable(value)) for name, value in columns[:MAX_COLUMNS]]
    if len(columns) > MAX_COLUMNS:
        shown.append(("…", f"{len(columns) - MAX_COLUMNS} more columns"))
    return shown


def _readable(value: Any) -> str:
    """A value as text: a text or JSON text as it is, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode()
    return json.dumps(value, ensure_ascii=False)


def cut(text: str, most: int = MAX_TEXT) -> str:
    """A text, cut after `most` characters. A text that was cut ends with the number of characters left out.

    >>> cut("abcdef", 3)
    'abc… (3 more characters)'
    """
    text = text.encode("utf-8", "replace").decode()  # lone surrogates, which UTF-8 cannot encode
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"

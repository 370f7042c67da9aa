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
from batchinfer.formats import Answer, OutputLine, answer_of, read_line
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.inventory import Snapshot
from batchinfer.ledger.jobs import OpenStore, job_chunks
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, remove_quietly

logger = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 64 << 20
"""Size in bytes up to which an output or a chunk is fetched for samples."""
MAX_TEXT = 2000
"""Largest number of characters that are shown of an answer or of a column's value."""
MAX_COLUMNS = 20
"""Largest number of a row's columns that are shown."""
SHORT_TEXT = 60
"""Largest number of characters of a value that is shown on one line together with other columns."""


class Cell(NamedTuple):
    """One column of a row: the column's name, and the row's value as text."""

    name: str
    text: str

    @property
    def is_short(self) -> bool:
        """Whether the text is short enough to be shown on one line together with other columns."""
        return len(self.text) <= SHORT_TEXT and "\n" not in self.text


class SampleRow(NamedTuple):
    """One row with its answers.

    `line` is the row's line in its chunk, counted from 0. `source` holds the row's columns; it is empty if the chunk
    could not be read.
    """

    chunk: str
    line: int
    source: list[Cell]
    output: OutputLine
    answer: Answer


def read_samples(
    store: Store, snapshot: Snapshot, open_store: OpenStore, *, num_rows: int
) -> list[SampleRow]:
    """Read sample rows of the first and of the last finished chunk, by name.

    If a chunk has failed rows, its first failed row is among the samples. A chunk whose output cannot be read is left
    out with a warning.

    Args:
        store: The run's store.
        snapshot: What was read of the run: its markers and its job.
        open_store: Opens the job's store.
        num_rows: Largest number of rows of each chunk, spread evenly over it. A failed row may be added to them.
    """
    names = sorted(snapshot.markers)
    rows: list[SampleRow] = []
    scratch = Scratch()
    reader = _SampleReader(store, snapshot, open_store, scratch)
    try:
        for name in dict.fromkeys([*names[:1], *names[-1:]]):
            try:
                rows += reader.read(name, num_rows)
            except BatchinferError as error:
                logger.warning("%s: no sample of it (%s)", name, error)
    finally:
        scratch.close()
    return rows


class SourceReader:
    """Reads rows of a job's chunks, for people to look at. Chunks are copied to a scratch folder first."""

    def __init__(self, snapshot: Snapshot, open_store: OpenStore, scratch: Scratch) -> None:
        self._chunks = job_chunks(snapshot.job, snapshot.job_url) if snapshot.job else {}
        self._open_store = open_store
        self._scratch = scratch

    def rows(self, name: str, wanted: Container[int]) -> dict[int, list[Cell]]:
        """Return the columns of a chunk's wanted lines, by the line's index from 0.

        The result is empty if the chunk is larger than MAX_OBJECT_BYTES, cannot be read, or is not in job.json.
        """
        ref = self._chunks.get(name)
        if ref is None or (ref.bytes or 0) > MAX_OBJECT_BYTES:
            return {}
        # The chunk's rows and checksum are not compared with job.json here. `verify` compares them.
        unchecked = ref._replace(rows=None, sha256=None)
        try:
            local = fetch(self._open_store(ref.root), unchecked, self._scratch)
        except BatchinferError as error:
            logger.info("%s: its answers are shown without their rows (%s)", name, error)
            return {}
        found = _lines_of(local.path, wanted)
        remove_quietly(local.path)
        return {index: _cells(line) for index, line in found.items()}


class _SampleReader:
    """Reads sample rows of one run. Outputs and chunks are copied to a scratch folder first."""

    def __init__(
        self, store: Store, snapshot: Snapshot, open_store: OpenStore, scratch: Scratch
    ) -> None:
        self._store = store
        self._markers = snapshot.markers
        self._rows = SourceReader(snapshot, open_store, scratch)
        self._scratch = scratch

    def read(self, name: str, num_rows: int) -> list[SampleRow]:
        """Read up to `num_rows` rows of one finished chunk, spread evenly over it, and its first failed row if any."""
        key = layout.marker_key(name, self._markers[name].generation)
        marker = codec.decode(self._store.get(key).data, Marker, name=key)
        if "/" in marker.output:
            raise InputError(f"{key}: names {marker.output!r}, expected a file in outputs/")
        output = layout.output_key(marker.output)
        if self._store.stat(output).bytes > MAX_OBJECT_BYTES:
            raise InputError(f"{output}: is larger than {MAX_OBJECT_BYTES >> 20} MiB")
        path = self._scratch.new_path(name)
        self._store.download(output, path)
        total = marker.rows_ok + marker.rows_error
        wanted = {round(i * max(0, total - 1) / max(1, num_rows - 1)) for i in range(num_rows)}
        answers = _lines_of(path, wanted, with_failed=marker.rows_error > 0)
        sources = self._rows.rows(name, answers)
        return [
            SampleRow(name, index, sources.get(index, []), output, answer_of(output))
            for index, output in ((index, read_line(line)) for index, line in answers.items())
        ]


def _lines_of(path: Path, wanted: Container[int], *, with_failed: bool = False) -> dict[int, bytes]:
    """The wanted lines of a file, by their index from 0.

    If `with_failed` is set, the first line with an error is added to the wanted lines.
    """
    found: dict[int, bytes] = {}
    with path.open("rb") as file:
        for index, line in enumerate(codec.lines(file)):
            is_failed = with_failed and not read_line(line).is_ok
            if index in wanted or is_failed:
                found[index] = line
                with_failed = with_failed and not is_failed
    return found


def _cells(line: bytes) -> list[Cell]:
    """The columns to show of a row."""
    row = read_object(line)
    if row is None:
        return [Cell("line", cut(line.decode(errors="replace")))]
    columns = [(name, value) for name, value in row.items() if name not in ("_row", "_id")]
    cells = [Cell(name, cut(_readable(value))) for name, value in columns[:MAX_COLUMNS]]
    if len(columns) > MAX_COLUMNS:
        cells.append(Cell("…", f"{len(columns) - MAX_COLUMNS} more columns"))
    return cells


def _readable(value: Any) -> str:
    """A value as text: a conversation turn by turn, a text or JSON text as it is, everything else as JSON.

    >>> print(
    ...     _readable([{"role": "user", "content": "Hi"}, {"content": "Yes?", "role": "assistant"}])
    ... )
    user: Hi
    assistant: Yes?
    >>> _readable([{"role": "user", "content": "Hi", "name": "Jo"}])
    '[{"role": "user", "content": "Hi", "name": "Jo"}]'
    """
    if isinstance(value, str):
        return value
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode()
    if isinstance(value, list) and value and all(map(_is_turn, value)):
        return "\n".join(f"{turn['role']}: {turn['content']}" for turn in value)
    return json.dumps(value, ensure_ascii=False)


def _is_turn(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )


def cut(text: str, most: int = MAX_TEXT) -> str:
    """A text, cut after `most` characters. A text that was cut ends with the number of characters left out.

    >>> cut("abcdef", 3)
    'abc… (3 more characters)'
    """
    text = text.encode(
        "utf-8", "replace"
    ).decode()  # replaces lone surrogates, which UTF-8 cannot encode
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"

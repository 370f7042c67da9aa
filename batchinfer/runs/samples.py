"""A few rows of a run to read: question and answer, from outputs that markers vouch for. Read-only."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.codec import ZstdFile
from batchinfer.core.errors import BatchinferError, InputError
from batchinfer.core.records import Marker
from batchinfer.formats import read_line
from batchinfer.ledger.snapshot import Snapshot
from batchinfer.storage import Store

logger = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 64 << 20
"""Larger outputs and chunks are not fetched for a sample."""
MAX_TEXT = 2000


SHORT_TEXT = 60


class Cell(NamedTuple):
    """A column of a row and what is in it, as text."""

    name: str
    text: str

    @property
    def is_short(self) -> bool:
        """Whether several of its kind fit on a line."""
        return len(self.text) <= SHORT_TEXT and "\n" not in self.text


class SampleRow(NamedTuple):
    """One row. `source` are its columns, where its chunk could be read; long texts are cut."""

    chunk: str
    line: int
    id: str
    source: list[Cell]
    is_ok: bool
    texts: list[str]
    finish_reasons: list[str]
    error: str
    prompt_tokens: int
    completion_tokens: int


def read_samples(
    store: Store,
    snapshot: Snapshot,
    open_store: Callable[[str], Store],
    *,
    num_chunks: int = 2,
    num_rows: int = 4,
) -> list[SampleRow]:
    """Read rows from the first and the last finished chunk; a failed row among them where there is one.

    What cannot be read is left out: a report is no check.
    """
    names = sorted(snapshot.markers)
    step = max(1, len(names) - 1) / max(1, num_chunks - 1)
    chosen = list(
        dict.fromkeys(
            names[round(i * step)] for i in range(num_chunks) if names and i * step < len(names)
        )
    )
    rows: list[SampleRow] = []
    with tempfile.TemporaryDirectory(prefix="batchinfer-report-") as folder:
        for name in chosen:
            try:
                rows += _chunk_samples(store, snapshot, open_store, name, num_rows, Path(folder))
            except BatchinferError as error:
                logger.warning("%s: no sample of it (%s)", name, error)
    return rows


def _chunk_samples(
    store: Store,
    snapshot: Snapshot,
    open_store: Callable[[str], Store],
    name: str,
    num_rows: int,
    folder: Path,
) -> list[SampleRow]:
    key = layout.marker_key(name, snapshot.markers[name].generation)
    marker = codec.decode(store.get(key).data, Marker, name=key)
    if "/" in marker.output:
        raise InputError(f"{key}: names {marker.output!r}, expected a file in outputs/")
    output = layout.output_key(marker.output)
    if store.stat(output).bytes > MAX_OBJECT_BYTES:
        raise InputError(f"{output}: is larger than {MAX_OBJECT_BYTES >> 20} MiB")
    path = folder / "output"
    store.download(output, path)
    total = marker.rows_ok + marker.rows_error
    wanted = {round(i * max(0, total - 1) / max(1, num_rows - 1)) for i in range(num_rows)}
    answers: dict[int, bytes] = {}
    has_failed_row = False
    with path.open("rb") as file:
        for index, line in enumerate(codec.lines(file)):
            is_failed = marker.rows_error > 0 and not has_failed_row and b'"error":null' not in line
            if index in wanted or is_failed:
                answers[index] = line
                has_failed_row = has_failed_row or is_failed
    sources = _sources(snapshot, open_store, marker, set(answers), folder)
    return [_row(name, index, answers[index], sources.get(index, [])) for index in sorted(answers)]


def _row(chunk: str, index: int, line: bytes, source: list[Cell]) -> SampleRow:
    summary = read_line(line)
    return SampleRow(
        chunk=chunk,
        line=index,
        id=cut(str(summary.id if summary.id is not None else index), 200),
        source=source,
        is_ok=summary.is_ok,
        texts=[cut(text) for text in summary.texts[:4]],
        finish_reasons=summary.finish_reasons,
        error=cut(f"{summary.code}: {summary.message}") if not summary.is_ok else "",
        prompt_tokens=summary.usage.prompt_tokens,
        completion_tokens=summary.usage.completion_tokens,
    )


def _sources(
    snapshot: Snapshot,
    open_store: Callable[[str], Store],
    marker: Marker,
    wanted: set[int],
    folder: Path,
) -> dict[int, list[Cell]]:
    """Columns of the wanted rows, if the job's chunk is there and not too large."""
    chunks = {chunk.name: chunk for chunk in snapshot.job.chunks} if snapshot.job else {}
    chunk = chunks.get(layout.stem(marker.chunk))
    if chunk is None or chunk.bytes > MAX_OBJECT_BYTES:
        return {}
    path = folder / "chunk"
    try:
        assert snapshot.job is not None
        key = layout.chunk_file(chunk.name, snapshot.job.compression)
        open_store(snapshot.job_url).download(key, path)
        with _plain(path, is_compressed=key.endswith(".zst")) as file:
            return {
                index: _columns(line)
                for index, line in enumerate(_bounded(file, max(wanted)))
                if index in wanted
            }
    except (BatchinferError, OSError, ValueError) as error:
        logger.info("%s: its rows are shown without their sources (%s)", chunk.name, error)
        return {}


def _bounded(file: IO[bytes], last: int) -> Iterator[bytes]:
    for index, line in enumerate(file):
        if index > last:
            return
        yield line


@contextmanager
def _plain(path: Path, *, is_compressed: bool) -> Iterator[IO[bytes]]:
    with path.open("rb") as file:
        if not is_compressed:
            yield file
            return
        import io

        import zstandard

        try:
            yield io.BufferedReader(ZstdFile(file))
        except (zstandard.ZstdError, EOFError) as error:
            raise ValueError(str(error)) from error


def _columns(line: bytes) -> list[Cell]:
    try:
        row: Any = json.loads(line)
    except ValueError:
        return [Cell("line", cut(line.decode(errors="replace")))]
    if not isinstance(row, dict):
        return [Cell("line", cut(json.dumps(row, ensure_ascii=False)))]
    return [
        Cell(str(name), cut(_readable(value)))
        for name, value in list(row.items())[:20]
        if name not in ("_row", "_id")
    ]


def _readable(value: Any) -> str:
    """A value as text: a conversation by its turns, all else but text as JSON.

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
    """A text of bounded length that says when it was cut.

    >>> cut("abcdef", 3)
    'abc… (3 more characters)'
    """
    text = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be written to a page
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"

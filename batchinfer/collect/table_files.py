"""Write rows to files: parquet, JSON Lines or CSV of a table, or lines of a form that programs know.

The same tables give the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from batchinfer.core.json_text import raw_members
from batchinfer.formats.lines import OutputLine, read_line
from batchinfer.storage.scratch import Scratch, scratch_errors

if TYPE_CHECKING:
    from batchinfer.collect.table import Collection as Rows

_GROUP_ROWS = 20_000
_GROUP_BYTES = 64 << 20
"""Most rows and bytes of a row group of parquet."""
_FEW_VALUES = ("status", "finish_reason", "error_code", "model", "label")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_SERVER_FAULT = 500


class TableFile(NamedTuple):
    """A finished file in the scratch folder."""

    path: Path
    rows: int
    bytes: int


def write_files(rows: Rows, kind: str, most: int, scratch: Scratch) -> Iterator[TableFile]:
    """Write rows to files of at most `most` rows each, and yield each file when it is finished.

    Without any row there is one file, which has the columns only.
    """
    most_rows = _GROUP_ROWS if kind == "parquet" else 1
    tables = grouped(rows.tables(), most_rows, _GROUP_BYTES)
    with scratch_errors(scratch.folder):
        left, index = next(tables, None), 0
        while left is not None or not index:
            path, count, index = scratch.new_path("table"), 0, index + 1
            with closing(_open_writer(path, kind, rows)) as writer:
                while left is not None and count < most:
                    part = left.slice(0, most - count)
                    writer.write_table(part)
                    count += len(part)
                    left = left.slice(len(part)) if len(part) < len(left) else next(tables, None)
            yield TableFile(path, count, path.stat().st_size)


def grouped(tables: Iterable[Any], most: int, most_bytes: float = math.inf) -> Iterator[Any]:
    """Yield rows in tables of so many rows and bytes at most, but of a whole table at least."""
    import pyarrow as pa

    held: list[Any] = []
    count, size = 0, 0
    for table in filter(len, tables):
        if held and (count + len(table) > most or size + table.nbytes > most_bytes):
            yield pa.concat_tables(held)
            held, count, size = [], 0, 0
        held.append(table)
        count, size = count + len(table), size + table.nbytes
    if held:
        yield pa.concat_tables(held)


def _open_writer(path: Path, kind: str, rows: Rows) -> Any:
    if kind == "csv":
        return CsvWriter(path, rows.schema)
    if kind != "parquet":
        return LinesWriter(path, rows.json_texts)
    from pyarrow import parquet

    few = [name for name in _FEW_VALUES if name in rows.schema.names]
    return parquet.ParquetWriter(
        path, rows.schema, compression="zstd", compression_level=1, use_dictionary=few
    )


class LinesWriter:
    """Writes one JSON object a row. A table whose only column is `line` has the lines themselves.

    Args:
        path: The file.
        json_texts: Columns that hold JSON texts. They are written as what they hold.
    """

    def __init__(self, path: Path, json_texts: Collection[str]) -> None:
        self._json_texts = json_texts
        self._file = path.open("wb")
        self.close = self._file.close

    def write_table(self, table: Any) -> None:
        """Append the rows of an Arrow table."""
        names = table.column_names
        if names == ["line"]:
            self._file.writelines(line + b"\n" for line in table["line"].to_pylist())
            return
        columns = [
            map(_raw, column.to_pylist()) if name in self._json_texts else _values(column, name)
            for name, column in zip(names, table.columns, strict=True)
        ]
        for row in zip(*columns, strict=True):
            self._file.write(_encode(dict(zip(names, row, strict=True))) + b"\n")


class CsvWriter:
    """Writes CSV. An empty text is "", a null is nothing; what CSV has no form for is JSON text."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._file = path.open("wb")
        self.close = self._file.close
        self.write_table(schema.empty_table(), has_header=True)

    def write_table(self, table: Any, *, has_header: bool = False) -> None:
        """Append the rows of an Arrow table."""
        import polars as pl

        from batchinfer.split.parquet_rows import plain_frame

        plain = plain_frame(table, "the rows")
        columns = {
            name: pl.Series(map(_cell, _values(column, name)), dtype=pl.String)
            if series.dtype.is_nested() or series.dtype.is_temporal()
            else series
            for name, column, series in zip(table.column_names, table.columns, plain, strict=True)
        }
        lines = io.BytesIO()
        # By itself, polars quotes no lone \r, which readers of CSV take for the end of a row.
        frame = pl.DataFrame(columns)
        frame.write_csv(lines, include_header=has_header, quote_style="non_numeric")
        self._file.write(lines.getvalue().decode(errors="replace").encode())


def _cell(value: msgspec.Raw) -> str | None:
    text = bytes(value).decode()
    return json.loads(text) if text == "null" or text[0] == '"' else text


def _raw(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_raw, value))
    try:  # DuckDB takes NaN and a comma too many, and keeps line ends between values
        return value and msgspec.Raw(msgspec.json.format(value, indent=-1).encode())
    except (msgspec.DecodeError, RecursionError):
        return value


def _values(column: Any, name: str) -> list[msgspec.Raw]:
    """Return the JSON of a column's values, as rows have them. Bytes that are no UTF-8 become U+FFFD.

    Raises:
        InputError: A date or a time is out of range.
    """
    import pyarrow as pa

    from batchinfer.split.parquet_rows import encoded, plain_frame

    lines = encoded(plain_frame(pa.table([column], [name]), "the rows"), f"column {name!r}: rows")
    return [msgspec.Raw(line[5:-1]) for line in lines.decode(errors="replace").split("\n")[:-1]]


# --------------------------------------------------------------------------- forms that are no tables


def _error_of(line: OutputLine) -> dict[str, Any]:
    """Return the error of a line as an OpenAI server writes it."""
    assert line.error is not None
    kind = "invalid_request_error" if line.status < _SERVER_FAULT else "server_error"
    error = line.error
    return {"code": error.code, "message": error.message, "param": error.param, "type": kind}


def openai_batch(line: str, _source: str) -> bytes:
    """Return the line of the output file of OpenAI's batch API. Its ids follow from the row."""
    found = read_line(line.encode())
    digest = hashlib.blake2b(f"{found.row}\0{found.id}".encode(), digest_size=12).hexdigest()
    body: Any = found.body if found.error is None else {"error": _error_of(found)}
    request = f"req_{digest}"
    response: Any = {"status_code": found.status, "request_id": request, "body": body}
    error = None
    if found.error is not None and found.status >= _SERVER_FAULT:  # no fault of the request
        response, error = None, {"code": found.code, "message": found.error.message}
    names = {"id": f"batch_{request}", "custom_id": found.id}
    return _encode({**names, "response": response, "error": error})


def completions(line: str, source: str) -> bytes:
    """Return the row's request and its result. A failed row has no result, but an error."""
    found = read_line(line.encode())
    members = raw_members(source.encode())  # None where the line is no JSON object
    names = [name for name in members or () if name not in ("_row", "_id")]
    request = members and {name: members[name] for name in names}
    if found.error is not None:
        return _encode({"request": request, "result": None, "error": _error_of(found)})
    choices = _decode(found.body).get("choices", msgspec.Raw(b"[]"))
    return _encode({"request": request, "result": {"choices": choices}})


ENCODERS: dict[str, Callable[[str, str], bytes]] = {
    "openai-batch": openai_batch,
    "completions": completions,
    "lines": lambda line, _source: line.encode(),
}
"""By the name of the form: a function of a row's output line, and of its line in the chunk if NEEDS_SOURCE."""
NEEDS_SOURCE = ("completions",)

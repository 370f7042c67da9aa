"""What `run` and `make_job` take as data: paths, and data in memory, which is written to a file for the command."""

from __future__ import annotations

import functools
import glob
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchinfer.core import errors

_FILES = (".parquet", ".jsonl", ".json", ".csv", ".txt", ".zst", ".gz")
_LISTS = ("to_list", "to_pylist", "tolist")
"""Methods by which columns give their values as Python's own; iterators of some give their own types."""


@contextmanager
def sources_of(data: Any) -> Iterator[tuple[list[str], Path]]:
    """Give the paths or URLs of data, and a scratch folder. Data in memory is written to a file there.

    Raises:
        errors.InputError: The data, or an item of it, is of a kind that cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="batchinfer-") as name:
        folder = Path(name)
        items = [data] if isinstance(data, str | Path) else data
        write = _writer_of(data)
        if isinstance(items, list | tuple) and items and all(map(_is_place, items)):
            places = [f"./{item}" if str(item).startswith("-") else str(item) for item in items]
            yield places, folder
        elif write is not None:
            try:
                write(folder / "data.parquet")
            except (TypeError, ValueError, NotImplementedError) as error:
                raise errors.InputError(
                    f"data: cannot be written as parquet ({error})",
                    hint="give each column a name of its own and values of one type",
                ) from error
            yield [str(folder / "data.parquet")], folder
        elif isinstance(data, Mapping) and data and all(map(_writer_of, data.values())):
            splits = ", ".join(map(str, data))
            raise errors.InputError(f"data: has the splits {splits}, expected one")
        elif isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
            _write_rows(data, folder / "data.jsonl")
            yield [str(folder / "data.jsonl")], folder
        else:
            raise errors.InputError(
                f"data: {data!r:.80} is no file, table, or list of prompts, conversations or dictionaries",
                hint="check the spelling of a path; give prompts as a list",
            )


def _is_place(item: Any) -> bool:
    """Whether an item is a path or URL. A text is one if it names something here, has a scheme, or ends like a file."""
    if not isinstance(item, str):
        return isinstance(item, Path)
    try:
        # Without pathlib, which takes no pattern of an absolute path, and no text that begins with ~ but names no home.
        is_there = bool(glob.glob(os.path.expanduser(item)))  # noqa: PTH111, PTH207
    except (OSError, ValueError):  # longer than a path may be, or with a zero byte
        is_there = False
    return is_there or "://" in item.partition(" ")[0] or item.endswith(_FILES)


def _writer_of(data: Any) -> Callable[[Path], Any] | None:
    """Return the function that writes a table to a parquet file; None if the data are no table.

    The class tells it by its attributes, since other packages extend pandas, and those of an object may be its columns.
    """
    kind = type(data)
    if hasattr(kind, "to_parquet"):  # of pandas, which has an index, or of datasets
        more = {"index": False} if hasattr(kind, "iloc") else {}
        return functools.partial(data.to_parquet, **more)
    if hasattr(kind, "lazy"):  # of polars
        return data.lazy().sink_parquet  # type: ignore[no-any-return]
    is_arrow = hasattr(kind, "schema") and hasattr(kind, "__arrow_c_stream__")
    return functools.partial(_write_stream, data) if is_arrow else None


def _write_stream(table: Any, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    batches = pa.RecordBatchReader.from_stream(table)
    with batches, pq.ParquetWriter(path, batches.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _write_rows(rows: Iterable[Any], path: Path) -> None:
    from batchinfer.core import codec

    for name in _LISTS:
        rows = getattr(rows, name)() if hasattr(rows, name) else rows
    with path.open("wb") as file:
        for index, item in enumerate(rows):
            row = {"prompt": item} if isinstance(item, str) else item
            row = {"messages": row} if isinstance(row, list | tuple) else row
            try:
                file.write(codec.encode(dict(row)) + b"\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise errors.InputError(
                    f"data: item {index}, a {type(item).__name__}, cannot be a row ({error})",
                    hint="give texts, lists of messages, or dictionaries of what JSON can hold",
                ) from error

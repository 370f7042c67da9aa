"""What `run` and `make_job` take as data: paths, and data in memory, which is written to a file for the command."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchinfer.core import errors

_FILES = (".parquet", ".jsonl", ".json", ".csv", ".txt", ".zst", ".gz")


@contextmanager
def sources_of(data: Any) -> Iterator[tuple[list[str], Path]]:
    """Give the paths or URLs of data, and a scratch folder. Data in memory is written to a file there.

    Raises:
        errors.InputError: The data, or an item of it, is of a kind that cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="batchinfer-") as name:
        folder = Path(name)
        items = [data] if isinstance(data, str | Path) else data
        package = type(data).__module__.partition(".")[0]
        if isinstance(items, list | tuple) and items and all(map(_is_place, items)):
            yield (
                [f"./{item}" if str(item).startswith("-") else str(item) for item in items],
                folder,
            )
        elif package in ("pyarrow", "pandas", "polars", "datasets"):
            _write_table(data, package, folder / "data.parquet")
            yield [str(folder / "data.parquet")], folder
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
        is_there = bool(glob.glob(str(Path(item).expanduser())))  # noqa: PTH207 - may be absolute
    except OSError:  # longer than a path may be
        is_there = False
    return is_there or "://" in item.partition(" ")[0] or item.endswith(_FILES)


def _write_table(data: Any, package: str, path: Path) -> None:
    if package == "pandas":
        data.to_parquet(path, index=False)
    elif package == "polars":
        data.lazy().sink_parquet(path)
    elif package == "datasets" and not hasattr(data, "to_parquet"):
        raise errors.InputError(f"data: has the splits {', '.join(map(str, data))}, expected one")
    elif package == "datasets":
        data.to_parquet(path)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        stream = pa.table(data) if isinstance(data, pa.RecordBatch) else data
        batches = pa.RecordBatchReader.from_stream(stream)
        with batches, pq.ParquetWriter(path, batches.schema) as writer:
            for batch in batches:
                writer.write_batch(batch)


def _write_rows(rows: Iterable[Any], path: Path) -> None:
    from batchinfer.core import codec

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

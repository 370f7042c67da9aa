"""Counts and reads the data sets that a job is made of. Never changes them.

The first look reads only the footers of parquet, but all of the other formats. After it, rows come in limited memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from batchinfer.core.errors import InputError, near
from batchinfer.core.records import FORMAT_VERSION, Job, Record, Source
from batchinfer.core.redaction import redact
from batchinfer.split import files, parquet_rows, text_lines
from batchinfer.split.blocks import Block, Wanted, refuse_columns
from batchinfer.split.files import DataFile
from batchinfer.storage.opening import is_inside

logger = logging.getLogger(__name__)

Count = Callable[[DataFile, Wanted], DataFile]
Read = Callable[[DataFile, Wanted, int], Iterator[Block]]

_FORMATS: dict[str, tuple[Count, Read]] = {
    "parquet": (parquet_rows.count_parquet, parquet_rows.read_parquet),
    "jsonl": (text_lines.count_lines, text_lines.read_lines),
    "csv": (text_lines.count_texts, text_lines.read_texts),
    "text": (text_lines.count_texts, text_lines.read_texts),
}
"""How files of each format are counted and read."""
_BATCH_REQUEST = {"custom_id", "method", "url", "body"}


class Sources(Record, frozen=True, kw_only=True):
    """Sources whose rows have been counted. The job numbers their rows from `first_row`, over all files in order."""

    arguments: list[str]
    sources: list[Source]
    """As job.json describes them."""
    files: list[DataFile]
    """The files that have rows."""
    wanted: Wanted
    columns: list[str]
    """Columns of the job: those chosen, else those of all files, in order of appearance."""
    rows: int
    first_row: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)

    def without(self, job: Job) -> Sources:
        """Return the sources without the files that a job has, numbered after its rows."""
        known = {file.content for file in job.files}
        left = []
        for source in self.sources:
            new = [file for file in source.files if file.content not in known]
            left += [msgspec.structs.replace(source, files=new)] if new else []
        new_files = [file for file in self.files if file.described.content not in known]
        rows = sum(file.rows for file in new_files)
        return msgspec.structs.replace(
            self, sources=left, files=new_files, rows=rows, first_row=job.rows
        )

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of all files in order, encoded with `_row` and `_id`; with a limit, more than it allows.

        Raises:
            InputError: A file is damaged, has changed since it was counted, or holds a value without a form in JSON.
        """
        row = self.first_row
        for file in self.files:
            last = row + file.rows
            for block in _FORMATS[file.format][1](file, self.wanted, row):
                row += block.num_rows
                if row > last:
                    break
                yield block
            if row != last:
                raise files.changed(file.url)

    def head(self, index: int, count: int) -> tuple[int, list[bytes]]:
        """Return the number of the first row of one of the files, and its first rows as lines."""
        file, first = self.files[index], sum(file.rows for file in self.files[:index])
        block = next(_FORMATS[file.format][1](file, self.wanted, first))
        most = min(count, block.num_rows, self.rows - first)
        return first, block.lines.split(b"\n", most)[:most]

    def check_unchanged(self) -> None:
        """Raise InputError if a file has changed since it was counted. Those of a commit on the Hub cannot."""
        there = {file.state for file in self.files if file.url.startswith("hf://")}
        for argument in self.arguments:
            if not argument.startswith("hf://"):
                there.update(file.state for file in files.locate(argument)[0])
        for file in self.files:
            if file.state not in there:
                raise files.changed(file.url)

    def check_apart(self, output: str) -> None:
        """Raise InputError if the output is a source, lies inside one, or has one inside."""
        inside = [each for each in self.arguments if is_inside(output, each)]
        for place in [*self.arguments, *(file.url for file in self.files)]:
            if place in inside or is_inside(place, output):
                raise InputError(
                    f"{output}: is not apart from the source {place}",
                    hint="name another --output, or narrow the source: FOLDER/*.parquet",
                )

    def require(self, option: str, names: Sequence[str], *, in_each: bool = True) -> None:
        """Raise InputError if a file lacks a column that an option needs; unless `in_each`, if all files lack it.

        ``*``, empty names and the columns that `split` adds are not checked.
        """
        for name in {*names} - {"", "*", "_row", "_id"}:
            _require_column(self.files, option, name, in_each=in_each)

    def as_job(self) -> Job:
        """Return what job.json says of these sources, without chunks."""
        return Job(
            format_version=FORMAT_VERSION,
            sources=self.sources,
            columns=self.columns,
            rows=self.rows,
            chunks=[],
            num_workers=1,
            id_column=self.wanted.id_column,
        )


def count_sources(
    arguments: Sequence[str],
    *,
    columns: list[str] | None = None,
    id_column: str = "",
    limit: int | None = None,
    delimiter: str = "",
) -> Sources:
    """Find and count every SOURCE argument. Read-only.

    Args:
        arguments: Files, folders, globs and URLs, in the order of their rows.
        columns: Columns to keep; None for all.
        id_column: Column whose values become `_id`; "_row" for row numbers, "" to choose.
        limit: Largest number of rows to take. Files that lie wholly beyond it are not counted.
        delimiter: Character between the values of CSV; "" for a comma, or a tab in .tsv files.

    Raises:
        InputError: A source has no file or files of several formats, a file is damaged or lacks a column, or all
            sources together have no rows.
        ConfigError: A source's URL cannot be used.
        AccessDenied: Credentials are missing or refused.
    """
    sources: list[Source] = []
    counted: list[DataFile] = []
    wanted = Wanted(columns=columns, delimiter=delimiter)
    rows = 0
    for argument in arguments:
        found, revision = files.locate(argument)
        new = []
        for file in found:
            if limit is None or rows < limit:
                with files.reading(file.url):
                    new.append(_FORMATS[file.format][0](file, wanted))
                rows += new[-1].rows
        described = [file.described for file in new]
        sources.append(
            Source(url=redact(argument), format=found[0].format, files=described, revision=revision)
        )
        counted += [file for file in new if file.rows]
    if not rows:
        raise InputError(
            f"{', '.join(arguments)}: holds no rows, expected at least one", hint="check the path"
        )
    _check_columns(counted, columns)
    if id_column not in ("", "_row"):
        _require_column(counted, "--id-column", id_column)
    id_column = "" if id_column == "_row" else id_column or _usual_id(counted)
    known = list(dict.fromkeys(name for file in counted for name in file.columns))
    return Sources(
        arguments=list(arguments),
        sources=sources,
        files=counted,
        wanted=msgspec.structs.replace(wanted, id_column=id_column),
        columns=known if columns is None else columns,
        rows=rows if limit is None else min(rows, limit),
    )


def _check_columns(found: list[DataFile], columns: list[str] | None) -> None:
    """Check the columns that are kept, and warn of those that only some tables have.

    Raises:
        InputError: A column that is kept has a name of `split`'s own columns, or is there twice; or a table lacks a
            column that was chosen, or no row of JSON Lines has it.
    """
    if columns and len({*columns}) < len(columns):
        raise InputError("--columns: a name is there twice, expected each once")
    for file in found:
        refuse_columns(
            [name for name in file.columns if columns is None or name in columns], file.url
        )
    for name in columns or ():
        _require_column(found, "--columns", name)
    tables = [file for file in found if file.format in ("parquet", "csv")]
    for file in tables if columns is None else []:
        if missing := set(tables[0].columns).symmetric_difference(file.columns):
            logger.warning(
                "column %r: in some files only, as %s and %s differ; rows without it lack it, --columns leaves it out",
                *(min(missing), redact(tables[0].url), redact(file.url)),
            )
            break


def _require_column(found: list[DataFile], option: str, name: str, *, in_each: bool = True) -> None:
    """Raise InputError if a file lacks a column; unless `in_each`, if all lack it. One row of JSON Lines is enough."""
    lacking = [
        file
        for file in found
        if name not in file.columns
        and not (file.format == "jsonl" and text_lines.has_column(file.url, name))
    ]
    if lacking and (in_each or len(lacking) == len(found)):
        known = lacking[0].columns
        shown = f"{', '.join(known[:30])}{near(name, known)}"
        raise InputError(
            f"{lacking[0].url}: has no column {name!r} (from {option}), expected one of: {shown}",
            hint="other files have it: rename the column, or leave this file out"
            if len(lacking) < len(found)
            else "name one of these columns",
        )


def _usual_id(found: list[DataFile]) -> str:
    """Choose the column that names rows: custom_id of OpenAI batch requests, else id, where all files have it."""
    common = set.intersection(*(set(file.columns) for file in found))
    if common >= _BATCH_REQUEST:
        return "custom_id"
    if "id" not in common:
        return ""
    logger.info(
        "column 'id' names the rows (_id); to take another: --id-column COLUMN, or _row for row numbers"
    )
    return "id"

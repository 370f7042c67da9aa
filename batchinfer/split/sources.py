"""Counts and reads the data sets that a job is made of. Never changes them.

The first look reads only the footers of parquet, but all of the other formats. After it, rows come in limited memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from batchinfer.core.errors import InputError, near
from batchinfer.core.records import FORMAT_VERSION, Job, Record, Source, SourceFile
from batchinfer.core.redaction import redact
from batchinfer.split import files, tables, text_lines
from batchinfer.split.files import FoundFile
from batchinfer.split.own_fields import Block, Counted, Part, refuse_own_fields
from batchinfer.storage.opening import is_inside

logger = logging.getLogger(__name__)

_FORMATS: dict[
    str, tuple[Callable[[FoundFile, str], Counted], Callable[[Part], Iterator[Block]]]
] = {
    "parquet": (tables.count_parquet, tables.read_parquet),
    "csv": (tables.count_csv, tables.read_csv),
    "jsonl": (text_lines.count_lines, text_lines.read_lines),
    "text": (text_lines.count_lines, text_lines.read_lines),
}
"""How files of each format are counted and read."""
_BATCH_REQUEST = {"custom_id", "method", "url", "body"}


class Sources(Record, frozen=True, kw_only=True):
    """Sources whose rows have been counted. The job numbers their rows from `first_row`, over all files in order."""

    arguments: list[str]
    sources: list[Source]
    """As job.json describes them."""
    parts: list[Part]
    """The files that have rows."""
    columns: list[str]
    """Columns of the job: those chosen, else those of all files, in order of appearance."""
    id_column: str
    rows: int
    first_row: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(part.found.bytes for part in self.parts)

    def without(self, job: Job) -> Sources:
        """Return the sources without the files that a job has, numbered after its rows."""
        known = {file.content for file in job.files}
        left = [
            msgspec.structs.replace(
                each, files=[file for file in each.files if file.content not in known]
            )
            for each in self.sources
        ]
        parts = [part for part in self.parts if source_file(part).content not in known]
        return msgspec.structs.replace(
            self,
            sources=[each for each in left if each.files],
            parts=parts,
            rows=sum(part.counted.rows for part in parts),
            first_row=job.rows,
        )

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of all files in order, encoded with `_row` and `_id`; with a limit, more than it allows.

        Raises:
            InputError: A file is damaged, has changed since it was counted, or holds a value without a form in JSON.
        """
        row = self.first_row
        for part in self.parts:
            last = row + part.counted.rows
            read = _FORMATS[part.found.format][1]
            for block in read(msgspec.structs.replace(part, first_row=row)):
                row += block.num_rows
                if row > last:
                    break
                yield block
            if row != last:
                raise files.changed(part.found.url)

    def head(self, index: int, count: int) -> tuple[int, list[bytes]]:
        """Return the number of the first row of one of the files, and its first rows as lines."""
        first = sum(part.counted.rows for part in self.parts[:index])
        part = msgspec.structs.replace(self.parts[index], first_row=first)
        block = next(_FORMATS[part.found.format][1](part))
        lines = block.encode(0, min(count, block.num_rows, self.rows - first))
        return first, lines.split(b"\n")[:-1]

    def check_unchanged(self) -> None:
        """Raise InputError if a file has changed since it was counted. Those of a commit on the Hub cannot."""
        there = {part.found for part in self.parts if part.found.url.startswith("hf://")}
        for argument in self.arguments:
            if not argument.startswith("hf://"):
                there.update(files.locate(argument)[0])
        for part in self.parts:
            if part.found not in there:
                raise files.changed(part.found.url)

    def check_apart(self, output: str) -> None:
        """Raise InputError if the output is a source, lies inside one, or has one inside."""
        inside = [each for each in self.arguments if is_inside(output, each)]
        for place in [*self.arguments, *(part.found.url for part in self.parts)]:
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
            _require_column(self.parts, option, name, in_each=in_each)

    def as_job(self) -> Job:
        """Return what job.json says of these sources, without chunks."""
        return Job(
            format_version=FORMAT_VERSION,
            sources=self.sources,
            columns=self.columns,
            rows=self.rows,
            chunks=[],
            num_workers=1,
            id_column=self.id_column,
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
    parts: list[Part] = []
    rows = 0
    for argument in arguments:
        found, revision = files.locate(argument)
        new = []
        for file in found:
            if limit is not None and rows >= limit:
                break
            with files.reading(file.url):
                one = _FORMATS[file.format][0](file, delimiter)
            rows += one.rows
            new.append(Part(found=file, counted=one, columns=columns, delimiter=delimiter))
        described = list(map(source_file, new))
        sources.append(
            Source(url=redact(argument), format=found[0].format, files=described, revision=revision)
        )
        parts += new
    if not rows:
        raise InputError(
            f"{', '.join(arguments)}: holds no rows, expected at least one", hint="check the path"
        )
    parts = [part for part in parts if part.counted.rows]
    _check_columns(parts, {"--columns": columns or [], "--id-column": [id_column]})
    id_column = id_column or _usual_id(parts)
    id_column = "" if id_column == "_row" else id_column
    known = list(dict.fromkeys(name for part in parts for name in part.counted.columns))
    return Sources(
        arguments=list(arguments),
        sources=sources,
        parts=[msgspec.structs.replace(part, id_column=id_column) for part in parts],
        columns=known if columns is None else columns,
        id_column=id_column,
        rows=rows if limit is None else min(rows, limit),
    )


def source_file(part: Part) -> SourceFile:
    """Return a file as job.json describes it."""
    found, counted = part.found, part.counted
    url = redact(found.url)
    return SourceFile(url=url, bytes=found.bytes, rows=counted.rows, digest=counted.digest)


def _check_columns(parts: list[Part], asked: dict[str, list[str]]) -> None:
    """Check the columns that options name, and warn of others that only some files have.

    Raises:
        InputError: A table lacks a column that an option names, or no row of JSON Lines has it; or a column that is
            kept has a name of `split`'s own columns.
    """
    for part in parts:
        refuse_own_fields(part.names, part.found.url)
    for option, names in asked.items():
        for name in {*names} - {"", "_row"}:
            _require_column(parts, option, name)
    tables = [part for part in parts if part.found.format in ("parquet", "csv")]
    for part in tables if not asked["--columns"] else []:
        if missing := set(tables[0].names).symmetric_difference(part.names):
            logger.warning(
                "column %r: in some files only, as %s and %s differ; rows without it lack it, --columns leaves it out",
                *(min(missing), redact(tables[0].found.url), redact(part.found.url)),
            )
            break


def _require_column(parts: list[Part], option: str, name: str, *, in_each: bool = True) -> None:
    """Raise InputError if a file lacks a column; unless `in_each`, if all lack it. One row of JSON Lines is enough."""
    lacking = [part for part in parts if not _has_column(part, name)]
    if lacking and (in_each or len(lacking) == len(parts)):
        known = lacking[0].counted.columns
        shown = f"{', '.join(known[:30])}{near(name, known)}"
        raise InputError(
            f"{lacking[0].found.url}: has no column {name!r} (from {option}), expected one of: {shown}",
            hint="other files have it: rename the column, or leave this file out"
            if len(lacking) < len(parts)
            else "name one of these columns",
        )


def _has_column(part: Part, name: str) -> bool:
    is_there = name in part.counted.columns
    return is_there or (
        part.found.format == "jsonl" and text_lines.has_column(part.found.url, name)
    )


def _usual_id(parts: list[Part]) -> str:
    """Choose the column that names rows: custom_id of OpenAI batch requests, else id, where all files have it."""
    common = set.intersection(*(set(part.counted.columns) for part in parts))
    if common >= _BATCH_REQUEST:
        return "custom_id"
    if "id" not in common:
        return "_row"
    logger.info(
        "column 'id' names the rows (_id); to take another: --id-column COLUMN, or _row for row numbers"
    )
    return "id"

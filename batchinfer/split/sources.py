"""Finds, counts and reads the data sets that a job is made of. Never changes them.

`count_sources` finds the files and counts their rows. It reads only the footers of parquet, but all of JSON Lines and
CSV. After that, `CountedSources.read` yields any range of rows in limited memory.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import msgspec

from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import Record, Source, SourceFile
from batchinfer.core.redaction import redact
from batchinfer.split import finding, source_files
from batchinfer.split.blocks import (
    OWN_FIELDS,
    ColumnChoice,
    CountedFile,
    Oddities,
    RowBlock,
    names_for_own,
    no_such_column,
)
from batchinfer.split.first_bytes import OtherFormat
from batchinfer.split.source_files import FoundFile
from batchinfer.storage.opening import is_inside

__all__ = [
    "ColumnChoice",
    "CountedFile",
    "CountedSources",
    "Oddities",
    "RowBlock",
    "count_sources",
]

logger = logging.getLogger(__name__)


class CountedSources(Record, frozen=True, kw_only=True):
    """Sources whose rows have been counted. The job numbers their rows from `first_row`, over all files in order."""

    sources: list[Source]
    files: list[CountedFile]
    bases: list[str]
    """Folders that are sources or that a pattern searches with subfolders. The output must not be in one of them."""
    choice: ColumnChoice
    rows: int
    columns: list[str]
    """Columns of the job: those chosen, else the known columns of all files, in order of appearance."""
    schema: str | msgspec.UnsetType = msgspec.UNSET
    """Field `schema` of job.json."""
    first_row: int = 0
    """Number of rows that the job has before these."""

    @property
    def end_row(self) -> int:
        """Number of rows of the job up to and with these."""
        return self.first_row + self.rows

    @property
    def blank_lines(self) -> int:
        """Number of blank lines of all files, which are no rows."""
        return sum(item.blank_lines for item in self.files)

    @property
    def is_shared(self) -> bool:
        """Whether other processes of this machine can read every file. They cannot read memory://."""
        return not any(item.found.url.startswith("memory://") for item in self.files)

    def read(self, rows: range, odd: Oddities) -> Iterator[RowBlock]:
        """Yield these rows in order, encoded with `_row` and `_id`.

        Args:
            rows: Consecutive row numbers of the job.
            odd: Counts to which the NaN, infinite values and broken lines found here are added.

        Raises:
            InputError: A file is damaged, changed since it was counted, or holds a value without an exact JSON form.
        """
        first = self.first_row
        for item in self.files:
            start, stop = max(rows.start, first), min(rows.stop, first + item.rows)
            if start < stop:
                part = range(start - first, stop - first)
                yield from _format_module(item.format).read(item, part, start, self.choice, odd)
            first += item.rows

    def row_group_starts(self) -> Iterator[int]:
        """Yield the rows at which a reader can start without reading earlier rows: the marks of all files."""
        first = self.first_row
        for item in self.files:
            yield from (first + row for row, _ in item.marks)
            first += item.rows

    def only(self, is_wanted: Callable[[CountedFile], bool], *, first_row: int) -> CountedSources:
        """Return the sources with only some of their files. Their rows are numbered from `first_row`."""
        files = [item for item in self.files if is_wanted(item)]
        rest = iter(self.files)
        sources = []
        for source in self.sources:
            kept = [file for file, item in zip(source.files, rest, strict=False) if is_wanted(item)]
            if kept:
                sources.append(msgspec.structs.replace(source, files=kept))
        return msgspec.structs.replace(
            self,
            sources=sources,
            files=files,
            rows=sum(item.rows for item in files),
            schema=_common_schema(files, self.choice, self.columns),
            first_row=first_row,
        )

    def require_column(self, option: str, name: str) -> None:
        """Raise InputError if a parquet or CSV file lacks the column, or if no file has it.

        May read JSON Lines to find out.
        """
        _require_columns(self.files, [(option, name)])

    def require_in_each_file(self, option: str, names: Sequence[str]) -> None:
        """Raise InputError if a file lacks one of these columns, since all its rows would fail.

        Of JSON Lines, a file is read up to the first row that has the columns. Files without any JSON object pass.

        Args:
            option: The option that names the columns, for the message.
            names: Names of the columns in the rows. ``*`` and empty names are not checked.
        """
        wanted = self._in_source(names)
        for item in self.files:
            missing = wanted - set(item.columns)
            if missing and item.format == "jsonl":
                from batchinfer.split import json_lines

                missing -= json_lines.find_keys(item, missing)
            if missing and item.columns:
                raise self._no_column(min(missing), item, option)

    def require_in_any_file(self, option: str, names: Sequence[str]) -> None:
        """Raise InputError if no file has one of these columns. See `require_in_each_file`."""
        missing = _in_no_file(self.files, self._in_source(names))
        if missing and any(item.columns for item in self.files):
            known = _known_columns(self.files)
            raise no_such_column(min(missing), known, where=_all(self.files), option=option)

    def _in_source(self, names: Sequence[str]) -> set[str]:
        """Return the names in the source of columns of the rows, without those that `split` gives each row."""
        names_in_source = {name: source_name for source_name, name in self.choice.renamed.items()}
        return {names_in_source.get(name, name) for name in names} - {"*", "", *OWN_FIELDS}

    def _no_column(self, name: str, item: CountedFile, option: str) -> InputError:
        error = no_such_column(name, item.columns, where=redact(item.found.url), option=option)
        if any(name in other.columns for other in self.files):
            error.hint = "other files have it: rename the column, or leave this file out"
        return error

    def check_apart(self, output: str) -> None:
        """Raise InputError if the output is inside a source, or a source inside the output."""
        for base in self.bases:
            if is_inside(output, base):
                raise InputError(
                    f"{output}: lies inside the source {base}, expected a place of its own",
                    hint="name another --output",
                )
        for item in self.files:
            if is_inside(item.found.url, output):
                raise InputError(
                    f"{item.found.url}: this source lies inside the output {output}",
                    hint="name another --output",
                )


def count_sources(
    arguments: Sequence[str],
    *,
    choice: ColumnChoice,
    limit: int | None = None,
    delimiter: str = "",
    with_checksums: bool = False,
) -> CountedSources:
    """Find and count every SOURCE argument. Read-only.

    Args:
        arguments: Files, folders, globs and URLs, in the order of their rows.
        choice: The columns to keep, and the column whose values become `_id`.
        limit: Largest number of rows to take. Files that lie wholly beyond it are not counted.
        delimiter: Character between the fields of CSV files; "" to find it.
        with_checksums: Whether local parquet files are read as a whole, to notice any change.

    Raises:
        ConfigError: A delimiter is given, and no source is CSV.
        InputError: A source has no file or an unknown format, a file is damaged or lacks a column, or all sources
            together have no rows or only broken lines.
        AccessDenied: Credentials are missing or refused.
    """
    sources, files, bases = [], [], []
    rows = 0
    for argument in arguments:
        located = finding.locate(argument)
        counted = []
        for found in located.files:
            if limit is not None and rows >= limit:
                break
            item = _count(found, located.format, delimiter)
            if with_checksums and item.format == "parquet" and source_files.is_local(found.url):
                item = msgspec.structs.replace(item, crc32=source_files.crc32_of(found))
            counted.append(item)
            rows += counted[-1].rows
        _warn_about_names(counted, located.format)
        files += counted
        bases += [located.base] if located.base else []
        sources.append(
            Source(
                url=redact(argument),
                format=_format_of(counted, located.format),
                files=[source_file(item) for item in counted],
                revision=located.revision,
            )
        )
    if delimiter and not any(item.format == "csv" for item in files):
        raise ConfigError(
            "--delimiter: no source is CSV", hint="leave it out, or check the sources' names"
        )
    if not rows:
        raise InputError(
            f"{', '.join(arguments)}: holds no rows, expected at least one",
            hint="check that this is the right file or folder",
        )
    _note_delimiters(files)
    _warn_about_repeats(files)
    _refuse_nothing_but_broken(files)
    choice = msgspec.structs.replace(
        choice, renamed=names_for_own([*_known_columns(files), *(choice.columns or ())])
    )
    columns = _check_columns(files, choice)
    _warn_about_bytes(files, choice, columns)
    limited = rows if limit is None else min(rows, limit)
    return CountedSources(
        sources=sources,
        files=files,
        bases=bases,
        choice=choice,
        rows=limited,
        columns=columns,
        schema=_common_schema(files, choice, columns),
    )


def _common_schema(
    files: list[CountedFile], choice: ColumnChoice, columns: list[str]
) -> str | msgspec.UnsetType:
    if any(item.format != "parquet" for item in files):
        return msgspec.UNSET
    from batchinfer.split.parquet import common_schema

    return common_schema(files, choice, columns)


def _count(found: FoundFile, kind: str, delimiter: str) -> CountedFile:
    """Count the rows of a file. `kind` is the format that its name tells; its first bytes may tell another."""
    try:
        if kind == "csv":
            from batchinfer.split import csv_tables

            return csv_tables.count(found, delimiter)
        return _format_module(kind).count(found)
    except OtherFormat as other:
        return _format_module(other.format).count(found)


def _format_of(files: list[CountedFile], named: str) -> str:
    """Return the format of a source: jsonl if any of its files has it, else csv if any has, else parquet.

    `named` is the format that the files' names tell. It is returned if no file was counted.
    """
    formats = {item.format for item in files}
    return "jsonl" if "jsonl" in formats else min(formats, default=named)


def _warn_about_names(files: list[CountedFile], named: str) -> None:
    """Warn of files whose format is not `named`, the one that their names tell."""
    others = [item for item in files if item.format != named]
    if others:
        logger.warning(
            "%s%s: named as %s, but holds %s, and is read as that",
            redact(others[0].found.url),
            f" and {len(others) - 1} more files" if len(others) > 1 else "",
            *(named, others[0].format),
        )


def _note_delimiters(files: list[CountedFile]) -> None:
    """Log the first delimiter that is not the usual one of its file."""
    for item in files:
        if item.format == "csv":
            from batchinfer.split.csv_tables import show_delimiter, usual_delimiter

            if item.delimiter != usual_delimiter(item.found.url):
                url, shown = redact(item.found.url), show_delimiter(item.delimiter)
                logger.info("%s: its fields are divided by %s", url, shown)
                return


def source_file(item: CountedFile) -> SourceFile:
    """Return a file as job.json describes it."""
    return SourceFile(
        url=redact(item.found.url),
        bytes=item.found.bytes,
        rows=item.rows,
        digest=item.digest,
        crc32=item.crc32 or msgspec.UNSET,
    )


def _check_columns(files: list[CountedFile], choice: ColumnChoice) -> list[str]:
    """Return the names of the job's columns in its rows.

    Raises:
        InputError: A column that an option names is missing.
    """
    asked = [("--columns", name) for name in choice.columns or []]
    asked += [("--id-column", choice.id_column)] if choice.id_column else []
    _require_columns(files, asked)
    return [choice.name_in_rows(name) for name in choice.columns or _known_columns(files)]


def _known_columns(files: list[CountedFile]) -> list[str]:
    """Return the known columns of all files, in order of appearance."""
    return list(dict.fromkeys(itertools.chain.from_iterable(item.columns for item in files)))


def _require_columns(files: list[CountedFile], asked: list[tuple[str, str]]) -> None:
    """Raise InputError if a parquet or CSV file lacks a column that an option names, or if no file has it."""
    missing = _in_no_file(files, {name for _, name in asked})
    for option, name in asked:
        if name in missing:
            raise no_such_column(name, _known_columns(files), where=_all(files), option=option)
        for item in files:
            if item.format != "jsonl" and name not in item.columns:
                raise no_such_column(name, item.columns, where=item.found.url, option=option)


def _in_no_file(files: list[CountedFile], names: set[str]) -> set[str]:
    """Return the columns that no file has. May read JSON Lines to find out."""
    missing = names - set(_known_columns(files))
    if missing:
        from batchinfer.split import json_lines

        for item in files:
            if item.format == "jsonl" and missing:
                missing -= json_lines.find_keys(item, missing)
    return missing


def _all(files: list[CountedFile]) -> str:
    return redact(files[0].found.url) + (" and the other files" if len(files) > 1 else "")


def _warn_about_repeats(files: list[CountedFile]) -> None:
    times = Counter(item.found.url for item in files)
    for url in (url for url, count in times.items() if count > 1):
        logger.warning(
            "%s: named by several sources, its rows are taken again each time", redact(url)
        )


def _refuse_nothing_but_broken(files: list[CountedFile]) -> None:
    """Raise InputError if all files are JSON Lines without any JSON object, since every row would be an error row."""
    if any(item.format != "jsonl" or item.columns for item in files):
        return
    from batchinfer.split import json_lines

    json_lines.refuse_without_object(files)


def _warn_about_bytes(files: list[CountedFile], choice: ColumnChoice, columns: list[str]) -> None:
    names = {choice.name_in_rows(name) for item in files for name in item.byte_columns}
    names.intersection_update(columns)
    if names:
        logger.warning(
            "%s: these columns hold bytes, not text; in the rows they are base64",
            ", ".join(sorted(names)),
        )


class _FormatModule(Protocol):
    """The functions that the module of each format has."""

    def count(self, found: FoundFile) -> CountedFile: ...
    def read(
        self, item: CountedFile, rows: range, first_row: int, choice: ColumnChoice, odd: Oddities
    ) -> Iterator[RowBlock]: ...


def _format_module(kind: str) -> _FormatModule:
    """Return a format's module, imported only for sources of that format: pyarrow takes time to load."""
    module = {"parquet": "parquet", "jsonl": "json_lines", "csv": "csv_tables"}[kind]
    return cast("_FormatModule", importlib.import_module(f"batchinfer.split.{module}"))

"""Counts and reads the data sets that a job is made of. Never changes them.

The first look reads only the footers of parquet, but all of the other formats. After it, rows come in limited memory.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from types import ModuleType

import msgspec

from batchinfer.core.errors import InputError, near
from batchinfer.core.records import FORMAT_VERSION, Job, Record, Source
from batchinfer.ledger.jobs import is_absolute, split_name
from batchinfer.split import files, text_lines
from batchinfer.split.files import Block, DataFile, Wanted, refuse_columns
from batchinfer.storage.opening import is_inside, join_url, local_path, open_store

logger = logging.getLogger(__name__)

_BATCH_REQUEST = {"custom_id", "method", "url", "body"}


class Sources(Record, frozen=True, kw_only=True):
    """Sources whose rows have been counted. The job numbers their rows from `first_row`, over all files in order."""

    arguments: list[str]
    files: list[DataFile]
    """The files that have rows."""
    wanted: Wanted
    columns: list[str]
    """Columns of the job: those chosen, else those of all files, in order of appearance."""
    rows: int
    first_row: int = 0

    def named_by(self, column: str) -> Sources:
        """Return the sources with the column that names a job's rows; "" for row numbers."""
        if column:
            self.require_column("the job", column)
        wanted = msgspec.structs.replace(self.wanted, id_column=column)
        return msgspec.structs.replace(self, wanted=wanted)

    def without(self, job: Job) -> Sources:
        """Return the sources without the files that a job has, numbered after its rows."""
        known = {file.content for file in job.files}
        new = [file for file in self.files if file.content not in known]
        rows = sum(file.rows for file in new)
        return msgspec.structs.replace(self, files=new, rows=rows, first_row=job.rows)

    def extend(self, job: Job) -> bool:
        """Whether these sources hold every file of the job, and at least one more."""
        num_new = len(self.without(job).files)
        return job.limit is None and num_new > 0 and len(self.files) - num_new >= len(job.files)

    def blocks(self, bounds: Sequence[int] = ()) -> Iterator[Block]:
        """Yield the rows of all files in order, encoded with `_row` and `_id`. No block goes across a bound.

        Args:
            bounds: Numbers of rows, counted from the first of these, in rising order.

        Raises:
            InputError: A file is damaged, has changed since it was counted, or holds a value without a form in JSON.
        """
        row, ends = 0, [*bounds, self.rows]
        for file in self.files:
            first, reader = row, _reader_of(file)
            for batch in reader.batches(file, self.wanted):
                at = 0
                while at < len(batch):
                    if row == self.rows:
                        return
                    stop = min(len(batch), at + ends[bisect.bisect(ends, row)] - row)
                    place = (self.first_row + each for each in (row, first))
                    yield reader.encode(batch[at:stop], file, self.wanted, *place)
                    row, at = row + stop - at, stop
            if row != first + file.rows:
                raise files.changed(file.url)

    def head(self, index: int, count: int) -> tuple[int, list[bytes]]:
        """Return the number of the first row of one of the files, and its first rows as lines."""
        first = sum(file.rows for file in self.files[:index])
        rows = min(count, self.files[index].rows, self.rows - first)
        only = msgspec.structs.replace(self, files=[self.files[index]], rows=rows, first_row=first)
        return first, b"".join(block.lines for block in only.blocks()).split(b"\n")[:-1]

    def check_unchanged(self) -> None:
        """Raise InputError if a file has changed since it was counted. Those of a commit on the Hub cannot."""
        found = (files.locate(each) for each in self.arguments if not each.startswith("hf://"))
        there = {(file.url, file.bytes, file.stamp) for located in found for file in located}
        for file in self.files:
            is_there = (file.url, file.bytes, file.stamp) in there
            if not is_there and not file.url.startswith("hf://"):
                raise files.changed(file.url)

    def check_apart(self, output: str) -> None:
        """Raise InputError if the output is a source, lies inside one, or has one inside."""
        arguments = {*self.arguments, *(file.argument for file in self.files)}
        for place in arguments | {file.url for file in self.files}:
            if is_inside(place, output) or (place in arguments and is_inside(output, place)):
                raise InputError(
                    f"{output}: is not apart from the source {place}",
                    hint="name another --output, or narrow the source: FOLDER/*.parquet",
                )

    def require(self, option: str, names: Iterable[str], *, in_each: bool = True) -> None:
        """Raise InputError if a file lacks a column that an option needs; unless `in_each`, if all files lack it.

        ``*``, empty names and the columns that `split` adds are not checked.
        """
        for name in {*names} - {"", "*", "_row", "_id"}:
            self.require_column(option, name, in_each=in_each)

    def require_column(self, option: str, name: str, *, in_each: bool = True) -> None:
        """Raise InputError if a file lacks a column. One row of JSON Lines is enough."""
        lacking = [file for file in self.files if not _has_column(file, name)]
        if lacking and (in_each or len(lacking) == len(self.files)):
            known = lacking[0].columns
            shown = f"{', '.join(known[:30])}{near(name, known)}"
            raise InputError(
                f"{lacking[0].url}: has no column {name!r} (from {option}), expected one of: {shown}",
                hint="name a column that all files have, rename it there, or leave this file out",
            )

    def check_columns(self) -> None:
        """Check the columns that are kept, and warn of those that only some tables have.

        Raises:
            InputError: A column that is kept has a name of `split`'s own columns, or is there twice; or a table lacks a
                column that was chosen, or no row of JSON Lines has it.
        """
        chosen = self.wanted.columns
        for file in self.files:
            refuse_columns(filter(self.wanted.takes, file.columns), file.url)
        refuse_columns(chosen or (), "--columns")
        for name in chosen or ():
            self.require_column("--columns", name)
        tables = [file.columns for file in self.files if file.format != "jsonl"]
        counts = Counter(name for names in tables for name in names)
        in_some = [name for name, count in counts.items() if count < len(tables)]
        if chosen is None and in_some:
            logger.warning("column %r: in some files only; --columns leaves it out", in_some[0])

    def as_job(self) -> Job:
        """Return what job.json says of these sources, without chunks."""
        sources = []
        for argument, group in itertools.groupby(self.files, attrgetter("argument")):
            found = list(group)
            pinned = re.match("hf://[^@]+@([^/]+)", found[0].url)
            sources.append(
                Source(
                    url=argument,
                    format=found[0].format,
                    files=[file.described for file in found],
                    revision=pinned[1] if pinned else "",
                )
            )
        return Job(
            format_version=FORMAT_VERSION,
            sources=sources,
            columns=self.columns,
            rows=self.rows,
            chunks=[],
            num_workers=1,
            id_column=self.wanted.id_column,
        )


def _has_column(file: DataFile, name: str) -> bool:
    is_late = file.format == "jsonl" and name not in file.columns
    return text_lines.has_column(file.url, name) if is_late else name in file.columns


def _reader_of(file: DataFile) -> ModuleType:
    """Return the module that counts and reads the rows of a file."""
    if file.format != "parquet":
        return text_lines
    from batchinfer.split import parquet_rows  # imports pyarrow and polars

    return parquet_rows


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
        InputError: A source has no file or files of several formats, a file is damaged, lacks a column or is named
            twice, or all sources together have no rows.
        ConfigError: A source's URL cannot be used.
        AccessDenied: Credentials are missing or refused.
    """
    counted: list[DataFile] = []
    wanted = Wanted(columns=columns, delimiter=delimiter)
    rows = 0
    located = [file for argument in arguments for file in files.locate(argument)]
    urls = Counter(files.place_of(file.url) for file in located)
    if urls.total() > len(urls):
        hint = "name it once (links lead to it, too); to have its rows twice, copy it"
        raise InputError(f"{urls.most_common(1)[0][0]}: is named twice", hint=hint)
    for file in located:
        if limit is None or rows < limit:
            found = _reader_of(file).count_rows(file, wanted)
            rows += found.rows
            counted += [found] if found.rows else []
    if not rows:
        raise InputError(
            f"{', '.join(arguments)}: holds no rows, expected at least one", hint="check the path"
        )
    known = list(dict.fromkeys(name for file in counted for name in file.columns))
    id_column = "" if id_column == "_row" else id_column or _usual_id(counted)
    counts = Sources(
        arguments=list(arguments),
        files=counted,
        wanted=msgspec.structs.replace(wanted, id_column=id_column),
        columns=known if columns is None else columns,
        rows=rows if limit is None else min(rows, limit),
    )
    counts.check_columns()
    if id_column:
        counts.require_column("--id-column", id_column)
    return counts


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


# --------------------------------------------------------------------------- by reference


def count_listed(url: str) -> Sources:
    """Find and count the files of JSON Lines that a list names (`split --by-reference`). Read-only.

    Args:
        url: Path or URL of the list: a path or URL a line, relative to the list's folder.

    Raises:
        InputError: A file is missing, is named twice or is no JSON Lines, or there is none.
    """
    store, name = split_name(url)
    folder = open_store(store).url
    with files.reading(url):
        lines = open_store(store).get(name).data.decode("utf-8-sig").split("\n")
    places = []
    for name in filter(None, map(str.strip, lines)):
        place = name if is_absolute(name) else join_url(folder, name)
        if files.is_local(place):  # no key may have a ".."
            place = os.path.normpath(local_path(place))
        places.append(place)
    if not places:
        raise InputError(f"{url}: names no file", hint="write a path or URL a line into it")
    counted = count_sources(places, id_column="_row")
    for file in counted.files:
        if file.format != "jsonl" or files.packing_of(file.url) == "gzip":
            what = "cannot be a chunk, expected .jsonl or .jsonl.zst"
            raise InputError(f"{file.url}: {what}", hint="name files of rows as SOURCE")
    listed = [msgspec.structs.replace(file, argument=url) for file in counted.files]
    return msgspec.structs.replace(counted, files=listed)

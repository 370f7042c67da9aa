"""Counts and reads the data sets that a job is made of. Never changes them.

The first look reads only the footers of parquet, but all of the other formats. After it, rows come in limited memory.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType

import msgspec

from batchinfer.core import layout
from batchinfer.core.errors import InputError, ObjectNotFound, near
from batchinfer.core.json_text import raw_members
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job, Record, Source, SourceFile
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef, OpenStore, is_absolute, split_name
from batchinfer.split import files, text_lines
from batchinfer.split.files import DataFile
from batchinfer.split.rows import Block, Wanted, refuse_columns
from batchinfer.storage.opening import is_inside, join_url
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

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

    def without(self, job: Job) -> Sources:
        """Return the sources without the files that a job has, numbered after its rows."""
        known = {file.content for file in job.files}
        left = []
        for source in self.sources:
            new = [file for file in source.files if file.content not in known]
            left += [msgspec.structs.replace(source, files=new)] if new else []
        new_files = [file for file in self.files if file.content not in known]
        rows = sum(file.rows for file in new_files)
        return msgspec.structs.replace(
            self, sources=left, files=new_files, rows=rows, first_row=job.rows
        )

    def extend(self, job: Job) -> bool:
        """Whether these sources hold every file of the job, and at least one more."""
        num_new = len(self.without(job).files)
        num_files = sum(file.rows > 0 for file in job.files)
        return job.limit is None and num_new > 0 and len(self.files) - num_new >= num_files

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of all files in order, encoded with `_row` and `_id`; with a limit, no more than it allows.

        Raises:
            InputError: A file is damaged, has changed since it was counted, or holds a value without a form in JSON.
        """
        row = self.first_row
        end = row + self.rows
        for file in self.files:
            last = row + file.rows
            for block in _reader_of(file).read_rows(file, self.wanted, row):
                row += block.num_rows
                if row > last:
                    break
                if row > end:
                    yield block.first(block.num_rows - (row - end))
                    return
                yield block
            if row != last:
                raise files.changed(file.url)

    def head(self, index: int, count: int) -> tuple[int, list[bytes]]:
        """Return the number of the first row of one of the files, and its first rows as lines."""
        file, first = self.files[index], sum(file.rows for file in self.files[:index])
        block = next(_reader_of(file).read_rows(file, self.wanted, first))
        most = min(count, block.num_rows, self.rows - first)
        return first, block.lines.split(b"\n", most)[:most]

    def check_unchanged(self) -> None:
        """Raise InputError if a file has changed since it was counted. Those of a commit on the Hub cannot."""
        found = (files.locate(each)[0] for each in self.arguments if not each.startswith("hf://"))
        there = {(file.url, file.bytes, file.stamp) for located in found for file in located}
        for file in self.files:
            is_pinned = file.url.startswith("hf://")
            if not is_pinned and (file.url, file.bytes, file.stamp) not in there:
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
            self.require_column(option, name, in_each=in_each)

    def require_column(self, option: str, name: str, *, in_each: bool = True) -> None:
        """Raise InputError if a file lacks a column. One row of JSON Lines is enough."""
        lacking = [
            file
            for file in self.files
            if name not in file.columns
            and not (file.format == "jsonl" and text_lines.has_column(file.url, name))
        ]
        if lacking and (in_each or len(lacking) == len(self.files)):
            known = lacking[0].columns
            shown = f"{', '.join(known[:30])}{near(name, known)}"
            is_elsewhere = len(lacking) < len(self.files) or option == "the job"
            hint = "other files have it: rename the column, or leave this file out"
            raise InputError(
                f"{lacking[0].url}: has no column {name!r} (from {option}), expected one of: {shown}",
                hint=hint if is_elsewhere else "name one of these columns",
            )

    def check_columns(self) -> None:
        """Check the columns that are kept, and warn of those that only some tables have.

        Raises:
            InputError: A column that is kept has a name of `split`'s own columns, or is there twice; or a table lacks a
                column that was chosen, or no row of JSON Lines has it.
        """
        columns = self.wanted.columns
        for file in self.files:
            names = [name for name in file.columns if columns is None or name in columns]
            refuse_columns(names, file.url)
        if columns is not None:
            refuse_columns(columns, "--columns")
            for name in columns:
                self.require_column("--columns", name)
            return
        tables = [file for file in self.files if file.format in ("parquet", "csv")]
        for file in tables:
            if missing := set(tables[0].columns).symmetric_difference(file.columns):
                text = "column %r: in some files only, as %s and %s differ; --columns leaves it out"
                logger.warning(text, min(missing), tables[0].url, file.url)
                break

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
    asked_by: str = "--id-column",
) -> Sources:
    """Find and count every SOURCE argument. Read-only.

    Args:
        arguments: Files, folders, globs and URLs, in the order of their rows.
        columns: Columns to keep; None for all.
        id_column: Column whose values become `_id`; "_row" for row numbers, "" to choose.
        limit: Largest number of rows to take. Files that lie wholly beyond it are not counted.
        delimiter: Character between the values of CSV; "" for a comma, or a tab in .tsv files.
        asked_by: What asks for `id_column`, for the error where a file lacks it.

    Raises:
        InputError: A source has no file or files of several formats, a file is damaged, lacks a column or is named
            twice, or all sources together have no rows.
        ConfigError: A source's URL cannot be used.
        AccessDenied: Credentials are missing or refused.
    """
    sources: list[Source] = []
    counted: list[DataFile] = []
    wanted = Wanted(columns=columns, delimiter=delimiter)
    rows = 0
    located = [files.locate(argument) for argument in arguments]
    urls = Counter(file.url for found, _ in located for file in found)
    if urls.total() > len(urls):
        hint = "name it once; to have its rows twice, copy it"
        raise InputError(f"{urls.most_common(1)[0][0]}: two SOURCE arguments name it", hint=hint)
    for argument, (found, revision) in zip(arguments, located, strict=True):
        new = []
        for file in found:
            if limit is None or rows < limit:
                new.append(_reader_of(file).count_rows(file, wanted))
                rows += new[-1].rows
        described = [file.described for file in new]
        sources.append(
            Source(url=argument, format=found[0].format, files=described, revision=revision)
        )
        counted += [file for file in new if file.rows]
    if not rows:
        raise InputError(
            f"{', '.join(arguments)}: holds no rows, expected at least one", hint="check the path"
        )
    known = list(dict.fromkeys(name for file in counted for name in file.columns))
    id_column = "" if id_column == "_row" else id_column or _usual_id(counted)
    counts = Sources(
        arguments=list(arguments),
        sources=sources,
        files=counted,
        wanted=msgspec.structs.replace(wanted, id_column=id_column),
        columns=known if columns is None else columns,
        rows=rows if limit is None else min(rows, limit),
    )
    counts.check_columns()
    if id_column:
        counts.require_column(asked_by, id_column)
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


def reference_job(url: str, open_store: OpenStore) -> Job:
    """Return the job whose chunks are the files of a list (`split --by-reference`), which are read once, not copied.

    Args:
        url: Path or URL of the list: a path or URL a line of JSON Lines, relative to the list's folder.
        open_store: Opens the stores of the list and of the files.

    Raises:
        InputError: A file is missing, empty or no JSON Lines.
    """
    folder, name = split_name(url)
    store = open_store(folder)
    try:
        listed = store.get(name).data.decode()
    except ObjectNotFound as error:
        raise InputError(f"{url}: no such file", hint="check the spelling") from error
    except UnicodeDecodeError as error:
        what = "is no text in UTF-8, expected a path or URL on each line"
        raise InputError(f"{url}: {what}", hint="name files of rows as SOURCE") from error
    places = list(filter(None, map(str.strip, listed.split("\n"))))
    chunks: list[Chunk] = []
    seen = set[str]()
    described: list[SourceFile] = []
    columns: dict[str, None] = {}
    row = num_broken = 0
    with contextlib.closing(Scratch()) as scratch:
        for place in places:
            full = place if is_absolute(place) else join_url(store.url, place)
            if files.is_local(full):  # no key may have a ".."
                scheme, separator, path = full.rpartition("://")
                full = scheme + separator + posixpath.normpath(path)
            if full in seen:
                raise InputError(f"{url}: names {full} twice", hint="name it once, or a copy of it")
            seen.add(full)
            root, key = split_name(full)
            name = layout.chunk_name(len(chunks), len(places))
            try:
                local = fetch(open_store(root), ChunkRef(name, root, key), scratch)
            except InputError as error:  # its hint is about what `split` has written
                error.hint = f"see to the file, or to its line in {url}, from whose folder relative paths count"
                raise
            with local.path.open("rb") as file:
                head = list(itertools.islice(file, text_lines.SAMPLE_LINES))
                if not head:
                    raise InputError(f"{full}: holds no rows", hint="leave it out of the list")
                columns.update(dict.fromkeys(text_lines.sample_columns(head, full)))
                num_broken += sum(raw_members(line) is None for line in itertools.chain(head, file))
            local.path.unlink()
            sizes = {"rows": local.num_lines, "bytes": local.stored_bytes or 0}
            chunks.append(Chunk(name=name, first_row=row, sha256=local.sha256, file=full, **sizes))
            described.append(SourceFile(url=full, digest=local.sha256, **sizes))
            row += local.num_lines
    if not chunks:
        raise InputError(f"{url}: names no file", hint="write a path or URL a line into it")
    return Job(
        format_version=FORMAT_VERSION,
        sources=[Source(url=url, format="jsonl", files=described)],
        columns=list(columns),
        rows=row,
        chunks=chunks,
        num_workers=1,
        broken_lines=num_broken,
    )


def references(job: Job) -> list[str]:
    """Return the paths and URLs of those chunks of a job that were not copied."""
    return [chunk.file for chunk in job.chunks if chunk.file and is_absolute(chunk.file)]

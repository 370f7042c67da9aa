"""Finds and opens the files that a SOURCE argument names, with filesystems of fsspec. Errors name the file."""

from __future__ import annotations

import contextlib
import glob
import io
import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchinfer.core import units
from batchinfer.core.errors import (
    AccessDenied,
    ConfigError,
    InputError,
    ObjectNotFound,
    StorageError,
)
from batchinfer.core.records import Record, SourceFile
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import (
    check_url,
    join_url,
    local_path,
    open_store,
    split_url,
)

if TYPE_CHECKING:
    import polars as pl

logger = logging.getLogger(__name__)

FORMATS = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".txt": "text",
}
"""Formats by the ends of files' names."""
_PACKINGS = {".gz": "gzip", ".zst": "zstd"}
_NOTES = (".json", ".txt")
"""Ends of files that describe the data if other files lie beside them."""
_EXPECTED = f"names that end in {', '.join(FORMATS)} (but for parquet also .gz, .zst)"
_STAMPS = ("etag", "blob_id", "mtime")
"""Keys in fsspec's descriptions of files whose values change with the file's bytes."""
_BUFFER_BYTES = 1 << 20


class DataFile(SourceFile, frozen=True, kw_only=True):
    """A file of a source. A change is noticed by its size and its stamp: an etag, a blob id or a time.

    The first look counts its rows, and finds its digest and its columns, of JSON Lines those of the first rows.
    """

    argument: str
    """The SOURCE that led to it."""
    rows: int = 0
    digest: str = ""
    format: str
    stamp: str
    columns: list[str] = []

    @property
    def described(self) -> SourceFile:
        """The file as job.json describes it."""
        return SourceFile(url=self.url, bytes=self.bytes, rows=self.rows, digest=self.digest)


class Wanted(Record, frozen=True, kw_only=True):
    """What to take of each row."""

    columns: list[str] | None = None
    """Columns to keep, in this order; None for all."""
    id_column: str = ""
    """Column whose values become `_id`; empty for row numbers."""
    delimiter: str = ""
    """Character between the values of CSV; "" for a comma, or a tab in .tsv files."""

    def takes(self, name: str) -> bool:
        """Whether a column is kept, or names the rows."""
        return self.columns is None or name in (*self.columns, self.id_column)


class Block(NamedTuple):
    """Some consecutive rows."""

    num_rows: int
    lines: bytes
    """The rows, each with a newline at its end."""
    ids: Sequence[bytes | None] | pl.Series = ()
    """The rows' ids from a column, if one was chosen; None for a row without."""
    num_broken: int = 0
    """Number of rows that are no JSON object."""


def refuse_columns(names: Iterable[str], where: str) -> None:
    """Raise InputError if a column is there twice, or has a name that `split` gives to a column of its own."""
    counts = Counter([*names, "_row", "_id"])
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InputError(
            f"{where}: column {twice[0]!r} is there twice, where _row and _id are split's own, expected unique names",
            hint="answers of an earlier run? narrow the source; else rename the column in the source, or leave it out: "
            "batchinfer split --columns A,B,…",
        )


# --------------------------------------------------------------------------- finding


def ending(url: str) -> str:
    """Return the end of a file's name that tells its format.

    >>> ending("s3://b/Rows.JSONL.gz"), ending("a.csv"), ending("rows")
    ('.jsonl', '.csv', '')
    """
    return posixpath.splitext(url.lower().removesuffix(".gz").removesuffix(".zst"))[1]


def packing_of(url: str) -> str:
    """Return how a file is compressed, by its name and in Arrow's words; "" if it is not.

    >>> [packing_of(url) for url in ("s3://b/A.JSONL.GZ", "a.zst", "a.csv")]
    ['gzip', 'zstd', '']
    """
    return next((how for end, how in _PACKINGS.items() if url.lower().endswith(end)), "")


def locate(argument: str) -> list[DataFile]:
    """Find the files of one SOURCE argument: a file, a folder, a glob or a URL. They are sorted by their addresses.

    What is below a name with "." or "_" at its start is left out, unless SOURCE or a pattern's last part names it.

    Raises:
        InputError: There is no file, none of a known format, or files of several formats.
        AccessDenied: Credentials are missing or refused.
        ConfigError: The URL cannot be used, or a package is missing.
    """
    check_url(argument)
    with reading(argument):
        url = _pinned(argument) if argument.startswith("hf://") else argument
        system, path = _filesystem(join_url(url, ""))
        # What a pattern's last part matches counts as named, but as in shells a dot only if it is typed.
        named = "._" if posixpath.basename(path).startswith(".") else "_"
        hiding = "/[._]"
        # Nobody typed the present folder's path, so no character in it makes a pattern.
        here = "" if argument.startswith("/") or not is_local(argument) else str(Path.cwd())
        here = here if path.startswith(here) else ""
        try:
            listed = {path: system.info(path)}
        except FileNotFoundError:
            if not re.search(r"[*?\[]", path.removeprefix(here)):
                raise
            pattern = glob.escape(here) + path.removeprefix(here)
            hiding = rf"/(?![{named}][^/]*$)[._]"
            listed = _matching(system, pattern, argument)
        for folder in [name for name, info in listed.items() if info["type"] == "directory"]:
            if is_local(argument) and "**" not in path:  # else `_matching` has done it
                _look_into(folder)
            listed |= system.find(folder, detail=True)
        found, hidden = list[DataFile](), list[DataFile]()
        for name in sorted(listed):
            info = listed[name]
            # A link to a local file counts as what it leads to. One to nothing cannot be opened. A pipe is no file.
            is_dangling = is_local(argument) and not Path(name).exists()
            info = system.info(name) if is_local(argument) and not is_dangling else info
            if is_dangling or info["type"] == "file":
                is_hidden = re.search(hiding, name[len(os.path.commonpath([name, path])) :])
                (hidden if is_hidden else found).append(_data_file(name, info, argument))
    known = [file for file in found if file.format]
    chosen = [file for file in known if ending(file.url) not in _NOTES] or known
    taken = {file.url for file in chosen}
    if left_out := [file.url for file in found + hidden if file.url not in taken]:
        what = units.many(len(left_out), "other or hidden file")
        logger.info("%s: left out %s, %s first", argument, what, left_out[0])
    _check_formats(argument, chosen)
    return chosen


def _matching(system: Any, pattern: str, argument: str) -> dict[str, dict[str, Any]]:
    """Return what matches a pattern, by names, as fsspec describes it.

    Raises:
        ConfigError: It is no pattern.
        PermissionError: A folder in which something could match cannot be listed.
    """
    before, deep, _ = pattern.partition("**")
    if is_local(argument) and not deep:
        # As a shell does, and unlike fsspec, Python follows links to folders.
        for folder in glob.glob(posixpath.dirname(pattern)):  # noqa: PTH207 - it may be /
            if Path(folder).is_dir():
                os.scandir(folder).close()
        found = map(Path, glob.glob(pattern, include_hidden=True))  # noqa: PTH207 - as above
        return {str(path): {"type": "directory" if path.is_dir() else "file"} for path in found}
    for folder in system.glob(before) if is_local(argument) else ():
        _look_into(folder)
    try:
        return dict(system.glob(pattern, detail=True))
    except ValueError as error:
        hint = "as in 'FOLDER/**/*.parquet'"
        raise ConfigError(f"{argument}: {error}", hint=hint) from error


def _look_into(folder: str) -> None:
    """Name what fsspec leaves out of a local folder without a word.

    Raises:
        PermissionError: A folder below it cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    for place, folders, _ in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in folders:
            if (linked := Path(place, name)).is_symlink():
                logger.warning("left out %s, a link to a folder: to take it, name it, too", linked)


def _data_file(name: str, info: dict[str, Any], argument: str) -> DataFile:
    """Return a file, whose address is spelled as the argument that leads to it. `name` is fsspec's."""
    if not is_local(argument):
        name = f"{split_url(argument)[0]}://{name}"
    elif not local_path(argument).is_absolute():
        name = os.path.relpath(name)
        name = f"./{name}" if name.startswith("~") else name
    kind = FORMATS.get(ending(name), "")
    return DataFile(
        url=name,
        argument=argument,
        format=kind,
        bytes=int(info.get("size") or 0),
        stamp=next((str(info[key]) for key in _STAMPS if info.get(key)), ""),
    )


def _pinned(url: str) -> str:
    """Return the URL of a data set of the Hub with its present commit as the revision."""
    from huggingface_hub import HfApi

    system, path = _filesystem(url)
    if not path.startswith("datasets/"):
        raise InputError(
            f"{url}: is no data set, expected hf://datasets/org/name[@revision][/path]",
            hint="download other files and pass their paths",
        )
    place = system.resolve_path(path)
    commit = HfApi().dataset_info(place.repo_id, revision=place.revision).sha
    return f"hf://datasets/{place.repo_id}@{commit}/{place.path_in_repo}".rstrip("/")


def _check_formats(argument: str, found: list[DataFile]) -> None:
    """Raise InputError unless there are files, of one format, with names that job.json can hold."""
    first = {file.format: file.url for file in reversed(found)}
    if not first:
        hint = "a data set that a script makes: name the Hub's copy, …@refs/convert/parquet/default"
        raise InputError(
            f"{argument}: holds no file of a known format, expected {_EXPECTED}",
            hint=hint if argument.startswith("hf://") else "check the path",
        )
    if len(first) > 1:
        shown = " and ".join(f"{kind} ({url})" for kind, url in sorted(first.items()))
        raise InputError(
            f"{argument}: holds files of several formats, {shown}, expected one",
            hint="name the files of one, as in 'FOLDER/**/*.parquet', or a source for each format",
        )
    for file in found:
        if file.format == "parquet" and packing_of(file.url):
            hint = "unpack it: gunzip FILE, or zstd -d FILE"
            raise InputError(f"{file.url}: can only be read unpacked", hint=hint)
        if file.url.encode(errors="ignore").decode() != file.url:
            raise InputError(f"{file.url!r}: has a name that is not UTF-8", hint="rename the file")


def changed(url: str) -> InputError:
    """Return the error for a file that changed while it was read."""
    return InputError(
        f"{url}: changed while it was being split, expected the file that was counted",
        hint="split a copy that nobody writes to; running the same command again is safe",
    )


def damaged(url: str, what: str) -> InputError:
    """Return the error for a file that is damaged or cut short. `what` is the message of the reader that failed."""
    return InputError(
        f"{url}: wrong, corrupt or truncated ({what.strip().partition(chr(10))[0] or 'ends early'})",
        hint="check the name, or fetch or write the file again, then run the same command",
    )


@contextlib.contextmanager
def opened(url: str) -> Iterator[Any]:
    """Open a file for reading, decompressed if its name ends in .gz or .zst."""
    with reading(url), contextlib.ExitStack() as stack:
        system, path = _filesystem(url)
        raw = stack.enter_context(system.open(path, "rb"))
        file: Any = io.BufferedReader(raw, _BUFFER_BYTES)  # raw lacks some methods of Python's own
        if packing := packing_of(url):
            import pyarrow

            if not file.peek(1):
                raise damaged(url, "")
            unpacked = pyarrow.input_stream(file, compression=packing)
            file = io.BufferedReader(unpacked, _BUFFER_BYTES)
        try:
            yield file
        except OSError as error:
            # pyarrow's error for damage has no errno; those of the system have one, those of clients other classes.
            if type(error) is OSError and error.errno is None:
                raise damaged(url, str(error)) from error
            raise


# --------------------------------------------------------------------------- filesystems and their errors


def is_local(url: str) -> bool:
    """Whether a URL or path is one of this machine."""
    return split_url(url)[0] == "file"


def place_of(url: str) -> str:
    """Return what the same file has in common under all its names; of links to files each is one of its own."""
    if not is_local(url):
        return url
    path = local_path(url)
    return str(Path(os.path.realpath(path.parent), path.name))


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the filesystem of `url`, in fsspec's interface, and the path of `url` in it."""
    import fsspec

    scheme, path = split_url(url)
    if scheme == "file":
        path = str(local_path(url).absolute())
    elif scheme != "hf":
        from batchinfer.storage.bucket_files import BucketFiles

        return BucketFiles(open_store(f"{scheme}://{path.partition('/')[0]}")), path
    return fsspec.filesystem(scheme), path


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Turn errors of filesystems, of the network and of damaged files into ours, with messages that name `url`."""
    try:
        with hub_errors(url) if url.startswith("hf://") else contextlib.nullcontext():
            yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ObjectNotFound) as error:
        hint = "check the spelling; a data set of the Hub is hf://datasets/ORG/NAME"
        raise InputError(f"{url}: no such file, folder or bucket", hint=hint) from error
    except PermissionError as error:
        hint = "check the file's permissions"
        raise AccessDenied(f"{url}: access refused ({error})", hint=hint) from error
    except OSError as error:
        hint = "check the disk or the network, then run the same command again"
        raise StorageError(f"{url}: cannot be read ({error})", hint=hint) from error
    except Exception as error:
        if isinstance(error, UnicodeDecodeError):
            hint = "compressed? Its name says so: .gz, .zst; else: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
            raise InputError(f"{url}: is not UTF-8 ({error})", hint=hint) from error
        if type(error).__module__.startswith("pyarrow"):
            raise damaged(url, str(error)) from error
        raise

"""Finds and opens the files that a SOURCE argument names, with filesystems of fsspec. Errors name the file."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from batchinfer.core import units
from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    ConfigError,
    InputError,
    ObjectNotFound,
    StorageError,
)
from batchinfer.core.records import SourceFile
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import (
    check_url,
    join_url,
    local_path,
    open_store,
    split_url,
)

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

    rows: int = 0
    digest: str = ""
    format: str
    stamp: str
    columns: list[str] = []

    @property
    def described(self) -> SourceFile:
        """The file as job.json describes it."""
        return SourceFile(url=self.url, bytes=self.bytes, rows=self.rows, digest=self.digest)


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


def locate(argument: str) -> tuple[list[DataFile], str]:
    """Find the files of one SOURCE argument: a file, a folder, a glob or a URL. They are sorted by their addresses.

    What is below a name with "." or "_" at its start is left out, unless SOURCE or a pattern's last part names it.

    Returns:
        The files, and the commit if the argument is a data set of the Hub, else "".

    Raises:
        InputError: There is no file, none of a known format, files of several formats, or a link to nothing.
        AccessDenied: Credentials are missing or refused.
        ConfigError: The URL cannot be used, or a package is missing.
    """
    check_url(argument)
    with reading(argument):
        url, revision = _pinned(argument) if argument.startswith("hf://") else (argument, "")
        system, path = _filesystem(join_url(url, ""))
        info = _info(system, path)
        if info is None and not re.search(r"[*?\[]", path):
            raise FileNotFoundError(path)
        is_folder = info is not None and info["type"] == "directory"
        if info is None:
            before, deep, _ = path.partition("**")
            try:
                listed = system.glob(path, detail=True)
            except ValueError as error:
                hint = "as in 'FOLDER/**/*.parquet'"
                raise ConfigError(f"{argument}: {error}", hint=hint) from error
            folders = system.glob(before) if deep else []
        else:
            listed = system.find(path, detail=True) if is_folder else {path: info}
            folders = [path] if is_folder else []
        for folder in folders if is_local(argument) else ():
            _look_into(folder)
        found, hidden = list[DataFile](), list[DataFile]()
        # What a pattern's last part matches counts as named, but as in shells a dot only if it is typed.
        named = "._" if posixpath.basename(path).startswith(".") else "_"
        hiding = r"/[._]" if is_folder else rf"/(?![{named}][^/]*$)[._]"
        for name, described in sorted(listed.items()):
            start = os.path.commonpath([name, path])
            # fsspec calls a link to a local file neither a file nor a folder, so local files are looked up.
            info = _info(system, name) if is_local(argument) else described
            is_hidden = re.search(hiding, name[len(start) :])
            if info and info["type"] == "file":
                (hidden if is_hidden else found).append(_data_file(name, info, argument))
            elif not (info or is_hidden) and ending(name) in FORMATS and Path(name).is_symlink():
                hint = "fetch the file, or remove the link"
                raise InputError(f"{name}: is a link to nothing", hint=hint)
    if left_out := [file.url for file in hidden if file.format]:
        text = "%s: left out %s whose name or folder begins with . or _, %s first"
        logger.info(text, argument, units.many(len(left_out), "file"), left_out[0])
    return _of_one_format(argument, found), revision


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


def _info(system: Any, path: str) -> dict[str, Any] | None:
    """Return fsspec's description of a file or folder; None if there is none."""
    try:
        return cast("dict[str, Any]", system.info(path))
    except FileNotFoundError as error:
        # fsspec raises it if the Hub cannot be reached or refuses, too. Its cause is the real error.
        if isinstance(error.__cause__, FileNotFoundError | None):
            return None
        raise


def _data_file(name: str, info: dict[str, Any], argument: str) -> DataFile:
    """Return a file, whose address is spelled as the argument that leads to it. `name` is fsspec's."""
    if not is_local(argument):
        name = name if "://" in name else f"{split_url(argument)[0]}://{name}"
    elif not local_path(argument).is_absolute():
        name = os.path.relpath(name)
        name = f"./{name}" if name.startswith("~") else name
    stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
    kind = FORMATS.get(ending(name), "")
    return DataFile(url=name, format=kind, bytes=int(info.get("size") or 0), stamp=stamp)


def _pinned(url: str) -> tuple[str, str]:
    """Return the URL of a data set of the Hub with its present commit as the revision, and the commit."""
    from huggingface_hub import HfApi

    system, path = _filesystem(url)
    if not path.startswith("datasets/"):
        raise InputError(
            f"{url}: is no data set, expected hf://datasets/org/name[@revision][/path]",
            hint="download other files and pass their paths",
        )
    place = system.resolve_path(path)
    commit: str = HfApi().dataset_info(place.repo_id, revision=place.revision).sha or ""
    return f"hf://datasets/{place.repo_id}@{commit}/{place.path_in_repo}".rstrip("/"), commit


def _of_one_format(argument: str, found: list[DataFile]) -> list[DataFile]:
    """Return the files that hold the data."""
    known = [file for file in found if file.format]
    chosen = [file for file in known if ending(file.url) not in _NOTES] or known
    if not chosen:
        what = f"{units.many(len(found), 'file')}, none of a known format" if found else "no file"
        hint = "a data set that a script makes: name the Hub's copy, …@refs/convert/parquet/default"
        raise InputError(
            f"{argument}: holds {what}, expected {_EXPECTED}",
            hint=hint if argument.startswith("hf://") else "check the path",
        )
    first = {file.format: file.url for file in reversed(chosen)}
    if len(first) > 1:
        shown = " and ".join(f"{kind} ({url})" for kind, url in sorted(first.items()))
        raise InputError(
            f"{argument}: holds files of several formats, {shown}, expected one",
            hint="name the files of one, as in 'FOLDER/**/*.parquet', or a source for each format",
        )
    for file in chosen:
        if file.url.encode(errors="ignore").decode() != file.url:
            raise InputError(f"{file.url!r}: has a name that is not UTF-8", hint="rename the file")
    places = {file.url for file in chosen}
    if left_out := [file.url for file in found if file.url not in places]:
        what = units.many(len(left_out), "other file")
        logger.info("%s: left out %s, %s first", argument, what, left_out[0])
    return chosen


def changed(url: str) -> InputError:
    """Return the error for a file that changed while it was read."""
    return InputError(
        f"{url}: changed while it was being split, expected the file that was counted",
        hint="split a copy that nobody writes to; running the same command again is safe",
    )


def damaged(url: str, what: str) -> InputError:
    """Return the error for a file that is damaged or cut short. `what` is the message of the reader that failed."""
    return InputError(
        f"{url}: corrupt or truncated ({what.strip().partition(chr(10))[0] or 'ends early'})",
        hint="fetch or write the file again, then run the same command",
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
    is_hub = url.startswith("hf://")
    way_round = (
        "where there is a network, `hf download --repo-type dataset ORG/NAME --local-dir data`"
    )
    try:
        with hub_errors(url, otherwise=way_round) if is_hub else contextlib.nullcontext():
            yield
    except ObjectNotFound as error:
        raise InputError(f"{url}: no such file", hint="check the spelling") from error
    except Exception as error:
        if translated := _translated(url, error):
            raise translated from error
        raise


def _translated(url: str, error: Exception) -> BatchinferError | None:
    """Return our error for one of a filesystem or a parser; None for any other."""
    package = type(error).__module__.partition(".")[0]
    if package == "pyarrow" or isinstance(error, UnicodeDecodeError):  # of names of columns
        return damaged(url, str(error))
    if isinstance(error, PermissionError):
        return AccessDenied(f"{url}: access refused ({error})", hint="check the file's permissions")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        hint = "check the spelling"
        if re.fullmatch(r"[\w-]+/[\w-]+", url):
            hint += f"; a data set of the Hub is hf://datasets/{url}"
        return InputError(f"{url}: no such file, folder or bucket", hint=hint)
    if isinstance(error, io.UnsupportedOperation) and packing_of(url):  # of parquet, to seek
        hint = f"unpack it: {'gunzip' if packing_of(url) == 'gzip' else 'zstd -d'} FILE"
        return InputError(f"{url}: can only be read unpacked", hint=hint)
    if isinstance(error, OSError):
        hint = "check the disk or the network, then run the same command again"
        return StorageError(f"{url}: cannot be read ({error})", hint=hint)
    return None

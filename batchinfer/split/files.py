"""Finds and opens the files that a SOURCE argument names, on any filesystem that fsspec knows. Errors name the file."""

from __future__ import annotations

import contextlib
import gzip
import io
import logging
import os
import posixpath
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from batchinfer.core import units
from batchinfer.core.codec import ZstdFile
from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    ConfigError,
    InputError,
    ObjectNotFound,
    StorageError,
)
from batchinfer.core.records import Record
from batchinfer.core.redaction import redact
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import (
    BUCKET_SCHEMES,
    check_url,
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
_NOTES = (".json", ".txt")
"""Ends of files that describe the data if other files lie beside them."""
_EXPECTED = f"names that end in {', '.join(FORMATS)} (but for parquet also .gz, .zst)"
_STAMPS = ("ETag", "etag", "blob_id", "generation", "mtime", "LastModified", "updated")
"""Keys in fsspec's descriptions of files whose values change with the file's bytes, the most reliable first."""
_GLOB = re.compile(r"[*?\[]")
_BUFFER_BYTES = 1 << 20


class FoundFile(Record, frozen=True, kw_only=True):
    """A file, and a stamp by which a change is noticed: its size with an etag, a blob id or a time."""

    url: str
    format: str
    bytes: int
    stamp: str


def ending(url: str) -> str:
    """Return the end of a file's name that tells its format.

    >>> ending("s3://b/Rows.JSONL.gz"), ending("https://host/a.csv?token=b"), ending("rows")
    ('.jsonl', '.csv', '')
    """
    if url.startswith(("http://", "https://")):
        url = url.partition("?")[0]
    return posixpath.splitext(url.lower().removesuffix(".gz").removesuffix(".zst"))[1]


def locate(argument: str) -> tuple[list[FoundFile], str]:
    """Find the files of one SOURCE argument: a file, a folder, a glob or a URL. They are sorted by their addresses.

    Returns:
        The files, and the commit if the argument is a data set of the Hub, else "".

    Raises:
        InputError: There is no file, no file of a known format, or files of several formats.
        AccessDenied: Credentials are missing or refused.
        ConfigError: The URL cannot be used, or a package is missing.
    """
    check_url(argument)
    with reading(argument):
        url, revision = _pinned(argument) if argument.startswith("hf://") else (argument, "")
        url = str(local_path(url)) if _is_local(url) else url.rstrip("/")
        system, path = _filesystem(url)
        info = _info(system, path, url)
        if info is None and _GLOB.search(path):
            found = _listed(system.glob(path, detail=True), *_before_glob(url, path))
        elif info is None:
            raise FileNotFoundError(path)
        elif info["type"] == "directory":
            found = _listed(system.find(path, detail=True), url, path)
        else:
            found = [_found_file(url, info)]
    return _of_one_format(argument, found), revision


def _info(system: Any, path: str, url: str) -> dict[str, Any] | None:
    """Return fsspec's description of a file or folder, of a local link its target's; None if there is none."""
    try:
        if not _is_local(url):
            return cast("dict[str, Any]", system.info(path))
        state = os.stat(path)  # noqa: PTH116 - a path from fsspec
    except FileNotFoundError as error:
        # fsspec raises it for a web server that cannot be reached or refuses, too. Its cause is the real error.
        if isinstance(error.__cause__, FileNotFoundError | None):
            return None
        raise
    kind = "directory" if stat.S_ISDIR(state.st_mode) else "file"
    return {"type": kind, "size": state.st_size, "mtime": f"{state.st_mtime_ns} {state.st_ino}"}


def _found_file(url: str, info: dict[str, Any]) -> FoundFile:
    stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
    kind = FORMATS.get(ending(url), "")
    return FoundFile(url=url, format=kind, bytes=int(info.get("size") or 0), stamp=stamp)


def _pinned(url: str) -> tuple[str, str]:
    """Return the URL of a data set of the Hub with its present commit as the revision, and the commit."""
    from huggingface_hub import HfApi

    system, path = _filesystem(url)
    place = system.resolve_path(path)
    if place.repo_type != "dataset":
        raise InputError(
            f"{url}: is no data set, expected hf://datasets/org/name[@revision][/path]",
            hint="download other files and pass their paths",
        )
    commit: str = HfApi().dataset_info(place.repo_id, revision=place.revision).sha or ""
    return f"hf://datasets/{place.repo_id}@{commit}/{place.path_in_repo}".rstrip("/"), commit


def _before_glob(url: str, path: str) -> tuple[str, str]:
    """Return the folders of a pattern before the first one with a glob character."""
    return cast(
        "tuple[str, str]", tuple(_GLOB.split(each)[0].rpartition("/")[0] for each in (url, path))
    )


def _listed(infos: dict[str, dict[str, Any]], url: str, path: str) -> list[FoundFile]:
    """Return the files of a listing. What is below a name with "." or "_" at its start is left out.

    `url` is the address, as the user spells it, of the folder that is `path` in the filesystem.
    """
    found = []
    for name, listed in sorted(infos.items()):
        below = name.removeprefix(path).strip("/")
        if re.search(r"(^|/)[._]", below):
            continue
        # fsspec calls a link to a local file neither a file nor a folder, so local files are looked up.
        info = _info(None, name, url) if _is_local(url) else listed
        if info is not None and info["type"] == "file":
            found.append(_found_file(f"{url.rstrip('/')}/{below}" if url else below, info))
    return found


def _of_one_format(argument: str, found: list[FoundFile]) -> list[FoundFile]:
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
    if left_out := [redact(file.url) for file in found if file not in set(chosen)]:
        what = units.many(len(left_out), "other file")
        logger.info("%s: left out %s, %s first", redact(argument), what, left_out[0])
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
def opened(url: str) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if its name ends in .gz or .zst."""
    with reading(url):
        system, path = _filesystem(url)
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(
                Path(path).open("rb") if _is_local(url) else system.open(path, "rb")  # noqa: SIM115
            )
            if url.lower().endswith(".gz"):
                yield cast("BinaryIO", stack.enter_context(gzip.open(raw, "rb")))
            elif url.lower().endswith(".zst"):
                yield cast("BinaryIO", io.BufferedReader(ZstdFile(raw), _BUFFER_BYTES))
            else:  # fsspec's files lack some methods of Python's own
                is_local = _is_local(url)
                yield raw if is_local else cast("BinaryIO", io.BufferedReader(raw, _BUFFER_BYTES))


# --------------------------------------------------------------------------- filesystems and their errors


def _is_local(url: str) -> bool:
    return split_url(url)[0] == "file"


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the filesystem of `url`, in fsspec's interface, and the path of `url` in it."""
    import fsspec

    scheme, path = split_url(url)
    if scheme in BUCKET_SCHEMES:
        from batchinfer.storage.bucket_files import BucketFiles

        return BucketFiles(open_store(f"{scheme}://{path.partition('/')[0]}")), path
    url = str(local_path(url).absolute()) if scheme == "file" else url
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{url}: no filesystem for {scheme}:// can be used here ({error})",
            hint="use a path, s3://, gs://, az:// or hf://",
        ) from error


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Turn errors of filesystems, of the network and of damaged files into ours, with messages that name `url`."""
    is_web = url.startswith(("hf://", "http://", "https://"))
    way_round = (
        "where there is a network, `hf download --repo-type dataset ORG/NAME --local-dir data`"
    )
    try:
        with hub_errors(url, otherwise=way_round) if is_web else contextlib.nullcontext():
            yield
    except ObjectNotFound as error:
        raise InputError(f"{url}: no such file", hint="check the spelling") from error
    except BatchinferError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise damaged(url, str(error)) from error
    except Exception as error:
        translated = _translated(url, error)
        if translated is None:
            raise
        raise translated from error


def _translated(url: str, error: Exception) -> BatchinferError | None:
    """Return our error for one of a filesystem or a parser; None for any other."""
    package = type(error).__module__.partition(".")[0]
    if isinstance(error, PermissionError):
        hint = "check the file's permissions"
        return AccessDenied(f"{url}: access refused ({error})", hint=hint)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        hint = "check the spelling"
        return InputError(f"{url}: no such file, folder or bucket", hint=hint)
    # pyarrow reports damaged pages as an OSError without errno; errors of the system always have one.
    is_damage = type(error) is OSError and error.errno is None and _is_local(url)
    if package in ("pyarrow", "zstandard", "_csv") or is_damage:
        return damaged(url, str(error))
    if isinstance(error, OSError):
        hint = "check the disk or the network, then run the same command again"
        return StorageError(f"{url}: cannot be read ({error})", hint=hint)
    return None

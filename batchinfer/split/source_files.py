"""Files on any filesystem, read-only: local ones by the system, the rest through fsspec; errors become ours here."""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import inspect
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import quote, unquote

from batchinfer.core.codec import ZstdFile
from batchinfer.core.errors import (
    AccessDenied,
    BatchinferError,
    InputError,
    ObjectNotFound,
    StorageError,
)
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import fsspec_options, open_store

MAGIC_PARQUET = b"PAR1"
_READ_AHEAD_BYTES = 4 << 20
_STAMP_KEYS = ("ETag", "etag", "blob_id", "generation", "mtime", "LastModified", "updated")
_REFUSED_STATUS = (401, 403)
CONVERTED = "refs/convert/parquet"
"""The branch where the Hub keeps a data set's conversion to parquet, as <config>/<split>/<number>.parquet."""

_URL = re.compile(
    r"^hf://datasets/(?P<repo>[^/@]+(?:/[^/@]+)?)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?$"
)


class FoundFile(NamedTuple):
    """One file: its address, its size, and a stamp that changes with its bytes (etag, blob id or times)."""

    url: str
    bytes: int
    stamp: str


def is_local(url: str) -> bool:
    """A plain path or a file:// URL."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path that a local URL names."""
    return Path(url.removeprefix("file://")).expanduser()


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's filesystem for `url` and the path of `url` in it. Never lists from a cache.

    Raises:
        InputError: The URL's scheme is unknown or needs a package that is not installed.
        ConfigError: It is r2:// and no endpoint is configured.
    """
    if is_local(url):
        return LocalFiles(), os.path.abspath(local_path(url))  # noqa: PTH100 - resolve() follows links
    scheme, _, rest = url.partition("://")
    if scheme == "r2":
        _check_r2(rest.partition("/")[0])
        scheme, url = "s3", f"s3://{rest}"
    filesystem = _filesystem(scheme)
    return filesystem, filesystem._strip_protocol(url)  # noqa: SLF001 - fsspec's documented way


@functools.cache
def _check_r2(bucket: str) -> None:
    """Raise ConfigError if requests would go to AWS. Sends nothing."""
    open_store(f"r2://{bucket}")


class LocalFiles:
    """The three questions we ask of fsspec's filesystems, answered by the system: fsspec takes its time to load."""

    def info(self, path: str) -> dict[str, Any]:
        """See fsspec. Raises FileNotFoundError."""
        found = Path(path).stat()
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "file"
        return {
            "type": kind,
            "size": found.st_size,
            "mtime": found.st_mtime_ns,
            "ino": found.st_ino,
        }

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        """See fsspec. Follows links to files, not to folders."""
        assert detail
        return {
            name: self.info(name)
            for folder, _, names in os.walk(path, onerror=_raise)
            for name in (f"{folder.rstrip('/')}/{name}" for name in names)
            if Path(name).exists()
        }

    def glob(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        """See fsspec."""
        assert detail
        return {
            name: self.info(name)
            for name in glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        }


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@functools.cache
def _filesystem(scheme: str) -> Any:
    import fsspec

    options = fsspec_options(scheme)
    try:
        # One that cannot do without an argument (ftp:// wants a host) would fail half made, with noise at its end.
        inspect.signature(fsspec.get_filesystem_class(scheme).__init__).bind(None, **options)
        return fsspec.filesystem(scheme, **options)
    except (ImportError, TypeError, ValueError) as error:
        raise InputError(
            f"{scheme}://: no filesystem of this name can be used here ({error})",
            hint="plain paths, s3://, gs:// (pip install 'gcsfs>=2025.7') and hf:// work",
        ) from error


def address(url: str, path: str) -> str:
    """URL of a path that the filesystem of `url` listed, in the manner of `url`."""
    if is_local(url):
        return path
    return f"{url.partition('://')[0]}://{path.lstrip('/')}"


def make_found_file(url: str, info: dict[str, Any]) -> FoundFile:
    """Read size and stamp out of what fsspec tells about a file."""
    stamp = next((f"{key}={info[key]}" for key in _STAMP_KEYS if info.get(key)), "")
    return FoundFile(
        url, int(info.get("size") or 0), f"{info.get('size')} {stamp} {info.get('ino', '')}"
    )


def look_up(url: str) -> FoundFile:
    """Ask for a file's present size and stamp. Raises InputError if it is gone."""
    with reading(url):
        filesystem, path = open_filesystem(url)
        return make_found_file(url, filesystem.info(path))


def check_unchanged(found: FoundFile) -> None:
    """Raise InputError if the file is no longer what it was when it was counted."""
    now = look_up(found.url)
    if now != found:
        raise changed(found.url)


def changed(url: str) -> InputError:
    """The error for a source that moves while it is being read."""
    return InputError(
        f"{url}: changed while it was being split, expected the file that was counted",
        hint="split a copy that nobody writes to; running the same command again is safe",
    )


def open_binary(found: FoundFile) -> BinaryIO:
    """Open a file for reading, in bounded memory wherever it lies."""
    if is_local(found.url):
        return local_path(found.url).open("rb")
    filesystem, path = open_filesystem(found.url)
    return cast("BinaryIO", filesystem.open(path, "rb", block_size=_READ_AHEAD_BYTES))


@contextlib.contextmanager
def open_stream(found: FoundFile, offset: int = 0) -> Iterator[BinaryIO]:
    """Open a file for reading forward, decompressed by its name (.gz, .zst).

    Args:
        found: The file.
        offset: Byte to start at; must be 0 for a compressed file.
    """
    with reading(found.url), open_binary(found) as raw:
        name = found.url.lower()
        if name.endswith(".gz"):
            with gzip.open(raw, "rb") as stream:
                yield cast("BinaryIO", stream)
        elif name.endswith((".zst", ".zstd")):
            with io.BufferedReader(ZstdFile(raw), 1 << 20) as stream:
                yield cast("BinaryIO", stream)
        else:
            if offset:
                raw.seek(offset)
            if is_local(found.url):
                yield raw
            else:  # fsspec's files lack some of a file's methods
                with io.BufferedReader(cast("io.RawIOBase", raw), 1 << 20) as stream:
                    yield cast("BinaryIO", stream)


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Turn whatever fails while `url` is listed or read into one of our errors, which names it."""
    is_web = url.startswith(("hf://", "http://", "https://"))
    try:
        with (
            hub_errors(url, otherwise=_way_round(url)) if is_web else contextlib.nullcontext(),
            _damage(url),
        ):
            yield
    except ObjectNotFound as error:
        raise InputError(f"{url}: no such file", hint="check the spelling") from error
    except BatchinferError:
        raise
    except _outside_errors() as error:
        raise _translate(url, error) from error


def _way_round(url: str) -> str:
    """What else to do where the Hub cannot be asked."""
    match = _URL.match(url)
    if match is None:
        return ""
    return (
        f"where there is a network, `hf download --repo-type dataset {match['repo']} --local-dir data`, "
        "and split that folder"
    )


@contextlib.contextmanager
def _damage(url: str) -> Iterator[None]:
    """Turn what decompressing and parsing raise into an InputError."""
    kinds: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    for module, name in (("pyarrow", "ArrowException"), ("zstandard", "ZstdError")):
        if module in sys.modules:  # a package that was not loaded has raised nothing
            kinds.append(getattr(sys.modules[module], name))
    try:
        yield
    except tuple(kinds) as error:
        raise damaged(url, str(error)) from error
    except OSError as error:
        # pyarrow reports damaged pages as an OSError without a number, the system always sets one.
        if type(error) is OSError and error.errno is None and is_local(url):
            raise damaged(url, str(error)) from error
        raise


def _outside_errors() -> tuple[type[Exception], ...]:
    """What adapters raise. Packages that were not loaded cannot have raised anything."""
    kinds: list[type[Exception]] = [OSError]
    for module, name in (
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
        ("aiohttp", "ClientError"),
        ("requests", "RequestException"),
        ("gcsfs.retry", "HttpError"),
    ):
        if module in sys.modules and hasattr(sys.modules[module], name):
            kinds.append(getattr(sys.modules[module], name))
    return tuple(kinds)


def _translate(url: str, error: Exception) -> BatchinferError:
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    is_refusal = isinstance(error, PermissionError) or status in _REFUSED_STATUS
    if is_refusal or names & {"NoCredentialsError", "PartialCredentialsError"}:
        return _access_denied(url, error)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return InputError(f"{url}: no such file, folder or bucket", hint="check the spelling")
    if isinstance(error, IsADirectoryError):
        return InputError(f"{url}: is a folder, expected a file", hint="name the files in it")
    return StorageError(f"{url}: cannot be read ({error})", hint="run the same command again")


def damaged(url: str, what: str) -> InputError:
    """The error for a file that is not what its name says, or was cut short."""
    return InputError(
        f"{url}: corrupt or truncated ({what.strip().splitlines()[0] if what.strip() else 'ends early'})",
        hint="fetch or write the file again, then run the same command",
    )


def _access_denied(url: str, error: Exception) -> AccessDenied:
    hints = {
        "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for R2 and others AWS_ENDPOINT_URL too",
        "gs": "run `gcloud auth application-default login` or set GOOGLE_APPLICATION_CREDENTIALS",
    }
    return AccessDenied(
        f"{url}: access refused ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})",
        hint=hints.get(url.partition("://")[0].replace("r2", "s3"), "check the file's permissions"),
    )


# --------------------------------------------------------------------------- the Hub


class HubDataset(NamedTuple):
    """An hf:// address. `revision` is a branch, tag or commit ("": the main branch)."""

    repo: str
    revision: str
    path: str

    @property
    def is_converted(self) -> bool:
        """The address asks for the Hub's conversion itself."""
        return self.revision == CONVERTED

    def at(self, commit: str) -> str:
        """The same address at one commit."""
        return f"hf://datasets/{self.repo}@{quote(commit, safe='')}/{self.path}".rstrip("/")


def parse_hub_url(url: str) -> HubDataset:
    """Split hf://datasets/org/name[@revision][/path]; a revision with a slash is quoted (%2F), save refs/….

    Raises:
        InputError: The URL is none of these.
    """
    match = _URL.match(url)
    if match is None:
        raise InputError(
            f"{url}: not an address of a data set, expected hf://datasets/org/name[@revision][/path]",
            hint="models and spaces hold no data sets; download other files and pass their paths",
        )
    return HubDataset(
        match["repo"], unquote(match["revision"] or ""), (match["path"] or "").strip("/")
    )


def resolve_commit(dataset: HubDataset) -> str:
    """Ask the Hub which commit the revision is now. One request."""
    from huggingface_hub import HfApi

    commit: str | None = HfApi().dataset_info(dataset.repo, revision=dataset.revision or None).sha
    if not commit:
        raise InputError(f"{dataset.repo}: the Hub names no commit", hint="name one after @")
    return commit


def converted_commit(dataset: HubDataset) -> str:
    """The commit of the Hub's conversion to parquet, or "" where there is none."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return resolve_commit(dataset._replace(revision=CONVERTED))
    except RevisionNotFoundError:
        return ""


def check_one_config(argument: str, paths: list[str]) -> None:
    """Refuse a converted data set with several configurations, whose rows often repeat each other.

    Args:
        argument: For the message.
        paths: Files relative to the data set's root.
    """
    converted = [
        path.split("/") for path in paths if re.search(r"/[^/]*/\d{4,}\.parquet$", f"/{path}")
    ]
    configs = sorted({parts[0] for parts in converted if len(parts) == 3})
    if len(configs) > 1:
        raise InputError(
            f"{argument}: has {len(configs)} configurations ({', '.join(configs[:10])}), expected one",
            hint=f"choose one by its folder: hf://datasets/…@{CONVERTED}/{configs[0]}",
        )

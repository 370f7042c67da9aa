"""Looks up and opens source files on any filesystem, and checks that they have not changed. Errors name the file."""

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
from batchinfer.storage.opening import fsspec_options, local_path, open_store, split_url

MAGIC_PARQUET = b"PAR1"
_READ_AHEAD_BYTES = 4 << 20
_CHECKSUM_BLOCK_BYTES = 1 << 20
_STAMP_KEYS = ("ETag", "etag", "blob_id", "generation", "mtime", "LastModified", "updated")
"""Keys in fsspec's descriptions of files whose values change with the file's bytes, the most reliable first."""
_REFUSED_STATUS = (401, 403)
CONVERTED = "refs/convert/parquet"
"""The branch where the Hub keeps a data set's conversion to parquet, as <config>/<split>/<number>.parquet."""

_URL = re.compile(
    r"^hf://datasets/(?P<repo>[^/@]+(?:/[^/@]+)?)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?$"
)


class FoundFile(NamedTuple):
    """A file: its address, its size in bytes, and a stamp by which a change is noticed (etag, blob id or time)."""

    url: str
    bytes: int
    stamp: str


def crc32_of(found: FoundFile) -> str:
    """Return the CRC-32 of a local file's bytes, 8 hexadecimal digits. It is read as a whole."""
    value = 0
    with reading(found.url), open_binary(found) as file:
        while block := file.read(_CHECKSUM_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def is_local(url: str) -> bool:
    """Return whether the URL is a plain path or begins with file://."""
    return split_url(url)[0] == "file"


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the filesystem of `url`, in fsspec's interface, and the path of `url` in it.

    Only listings of the Hub are cached: its paths name a commit here, whose files never change.

    Raises:
        InputError: The URL's scheme is unknown or needs a package that is not installed.
        ConfigError: The URL begins with r2:// and no endpoint is configured.
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
    """Raise ConfigError if no endpoint is configured for R2: requests would go to AWS. Sends no request."""
    open_store(f"r2://{bucket}")


class LocalFiles:
    """A filesystem of local files, with the three methods of fsspec's interface that we call.

    fsspec's own class does not fit: it lists a link to a file as neither file nor folder, so a folder of the Hub's
    cache, which holds only links, would look empty. Importing it also costs a tenth of a second of CPU, a third of a
    small split.
    """

    def info(self, path: str) -> dict[str, Any]:
        """Describe a file or folder; of a link, its target. Raises FileNotFoundError if there is none."""
        found = Path(path).stat()
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "file"
        return {
            "type": kind,
            "size": found.st_size,
            "mtime": found.st_mtime_ns,
            "ino": found.st_ino,
        }

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        """Describe the files below a folder. Links to files are followed; links to folders and to nothing are not."""
        assert detail
        return {
            name: self.info(name)
            for folder, _, names in os.walk(path, onerror=_raise)
            for name in (f"{folder.rstrip('/')}/{name}" for name in names)
            if Path(name).exists()
        }

    def glob(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        """Describe the files and folders that match a pattern. Links to nothing are left out, as in `find`."""
        assert detail
        return {
            name: self.info(name)
            for name in glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
            if Path(name).exists()
        }


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@functools.cache
def _filesystem(scheme: str) -> Any:
    import fsspec

    options = fsspec_options(scheme)
    try:
        # Some filesystems need more arguments: ftp:// needs a host. Their constructors would fail, and their
        # destructors would then print a traceback. So the constructor's signature is checked first.
        inspect.signature(fsspec.get_filesystem_class(scheme).__init__).bind(None, **options)
        return fsspec.filesystem(scheme, **options)
    except (ImportError, TypeError, ValueError) as error:
        raise InputError(
            f"{scheme}://: no filesystem of this name can be used here ({error})",
            hint="plain paths, s3://, gs:// (pip install 'gcsfs>=2025.7') and hf:// work",
        ) from error


def address(url: str, path: str) -> str:
    """Return the URL of a path that the filesystem of `url` has listed; for a local `url` the path itself."""
    if is_local(url):
        return path
    return f"{url.partition('://')[0]}://{path.lstrip('/')}"


def make_found_file(url: str, info: dict[str, Any]) -> FoundFile:
    """Make a `FoundFile` from fsspec's description of a file."""
    stamp = next((f"{key}={info[key]}" for key in _STAMP_KEYS if info.get(key)), "")
    return FoundFile(
        url, int(info.get("size") or 0), f"{info.get('size')} {stamp} {info.get('ino', '')}"
    )


def look_up(url: str) -> FoundFile:
    """Return a file's present size and stamp. Raises InputError if the file is gone."""
    with reading(url):
        filesystem, path = open_filesystem(url)
        return make_found_file(url, filesystem.info(path))


def check_unchanged(found: FoundFile) -> None:
    """Raise InputError if the file's size or stamp differs from when it was counted."""
    now = look_up(found.url)
    if now != found:
        raise changed(found.url)


def changed(url: str) -> InputError:
    """Return the error for a source file that changed while it was being split."""
    return InputError(
        f"{url}: changed while it was being split, expected the file that was counted",
        hint="split a copy that nobody writes to; running the same command again is safe",
    )


def open_binary(found: FoundFile) -> BinaryIO:
    """Open a file for reading. A remote file is read ahead by a few MiB, not downloaded first."""
    if is_local(found.url):
        return local_path(found.url).open("rb")
    filesystem, path = open_filesystem(found.url)
    return cast("BinaryIO", filesystem.open(path, "rb", block_size=_READ_AHEAD_BYTES))


@contextlib.contextmanager
def open_stream(found: FoundFile, offset: int = 0) -> Iterator[BinaryIO]:
    """Open a file for reading from start to end, decompressed if its name ends in .gz, .zst or .zstd.

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
            else:  # fsspec's file objects lack some methods of Python's own, such as readlines with a size
                with io.BufferedReader(cast("io.RawIOBase", raw), 1 << 20) as stream:
                    yield cast("BinaryIO", stream)


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Turn errors of filesystems, of the network and of damaged files into ours, with messages that name `url`."""
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
    """Return a hint for a user who cannot reach the Hub; "" if the URL is not a data set of the Hub."""
    match = _URL.match(url)
    if match is None:
        return ""
    return (
        f"where there is a network, `hf download --repo-type dataset {match['repo']} --local-dir data`, "
        "and split that folder"
    )


@contextlib.contextmanager
def _damage(url: str) -> Iterator[None]:
    """Turn the errors that decompressors and parsers raise on a damaged file into an InputError."""
    kinds: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    for module, name in (("pyarrow", "ArrowException"), ("zstandard", "ZstdError")):
        if module in sys.modules:  # a package that was not imported cannot have raised anything
            kinds.append(getattr(sys.modules[module], name))
    try:
        yield
    except tuple(kinds) as error:
        raise damaged(url, str(error)) from error
    except OSError as error:
        # pyarrow reports damaged pages as an OSError without errno; errors of the system always have an errno.
        if type(error) is OSError and error.errno is None and is_local(url):
            raise damaged(url, str(error)) from error
        raise


def _outside_errors() -> tuple[type[Exception], ...]:
    """Return the errors that fsspec's filesystems raise. A package that was not imported cannot have raised any."""
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
    what = "disk" if is_local(url) else "network"
    hint = f"check the {what}, then run the same command again"
    return StorageError(f"{url}: cannot be read ({error})", hint=hint)


def damaged(url: str, what: str) -> InputError:
    """Return the error for a file that is corrupt or cut short. `what` is the message of the reader that failed."""
    return InputError(
        f"{url}: corrupt or truncated ({what.strip().splitlines()[0] if what.strip() else 'ends early'})",
        hint="fetch or write the file again, then run the same command",
    )


def _access_denied(url: str, error: Exception) -> AccessDenied:
    hints = {
        "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for R2 and others AWS_ENDPOINT_URL too",
        "gs": "run `gcloud auth application-default login` or set GOOGLE_APPLICATION_CREDENTIALS",
        "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    }
    return AccessDenied(
        f"{url}: access refused ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})",
        hint=hints.get(url.partition("://")[0].replace("r2", "s3"), "check the file's permissions"),
    )


# --------------------------------------------------------------------------- the Hub


class HubDataset(NamedTuple):
    """The parts of an hf:// address. `revision` is a branch, tag or commit; "" stands for the main branch."""

    repo: str
    revision: str
    path: str

    @property
    def is_converted(self) -> bool:
        """Whether the address names the branch of the Hub's conversion to parquet."""
        return self.revision == CONVERTED

    def at(self, commit: str) -> str:
        """Return the same address with `commit` as its revision."""
        return f"hf://datasets/{self.repo}@{quote(commit, safe='')}/{self.path}".rstrip("/")


def parse_hub_url(url: str) -> HubDataset:
    """Split hf://datasets/org/name[@revision][/path]. A slash in a revision is written %2F.

    Only refs/convert/… and refs/pr/… keep theirs.

    Raises:
        InputError: The URL does not have this form.
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
    """Ask the Hub, in one request, which commit the revision stands for now."""
    from huggingface_hub import HfApi

    commit: str | None = HfApi().dataset_info(dataset.repo, revision=dataset.revision or None).sha
    if not commit:
        raise InputError(f"{dataset.repo}: the Hub names no commit", hint="name one after @")
    return commit


def converted_commit(dataset: HubDataset) -> str:
    """Return the commit of the Hub's conversion to parquet, or "" if the data set has none."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return resolve_commit(dataset._replace(revision=CONVERTED))
    except RevisionNotFoundError:
        return ""


def check_one_config(argument: str, paths: list[str]) -> None:
    """Raise InputError if a converted data set has several configurations, because these often hold the same rows.

    Args:
        argument: The SOURCE argument, for the message.
        paths: Paths of its files, relative to the data set's root.
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

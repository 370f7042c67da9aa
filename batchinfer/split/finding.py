"""Finds the files that a SOURCE argument names: a file, a folder, a glob, or a data set of the Hub, local or remote.

Files are sorted by their address as text, so the same files give the same rows in the same order.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import click

from batchinfer.core import units
from batchinfer.core.errors import InputError
from batchinfer.core.redaction import redact
from batchinfer.split import first_bytes, source_files
from batchinfer.split.source_files import FoundFile
from batchinfer.storage.opening import check_url, local_path

logger = logging.getLogger(__name__)

_FORMATS = (
    ("parquet", (".parquet", ".pq")),
    ("jsonl", (".jsonl", ".ndjson")),
    ("csv", (".csv", ".tsv")),
    ("jsonl", (".json",)),
)
"""Formats and their file endings, in order of preference. In a folder, the first format that any file has is read.
If the folder also holds files of another format, it is refused; but .json files are left out with a
warning, because they often describe the data."""
_COMPRESSED = re.compile(r"\.(gz|zst|zstd)$")
_GLOB = re.compile(r"[*?\[]")
_LOGGED = "batchinfer.split.finding.logged"
"""Key of the texts that a command has logged by `_log_once`, in `click.Context.meta`."""


class LocatedSource(NamedTuple):
    """The files of one SOURCE argument.

    `revision` is the commit if the source is a data set of the Hub, else "". `base` is the folder that the argument
    names, or whose subfolders its pattern searches, else "".
    """

    url: str
    revision: str
    format: str
    files: list[FoundFile]
    base: str


def locate(argument: str) -> LocatedSource:
    """Find the files of one SOURCE argument. If a file's name does not tell its format, 64 bytes of it are read.

    Raises:
        InputError: There is no file, no file of a known format, or a mixture of formats.
        AccessDenied: Credentials are missing or refused.
        ConfigError: The argument is a URL that lacks a slash, or has a secret in it.
    """
    check_url(argument)
    if argument.startswith("hf://"):
        return _locate_on_hub(argument)
    url = argument if "://" in argument else str(local_path(argument))
    with source_files.reading(argument):
        kind, files, base = _list(url)
    return LocatedSource(argument, "", kind, files, base)


def find_text_files(argument: str) -> list[FoundFile]:
    """Return the .txt files that an argument names: a path, a URL or a glob. Empty if its name does not end in .txt.

    Raises:
        InputError: There is no such file.
    """
    if not _endings(argument).endswith(".txt"):
        return []
    check_url(argument)
    url = argument if "://" in argument else str(local_path(argument))
    with source_files.reading(argument):
        filesystem, path = source_files.open_filesystem(url)
        info = _info(filesystem, path)
        if info is not None and info["type"] != "file":
            return []
        if info is not None:
            return [source_files.make_found_file(url, info)]
        files = _founds(url, filesystem.glob(path, detail=True), path) if _GLOB.search(path) else []
        if not files:
            raise FileNotFoundError(path)
    return files


def _locate_on_hub(argument: str) -> LocatedSource:
    with source_files.reading(argument):
        dataset = source_files.parse_hub_url(argument)
        commit = source_files.resolve_commit(dataset)
        url = dataset.at(commit)
        if dataset.path:
            kind, files, base = _list(url)
            return LocatedSource(argument, commit, kind, files, base)
        found = _find(url)
        if (
            not _of_formats(found, 0)
            and not dataset.is_converted
            and (converted := source_files.converted_commit(dataset))
        ):
            logger.info("%s: holds no parquet, taking the Hub's own conversion", argument)
            commit, url = converted, dataset.at(converted)
            found = _find(url)
        source_files.check_one_config(
            argument, [file.url.removeprefix(url).strip("/") for file in found]
        )
        kind, files = _choose(argument, found)
    return LocatedSource(argument, commit, kind, files, url)


def _list(url: str) -> tuple[str, list[FoundFile], str]:
    """Return (format, files, base folder) of a file, folder or glob."""
    filesystem, path = source_files.open_filesystem(url)
    info = _info(filesystem, path)
    if info is not None and info["type"] == "file":
        return _format_of(url), [source_files.make_found_file(url, info)], ""
    if info is None and _GLOB.search(path):
        matches: dict[str, dict[str, Any]] = filesystem.glob(path, detail=True)
        files = _founds(url, matches, path)
        if not files:
            raise InputError(
                f"{url}: matches no file",
                hint="check the spelling of the folder and of the pattern"
                if source_files.is_local(url)
                else "check the spelling of the bucket, of the folder and of the pattern",
            )
        base = _GLOB.split(path, maxsplit=1)[0].rpartition("/")[0] if "**" in path else ""
        kind, chosen = _choose(url, files, is_whole=True)
        return kind, chosen, source_files.address(url, base) if base else ""
    kind, chosen = _choose(url, _find(url))
    return kind, chosen, url


def _info(filesystem: Any, path: str) -> dict[str, Any] | None:
    try:
        info: dict[str, Any] = filesystem.info(path)
    except FileNotFoundError as error:
        # fsspec raises it for a web server that cannot be reached or refuses, too. Its cause is the real error.
        is_web = path.startswith(("http://", "https://"))
        if is_web and not isinstance(error.__cause__, FileNotFoundError | None):
            raise
        return None
    return info


def _find(url: str) -> list[FoundFile]:
    filesystem, path = source_files.open_filesystem(url)
    matches: dict[str, dict[str, Any]] = filesystem.find(path, detail=True)
    if not matches and _info(filesystem, path) is None:
        raise FileNotFoundError(path)
    return _founds(url, matches, path)


def _founds(url: str, matches: dict[str, dict[str, Any]], path: str) -> list[FoundFile]:
    """Return the files sorted by address. Leaves out files and folders whose names begin with "." or "_" (_SUCCESS)."""
    base = _GLOB.split(path, maxsplit=1)[0].rpartition("/")[0] if _GLOB.search(path) else path
    return sorted(
        source_files.make_found_file(_url_of(url, name), info)
        for name, info in matches.items()
        if info["type"] == "file"
        and not any(
            part.startswith((".", "_")) for part in name.removeprefix(base).strip("/").split("/")
        )
    )


def _url_of(url: str, name: str) -> str:
    """Return the address of the listed file `name`. It is a relative path if `url` is one."""
    if source_files.is_local(url):
        root = source_files.open_filesystem(url)[1]
        plain = str(local_path(url))
        if _GLOB.search(plain):
            root, plain = (
                _GLOB.split(text, maxsplit=1)[0].rpartition("/")[0] for text in (root, plain)
            )
        rest = name.removeprefix(root).lstrip("/")
        return posixpath.join(plain, rest) if plain else rest
    return source_files.address(url, name)


def _endings(url: str) -> str:
    return _COMPRESSED.sub("", url.lower())


def _of_formats(files: Iterable[FoundFile], index: int) -> list[FoundFile]:
    return [file for file in files if _endings(file.url).endswith(_FORMATS[index][1])]


def _choose(
    url: str, files: list[FoundFile], *, is_whole: bool = False
) -> tuple[str, list[FoundFile]]:
    """Return the format to read and the files that have it.

    Args:
        url: The source, for messages.
        files: The files that were found.
        is_whole: Whether all files must have the same format, because the user's pattern chose each of them.
    """
    for index, (kind, _) in enumerate(_FORMATS):
        chosen = _of_formats(files, index)
        if chosen and is_whole and len(chosen) < len(files):
            other = next(file.url for file in files if file not in chosen)
            raise InputError(
                f"{url}: matches {other} beside {kind} files, expected files of one format",
                hint="narrow the pattern, or pass two sources",
            )
        if chosen:
            _check_rest(url, kind, [file for file in files if file not in set(chosen)])
            return kind, chosen
    raise InputError(
        f"{url}: holds no parquet, JSON Lines or CSV file" if files else f"{url}: holds no file",
        hint="expected names that end in .parquet, .jsonl, .json or .csv (also .gz, .zst)",
    )


def _check_rest(url: str, kind: str, rest: list[FoundFile]) -> None:
    """Check the files (`rest`) that are left out because they do not have the format `kind`.

    Raises:
        InputError: A file has another data format, so its rows would be missing.
    """
    for index, (other, endings) in enumerate(_FORMATS):
        data = _of_formats(rest, index)
        if not data:
            continue
        if endings == (".json",):  # such a file often describes the data
            _note_left_out(logging.WARNING, url, ".json file", data)
            rest = [file for file in rest if file not in set(data)]
            continue
        ending = next(one for one in _FORMATS if one[0] == kind)[1][0]
        raise InputError(
            f"{url}: holds {data[0].url} ({other}) beside {kind} files, expected files of one format",
            hint=f"name those you want, as in '{url.rstrip('/')}/**/*{ending}', or a source for each format",
        )
    _note_left_out(logging.INFO, url, "other file", rest)


def _note_left_out(level: int, url: str, what: str, files: list[FoundFile]) -> None:
    if files:
        first = redact(files[0].url)
        _log_once(level, f"{redact(url)}: left out {units.many(len(files), what)}, {first} first")


def _log_once(level: int, text: str) -> None:
    """Log a text that the running command has not logged before: `run` finds its sources several times."""
    context = click.get_current_context(silent=True)
    logged = context.meta.setdefault(_LOGGED, set()) if context is not None else set()
    if text not in logged:
        logged.add(text)
        logger.log(level, "%s", text)


def _format_of(url: str) -> str:
    """Return the format of one file, by its ending or, if that is unknown, by its first bytes."""
    for kind, endings in _FORMATS:
        if _endings(url).endswith(endings):
            return kind
    with source_files.open_stream(source_files.look_up(url)) as stream:
        kind = first_bytes.format_of(stream.read(first_bytes.HEAD_BYTES))
    if kind in ("parquet", "jsonl"):
        return kind
    hint = "expected a name that ends in .parquet, .jsonl, .json or .csv (also .gz, .zst)"
    if url.lower().endswith(".txt"):
        hint = (
            "`batchinfer run` takes text, a prompt a line; for `split` make JSON Lines of it: "
            "jq -Rc '{prompt: .}' FILE.txt > FILE.jsonl"
        )
    raise InputError(f"{url}: neither its name nor its first bytes tell the format", hint=hint)

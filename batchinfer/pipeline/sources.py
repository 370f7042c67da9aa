"""Prepares the sources of `run`: finds the column with the prompt, and turns text into JSON Lines."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from batchinfer.core import codec
from batchinfer.core.errors import BatchinferError, ConfigError, InputError
from batchinfer.split.finding import find_text_files
from batchinfer.split.first_bytes import format_of
from batchinfer.split.source_files import FoundFile, open_stream
from batchinfer.storage.scratch import scratch_errors

logger = logging.getLogger(__name__)

STDIN = "-"
TEXT_COLUMN = "prompt"
"""Name of the column of a text's rows."""

_BATCH_KEYS = {"custom_id", "method", "url", "body"}
_CONVERSATIONS = ("messages", "conversation", "conversations")
_TEXTS = ("prompt", "text")
_SAYS_THE_PROMPT = (
    "messages_column",
    "prompt_column",
    "prompt_template",
    "template_name",
    "pair_columns",
)
_BLOCK = 1 << 20


def recognise(columns: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the option that says where the prompt is, by the names of the columns.

    Args:
        columns: Names of the sources' columns.
        options: The command's options, by the names of click's parameters.

    Returns:
        Options to add; empty if the user has said where the prompt is.

    Raises:
        ConfigError: No column has one of the names that prompts usually have.
    """
    if options["request_format"] != "rows" or any(options[name] for name in _SAYS_THE_PROMPT):
        return {}
    found: dict[str, Any] = {}
    if set(columns) >= _BATCH_KEYS:
        found = {"request_format": "openai-batch"}
    for name in (*_CONVERSATIONS, *_TEXTS):
        if name in columns and not found:
            option = "messages_column" if name in _CONVERSATIONS else "prompt_column"
            found = {option: name}
    if not found:
        raise ConfigError(
            f"where is the prompt? The columns are {', '.join(columns)}",
            hint="say it: --prompt-column COLUMN, --messages-column COLUMN, or a template (--prompt-template FILE)",
        )
    for option, value in found.items():
        logger.info("taken from the data: --%s %s", option.replace("_", "-"), value)
    return found


def as_tables(sources: Sequence[str], folder: Path) -> list[str]:
    """Return the sources, with standard input and .txt files replaced by files of JSON Lines in `folder`.

    A .txt file may be a URL or match a glob, be compressed (.gz, .zst), and have its ending in upper case. Every line
    of a text becomes a row with the column `prompt`; blank lines are left out. Standard input is read as JSON Lines if
    its first character besides white space is a brace. Other formats are refused, and what has no format is text.

    Raises:
        InputError: Standard input is a terminal, or a text is empty, missing or not UTF-8.
    """
    return [table for source in sources for table in _as_tables(source, folder)]


def _as_tables(source: str, folder: Path) -> list[str]:
    if source == STDIN:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError(
                "SOURCE -: standard input is a terminal, expected rows from a pipe or a file",
                hint="batchinfer run - -o DEST < rows.jsonl",
            )
        return [_write(sys.stdin.buffer, "stdin", folder)]
    return [_text_file(found, folder) for found in find_text_files(source)] or [source]


def _text_file(found: FoundFile, folder: Path) -> str:
    name = found.url.rsplit("/", 1)[-1]
    with open_stream(found) as stream:
        return _write(stream, name, folder, is_text=True)


def _write(stream: BinaryIO, name: str, folder: Path, *, is_text: bool = False) -> str:
    """Write the rows of a stream to a file whose name has their digest, and return the file's path."""
    with scratch_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        growing = folder / f"{name}.part"
        digest = hashlib.sha256()
        with growing.open("wb") as file:
            head = stream.read(_BLOCK)
            if not head.strip():
                raise InputError(f"SOURCE {name}: is empty", hint="give at least one row")
            kind = "" if is_text else format_of(head)
            if kind not in ("", "jsonl"):
                raise InputError(
                    f"SOURCE {name}: holds {kind} data, expected JSON Lines or text",
                    hint="name the file instead of -, or unpack it first",
                )
            if kind and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                raise InputError(
                    f"SOURCE {name}: is a JSON array, expected one JSON object a line",
                    hint="convert it: jq -c '.[]' FILE > rows.jsonl",
                )
            is_rows = not is_text and (kind == "jsonl" or head.lstrip().startswith(b"{"))
            for block in _blocks(head, stream) if is_rows else _rows(head, stream, name):
                digest.update(block)
                file.write(block)
        path = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        growing.replace(path)
    return str(path)


def _blocks(head: bytes, stream: BinaryIO) -> Iterator[bytes]:
    yield head
    while block := stream.read(_BLOCK):
        yield block


def _rows(head: bytes, stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield a text as JSON Lines, with a row for each line that is not blank."""
    rest = b""
    for block in _blocks(head, stream):
        *lines, rest = (rest + block).split(b"\n")
        yield b"".join(_row(line, name) for line in lines)
    yield _row(rest, name)


def _row(line: bytes, name: str) -> bytes:
    try:
        text = line.decode().strip("\r\n\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"SOURCE {name}: is not UTF-8 ({error.reason})",
            hint="if it is text in another encoding, convert it: iconv -f LATIN1 -t UTF-8 FILE > NEW",
        ) from error
    return codec.encode({TEXT_COLUMN: text}) + b"\n" if text.strip() else b""


def copy_to(path: Path, stream: BinaryIO) -> None:
    """Copy a file to a stream.

    Raises:
        BatchinferError: The stream cannot take it, because the disk is full, for example.
        BrokenPipeError: The program that reads the stream, such as `head`, has ended.
    """
    try:
        with path.open("rb") as file:
            shutil.copyfileobj(file, stream, _BLOCK)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BatchinferError(
            f"stdout: cannot take the answers ({error.strerror})",
            hint="free space there, then run it again; with --work FOLDER the answers are kept",
        ) from error

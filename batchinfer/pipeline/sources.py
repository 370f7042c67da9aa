"""Prepares the sources of `run`: finds the column with the prompt, and turns text into JSON Lines."""

from __future__ import annotations

import hashlib
import itertools
import logging
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from batchinfer.core import codec
from batchinfer.core.errors import BatchinferError, ConfigError, InputError
from batchinfer.split.finding import find_text_files
from batchinfer.split.source_files import open_stream
from batchinfer.storage.scratch import scratch_errors

logger = logging.getLogger(__name__)

STDIN = "-"
TEXT_COLUMN = "prompt"
"""Name of the column of a text's rows."""
_BATCH_KEYS = {"custom_id", "method", "url", "body"}
_COLUMNS = {
    **dict.fromkeys(("messages", "conversation", "conversations"), "messages_column"),
    **dict.fromkeys(("prompt", "text"), "prompt_column"),
}
"""Options that say where the prompt is, by the name of the column that they mean, the likeliest first."""


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
    says = {*_COLUMNS.values(), "prompt_template", "pair_columns", "audio_columns"}
    if options["request_format"] != "rows" or any(options.get(name) for name in says):
        return {}
    found = [(option, name) for name, option in _COLUMNS.items() if name in columns]
    if set(columns) >= _BATCH_KEYS:
        found = [("request_format", "openai-batch")]
    if not found:
        raise ConfigError(
            f"where is the prompt? The columns are {', '.join(columns)}",
            hint="say it: --prompt-column COLUMN, --messages-column COLUMN, or a template (--prompt-template FILE)",
        )
    option, value = found[0]
    logger.info("taken from the data: --%s %s", option.replace("_", "-"), value)
    return {option: value}


def as_tables(sources: Sequence[str], folder: Path) -> list[str]:
    """Return the sources, with standard input and .txt files replaced by files of JSON Lines in `folder`.

    Every line of a text that is not blank becomes a row with the column `prompt`. Standard input is read as JSON Lines
    if its first character besides white space is a brace.

    Raises:
        InputError: Standard input is a terminal, or a text is empty, missing or not UTF-8.
    """
    tables = []
    for source in sources:
        if source == STDIN:
            if sys.stdin is None or sys.stdin.isatty():
                raise InputError(
                    "SOURCE -: standard input is a terminal, expected rows from a pipe or a file",
                    hint="batchinfer run - -o DEST < rows.jsonl",
                )
            tables.append(_write("stdin", sys.stdin.buffer, folder))
            continue
        texts = find_text_files(source)
        for text in texts:
            with open_stream(text) as stream:
                name = text.url.rsplit("/", 1)[-1]
                tables.append(_write(name, stream, folder, is_text=True))
        tables += [] if texts else [source]
    return tables


def _write(name: str, lines: Iterable[bytes], folder: Path, *, is_text: bool = False) -> str:
    """Write the rows of a text or of JSON Lines to a file whose name has their digest, and return the file's path."""
    left = (line for line in lines if line.strip())
    first = next(left, b"").removeprefix(b"\xef\xbb\xbf")
    if not first:
        raise InputError(f"SOURCE {name}: is empty", hint="give at least one row")
    is_rows = not is_text and first.lstrip().startswith(b"{")
    if not is_text and first.lstrip().startswith(b"[{"):
        raise InputError(
            f"SOURCE {name}: is a JSON array, expected one JSON object a line",
            hint="convert it: jq -c '.[]' FILE > rows.jsonl",
        )
    with scratch_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        growing, digest = folder / f"{name}.part", hashlib.sha256()
        with growing.open("wb") as file:
            for line in itertools.chain([first], left):
                row = line.rstrip(b"\n") + b"\n" if is_rows else _row(line, name)
                digest.update(row)
                file.write(row)
        path = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        growing.replace(path)
    return str(path)


def _row(line: bytes, name: str) -> bytes:
    try:
        return codec.encode({TEXT_COLUMN: line.decode().rstrip("\r\n")}) + b"\n"
    except UnicodeDecodeError as error:
        raise InputError(
            f"SOURCE {name}: is not UTF-8 ({error.reason})",
            hint="other formats are named, not piped; other encodings: iconv -f LATIN1 -t UTF-8 FILE > NEW",
        ) from error


def copy_to(path: Path, stream: BinaryIO) -> None:
    """Copy a file to a stream.

    Raises:
        BatchinferError: The stream cannot take it, because the disk is full, for example.
        BrokenPipeError: The program that reads the stream, such as `head`, has ended.
    """
    try:
        with path.open("rb") as file:
            shutil.copyfileobj(file, stream)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BatchinferError(
            f"stdout: cannot take the answers ({error.strerror})",
            hint="free space there, then run it again; with --work FOLDER the answers are kept",
        ) from error

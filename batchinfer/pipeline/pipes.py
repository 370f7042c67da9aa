"""Prepares the sources of `run`: finds the column with the prompt, and writes standard input to a file."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from batchinfer.cli.terminal import stdout_errors
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.tasks import OF_SOUNDS
from batchinfer.storage.scratch import scratch_errors

logger = logging.getLogger(__name__)

STDIN = "-"
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
    says = {*_COLUMNS.values(), "prompt_template", "pair_columns"}
    is_said = options["request_format"] != "rows" or options["task"] in OF_SOUNDS
    if is_said or any(options.get(name) for name in says):
        return {}
    found = [(option, name) for name, option in _COLUMNS.items() if name in columns]
    if set(columns) >= _BATCH_KEYS:
        found = [("request_format", "openai-batch")]
    if not found:
        raise ConfigError(
            f"where is the prompt? The columns are {', '.join(columns)}",
            hint="say it: --prompt-column COLUMN, --messages-column COLUMN, or a template (--prompt-template FILE)"
            + ("; of CSV perhaps --delimiter ';', or tab" if len(columns) == 1 else ""),
        )
    option, value = found[0]
    logger.info("taken from the data: --%s %s", option.replace("_", "-"), value)
    return {option: value}


def with_stdin_in_a_file(sources: Sequence[str], folder: Path) -> list[str]:
    """Return the sources, with standard input replaced by a file in `folder`, since it is read more than once.

    It is JSON Lines if its first character besides white space is a brace or a bracket, else a text.

    Raises:
        InputError: Standard input is a terminal, or empty.
    """
    return [_write_stdin(folder) if source == STDIN else source for source in sources]


def _write_stdin(folder: Path) -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError(
            "SOURCE -: standard input is a terminal, expected rows from a pipe or a file",
            hint="batchinfer run - -o DEST < rows.jsonl",
        )
    digest, start = hashlib.sha256(), b""
    with scratch_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        growing = folder / "stdin.part"
        with growing.open("wb") as file:
            while block := sys.stdin.buffer.read(1 << 20):
                start = start or block.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
                digest.update(block)
                file.write(block)
        if not start:
            raise InputError("SOURCE -: standard input is empty", hint="give at least one row")
        kind = "jsonl" if start in b"{[" else "txt"
        path = folder / f"stdin-{digest.hexdigest()[:16]}.{kind}"
        growing.replace(path)
    return str(path)


def copy_to(path: Path, stream: BinaryIO) -> None:
    """Copy a file to a stream.

    Raises:
        BatchinferError: The stream cannot take it, because the disk is full, for example.
        BrokenPipeError: The program that reads the stream, such as `head`, has ended.
    """
    hint = "free space there, then run it again; with --work FOLDER the answers are kept"
    with stdout_errors("answers", hint), path.open("rb") as file:
        shutil.copyfileobj(file, stream)
        stream.flush()

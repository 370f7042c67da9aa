"""Compare one output with its marker, and line by line with its chunk, for `verify --deep`.

Files are read line by line, so the memory used does not grow with their size.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from batchinfer.core import layout
from batchinfer.core.errors import InputError, ObjectNotFound, RowError
from batchinfer.core.records import Marker, Run
from batchinfer.formats.lines import read_line
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.prompts import json_lines
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch

MAX_PROBLEMS = 5
"""Largest number of problems that are reported of one output. That of another chunk would have one in each line."""


class Alignment:
    """Compares outputs of one run with their chunks.

    Threads may share an Alignment, because each comparison has scratch files of its own.

    Args:
        run: The content of run.json. Its prompt options name the column of ids.
        store: The run's store.
        scratch: Folder for temporary files. Each comparison under way keeps two: the chunk and its output.
    """

    def __init__(self, run: Run, store: Store, scratch: Scratch) -> None:
        prompt = run.config.get("prompt")
        options: dict[str, Any] = prompt if isinstance(prompt, dict) else {}
        columns = options.get("columns")
        own = columns.get("id") if isinstance(columns, dict) else None
        self._id_columns = [str(own[0]) if isinstance(own, list) and own else json_lines.ID_FIELD]
        if options.get("request_format") == "openai-batch":
            self._id_columns.insert(0, "custom_id")
        self._store = store
        self._scratch = scratch

    def problems(self, ref: ChunkRef, marker: Marker, source: Store) -> list[str]:
        """Read a chunk and its output, and return what is wrong with them: up to MAX_PROBLEMS texts.

        Args:
            ref: The chunk.
            marker: The chunk's newest marker.
            source: The store that holds the chunk.
        """
        path = self._scratch.new_path(f"{ref.name}.output")
        try:
            self._store.download(layout.output_key(marker.output), path)
        except ObjectNotFound:
            return [f"{marker.output}: vanished"]
        try:
            local = fetch(source, ref, self._scratch)
        except InputError as error:
            path.unlink()
            return [f"the chunk itself: {error.message}"]
        try:
            if local.sha256 != marker.chunk_sha256:
                found = f"has sha256 {local.sha256[:12]}…"
                return [
                    f"{ref.key}: {found}, the marker is of one with {marker.chunk_sha256[:12]}…"
                ]
            num_rows = local.num_lines if ref.row_limit is None else ref.row_limit
            found_all = self._compare(
                path, local.path, range(ref.first_row, ref.first_row + num_rows), marker
            )
            return list(islice(found_all, MAX_PROBLEMS))
        finally:
            path.unlink()
            local.path.unlink()

    def _compare(self, output: Path, chunk: Path, numbers: range, marker: Marker) -> Iterator[str]:
        """Yield what is wrong. `numbers` are the numbers in the job of the chunk's rows."""
        digest = hashlib.sha256()
        codes: Counter[str] = Counter()
        num_lines = 0
        with output.open("rb") as lines, chunk.open("rb") as rows:
            for line in lines:
                digest.update(line)
                if num_lines < len(numbers):
                    code, problems = self._check_line(line, rows.readline(), numbers[num_lines])
                    yield from (f"line {num_lines}: {problem}" for problem in problems)
                    codes.update(() if code is None else (code,))
                num_lines += 1
        if digest.hexdigest() != marker.output_sha256:
            yield f"sha256 {digest.hexdigest()[:12]}…, the marker says {marker.output_sha256[:12]}…"
        if num_lines != len(numbers):
            yield f"{num_lines} lines, the chunk has {len(numbers)} rows"
        num_ok = codes.pop("", 0)
        if (num_ok, codes.total()) != (marker.rows_ok, marker.rows_error):
            says = f"the marker says {marker.rows_ok} and {marker.rows_error}"
            yield f"{num_ok} rows ok and {codes.total()} errors, {says}"
        if marker.errors and dict(codes) != marker.errors:
            yield f"errors {dict(codes)}, the marker says {marker.errors}"

    def _check_line(self, line: bytes, row: bytes, number: int) -> tuple[str | None, list[str]]:
        """Compare an output line with its row. Return its error code, "" for an answer, and the problems found.

        The code is None if the line cannot be read. `number` is the row's number in the job.
        """
        if not line.endswith(b"\n"):
            return None, ["is cut off"]
        try:
            answer = read_line(line[:-1])
        except InputError as error:
            return None, [error.message]
        found = []
        if answer.row != number:
            found.append(f"is of row {answer.row}, expected {number}")
        ids = self._ids_of(row, number)
        if not ids and answer.is_ok:
            found.append("is an answer to a row that cannot be read")
        elif not answer.is_ok:
            ids.append(str(number))  # the worker may give an error row its number as id
        if answer.id not in ids:
            found.append(f"has the id {answer.id!r}, expected {ids[0]!r}")
        return answer.code, found

    def _ids_of(self, row: bytes, number: int) -> list[str]:
        """Return a list with the id that the worker gives to a row; an empty list if the row cannot be read."""
        try:
            row_data = json_lines.decode_object(row)
        except RowError:
            return []
        found = [row_data[name] for name in self._id_columns if row_data.get(name) is not None]
        return [json_lines.as_id(found[0]) if found else str(number)]

"""A chunk's local copy: fetched to the scratch folder, checked against job.json if there is one, and decompressed."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, remove_quietly, scratch_errors

_BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 17
_RESTORE = (
    "restore it: of what split has made, the same split into another place makes the same chunks"
)


class LocalChunk(NamedTuple):
    """A chunk's local copy: a file of plain (decompressed) lines in the scratch folder.

    `size_bytes` is the size of this file. `sha256` and `stored_bytes` are the checksum and the size of the stored
    object, which may be compressed.
    """

    path: Path
    num_lines: int
    sha256: str
    size_bytes: int = 0
    stored_bytes: int | None = None


def fetch(store: Store, ref: ChunkRef, scratch: Scratch) -> LocalChunk:
    """Copy a chunk to scratch as plain lines, and check it against what job.json says of it, if there is a job.json.

    Raises:
        InputError: The chunk is missing, cannot be decompressed, or has another checksum or number of rows than
            job.json says.
    """
    name = f"{ref.root}/{ref.key}"
    stored = plain = scratch.new_path(ref.name)
    # Of a failed attempt nothing may stay: the next one has other file names, and space would run out.
    with contextlib.ExitStack() as undo:
        undo.callback(remove_quietly, stored)
        try:
            with scratch_errors(stored.parent):
                store.download(ref.key, stored)
        except ObjectNotFound:
            raise InputError(f"{name}: the chunk is gone", hint=_RESTORE) from None
        digest, num_lines = _scan(stored)
        stored_bytes = stored.stat().st_size
        if ref.sha256 is not None and digest != ref.sha256:
            raise InputError(
                f"{name}: sha256 {digest[:12]}…, job.json says {ref.sha256[:12]}…",
                hint=f"it was changed after the split; {_RESTORE}",
            )
        if ref.key.endswith((".zst", ".zstd")):
            plain = scratch.new_path(ref.name)
            undo.callback(remove_quietly, plain)
            _decompress(stored, plain, name)
            remove_quietly(stored)
            _, num_lines = _scan(plain)
        if ref.rows is not None and num_lines != ref.rows:
            what = f"{num_lines} rows, job.json says {ref.rows}"
            raise InputError(f"{name}: {what}", hint=_RESTORE)
        found = LocalChunk(plain, num_lines, digest, plain.stat().st_size, stored_bytes)
        undo.pop_all()
    return found


def _scan(path: Path) -> tuple[str, int]:
    """Return a file's sha256 and its number of lines; a last line without a newline counts too."""
    digest = hashlib.sha256()
    num_lines = 0
    last = b"\n"
    with scratch_errors(path.parent), path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            num_lines += block.count(b"\n")
            last = block[-1:]
    return digest.hexdigest(), num_lines + (last != b"\n")


def _decompress(source: Path, target: Path, name: str) -> None:
    import pyarrow

    with scratch_errors(target.parent), source.open("rb") as packed, target.open("wb") as plain:
        unpacked = pyarrow.input_stream(packed, compression="zstd")
        try:
            shutil.copyfileobj(unpacked, plain, _BLOCK_BYTES)
        except OSError as error:
            if error.errno is not None:  # the disk's; pyarrow's own have no number
                raise
            raise InputError(
                f"{name}: not readable as zstd ({error})",
                hint="copy it there again, or split again with --overwrite",
            ) from error

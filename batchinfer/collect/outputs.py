"""Bring outputs to the scratch folder. Only bytes whose checksum is the marker's are handed on. Nothing is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from batchinfer.collect.selection import Selection
from batchinfer.core import codec, layout
from batchinfer.core.errors import ObjectNotFound
from batchinfer.core.records import Marker
from batchinfer.ledger.audit import CORRUPT, Finding
from batchinfer.ledger.inventory import in_parallel
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.storage import Store
from batchinfer.storage.scratch import Scratch, scratch_errors

logger = logging.getLogger(__name__)

_FETCHERS = 4
_GROUP_BYTES = 64 << 20
_GROUP_FILES = 64

Outputs = dict[Path, tuple[ChunkRef, Marker]]
"""Local copies of outputs."""


def sound_outputs(
    selection: Selection, store: Store, scratch: Scratch, damaged: list[Finding]
) -> Iterator[Outputs]:
    """Yield the sound outputs of a run in input order, some at a time. Copies go when the next ones are asked for.

    Chunks whose output cannot be used are added to `damaged`.
    """

    def bring(pair: tuple[ChunkRef, Marker]) -> tuple[Path, str]:
        ref, marker = pair
        path = scratch.new_path(f"{ref.name}.jsonl")
        try:
            store.download(layout.output_key(marker.output), path)
        except ObjectNotFound:
            return path, f"its output {marker.output} is gone"
        with scratch_errors(path.parent), path.open("rb") as file:
            is_sound = codec.sha256_file(file) == marker.output_sha256
        return path, "" if is_sound else f"the sha256 of {marker.output} is not its marker's"

    found: Outputs = {}
    held = 0
    for (path, problem), (ref, marker) in zip(
        in_parallel(bring, selection.sound, _FETCHERS), selection.sound, strict=True
    ):
        if problem:
            path.unlink(missing_ok=True)
            damaged.append(Finding(kind=CORRUPT, subject=ref.name, problem=problem, fix="redo"))
            logger.warning("%s: %s: %s", store.url, ref.name, problem)
            continue
        found[path] = ref, marker
        held += marker.output_bytes
        if held >= _GROUP_BYTES or len(found) >= _GROUP_FILES:
            yield from _lent(found)
            found, held = {}, 0
    if found:
        yield from _lent(found)


def _lent(found: Outputs) -> Iterator[Outputs]:
    yield found
    for path in found:
        path.unlink()

"""Files of a list, for which no job.json vouches: whether a marker with a file's name is of this very file.

The chunk names of a job are its own. In a list two files may have one name (``a/x.jsonl``, ``b/x.jsonl``), each with a
worker of its own, and a file may be replaced after it was done. Then the marker of that name vouches for other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from batchinfer.core import codec, layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import Marker
from batchinfer.core.redaction import redact
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.storage import Store
from batchinfer.worker.background import Background, Pending

_HANDS = 4
"""Markers are read by so many at once."""


def check_answers(ref: ChunkRef, marker: Marker) -> None:
    """Refuse a marker of another file than `ref`. Pure. Says nothing of chunks that a job.json vouches for.

    A file that was replaced is known by its size; one of as many bytes passes.

    Raises:
        InputError: it answers a file in another place, or other text.
    """
    if ref.sha256 is not None:
        return
    here = redact(f"{ref.root}/{ref.key}")
    there = f"{marker.chunk_root or redact(ref.root)}/{marker.chunk}"
    if here != there:
        raise InputError(
            f"{here}: this run has the answers to {there} under its name, and none to this file: "
            "give it another name, or write to another --output",
            hint="two files of one name need two outputs",
        )
    if (
        None not in (marker.chunk_bytes, ref.listed_bytes)
        and marker.chunk_bytes != ref.listed_bytes
    ):
        raise InputError(
            f"{ref.name}: was changed after it was done: {here} had {marker.chunk_bytes} bytes, and has "
            f"{ref.listed_bytes} now: give the new text another name, or write to another --output",
            hint=f"or do it again from the start: batchinfer clean RUN --redo {ref.name} --yes",
        )


def is_answered(store: Store, ref: ChunkRef, generation: int) -> bool:
    """Whether the marker of this generation is there, and of this very file."""
    key = layout.marker_key(ref.name, generation)
    try:
        check_answers(ref, codec.decode(store.get(key).data, Marker, name=key))
    except (ObjectNotFound, InputError):
        return False
    return True


class Proof:
    """Finds out, in the background, of which of a worker's own chunks that have a marker the marker is not.

    Reads one marker for each file of a list that is done, and none for the chunks of a job.

    Args:
        store: The run's.
        background: Where markers are read.
        chunks: The worker's own.
        done: Chunks that have a marker, with their highest generation.
    """

    def __init__(
        self, store: Store, background: Background, chunks: Iterable[ChunkRef], done: dict[str, int]
    ) -> None:
        self._done = done
        self._strange: set[str] = set()
        self._store = store
        listed = [ref for ref in chunks if ref.sha256 is None and ref.name in done]
        self._looks = [
            background.submit(partial(self._look, part))
            for hand in range(_HANDS)
            if (part := listed[hand::_HANDS])
        ]

    def settle(self, wait: Callable[[Pending[None]], object]) -> dict[str, int]:
        """Wait for all looks; return what is really done. The rest is refused, or done again, when it is opened."""
        for look in self._looks:
            wait(look)
        return {name: each for name, each in self._done.items() if name not in self._strange}

    def _look(self, refs: list[ChunkRef]) -> None:
        for ref in refs:
            if not is_answered(self._store, ref, self._done[ref.name]):
                self._strange.add(ref.name)

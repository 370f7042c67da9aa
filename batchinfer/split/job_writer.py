"""Writes a job to a store: chunks, then manifests, then job.json. Without job.json, the place holds no job.

When data are appended to a job, job.json is replaced once the new chunks are complete, and the manifests after it: two
commands that append at once could each write manifests, but only one of them can replace job.json. Workers take the
chunks that a manifest lacks from job.json.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import AlreadyExists, InputError, ObjectNotFound, PreconditionFailed
from batchinfer.core.records import Chunk, Job
from batchinfer.ledger.jobs import chunk_key, load_job, manifest_chunks
from batchinfer.split.chunk_files import BuiltChunk
from batchinfer.storage import Object, Store

_THREADS = 4
_NONCE_DIGITS = 12
_BYTES = 64 << 20
"""Most bytes of the chunks that are published at the same time, to limit memory. A larger chunk is published alone."""


def read_job(store: Store, *, hint: str = "") -> Job | None:
    """Read the job.json of `store`, or return None if there is none; see `load_job`."""
    found = load_job(store.url, lambda _: store, hint=hint)
    return found[0] if found else None


def refuse_newer(store: Store) -> None:
    """Raise NewerVersion if a later version of batchinfer wrote job.json. A damaged job.json is accepted."""
    try:
        data = store.get(layout.JOB_KEY).data
    except ObjectNotFound:
        return
    codec.check_version(data, name=f"{store.url}/{layout.JOB_KEY}")


def remove_job(store: Store) -> None:
    """Remove a job. job.json goes first, so that after a crash the remaining objects are not a job."""
    store.delete([layout.JOB_KEY])
    for prefix in (layout.CHUNKS, layout.MANIFESTS):
        store.delete([item.key for item in store.list(prefix)])


def replace_manifests(store: Store, job: Job, etag: str) -> None:
    """Make the manifests list the chunks of `job`, unless job.json has another etag than `etag` by now.

    The command that has replaced job.json writes its manifests itself. A command that replaced job.json before may
    still write older manifests meanwhile, so a write that fails is tried again.
    """
    waiting = deque(_manifests(job).items())
    while waiting:
        key, text = waiting[0]
        there = _get_or_none(store, key)
        if there is not None and there.data == text:
            waiting.popleft()
        # Only a look at job.json after the look at the manifest shows that no later command has written the manifest.
        elif store.stat(layout.JOB_KEY).etag != etag:
            return
        else:
            with contextlib.suppress(AlreadyExists, PreconditionFailed):
                if there is None:
                    store.create(key, text)
                else:
                    store.replace(key, text, there.etag)
                waiting.popleft()


def _get_or_none(store: Store, key: str) -> Object | None:
    try:
        return store.get(key)
    except ObjectNotFound:
        return None


def _manifests(job: Job) -> dict[str, bytes]:
    """Return the content of every manifest, by its key."""
    return {
        key: "".join(f"{chunk_key(job, chunk)}\n" for chunk in chunks).encode()
        for key, chunks in manifest_chunks(job).items()
    }


class JobWriter:
    """Writes one job to a place that is empty or that holds what an unfinished split left.

    If an object exists already with other bytes, and there is no job.json, the object is replaced.

    Args:
        store: The store at the job's place.
        compression: Compression of the chunks, "none" or "zstd".
        advance: A function that is called after each chunk is durable, with the number of the chunk's rows.
        appends: Whether the chunks are appended to a job. No object is then replaced: a chunk whose key holds other
            bytes, which another command that appends has written, gets a key with a nonce.
        is_shared: Whether several processes write the same job. No object is then replaced either: an object with other
            bytes is an error.
    """

    def __init__(
        self,
        store: Store,
        compression: str,
        advance: Callable[[int], object],
        *,
        appends: bool = False,
        is_shared: bool = False,
    ) -> None:
        self._store = store
        self._compression = compression
        self._advance = advance
        self._appends = appends
        self._is_shared = is_shared

    def publish(self, built: Iterable[BuiltChunk]) -> Iterator[BuiltChunk]:
        """Publish chunk files in threads while later chunks are built. Yields each chunk once it is durable."""
        waiting: deque[tuple[BuiltChunk, Future[Chunk]]] = deque()
        num_bytes = 0
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="publish") as pool:

            def finish() -> BuiltChunk:
                nonlocal num_bytes
                item, future = waiting.popleft()
                item = item._replace(chunk=future.result())
                num_bytes -= item.chunk.bytes
                self._advance(item.chunk.rows)
                return item

            for item in built:
                while waiting and (
                    len(waiting) >= _THREADS or num_bytes + item.chunk.bytes > _BYTES
                ):
                    yield finish()
                num_bytes += item.chunk.bytes
                waiting.append((item, pool.submit(self._publish_chunk, item)))
            while waiting:
                yield finish()

    def finish(self, job: Job) -> None:
        """Write the manifests, remove chunks that are not of the job, check that all of the job exist, write job.json.

        Raises:
            InputError: Another split wrote to the same place meanwhile.
        """
        texts = _manifests(job)
        for key, text in texts.items():
            self._create(key, text)
        stale = [item.key for item in self._store.list(layout.MANIFESTS) if item.key not in texts]
        self._store.delete(stale)
        there = self._sizes()
        expected = {chunk_key(job, chunk): chunk.bytes for chunk in job.chunks}
        self._store.delete([key for key in there if key not in expected])
        if any(there.get(key) != size for key, size in expected.items()):
            raise self._other_split()
        try:
            self._store.create(layout.JOB_KEY, codec.encode_pretty(job))
        except AlreadyExists as error:
            raise self._other_split() from error

    def finish_append(self, job: Job, etag: str) -> None:
        """Check that the new chunks exist, replace job.json, then write the manifests.

        Args:
            job: The job with the new chunks.
            etag: Etag of the job.json without them.

        Raises:
            InputError: Another command has appended data or replaced the job meanwhile.
        """
        assert job.appends
        there = self._sizes()
        new = job.chunks[job.appends[-1].first_chunk :]
        if any(there.get(chunk_key(job, chunk)) != chunk.bytes for chunk in new):
            raise self._other_split()
        try:
            new_etag = self._store.replace(layout.JOB_KEY, codec.encode_pretty(job), etag)
        except PreconditionFailed as error:
            raise InputError(
                f"{self._store.url}: another command changed the job meanwhile; nothing was appended to it",
                hint="run the same command again",
            ) from error
        replace_manifests(self._store, job, new_etag)

    def _sizes(self) -> dict[str, int]:
        return {item.key: item.bytes for item in self._store.list(layout.CHUNKS)}

    def _publish_chunk(self, item: BuiltChunk) -> Chunk:
        chunk = item.chunk
        key = layout.chunk_file(chunk.name, self._compression)
        held = self._sha256_of(key)
        if held is not None and held != chunk.sha256:
            if self._appends:
                chunk = msgspec.structs.replace(chunk, nonce=chunk.sha256[:_NONCE_DIGITS])
                key = layout.chunk_file(chunk.name, self._compression, chunk.nonce or "")
            else:
                self._remove_leftover(key)
        self._store.put_file(key, item.path)
        item.path.unlink()
        return chunk

    def _sha256_of(self, key: str) -> str | None:
        """Return the checksum of what is stored at `key`; None if nothing is."""
        try:
            return codec.sha256(self._store.get(key).data)
        except ObjectNotFound:
            return None

    def _create(self, key: str, data: bytes) -> None:
        try:
            self._store.create(key, data)
        except AlreadyExists:
            self._remove_leftover(key)
            self._store.create(key, data)

    def _remove_leftover(self, key: str) -> None:
        """Remove an object that an unfinished split left under a key of this job.

        Raises InputError if job.json exists, because then the object belongs to a finished job.
        """
        if self._is_shared:
            raise InputError(
                f"{self._store.url}/{key}: is there with other bytes, from another split or other sources",
                hint="name another --output, or remove what is there and start all ranks again",
            )
        if read_job(self._store) is not None:
            raise self._other_split()
        self._store.delete([key])

    def _other_split(self) -> InputError:
        return InputError(
            f"{self._store.url}: another split wrote here at the same time, expected to be alone",
            hint="run the same command again: it tells whether the job there is the one you want",
        )

"""Writes a job to a store: chunks, then manifests, then job.json. Without job.json, the place holds no job."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from batchinfer.core import codec, layout
from batchinfer.core.errors import AlreadyExists, InputError, ObjectNotFound
from batchinfer.core.records import Chunk, Job
from batchinfer.ledger.jobs import load_job
from batchinfer.split.chunk_files import BuiltChunk
from batchinfer.storage import Store

_THREADS = 4
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


class JobWriter:
    """Writes one job to a place that is empty or that holds what an unfinished split left.

    If an object exists already with other bytes, and there is no job.json, the object is replaced.

    Args:
        store: The store at the job's place.
        compression: Compression of the chunks, "none" or "zstd".
        advance: A function that is called after each chunk is durable, with the number of the chunk's rows.
    """

    def __init__(self, store: Store, compression: str, advance: Callable[[int], object]) -> None:
        self._store = store
        self._compression = compression
        self._advance = advance

    def publish(self, built: Iterable[BuiltChunk]) -> Iterator[BuiltChunk]:
        """Publish chunk files in threads while later chunks are built. Yields each chunk once it is durable."""
        waiting: deque[tuple[BuiltChunk, Future[None]]] = deque()
        num_bytes = 0
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="publish") as pool:

            def finish() -> BuiltChunk:
                nonlocal num_bytes
                item, future = waiting.popleft()
                future.result()
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

    def write_manifests(self, chunks: Sequence[Chunk], num_workers: int) -> None:
        """Write all.txt and one manifest of consecutive chunks for each worker. Remove other manifests.

        The numbers of chunks of any two workers differ by at most one.
        """
        lines = [f"{self._key(chunk)}\n" for chunk in chunks]
        texts = {layout.ALL_MANIFEST: "".join(lines)}
        for index in range(num_workers):
            start, stop = (len(lines) * place // num_workers for place in (index, index + 1))
            texts[layout.worker_manifest(index, num_workers)] = "".join(lines[start:stop])
        for key, text in texts.items():
            self._create(key, text.encode())
        stale = [item.key for item in self._store.list(layout.MANIFESTS) if item.key not in texts]
        self._store.delete(stale)

    def finish(self, job: Job) -> None:
        """Remove chunks that are not of the job, check that all of the job exist, and write job.json.

        Raises:
            InputError: Another split wrote to the same place meanwhile.
        """
        there = {item.key: item.bytes for item in self._store.list(layout.CHUNKS)}
        expected = {self._key(chunk): chunk.bytes for chunk in job.chunks}
        self._store.delete([key for key in there if key not in expected])
        if any(there.get(key) != size for key, size in expected.items()):
            raise self._other_split()
        try:
            self._store.create(layout.JOB_KEY, codec.encode_pretty(job))
        except AlreadyExists as error:
            raise self._other_split() from error

    def _key(self, chunk: Chunk) -> str:
        return layout.chunk_file(chunk.name, self._compression)

    def _publish_chunk(self, item: BuiltChunk) -> None:
        key = self._key(item.chunk)
        try:
            self._store.create_file(key, item.path, is_final=True)
        except AlreadyExists:
            self._remove_leftover(key)
            self._store.create_file(key, item.path, is_final=True)
        item.path.unlink()

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
        if read_job(self._store) is not None:
            raise self._other_split()
        self._store.delete([key])

    def _other_split(self) -> InputError:
        return InputError(
            f"{self._store.url}: another split wrote here at the same time, expected to be alone",
            hint="run the same command again: it tells whether the job there is the one you want",
        )

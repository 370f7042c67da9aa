"""Jobs and runs for tests: small jobs at any URL, and workers (echo engine) over them, here or as real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job, Marker
from batchinfer.ledger.survey import newest_markers
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store

ECHO = ("--engine", "echo", "--prompt-column", "prompt")


class Finished(NamedTuple):
    """A command that has ended. `result` is the JSON object of its last line of stdout, {} if there is none."""

    status: int
    result: dict[str, Any]
    stderr: str


class Called(NamedTuple):
    """A command that has run in this process: its status, what it printed, and the JSON object of the last line."""

    status: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1]) if self.out.strip() else {}
        return found


Call = Callable[..., Called]


def default_row(index: int) -> dict[str, Any]:
    """The columns of one row; answers of the echo engine repeat the prompt."""
    return {"prompt": f"hello row {index} " + "x " * (index % 17)}


def make_job(
    url: str | Path,
    *,
    rows: int,
    per_chunk: int,
    workers: int = 1,
    make_row: Callable[[int], dict[str, Any]] = default_row,
    compression: str = "none",
) -> Job:
    """Write a job as `split` would, job.json last. Rows have `_row` and `_id` (the row's number as text)."""
    store = open_store(str(url))
    num_chunks = -(-rows // per_chunk)
    chunks: list[Chunk] = []
    keys: list[str] = []
    for index in range(num_chunks):
        first = index * per_chunk
        numbers = range(first, min(first + per_chunk, rows))
        data = b"".join(
            json.dumps({**make_row(row), "_row": row, "_id": str(row)}).encode() + b"\n"
            for row in numbers
        )
        if compression == "zstd":
            import zstandard

            data = zstandard.ZstdCompressor().compress(data)
        name = layout.chunk_name(index, num_chunks)
        keys.append(layout.chunk_file(name, compression))
        store.create(keys[-1], data)
        chunks.append(
            Chunk(
                name=name,
                first_row=first,
                rows=len(numbers),
                bytes=len(data),
                sha256=codec.sha256(data),
            )
        )
    store.create(layout.ALL_MANIFEST, _lines(keys))
    for worker in range(workers):
        start, end = worker * num_chunks // workers, (worker + 1) * num_chunks // workers
        store.create(layout.worker_manifest(worker, workers), _lines(keys[start:end]))
        store.create(f"{layout.MANIFESTS}only-{worker}.txt", _lines(keys[start:end]))
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=list(make_row(0)),
        rows=rows,
        chunks=chunks,
        num_workers=workers,
        compression=compression,
    )
    store.create(layout.JOB_KEY, codec.encode_pretty(job))
    return job


def make_job_of(url: str | Path, *files: bytes) -> Job:
    """Write a job whose chunks are these JSON Lines, as `split --by-reference` would make one of them."""
    store = open_store(str(url))
    chunks: list[Chunk] = []
    for index, data in enumerate(files):
        name = layout.chunk_name(index, len(files))
        store.create(layout.chunk_file(name, "none"), data)
        chunk = Chunk(
            name=name,
            first_row=sum(each.rows for each in chunks),
            rows=data.count(b"\n"),
            bytes=len(data),
            sha256=codec.sha256(data),
        )
        chunks.append(chunk)
    rows = sum(chunk.rows for chunk in chunks)
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=[],
        rows=rows,
        chunks=chunks,
        num_workers=1,
    )
    store.create(layout.JOB_KEY, codec.encode_pretty(job))
    return job


def said(line: dict[str, Any]) -> str:
    """The text of the first answer in an output line of a completion or a chat."""
    choice = line["body"]["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _lines(keys: Iterable[str]) -> bytes:
    return "".join(f"{key}\n" for key in keys).encode()


def worker_arguments(
    job: str | Path,
    run: str | Path,
    *options: str,
    index: int | None = None,
    only: int | None = None,
) -> list[str]:
    """Arguments of an echo worker over one worker's manifest, or over all.txt without `index`.

    With `only`, it does that worker's chunks and no others.
    """
    manifest = layout.ALL_MANIFEST if only is None else f"{layout.MANIFESTS}only-{only}.txt"
    if index is not None:
        found = codec.decode(open_store(str(job)).get(layout.JOB_KEY).data, Job, name="job.json")
        manifest = layout.worker_manifest(index, found.num_workers)
    return ["worker", "--manifest", f"{job}/{manifest}", "--output", str(run), *ECHO, *options]


def start_process(
    arguments: list[str], *, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `python -m batchinfer …` with pipes for its output. The caller kills or waits for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "batchinfer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def finish_process(process: subprocess.Popen[str], timeout_seconds: float = 240) -> Finished:
    """Wait for a process of `start_process` and read its result. Kills it when the time is up."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        _, stderr = process.communicate()
        raise AssertionError(f"still running after {timeout_seconds} s:\n{stderr}") from None
    lines = stdout.strip().splitlines()
    return Finished(process.returncode, json.loads(lines[-1]) if lines else {}, stderr)


def run_process(arguments: list[str], *, environment: dict[str, str] | None = None) -> Finished:
    """Run `python -m batchinfer …` to its end."""
    return finish_process(start_process(arguments, environment=environment))


def run_worker_process(
    job: str | Path,
    run: str | Path,
    *options: str,
    index: int | None = None,
    environment: dict[str, str] | None = None,
) -> Finished:
    """Run an echo worker as a process of its own."""
    return run_process(worker_arguments(job, run, *options, index=index), environment=environment)


def run_worker_here(
    job: str | Path,
    run: str | Path,
    *options: str,
    index: int | None = None,
    only: int | None = None,
) -> dict[str, Any]:
    """Run an echo worker in this process, which works with memory:// too. Raises what it raises."""
    from batchinfer.worker.command import command

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        result: dict[str, Any] = command.main(
            worker_arguments(job, run, *options, index=index, only=only)[1:], standalone_mode=False
        )
        return result
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------------- damage


def finished_chunks(store: Store) -> dict[str, int]:
    """Return every chunk that has a marker, with the highest generation of its markers."""
    return {name: marker.generation for name, marker in newest_markers(store).items()}


def read_marker(store: Store, name: str, generation: int = 0) -> Marker:
    """Read a chunk's marker."""
    key = layout.marker_key(name, generation)
    return codec.decode(store.get(key).data, Marker, name=key)


def output_key(store: Store, name: str) -> str:
    """The key of the output that a chunk's marker names."""
    return layout.output_key(read_marker(store, name).output)


def output_lines(run: str | Path) -> list[dict[str, Any]]:
    """The lines of the outputs that the newest markers of a run vouch for, chunk after chunk."""
    store, found = open_store(str(run)), []
    for name, generation in sorted(finished_chunks(store).items()):
        marker = read_marker(store, name, generation)
        data = store.get(layout.output_key(marker.output)).data
        assert (len(data), codec.sha256(data)) == (marker.output_bytes, marker.output_sha256)
        lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
        assert len(lines) == marker.rows_ok + marker.rows_error
        found += lines
    return found


def change_marker(store: Store, name: str, generation: int = 0, /, **changes: Any) -> None:
    """Write other values into a chunk's marker."""
    marker = msgspec.structs.replace(read_marker(store, name, generation), **changes)
    overwrite(store, layout.marker_key(name, generation), codec.encode(marker))


def overwrite(store: Store, key: str, data: bytes) -> None:
    """Put other bytes, perhaps none, in an object's place, as careless hands do."""
    store.delete([key])
    put_raw(store, key, data)


def put_raw(store: Store, key: str, data: bytes) -> None:
    """Put an object of any bytes, also none, over any that is there."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        store.put_file(key, Path(file.name))


def free_ports() -> int:
    """Return a port of 127.0.0.1 that is free, as the next one is."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port

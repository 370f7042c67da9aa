"""Jobs and runs for tests: small jobs at any URL, and workers (echo engine) over them, here or as real processes."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zstandard

from batchinfer.core import codec, layout
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job, Marker
from batchinfer.ledger.survey import newest_markers
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store

ECHO = ("--engine", "echo", "--prompt-column", "prompt")


class Called(NamedTuple):
    """A command that has ended: its status, what it printed, and the JSON object of the last line, {} without one."""

    status: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1]) if self.out.strip() else {}


Call = Callable[..., Called]


def default_row(index: int) -> dict[str, Any]:
    """The columns of one row; answers of the echo engine repeat the prompt."""
    return {"prompt": f"hello row {index} " + "x " * (index % 17)}


def put_job(
    put: Callable[[str, bytes], object],
    chunks: Sequence[bytes],
    *,
    workers: int = 1,
    compression: str = "none",
    columns: Sequence[str] = (),
) -> Job:
    """Put a job whose chunks are these JSON Lines, as `split` would, job.json last. Lines are taken as they are."""
    found: list[Chunk] = []
    keys: list[str] = []
    first_row = 0
    for index, data in enumerate(chunks):
        num_rows = data.count(b"\n")
        if compression == "zstd":
            data = zstandard.ZstdCompressor().compress(data)  # noqa: PLW2901 - the chunk's bytes
        name = layout.chunk_name(index, len(chunks))
        keys.append(layout.chunk_file(name, compression))
        put(keys[-1], data)
        chunk = Chunk(
            name=name,
            first_row=first_row,
            rows=num_rows,
            bytes=len(data),
            sha256=codec.sha256(data),
        )
        found.append(chunk)
        first_row += num_rows
    manifests = {layout.ALL_MANIFEST: keys}
    for worker in range(workers):
        share = keys[worker * len(keys) // workers : (worker + 1) * len(keys) // workers]
        manifests[layout.worker_manifest(worker, workers)] = share
        manifests[own_manifest(worker)] = share
    for manifest, lines in manifests.items():
        put(manifest, "".join(f"{key}\n" for key in lines).encode())
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=list(columns),
        rows=first_row,
        chunks=found,
        num_workers=workers,
        compression=compression,
    )
    put(layout.JOB_KEY, codec.encode_pretty(job))
    return job


def own_manifest(index: int) -> str:
    """Key of a list of one worker's chunks that `split` would not write: whoever works by it takes no others."""
    return f"{layout.MANIFESTS}only-{index}.txt"


def make_job(
    url: str | Path,
    *,
    rows: int,
    per_chunk: int,
    make_row: Callable[[int], dict[str, Any]] = default_row,
    **options: Any,
) -> Job:
    """Put a job at a URL. Rows have `_row` and `_id` (the row's number as text). `options` are those of `put_job`."""
    lines = [
        json.dumps({**make_row(row), "_row": row, "_id": str(row)}).encode() + b"\n"
        for row in range(rows)
    ]
    chunks = [b"".join(lines[first : first + per_chunk]) for first in range(0, rows, per_chunk)]
    return put_job(open_store(str(url)).create, chunks, columns=list(make_row(0)), **options)


def split(source: Any, output: str | Path, **options: Any) -> dict[str, Any]:
    """Run `batchinfer split` of a source, or of a list of them, in this process, and return its result."""
    from batchinfer.split.splitting import SplitConfig, run_split

    sources = [str(each) for each in (source if isinstance(source, list) else [source])]
    config = SplitConfig(sources=sources, output=str(output), **options)
    return run_split(config, store=open_store(str(output)))


def said(line: dict[str, Any]) -> str:
    """The text of the first answer in an output line of a completion or a chat."""
    choice = line["body"]["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


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
    manifest = layout.ALL_MANIFEST if only is None else own_manifest(only)
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


def finish_process(process: subprocess.Popen[str], timeout_seconds: float = 240) -> Called:
    """Wait for a process of `start_process`. Kills it when the time is up."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        _, stderr = process.communicate()
        raise AssertionError(f"still running after {timeout_seconds} s:\n{stderr}") from None
    return Called(process.returncode, stdout, stderr)


def run_process(arguments: list[str], *, environment: dict[str, str] | None = None) -> Called:
    """Run `python -m batchinfer …` to its end."""
    return finish_process(start_process(arguments, environment=environment))


def run_worker_here(
    job: str | Path, run: str | Path, *options: str, **which: int
) -> dict[str, Any]:
    """Run an echo worker in this process, which works with memory:// too. Raises what it raises.

    `which` is `index` or `only`, as for `worker_arguments`.
    """
    from batchinfer.worker.command import command

    return command.main(worker_arguments(job, run, *options, **which)[1:], standalone_mode=False)


# --------------------------------------------------------------------------- damage


def finished_chunks(store: Store) -> dict[str, int]:
    """Return every chunk that has a marker, with the highest generation of its markers."""
    return newest_markers(store)


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


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, two minutes at most."""
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def python(code: str, *words: Any, status: int = 0, **options: Any) -> str:
    """Run a program of Python in a process of its own, which must end with this status. Returns what it prints."""
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == status, done.stderr
    return done.stdout


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def put_program(path: Path, text: str) -> Path:
    """Write a program that can be run by its name."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def free_ports() -> int:
    """Return a port of 127.0.0.1 that is free, as the next one is, below those that the kernel gives to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError):
            for one in (port, port + 1):
                socket.create_server(("127.0.0.1", one)).close()
            return port

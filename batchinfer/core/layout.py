"""Keys of the objects below a job's and a run's folder on storage. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from batchinfer.core.errors import InputError

JOB_KEY = "job.json"
RUN_KEY = "run.json"
STOP_KEY = "stop.json"
CHUNKS = "chunks/"
MANIFESTS = "manifests/"
ALL_MANIFEST = "manifests/all.txt"
RUNS = "runs/"
OUTPUTS = "outputs/"
CHECKPOINTS = "checkpoints/"
CLAIMS = "claims/"
COMPLETE = "complete/"
WORKERS = "workers/"
PROBES = "probes/"
LAUNCHES = "launches/"
MARKER_SUFFIX = ".succeed"
STATISTICS_SUFFIX = ".stats.json"

_OUTPUT = re.compile(r"^(?P<chunk>[^/]+)\.[^./]+\.jsonl\Z")
_MARKER = re.compile(r"^(?P<chunk>[^/]+?)\.succeed(?:\.(?P<generation>[1-9][0-9]*))?\Z")
_SEGMENT = re.compile(r"^(?P<writer>.+)-(?P<seq>[0-9]{6})\.(?P<rows>[0-9]{1,12})\.jsonl$")
_RUN_OBJECT = re.compile(
    r"^(?P<folder>(?:.*/)?)(?:run\.json|outputs/[^/]+\.succeed(?:\.[0-9]+)?|checkpoints/[^/]+/[^/]+\.jsonl)$"
)
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


def is_chunk_name(name: str) -> bool:
    """Whether a chunk's name in a job.json is safe to use as a part of keys.

    >>> is_chunk_name("part-00007"), is_chunk_name("../evil"), is_chunk_name("")
    (True, False, False)
    """
    return _NAME.match(name) is not None


def chunk_name(index: int, num_chunks: int) -> str:
    """Return a chunk's name. Its number has five digits, or more if the job's last chunk needs more.

    >>> chunk_name(7, 200)
    'part-00007'
    """
    return f"part-{index:0{max(5, len(str(num_chunks - 1)))}d}"


def chunk_file(name: str, compression: str, nonce: str = "") -> str:
    """Key of a chunk's file, relative to the folder of its job. With `nonce`, a key for when the plain key is taken.

    >>> chunk_file("part-00007", "zstd"), chunk_file("part-00007", "none", "3f2a")
    ('chunks/part-00007.jsonl.zst', 'chunks/part-00007.3f2a.jsonl')
    """
    stem = f"{name}.{nonce}" if nonce else name
    return f"{CHUNKS}{stem}.jsonl{'.zst' if compression == 'zstd' else ''}"


def stem(path: str) -> str:
    """Name of the chunk in the file at a path or URL: the file's name without .jsonl, .zst and .zstd.

    >>> stem("s3://b/chunks/part-00007.jsonl.zst")
    'part-00007'
    """
    name = path.rsplit("/", 1)[-1]
    for suffix in (".zst", ".zstd"):
        name = name.removesuffix(suffix)
    return name.removesuffix(".jsonl")


def worker_manifest(index: int, num_workers: int) -> str:
    """Key of one worker's manifest.

    >>> worker_manifest(3, 16)
    'manifests/worker-00003.txt'
    """
    width = max(5, len(str(num_workers - 1)))
    return f"{MANIFESTS}worker-{index:0{width}d}.txt"


def output_file(name: str, nonce: str) -> str:
    """Name of an output file of a chunk in outputs/. `nonce` makes it a name of its own, and has no dot.

    >>> output_file("part-00007", "3f2a")
    'part-00007.3f2a.jsonl'
    """
    return f"{name}.{nonce}.jsonl"


def output_key(file: str) -> str:
    """Key of the output with this file name."""
    return OUTPUTS + file


def chunk_of_output(key: str) -> str:
    """Name of the chunk that an output belongs to; empty if the key is not that of an output.

    >>> (
    ...     chunk_of_output("outputs/part-00007.3f2a.jsonl"),
    ...     chunk_of_output("outputs/part-00007.succeed"),
    ... )
    ('part-00007', '')
    """
    match = _OUTPUT.match(key.removeprefix(OUTPUTS))
    return match["chunk"] if match else ""


def marker_key(name: str, generation: int = 0) -> str:
    """Key of a chunk's marker.

    >>> marker_key("part-00007"), marker_key("part-00007", 2)
    ('outputs/part-00007.succeed', 'outputs/part-00007.succeed.2')
    """
    suffix = f".{generation}" if generation else ""
    return f"{OUTPUTS}{name}{MARKER_SUFFIX}{suffix}"


def parse_marker(key: str) -> tuple[str, int] | None:
    """Return (chunk name, generation) of a marker's key, or None if the key does not end like a marker's.

    >>> parse_marker("outputs/part-00007.succeed.2")
    ('part-00007', 2)
    """
    match = _MARKER.match(key.removeprefix(OUTPUTS))
    if match is None:
        return None
    return match["chunk"], int(match["generation"] or 0)


def checkpoint_prefix(name: str) -> str:
    """Prefix of the keys of a chunk's checkpoint segments."""
    return f"{CHECKPOINTS}{name}/"


class SegmentName(NamedTuple):
    """What a checkpoint segment's key tells: its chunk, and the number of its finished rows."""

    chunk: str
    rows: int


def segment_key(name: str, writer: str, seq: int, rows: int = 0) -> str:
    """Key of one checkpoint segment. `writer` is the worker's id and the nonce of its start.

    >>> segment_key("part-00007", "w0.3f2a", 3, 250)
    'checkpoints/part-00007/w0.3f2a-000003.250.jsonl'
    """
    return f"{CHECKPOINTS}{name}/{writer}-{seq:06d}.{rows}.jsonl"


def parse_segment(key: str) -> SegmentName | None:
    """Return what a checkpoint segment's key tells, or None if the file's name is not that of a segment."""
    name, _, file = key.removeprefix(CHECKPOINTS).partition("/")
    match = _SEGMENT.match(file)
    if match is None:
        return None
    return SegmentName(name, int(match["rows"]))


def run_above(key: str) -> str | None:
    """Folder ("" or with a final slash) of the run that a run.json, a marker or a checkpoint segment belongs to.

    None for the key of any other object. Every run that is worth keeping has one of these three.

    >>> (
    ...     run_above("tests/a/outputs/part-00000.succeed"),
    ...     run_above("run.json"),
    ...     run_above("chunks/a.jsonl"),
    ... )
    ('tests/a/', '', None)
    """
    match = _RUN_OBJECT.match(key)
    return match["folder"] if match else None


def claim_key(name: str) -> str:
    """Key of a chunk's claim."""
    return f"{CLAIMS}{name}.json"


def worker_key(worker_id: str) -> str:
    """Key of a worker's record.

    Raises:
        InputError: The id has a character that is not allowed, such as a slash, or a wrong length.
    """
    if not _NAME.match(worker_id) or worker_id.endswith(".stats"):
        raise InputError(
            f"worker id {worker_id!r}: expected 1 to 128 letters, digits, '.', '_' or '-', the first a letter or "
            "digit, and another end than .stats",
            hint="pass another --worker-id",
        )
    return f"{WORKERS}{worker_id}.json"


def statistics_key(worker_id: str) -> str:
    """Key of a worker's statistics, beside its record."""
    return worker_key(worker_id).removesuffix(".json") + STATISTICS_SUFFIX


def launch_key(launch_id: str) -> str:
    """Key of the record of a launch, written before anything is submitted."""
    return f"{LAUNCHES}{launch_id}.json"


def launched_worker(launch_id: str, rank: int) -> str:
    """Id of the worker of one rank, counted from 0, of a launch.

    >>> launched_worker("20261122-7f3a", 3)
    '20261122-7f3a-00003'
    """
    return f"{launch_id}-{rank:05d}"


def without_slash(url: str) -> str:
    """Return a path or URL without the slashes at its end. The path "/" and a bare "s3://" stay as they are.

    >>> without_slash("s3://b/run/"), without_slash("s3://"), without_slash("/")
    ('s3://b/run', 's3://', '/')
    """
    stripped = url.rstrip("/")
    return stripped if stripped and not stripped.endswith(":") else url


def run_url(job_url: str, run_name: str) -> str:
    """URL at which a run is placed by default: below its job."""
    return f"{job_url.rstrip('/')}/runs/{run_name}"


def job_beside(run_url: str) -> str:
    """URL of the job in the work folder of `batchinfer run`, beside the run; empty for a run with another name.

    >>> job_beside("s3://bucket/answers.batchinfer/run"), job_beside("s3://bucket/job/runs/llama")
    ('s3://bucket/answers.batchinfer/job', '')
    """
    work, _, name = run_url.rstrip("/").rpartition("/")
    return f"{work}/job" if work and name == "run" else ""


def job_above(run_url: str) -> str:
    """URL of the job that a run's URL is below; empty if the run is not at its default place below a job.

    >>> job_above("s3://bucket/job/runs/llama"), job_above("s3://bucket/answers")
    ('s3://bucket/job', '')
    """
    job, slash, name = run_url.rstrip("/").rpartition(f"/{RUNS}")
    return job if slash and name and "/" not in name else ""

"""Writes a job and a run as they would lie in a bucket after many workers worked on it, without any worker.

2000 chunks, 40 workers, a few of them killed and resumed, one gone, one with a clock hours off. Deterministic.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.clock import iso_utc
from batchinfer.core.records import Chunk, ErrorExample, Job, Minute, Run, Worker
from batchinfer.storage import Store
from fakes import MemoryStore, marker_record, put_worker

NOW = 1_790_000_000.0
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Shape(NamedTuple):
    """What to simulate. `done_share` of the chunks have markers; times end at `now`."""

    num_chunks: int = 2000
    rows_per_chunk: int = 500
    num_workers: int = 40
    done_share: float = 0.6
    now: float = NOW
    hours: float = 6.0
    rows_in_outputs: int = 5
    """Only so many lines are really written to each output."""
    num_outputs: int = 2
    """Number of chunks that exist, and whose markers count these lines."""
    text: str = "An answer."
    clock_off_seconds: float = 0.0
    """Of the second worker."""


def chunk_names(shape: Shape) -> list[str]:
    return [layout.chunk_name(index, shape.num_chunks) for index in range(shape.num_chunks)]


def make_job(shape: Shape) -> Job:
    return Job(
        format_version=1,
        sources=[],
        columns=["prompt"],
        rows=shape.num_chunks * shape.rows_per_chunk,
        chunks=[
            Chunk(
                name=name,
                first_row=index * shape.rows_per_chunk,
                rows=shape.rows_per_chunk,
                bytes=1000,
                sha256="0" * 64,
            )
            for index, name in enumerate(chunk_names(shape))
        ],
        num_workers=shape.num_workers,
    )


def make_run(job_bytes: bytes, **config: Any) -> Run:
    config = {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "job_sha256": codec.sha256(job_bytes),
        "limit": None,
        "sampling": {"max_tokens": 512, "temperature": 0.7},
        "prompt": {"messages_column": "conversation", "system_prompt": HOSTILE},
        **config,
    }
    return Run(
        format_version=1,
        fingerprint=codec.fingerprint(config),
        config=config,
        recorded={
            "engine": "vllm",
            "engine_version": "0.30.0",
            "device": "NVIDIA L4",
            "tensor_parallel_size": 1,
            "replicas": 1,
        },
        nonce="n",
    )


def make_workers(shape: Shape) -> list[Worker]:
    names = chunk_names(shape)
    num_done = int(len(names) * shape.done_share)
    share: list[list[str]] = [
        names[i : num_done : shape.num_workers] for i in range(shape.num_workers)
    ]
    todo = names[num_done:]
    return [
        _worker(shape, index, share[index], todo[2 * index : 2 * index + 2])
        for index in range(shape.num_workers)
    ]


def _worker(shape: Shape, index: int, done: list[str], open_chunks: list[str]) -> Worker:
    dice = random.Random(index)
    begin = shape.now - shape.hours * 3600 + 60 * dice.random()
    killed_at = begin + shape.hours * 3600 * (0.3 + 0.4 * dice.random())
    is_killed = index % 5 == 3
    resumed_at = killed_at + 900 if is_killed else killed_at
    end = shape.now - 10
    is_gone = index == 7
    if is_gone:
        end = shape.now - 3600
    working = end - begin - (resumed_at - killed_at)
    minutes = []
    rows = prompt = completion = errors = 0
    for minute in range(int(begin // 60) + 2, int(end // 60)):
        if is_killed and killed_at < minute * 60 < resumed_at + 120:
            continue
        some = Minute(
            minute=minute,
            rows=dice.randint(30, 50),
            prompt_tokens=dice.randint(9000, 12000),
            completion_tokens=dice.randint(14000, 22000),
            errors=int(dice.random() < 0.02),
        )
        minutes.append(some)
        rows, errors = rows + some.rows, errors + some.errors
        prompt, completion = prompt + some.prompt_tokens, completion + some.completion_tokens
    clouds = [("aws", "us-east-1"), ("gcp", "us-central1"), ("lambda", "us-west-1")]
    cloud, region = clouds[index % 3]
    worker = Worker(
        id=f"sky-2026-{index:03d}",
        nonce="n",
        state="running",
        started=begin,
        heartbeat=end,
        host={"cloud": cloud, "region": region, "accelerator": "L4:1", "spot": index % 2 == 0},
        engine={
            "name": "vllm",
            "device": "NVIDIA L4",
            "num_replicas": 1,
            "load_seconds": 90.0,
            "model": "meta-llama/Llama-3.1-8B-Instruct",
        },
        open_chunks=dict.fromkeys(open_chunks, 50),
        chunks_done=len(done),
        rows_ok=rows - errors,
        rows_error=errors,
        rows_resumed=40 if is_killed else 0,
        prompt_tokens=prompt,
        completion_tokens=completion,
        busy_seconds=working - 120,
        errors={"prompt_too_long": errors} if errors else {},
        examples={"prompt_too_long": ErrorExample(chunk="part-00001", line=3, message=HOSTILE)}
        if errors
        else {},
        finish_reasons={"stop": int((rows - errors) * 0.9), "length": int((rows - errors) * 0.1)},
        minutes=minutes[-1440:],
        starts=[begin, resumed_at] if is_killed else [begin],
        up_seconds=working,
    )
    return _shifted(worker, shape.clock_off_seconds) if index == 1 else worker


def _shifted(worker: Worker, seconds: float) -> Worker:
    """The same worker on a machine whose clock is wrong."""

    return msgspec.structs.replace(
        worker,
        started=worker.started + seconds,
        heartbeat=worker.heartbeat + seconds,
        starts=[start + seconds for start in worker.starts],
        minutes=[
            msgspec.structs.replace(minute, minute=minute.minute + int(seconds // 60))
            for minute in worker.minutes
        ],
    )


def output_lines(name: str, shape: Shape) -> bytes:
    lines = []
    for index in range(shape.rows_in_outputs):
        line = {
            "_row": index,
            "_id": f"{name}-{index}",
            "status": 200,
            "body": {
                "choices": [{"index": 0, "text": shape.text, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 20},
            },
        }
        lines.append(codec.encode(line) + b"\n")
    return b"".join(lines)


def write_big_run(job: Store, run: Store, shape: Shape | None = None) -> None:
    """Write everything. Both stores may be the same bucket."""
    shape = shape or Shape()
    job_bytes = codec.encode_pretty(make_job(shape))
    job.create(layout.JOB_KEY, job_bytes)
    written = make_run(job_bytes)
    run.create(layout.RUN_KEY, codec.encode_pretty(written))
    workers = make_workers(shape)
    for worker in workers:
        put_worker(run, worker)
    for worker in workers:
        for chunk, rows in worker.open_chunks.items():
            key = layout.segment_key(chunk, f"{worker.id}.n", 1, rows)
            run.create(key, b"finished rows")
    names = chunk_names(shape)
    for index, name in enumerate(names[: int(len(names) * shape.done_share)]):
        body = output_lines(name, shape)
        run.create(layout.output_key(layout.output_file(name, "0")), body)
        if index < shape.num_outputs:
            rows = "".join(
                f'{{"prompt": "question {i} {HOSTILE[:8]}"}}\n'
                for i in range(shape.rows_in_outputs)
            )
            job.create(layout.chunk_file(name, "none"), rows.encode())
        marker = marker_record(
            output=layout.output_file(name, "0"),
            output_bytes=len(body),
            output_sha256=codec.sha256(body),
            chunk=layout.chunk_file(name, "none"),
            chunk_sha256="0" * 64,
            rows_ok=shape.rows_in_outputs if index < shape.num_outputs else shape.rows_per_chunk,
            fingerprint=written.fingerprint,
            worker=workers[index % len(workers)].id,
            start=iso_utc(shape.now - 100),
            end=iso_utc(shape.now),
            prompt_tokens=250 * shape.rows_per_chunk,
            completion_tokens=450 * shape.rows_per_chunk,
            nonce="n",
        )
        run.create(layout.marker_key(name), codec.encode(marker))


def in_memory(url: str) -> Store:
    """Opens memory stores whose objects were written at NOW."""
    return MemoryStore(url, clock=lambda: NOW)


def write_in_memory(root: str, shape: Shape) -> str:
    """Write it to memory, as of NOW; returns the run's URL."""
    write_big_run(in_memory(root), in_memory(f"{root}/runs/a"), shape)
    return f"{root}/runs/a"


def write_local(folder: Path, shape: Shape | None = None) -> Path:
    """Write it as plain files; returns the run's folder."""
    from batchinfer.storage.local import LocalStore

    run = folder / "runs" / "big"
    shape = shape or Shape()
    write_big_run(LocalStore(folder), LocalStore(run), shape)
    for worker in make_workers(shape):
        # Storage's clock is right, whatever the worker's says.
        written = worker.heartbeat - (shape.clock_off_seconds if worker.id.endswith("-001") else 0)
        for key in (layout.worker_key(worker.id), layout.statistics_key(worker.id)):
            os.utime(run / key, (written, written))
    for marker in run.glob("outputs/*.succeed*"):
        os.utime(marker, (shape.now - 10, shape.now - 10))
    return run

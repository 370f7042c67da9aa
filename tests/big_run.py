"""A run as it lies in a bucket while workers are at work on it, written without any worker."""

from typing import NamedTuple

from batchinfer.core import layout
from batchinfer.core.records import ErrorExample, Minute, Worker
from batchinfer.storage import Store
from fakes import MemoryStore, put_worker, worker_record
from finished_run import chat, finish_run
from making import put_job

NOW = 1_790_000_000.0
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
NUM_CHUNKS, ROWS_PER_CHUNK = 20, 10


class Shape(NamedTuple):
    """What to write. `done_share` of the chunks have markers; the workers began six hours ago."""

    num_workers: int = 3
    done_share: float = 0.6
    text: str = "An answer."

    @property
    def num_done(self) -> int:
        return int(NUM_CHUNKS * self.done_share)


def make_workers(shape: Shape) -> list[Worker]:
    """Records of workers that share the chunks; each has two open ones."""
    todo = [layout.chunk_name(index, NUM_CHUNKS) for index in range(shape.num_done, NUM_CHUNKS)]
    begin = NOW - 6 * 3600
    minutes = [
        Minute(
            minute=minute,
            rows=40,
            prompt_tokens=10_000,
            completion_tokens=18_000,
            errors=int(minute % 50 == 0),
        )
        for minute in range(int(begin // 60) + 2, int(NOW // 60))
    ]
    rows, errors = 40 * len(minutes), sum(each.errors for each in minutes)
    return [
        worker_record(
            id=f"sky-2026-{index:03d}",
            nonce="n",
            started=begin,
            num_starts=1,
            last_start=begin,
            heartbeat=NOW - 10,
            host={"cloud": "gcp", "region": "us-central1", "accelerator": "L4:1", "spot": True},
            engine={"name": "vllm", "device": "NVIDIA L4", "load_seconds": 90.0, "model": MODEL},
            open_chunks=dict.fromkeys(todo[2 * index : 2 * index + 2], 5),
            chunks_done=shape.num_done // shape.num_workers,
            rows_ok=rows - errors,
            rows_error=errors,
            prompt_tokens=10_000 * len(minutes),
            completion_tokens=18_000 * len(minutes),
            busy_seconds=NOW - begin - 120,
            up_seconds=NOW - begin,
            errors={"prompt_too_long": errors},
            examples={"prompt_too_long": ErrorExample(chunk="part-00001", line=3, message=HOSTILE)},
            finish_reasons={"stop": rows - errors},
            minutes=minutes,
        )
        for index in range(shape.num_workers)
    ]


def in_memory(url: str) -> Store:
    """Opens memory stores whose objects were written at NOW."""
    return MemoryStore(url, clock=lambda: NOW)


def write_in_memory(job: str, shape: Shape) -> str:
    """Write the job and, as of NOW, its run to memory; returns the run's URL."""
    lines = (f'{{"prompt": "question {row} </script"}}\n' for row in range(ROWS_PER_CHUNK))
    chunks = ["".join(lines).encode()] * NUM_CHUNKS
    put_job(in_memory(job).create, chunks, workers=shape.num_workers, columns=["prompt"])
    run = f"{job}/runs/a"
    finish_run(
        job,
        run,
        lambda _: chat(shape.text),
        prompt={"system_prompt": HOSTILE},
        leave_out=range(shape.num_done, NUM_CHUNKS),
        model=MODEL,
        open_store=in_memory,
    )
    store = in_memory(run)
    for worker in make_workers(shape):
        put_worker(store, worker)
        for chunk, rows in worker.open_chunks.items():
            store.create(layout.segment_key(chunk, f"{worker.id}.n", 1, rows), b"finished rows")
    return run

"""Measure `--dedupe`: rows that the engine is asked, its steps, and the worker's CPU, by the share of equal requests.

The worker is the real one; the engine is the model of `prefix.py`, with 32 sequences. With a share of 50 %, half of the
rows repeat the prompt of a random other row. The last line is one JSON object.

    python benchmarks/dedupe.py [--rows 8000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import workload
from harness import alternate, entries, print_table, spread
from prefix import CacheModel

from batchinfer.core.records import Request, Sampling
from batchinfer.engines import RequestSource, Stop
from batchinfer.engines.config import EngineConfig
from batchinfer.prompts import PromptConfig
from batchinfer.worker.config import Limits, WorkerConfig, real_environment
from batchinfer.worker.start import run_worker

SHARES = (0.0, 0.5)
STEP_SECONDS = 0.002
ROWS_PER_CHUNK = 500


class Measured(NamedTuple):
    """One run: rows that the engine got, its steps, microseconds of CPU for each row."""

    asked: int
    steps: int
    cpu_us: float


class CountingModel(CacheModel):
    """Counts the requests that it takes."""

    asked = 0

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[Any]:
        """See Engine.generate."""
        take = source.take

        def counted(most: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
            taken = take(most, free_slots)
            self.asked += len(taken or ())
            return taken

        source.take = counted  # type: ignore[method-assign]
        return super().generate(source, stop)


def make_prompts(rows: int, share: float) -> list[list[int]]:
    """Return prompts of 64 random tokens, a share of which repeat other ones."""
    rng = random.Random(0)
    distinct = [rng.choices(range(10, 32_000), k=64) for _ in range(round(rows * (1 - share)))]
    prompts = distinct + [rng.choice(distinct) for _ in range(rows - len(distinct))]
    rng.shuffle(prompts)
    return prompts


def run(job: Path, runs: Iterator[int], rows: int, *, dedupe: bool) -> Measured:
    """Run the worker over a job."""
    engine = CountingModel(STEP_SECONDS)
    config = WorkerConfig(
        manifests=[f"{job}/manifests/all.txt"],
        output=f"{job}/runs/{next(runs)}",
        engine=EngineConfig(engine="echo"),
        prompt=PromptConfig(prompt_column="prompt"),
        sampling=Sampling(max_tokens=1, temperature=0.0),
        limits=Limits(dedupe=dedupe),
    )
    environment = real_environment(grace_seconds=1.0, show_progress=lambda *_: None)
    before = time.process_time()
    run_worker(config, dataclasses.replace(environment, create_engine=lambda _: engine))
    return Measured(engine.asked, engine.stats().steps, 1e6 * (time.process_time() - before) / rows)


def main() -> None:
    """Run every share with and without the option, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    result: dict[str, Any] = {"benchmark": "dedupe", "rows": arguments.rows}
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES:
            job = Path(folder) / f"job-{share}"
            rows = [{"prompt": each} for each in make_prompts(arguments.rows, share)]
            workload.write_job(str(job), rows, per_chunk=ROWS_PER_CHUNK)
            ways = {
                str(dedupe): partial(run, job, count(dedupe, 2), len(rows), dedupe=dedupe)
                for dedupe in (False, True)
            }
            for name, found in alternate(ways, arguments.repeats).items():
                figures = {
                    key: spread(each)
                    for key, each in zip(Measured._fields, zip(*found, strict=True), strict=True)
                }
                result[f"{share:.0%} equal, dedupe {name}"] = entries(figures)
                table.append([f"{share:.0%}", name, *(f"{each:,.0f}" for each in figures.values())])
    print_table(["equal", "--dedupe", "rows asked", "engine steps", "CPU us a row"], table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

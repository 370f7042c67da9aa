"""A slow bucket costs no engine step: what touches storage runs beside generation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply
from batchinfer.engines import RequestSource, Stop
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.prompts.types import PromptConfig
from batchinfer.storage.opening import open_store
from batchinfer.worker.start import run_worker
from batchinfer.worker.worker_config import WorkerConfig, real_environment
from making import make_job

SEQS = 8
STEP_SECONDS = 0.02
ROWS, ROWS_PER_CHUNK = 400, 20


class Slow:
    """A store that thinks for a while before every verb."""

    def __init__(self, url: str, seconds: float) -> None:
        self._store = open_store(url)
        self._seconds = seconds
        self.url = self._store.url

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        if not callable(verb):
            return verb

        def slowly(*arguments: Any, **options: Any) -> Any:
            time.sleep(self._seconds)
            return verb(*arguments, **options)

        return slowly


class Steps:
    """An engine that counts: eight rows run at a time, each for four to eleven steps."""

    def __init__(self) -> None:
        self.steps = self.slots = 0
        self.is_last = False

    def open(self, stop: Stop) -> EngineInfo:
        time.sleep(2.0)  # as a model, it loads for longer than the first chunk needs
        return EngineInfo(
            name="steps",
            version="1",
            model="steps",
            max_model_len=100,
            max_num_seqs=SEQS,
            max_in_flight=SEQS * 3 // 2,
        )

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        waiting: list[Call] = []
        running: list[tuple[int, Call]] = []
        while not stop.is_set():
            taken = source.take(SEQS * 3 // 2 - len(waiting) - len(running))
            waiting += taken or []
            while waiting and len(running) < SEQS:
                call = waiting.pop(0)
                running.append((self.steps + 4 + call.key[1] % 8, call))
            if not running:
                if taken is None:
                    return
                yield []
                source.wait(0.1)
                continue
            time.sleep(STEP_SECONDS)
            self.steps += 1
            self.slots += len(running)
            done = [call for end, call in running if end <= self.steps]
            running = [each for each in running if each[0] > self.steps]
            yield [Reply(key=each.key, status=200, body=b"{}") for each in done]

    def parameters(self, _path: str) -> frozenset[str]:
        return frozenset()

    def stats(self) -> EngineStats:
        return EngineStats(steps=self.steps)

    def close(self) -> None:
        pass


def run(job: str, name: str, seconds: float) -> Steps:
    engine = Steps()
    config = WorkerConfig(
        manifests=[f"{job}/manifests/all.txt"],
        output=f"{job}/runs/{name}",
        engine=EngineConfig(engine="echo"),
        prompt=PromptConfig(prompt_column="prompt"),
        checkpoint_seconds=0.5,
    )
    environment = real_environment(grace_seconds=1.0, show_progress=lambda *_: None)
    environment = dataclasses.replace(
        environment, open_store=lambda url: Slow(url, seconds), create_engine=lambda _: engine
    )
    result = run_worker(config, environment)
    assert result["request_count"] == ROWS
    return engine


def test_two_hundred_milliseconds_a_request_cost_no_engine_step(tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=ROWS, per_chunk=ROWS_PER_CHUNK)
    quick, slow = run(job, "quick", 0.0), run(job, "slow", 0.2)
    # Each row takes its steps whatever storage does; were the engine ever short of rows, there would be more
    # steps in which fewer than eight ran.
    assert quick.slots == slow.slots
    assert slow.steps <= quick.steps * 1.02

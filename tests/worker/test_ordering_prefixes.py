"""The order of rows within a window of prefixes: neighbours share what they can, and outputs do not notice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.records import Call, Reply
from batchinfer.engines import RequestSource, Stop
from batchinfer.engines.config import EchoOptions, EngineConfig
from batchinfer.engines.http import HttpEngine
from batchinfer.prompts import PromptConfig
from batchinfer.worker.config import Limits, WorkerConfig, real_environment
from batchinfer.worker.ordering import PrefixWindow
from batchinfer.worker.start import run_worker
from making import make_job, said

prompts = st.binary(min_size=1, max_size=3) | st.text("ab", min_size=1, max_size=8).map(str.encode)


def in_order(many: list[bytes], size: int = 100) -> list[bytes]:
    window: PrefixWindow[Call] = PrefixWindow(size, lambda each: each)
    window.extend(Call(key=("c", line), path="/", body=body) for line, body in enumerate(many))
    return [each.body for each in window.release()]


def shared(one: bytes, other: bytes) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len(list(pairs))


@given(st.lists(prompts, max_size=12))
def test_no_order_gives_neighbours_longer_prefixes_in_common(many: list[bytes]) -> None:
    ordered = in_order(many)
    assert sorted(ordered) == sorted(many)
    for index, prompt in enumerate(ordered[1:], 1):
        best = max(shared(prompt, before) for before in ordered[:index])
        assert shared(prompt, ordered[index - 1]) == best


def test_without_a_window_rows_keep_their_order() -> None:
    assert in_order([b"c", b"a", b"b"], size=0) == [b"c", b"a", b"b"]


def test_equal_bodies_keep_their_order() -> None:
    window: PrefixWindow[Call] = PrefixWindow(10, lambda each: each)
    window.extend(Call(key=("c", line), path="/", body=b"same") for line in (2, 0, 1))
    assert [each.key[1] for each in window.release()] == [2, 0, 1]


class Recorded:
    """A source of calls that remembers their prompts."""

    def __init__(self, source: RequestSource, prompts: list[str]) -> None:
        self._source, self._prompts, self.wait = source, prompts, source.wait

    def take(self, max_calls: int, free_slots: Sequence[int] = ()) -> list[Call] | None:
        calls = self._source.take(max_calls, free_slots)
        self._prompts += [json.loads(call.body)["prompt"] for call in calls or ()]
        return calls


class Recording(HttpEngine):
    """The echo engine, which remembers what it was given, in order."""

    def __init__(self) -> None:
        echo = EchoOptions(latency_seconds=0.01)
        super().__init__(
            EngineConfig(engine="echo", server_args=["--max-num-seqs", "8"], echo=echo)
        )
        self.prompts: list[str] = []

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        return super().generate(Recorded(source, self.prompts), stop)


@pytest.fixture
def job(tmp_path: Path) -> str:
    """600 rows in chunks of 50; ten beginnings, drawn at random."""
    rng = random.Random(0)
    rows = [{"prompt": f"beginning {rng.randrange(10)} and row {row}"} for row in range(600)]
    make_job(tmp_path / "job", rows=600, per_chunk=50, make_row=rows.__getitem__)
    return str(tmp_path / "job")


def run(job: str, window: int) -> tuple[list[str], list[str]]:
    """What the engine got, and the output lines."""
    engine = Recording()
    output = f"{job}/runs/{window}"
    config = WorkerConfig(
        manifests=[f"{job}/manifests/all.txt"],
        output=output,
        engine=EngineConfig(engine="echo"),
        prompt=PromptConfig(prompt_column="prompt"),
        limits=Limits(prefix_window=window),
    )
    environment = real_environment(grace_seconds=1.0, show_progress=lambda *_: None)
    run_worker(config, dataclasses.replace(environment, create_engine=lambda _: engine))
    paths = sorted(Path(output, "outputs").glob("*.jsonl"))
    return engine.prompts, [line for path in paths for line in path.read_text().splitlines()]


def num_changes(prompts: list[str]) -> int:
    beginnings = [prompt.split()[1] for prompt in prompts]
    return sum(one != other for one, other in itertools.pairwise(beginnings))


def test_a_window_groups_beginnings_over_chunks_and_changes_no_output(job: str) -> None:
    plain, expected = run(job, 0)
    grouped, lines = run(job, 200)
    assert plain == [said(json.loads(line)) for line in expected]
    assert lines == expected
    assert sorted(grouped) == sorted(plain)
    assert num_changes(plain) > 400
    assert num_changes(grouped) < 300


def test_a_window_larger_than_the_job_does_not_wait_for_more(job: str) -> None:
    grouped, lines = run(job, 100_000)
    assert len(lines) == len(grouped) == 600

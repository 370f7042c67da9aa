"""The order of rows within a window of prefixes: neighbours share what they can, and outputs do not notice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.records import Request, Sampling
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.echo import EchoEngine
from batchinfer.prompts import PromptConfig
from batchinfer.worker.config import Limits, WorkerConfig, real_environment
from batchinfer.worker.ordering import PrefixWindow, prefix_key
from batchinfer.worker.start import run_worker
from making import make_job

prompts = st.lists(st.integers(0, 3) | st.integers(0, 200_000), min_size=1, max_size=8)


def request(token_ids: list[int], line: int = 0) -> Request:
    return Request(key=("part-00000", line), sampling=Sampling(), token_ids=token_ids)


def in_order(many: list[list[int]], size: int = 100) -> list[list[int]]:
    window: PrefixWindow[Request] = PrefixWindow(size, lambda each: each)
    for index, token_ids in enumerate(many):
        window.extend([request(token_ids, index)])
    return [each.token_ids or [] for each in window.release()]


def shared(one: list[int], other: list[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len(list(pairs))


@given(st.lists(prompts, max_size=12))
def test_no_order_gives_neighbours_longer_prefixes_in_common(many: list[list[int]]) -> None:
    ordered = in_order(many)
    assert sorted(ordered) == sorted(many)
    for index, prompt in enumerate(ordered[1:], 1):
        best = max(shared(prompt, before) for before in ordered[:index])
        assert shared(prompt, ordered[index - 1]) == best


def test_a_prefix_runs_before_its_extensions() -> None:
    assert in_order([[1, 2, 3], [9], [1, 2], [1]]) == [[1], [1, 2], [1, 2, 3], [9]]


@pytest.mark.parametrize(
    "odd",
    [
        request([2**32, 2]),
        request([-1]),
        Request(key=("c", 0), sampling=Sampling(), text="\ud800"),
        Request(
            key=("c", 0), sampling=Sampling(), messages=[{"role": "user", "content": "\ud800"}]
        ),
        Request(key=("c", 0), sampling=Sampling(), messages=[{"role": "user", "content": 2**70}]),
    ],
)
def test_every_request_has_a_key(odd: Request) -> None:
    """One row that had none ended the worker, and every start after it."""
    assert isinstance(prefix_key(odd), bytes)


def test_without_a_window_rows_keep_their_order() -> None:
    assert in_order([[3], [1], [2]], size=0) == [[3], [1], [2]]


def test_equal_prompts_keep_their_order() -> None:
    window: PrefixWindow[Request] = PrefixWindow(10, lambda each: each)
    for line in (2, 0, 1):
        window.extend([request([7, 7], line)])
    assert [each.key[1] for each in window.release()] == [2, 0, 1]


def test_texts_and_messages_are_ordered_by_how_they_begin() -> None:
    texts = ["b", "a b", "\ud800", "a"]
    keys = [prefix_key(Request(key=("c", 0), sampling=Sampling(), text=text)) for text in texts]
    assert sorted(keys) == [keys[3], keys[1], keys[0], keys[2]]
    chats = [[{"role": "user", "content": text}] for text in ("b", "a")]
    first, second = (
        prefix_key(Request(key=("c", 0), sampling=Sampling(), messages=chat)) for chat in chats
    )
    assert second < first


class Recording(EchoEngine):
    """The echo engine, which remembers what it was given, and when."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(engine="echo", max_num_seqs=8, echo_latency_seconds=0.01))
        self.prompts: list[str] = []

    def _admit(self, requests: list[Request], now: float) -> Any:
        self.prompts += [each.text or "" for each in requests]
        return super()._admit(requests, now)


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
        sampling=Sampling(),
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
    assert plain == [json.loads(line)["choices"][0]["text"] for line in expected]
    assert lines == expected
    assert sorted(grouped) == sorted(plain)
    assert num_changes(plain) > 400
    assert num_changes(grouped) < 300


def test_a_window_larger_than_the_job_does_not_wait_for_more(job: str) -> None:
    grouped, lines = run(job, 100_000)
    assert len(lines) == len(grouped) == 600

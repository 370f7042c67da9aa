"""The way of rows through a worker: how much memory they take there, suspects and rows with images among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchinfer.core.errors import EngineDied, Interrupted
from batchinfer.core.records import Call, Failure, Reply, RowKey
from batchinfer.prompts.builder import PromptBuilder
from batchinfer.worker.media_fetching import NUM_THREADS, MediaFetcher
from batchinfer.worker.stream import RowStream
from batchinfer.worker.worker_config import Limits
from simulation.machine import BROKEN, POISON, fetch_images
from simulation.scheduler import Process
from simulation.stage import Ending, Row, Stage

KIB = 1 << 10
LARGE = "x" * (256 * KIB)
TWO_MIB = Limits(max_row_memory=2)
"""Room for eight large rows."""


class Counted(Stage):
    """Counts the rows that are held: a call was built for them or an image fetched, and they are not finished."""

    def __init__(self, rows: list[Row]) -> None:
        half = (len(rows) + 1) // 2
        super().__init__([rows[:half], rows[half:]])
        self.engine.max_in_flight = 100
        self.num_fetched = self.most_held = self.most_in_engine = 0
        self.streams: list[RowStream] = []
        self._held: set[RowKey] = set()

    def run(self, *arguments: Any, **options: Any) -> Ending:
        self._held.clear()  # what an engine had that died is held no more
        ending = super().run(*arguments, **options)
        if ending.is_success:
            assert self.streams[-1]._num_bytes == 0, "rows that are done are counted as held"
        return ending

    def hold(self, key: RowKey) -> None:
        self._held.add(key)
        self.most_held = max(self.most_held, len(self._held))

    def took(self, process: Process, call: Call) -> None:
        super().took(process, call)
        self.hold(call.key)
        self.most_in_engine = max(self.most_in_engine, len(self.taken) - len(self.finished))

    def yielded(self, process: Process, replies: list[Reply]) -> None:
        super().yielded(process, replies)
        self._held -= {reply.key for reply in replies}


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counted]:
    """Make a stage that counts rows. Every image is this one, and takes so many seconds."""
    build, init = PromptBuilder.build, RowStream.__init__

    def counted(rows: list[Row], *, image: bytes = b"", seconds: float = 0.0) -> Counted:
        stage = Counted(rows)

        def built(self: PromptBuilder, *arguments: Any) -> Any:
            found = build(self, *arguments)
            for each in found:
                if each.call is not None:
                    stage.hold(each.key)
            return found

        def fetched(self: MediaFetcher, refs: Any) -> list[bytes] | Failure:
            stage.num_fetched += 1
            stage.most_held = max(stage.most_held, stage.num_fetched - len(stage.finished))
            self._background._process.sleep(seconds)  # type: ignore[attr-defined]
            found = fetch_images(self, refs, 0.0)
            return found if isinstance(found, Failure) else [image]

        def noted(self: RowStream, *arguments: Any, **options: Any) -> None:
            stage.streams.append(self)
            init(self, *arguments, **options)

        monkeypatch.setattr(PromptBuilder, "build", built)
        monkeypatch.setattr(MediaFetcher, "fetch_now", fetched)
        monkeypatch.setattr(RowStream, "__init__", noted)
        return stage

    return counted


def test_rows_in_flight_and_waiting_are_bounded_in_bytes(count: Callable[..., Counted]) -> None:
    """Rows of a megabyte took 420 MB with 512 sequences."""
    with count([LARGE] * 40) as stage:
        assert stage.run(limits=TWO_MIB).is_success
        assert stage.most_held == 8


def test_a_row_larger_than_the_memory_for_rows_runs_all_the_same(
    count: Callable[..., Counted],
) -> None:
    with count([3 * 4 * LARGE] * 3) as stage:
        assert stage.run(limits=Limits(max_row_memory=1)).is_success
        assert stage.most_held == 1


def test_ordinary_rows_fill_the_engine(count: Callable[..., Counted]) -> None:
    with count(["word " * 400] * 3000) as stage:
        stage.engine.max_in_flight = 1536
        assert stage.run().is_success
        assert stage.most_in_engine == 1536


def test_a_group_of_suspects_is_bounded_in_bytes(count: Callable[..., Counted]) -> None:
    with count([LARGE] * 39 + [f"{POISON}{LARGE}"]) as stage:
        stage.engine.kills_at_once = True
        for _ in range(2):
            assert isinstance(stage.run().error, EngineDied)
            assert len(stage.deaths[-1]) > 30
        stage.most_held = 0
        while not stage.run(limits=Limits(max_row_memory=1)).is_success:
            pass
        assert stage.most_held == 3, "with their columns' names"


def with_images(number: int) -> list[Row]:
    return [{"prompt": "say", "image": f"http://{index}"} for index in range(number)]


def test_images_that_are_fetched_count_as_memory_of_rows(count: Callable[..., Counted]) -> None:
    image = bytes(192 * KIB)  # a quarter of a megabyte as base64
    broken = {"prompt": LARGE, "image": f"http://{BROKEN}"}
    with count([*with_images(60), broken, broken], image=image) as stage:
        assert stage.run(limits=TWO_MIB, has_images=True).is_success
        # What is being fetched when the bound is reached comes on top: here all threads at once.
        assert stage.most_held <= 8 + NUM_THREADS
        assert stage.num_fetched == 62


def test_a_worker_that_ends_fetches_no_more_images(count: Callable[..., Counted]) -> None:
    """While it waits for rows that are in the engine."""
    with count(["say", *with_images(3 * NUM_THREADS)], seconds=3.5) as stage:
        stage.engine.load_seconds, stage.engine.row_seconds = 0.01, 1000.0
        stage.scheduler.after(2.0, lambda: stage.stop(Interrupted("stopped")))
        stage.run(has_images=True)
        assert stage.num_fetched == NUM_THREADS

"""The stream of rows by itself: who is in the engine with whom, and rows that cannot be written as they are."""

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from batchinfer.core.records import Call, Reply
from batchinfer.ledger.checkpoints import Deaths
from batchinfer.ledger.chunk_files import LocalChunk
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.prompts.builder import PromptBuilder
from batchinfer.prompts.types import EngineRules, PromptConfig
from batchinfer.worker.chunk import OpenChunk, Spool
from batchinfer.worker.stream import RowStream
from batchinfer.worker.worker_config import Limits
from fakes import Done, FakeClock

PROMPT = PromptConfig(prompt_column="q", body={"temperature": 0.0})
WITH_IMAGES = PromptConfig(prompt_column="q", as_chat=True, columns={"image": ["image"]})
FORBIDDEN = 'say","image":"/etc/passwd'
"""Text of a row with an image, as `ChunksPutByHand.put` takes it."""


class Pictures:
    """A store in which everything is a picture of so many bytes."""

    def __init__(self, num_bytes: int = 100) -> None:
        self.bytes = num_bytes
        self.fetched: list[str] = []

    def stat(self, key: str) -> Any:
        return self

    def get(self, key: str) -> Any:
        self.fetched.append(key)
        return SimpleNamespace(data=b"\x89PNG".ljust(self.bytes, b"x"))


class ChunksPutByHand:
    """Open chunks that the test puts there by hand."""

    is_closing = False
    may_grow = False
    telemetry = SimpleNamespace(row_failed=lambda *_: None)

    def __init__(self, folder):
        self.open = {}
        self.finished = []
        self._folder = folder

    def put(self, name: str, num_rows: int, texts=("say",)) -> OpenChunk:
        path = self._folder / name
        each = itertools.islice(itertools.cycle(texts), num_rows)
        path.write_text("".join(f'{{"q":"{text}","note":[1]}}\n' for text in each))
        ref = ChunkRef(name=name, root="job", key=f"{name}.jsonl")
        spool = Spool(self._folder / f"{name}.spool", num_rows)
        local = LocalChunk(path, num_rows, "", path.stat().st_size)
        self.open[name] = OpenChunk(ref, local, spool, num_rows=num_rows, started=0.0)
        return self.open[name]

    @property
    def num_unread(self) -> int:
        return sum(chunk.num_unread for chunk in self.open.values())

    def close(self) -> None:
        self.is_closing = True

    def note_death(self, keys):
        for name, line in keys:
            if name in self.open:
                self.open[name].note_deaths([line], len(keys))

    def finish(self, name, rows):
        self.finished += self.open[name].finish(rows)


@pytest.fixture
def chunks(tmp_path):
    chunks = ChunksPutByHand(tmp_path)
    yield chunks
    for chunk in chunks.open.values():
        chunk.close()


def stream_over(
    chunks: ChunksPutByHand,
    *,
    max_in_flight: int = 4,
    max_row_memory: int = 256,
    num_replicas: int = 1,
    prompt: PromptConfig = PROMPT,
    pictures: Pictures | None = None,
) -> RowStream:
    at_once = Mock(submit=Done)
    at_once.beside.return_value = at_once
    environment = SimpleNamespace(
        clock=FakeClock(),
        background=at_once,
        open_store=lambda _url: pictures or Pictures(),
    )
    return RowStream(
        environment,
        chunks,
        PromptBuilder(prompt, None, rules=EngineRules(model="m")),
        Limits(max_row_memory=max_row_memory),
        info=SimpleNamespace(max_in_flight=max_in_flight, num_replicas=num_replicas),
    )


def answer(call: Call) -> Reply:
    return Reply(key=call.key, status=200, body=b'{"choices":[{"text":"said"}]}')


MIB = 1 << 20


def take_all(stream: RowStream, rounds: int = 50) -> list[Call]:
    """All rows that an engine without a limit of its own gets, after so many turns of the worker's loop."""
    found = []
    for _ in range(rounds):
        stream.collect()
        stream.prepare()
        found += stream.take(1000) or []
    return found


def answer_all(stream: RowStream, held: list[Call]) -> list[int]:
    """Answer these rows, then those that come after them; how many they were at a time."""
    numbers = []
    while held:
        numbers.append(len(held))
        stream.handle([answer(call) for call in held])
        held = take_all(stream)
    return numbers


def test_rows_in_flight_and_waiting_are_bounded_in_bytes(chunks):
    """Rows of a megabyte took 420 MB with 512 sequences."""
    for name in ("first", "second"):
        chunks.put(name, 20, texts=["x" * MIB])
    stream = stream_over(chunks, max_in_flight=100, max_row_memory=4, num_replicas=2)
    held = take_all(stream)
    assert len(held) == 8
    stream.handle([answer(call) for call in held[:3]])
    more = take_all(stream)
    assert len(more) == 3
    assert max(answer_all(stream, held[3:] + more)) <= 8
    assert len(chunks.finished) == 40


def test_rows_that_are_asked_again_after_a_death_take_as_much_memory_as_before(chunks):
    chunks.put("first", 20, texts=["x" * MIB])
    stream = stream_over(chunks, max_in_flight=100, max_row_memory=8)
    held = take_all(stream)
    stream.handle([Reply(key=call.key, status=0, body=b"killed") for call in held])
    assert max(answer_all(stream, take_all(stream))) == len(held) == 8
    assert len(chunks.finished) == 20


@pytest.mark.parametrize("is_stopped", [False, True])
def test_rows_are_at_fault_for_no_server_that_ends_while_the_worker_is_stopped(chunks, is_stopped):
    """Who stops a worker may stop all its processes at once."""
    chunk = chunks.put("first", 3)
    stream = stream_over(chunks)
    held = take_all(stream)
    chunks.is_closing = is_stopped
    stream.handle([Reply(key=call.key, status=0, body=b"killed by SIGTERM") for call in held])
    assert len(chunk.deaths) == (0 if is_stopped else 3)


def over_pictures(chunks: ChunksPutByHand, num_bytes: int) -> tuple[RowStream, Pictures]:
    """A stream over 40 rows, each with a picture of its own, with memory for 8 MiB of rows."""
    chunks.put("first", 40, texts=[f'say","image":"memory://pictures/{i}.png' for i in range(40)])
    pictures = Pictures(num_bytes)
    stream = stream_over(
        chunks, max_in_flight=100, max_row_memory=8, prompt=WITH_IMAGES, pictures=pictures
    )
    return stream, pictures


def test_images_that_are_fetched_count_as_memory_of_rows(chunks):
    stream, pictures = over_pictures(chunks, 3 * MIB // 4)  # a megabyte as base64
    held = take_all(stream)
    # Rows that are fetched at the same time count before they are there: none comes on top.
    assert len(held) == len(pictures.fetched) == 7
    answer_all(stream, held)
    assert len(chunks.finished) == len(pictures.fetched) == 40


def test_one_huge_image_lets_the_engine_wait_for_no_others(chunks):
    stream, pictures = over_pictures(chunks, 9 * MIB)
    [huge] = take_all(stream)
    pictures.bytes = 100
    stream.handle([answer(huge)])
    assert len(take_all(stream)) == 39


def test_a_row_whose_image_cannot_be_had_is_an_error_row_and_takes_no_memory(chunks):
    chunks.put("first", 3, [FORBIDDEN])
    stream = stream_over(chunks, prompt=WITH_IMAGES)
    assert take_all(stream) == []
    assert [row.code for row in chunks.finished] == ["media_forbidden"] * 3
    assert (stream.num_pending, stream._num_bytes) == (0, 0)


def test_a_row_larger_than_the_memory_for_rows_runs_all_the_same(chunks):
    chunks.put("first", 3, texts=["x" * 3 * MIB])
    stream = stream_over(chunks, max_in_flight=100, max_row_memory=1)
    assert answer_all(stream, take_all(stream)) == [1, 1, 1]


def test_a_group_of_suspects_is_bounded_in_bytes(chunks):
    chunk = chunks.put("first", 40, texts=["x" * MIB])
    chunk.deaths = {line: Deaths(2, 160) for line in range(40)}
    stream = stream_over(chunks, max_in_flight=100, max_row_memory=5)
    # Four rows with their lines' ends fit.
    assert answer_all(stream, take_all(stream)) == [4] * 10


def test_ordinary_rows_fill_the_engine(chunks):
    chunks.put("first", 3000, texts=["word " * 400])
    stream = stream_over(chunks, max_in_flight=1536)
    assert len(take_all(stream)) >= 1536

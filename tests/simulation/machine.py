"""The `config.Environment` of one simulated worker process: clock, background, stores and engine."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from batchinfer.core.clock import Clock
from batchinfer.core.errors import EngineDied, EngineLoadError, Interrupted
from batchinfer.core.records import Call, EngineInfo, EngineStats, Failure, Reply, RowKey
from batchinfer.core.row_codes import Code
from batchinfer.engines import RequestSource, Stop
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.prompts.types import CHAT_URL, MediaRef, PromptConfig
from batchinfer.storage import Store
from batchinfer.storage.opening import check_preconditions
from batchinfer.worker.background import Stopper
from batchinfer.worker.media_fetching import MediaFetcher
from batchinfer.worker.worker_config import Environment, WorkerConfig

from .scheduler import Process
from .storage import EPOCH, Network, SimStore

T = TypeVar("T")

BUCKET = "s3://sim/"
FLAKY = "flaky"
"""A prompt that holds this is refused, until the engine was mended."""
POISON = "poison"
"""A prompt that holds this kills its engine."""
BROKEN = "#broken"
"""A URL with this leads to no image."""
_LONGEST_WAIT_SECONDS = 0.25


class SimClock(Clock):
    """A machine's clock. `skew_seconds`: how wrong its wall time is."""

    def __init__(self, process: Process, skew_seconds: float) -> None:
        self._process = process
        self._skew_seconds = skew_seconds

    def monotonic(self) -> float:
        return self._process.scheduler.now - self._process.frozen_seconds

    def now(self) -> float:
        return EPOCH + self._skew_seconds + self.monotonic()

    def sleep(self, seconds: float) -> None:
        self._process.sleep(seconds)

    def step(self, seconds: float) -> None:
        """Set the wall clock, forth or back."""
        self._skew_seconds += seconds


class _Job(Future[Any]):
    """One piece of submitted work and its outcome.

    `is_late`: draws whether the first question after the end comes just before it.
    """

    def __init__(self, is_late: Callable[[], bool]) -> None:
        super().__init__()
        self._is_late: Callable[[], bool] | None = is_late

    def done(self) -> bool:
        if super().done() and self._is_late is not None:
            is_late, self._is_late = self._is_late, None
            return not is_late()
        return super().done()

    def result(self) -> Any:
        return super().result(timeout=0)  # nobody asks for that of work that has not finished


class _Event:
    def __init__(self, process: Process, delay: Callable[[], float] = lambda: 0.0) -> None:
        self._process = process
        self._delay = delay
        self._is_set = False
        self._waiting: tuple[Any, int] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiting is not None:
            self._process.wake(self._waiting, self._delay())

    def wait(self, timeout_seconds: float) -> None:
        if not self._is_set:
            self._waiting = self._process.ticket()
            self._process.wake(self._waiting, timeout_seconds)
            self._process.block()
            self._waiting = None

    def clear(self) -> None:
        self._is_set = False


class _Gate:
    def __init__(self, process: Process, number: int) -> None:
        self._process = process
        self._num_free = number
        self._waiting: deque[tuple[Any, int]] = deque()

    def acquire(self, *, blocking: bool = True) -> bool:
        while not self._num_free:
            if not blocking:
                return False
            self._waiting.append(self._process.ticket())
            self._process.block()
        self._num_free -= 1
        return True

    def release(self) -> None:
        self._num_free += 1
        if self._waiting:
            self._process.wake(self._waiting.popleft())

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()


class SimBackground:
    """As background.Background: every piece of work on a thread of its own, and timers."""

    def __init__(self, process: Process, *, latency_seconds: float) -> None:
        self._process = process
        self._random = process.scheduler.random
        self._latency_seconds = latency_seconds
        self._finished = _Event(process, self._delay)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        job = _Job(self._is_late)

        def thread() -> None:
            try:
                settle = partial(job.set_result, work())
            except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result
                settle = partial(job.set_exception, error)
            self._process.sleep(self._delay())
            settle()
            self.wake()

        self._process.spawn(thread, delay=self._delay())
        return job

    def event(self) -> _Event:
        return _Event(self._process)

    def gate(self, number: int) -> _Gate:
        return _Gate(self._process, number)

    def every(self, interval_seconds: float, work: Callable[[], None]) -> Callable[[], object]:
        cancelled: list[bool] = []

        def loop() -> None:
            while True:
                self._process.sleep(interval_seconds)
                if cancelled:
                    return
                work()

        self._process.spawn(loop)
        return lambda: cancelled.append(True)

    def wait(self, timeout_seconds: float) -> None:
        self._finished.wait(timeout_seconds)
        self._finished.clear()

    def wake(self) -> None:
        self._finished.set()

    def _is_late(self) -> bool:
        # Work often ends between two questions whether it has ended. A wait ends then.
        is_late = self._random.random() < 0.3
        if is_late:
            self.wake()
        return is_late

    def _delay(self) -> float:
        return self._latency_seconds * self._random.random()


def worker_config(
    process: Process,
    folder: Path,
    manifest: str,
    *,
    temperature: float = 0.5,
    has_images: bool = False,
    **options: Any,
) -> WorkerConfig:
    """What a worker process is told, whose name begins with the worker's id. `folder`: for scratch files."""
    given = {
        "manifests": [f"{BUCKET}job/{manifest}"],
        "output": f"{BUCKET}run",
        "engine": EngineConfig(engine="sim", model="sim"),
        "prompt": prompt_config(temperature, has_images=has_images),
        "worker_id": process.name.split("#")[0],
        "max_attempts": 1000,
        "scratch_dir": str(folder / process.name),
    }
    return WorkerConfig(**given | options)


def prompt_config(temperature: float, *, has_images: bool = False) -> PromptConfig:
    """How the rows of a simulated job become calls. Rows with images are chats."""
    return PromptConfig(
        prompt_column="prompt",
        as_chat=has_images,
        columns={"image": ["image"]} if has_images else {},
        body={"temperature": temperature, "max_tokens": 64},
    )


class Asked(NamedTuple):
    """What a call says. `image` is the link that its image was fetched from; empty without an image."""

    prompt: str
    image: str
    temperature: float | None
    seed: int | None


def read_call(call: Call) -> Asked:
    """Read a call as a server would. Raises KeyError or ValueError if it is no request for a completion or a chat."""
    body = msgspec.json.decode(call.body)
    prompt, image = body.get("prompt", ""), ""
    if call.path == CHAT_URL:
        content = body["messages"][-1]["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        prompt = "".join(part["text"] for part in parts if part["type"] == "text")
        links = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        image = "".join(base64.b64decode(link.partition(",")[2]).decode() for link in links)
    return Asked(prompt, image, body.get("temperature"), body.get("seed"))


def answer(asked: Asked) -> str:
    """The answer of the simulated model: its whole input, so that a row of another configuration shows."""
    return f"{asked.prompt}|{asked.image}|{asked.temperature}|{asked.seed}"


@dataclass(slots=True, kw_only=True)
class EngineTraits:
    """How the engines of a seed behave."""

    max_in_flight: int = 8
    step_seconds: float = 0.1
    row_seconds: float = 1.0
    load_seconds: float = 1.0
    dies: float = 0.0
    """Probability of a step."""
    fails_to_load: float = 0.0
    restarts: float = 0.0
    """Probability that a dead engine process is replaced by another one within the same worker."""
    kills_at_once: bool = False
    """Whether poison kills the engine at the first step, before another row of the same moment is done."""
    is_mended: bool = False
    varies: bool = False
    """Whether two answers to a row differ, as log-probabilities do with the rows beside it."""


class SimEngine:
    """Implements engines.Engine. Answers what `answer` says, in a random order."""

    def __init__(self, process: Process, traits: EngineTraits, ward: Any) -> None:
        self._process = process
        self._random = process.scheduler.random
        self._traits = traits
        self._ward = ward
        self._steps = 0

    def open(self, stop: Stop) -> EngineInfo:
        started = self._process.scheduler.now
        seconds = self._traits.load_seconds * 2 * self._random.random()
        while self._process.scheduler.now - started < seconds:
            if stop.is_set():
                raise Interrupted("sim: stopped while it was loading")
            self._process.sleep(min(0.5, seconds))
        if self._random.random() < self._traits.fails_to_load:
            raise EngineLoadError("sim: did not load")
        return self._info(seconds)

    def _info(self, load_seconds: float) -> EngineInfo:
        most = self._traits.max_in_flight
        sizes = {"max_model_len": 4096, "max_num_seqs": most, "max_in_flight": most}
        return EngineInfo(name="sim", version="1", model="sim", load_seconds=load_seconds, **sizes)

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        traits, process = self._traits, self._process
        running: dict[RowKey, tuple[float, Call]] = {}
        is_exhausted = False
        while not stop.is_set():
            process.in_engine()
            if not is_exhausted and len(running) < traits.max_in_flight:
                calls = source.take(traits.max_in_flight - len(running))
                is_exhausted = calls is None
                for call in calls or ():
                    assert call.key not in running, f"{call.key} is in the engine already"
                    self._ward.took(process, call)
                    due = process.scheduler.now + traits.row_seconds * 2 * self._random.random()
                    if traits.kills_at_once and _is_poison(call):
                        due = process.scheduler.now
                    running[call.key] = (due, call)
            if not running:
                if is_exhausted:
                    return
                yield []
                source.wait(1.0)
                continue
            process.sleep(traits.step_seconds * (0.5 + self._random.random()))
            self._steps += 1
            due_now = [key for key, (due, _) in running.items() if due <= process.scheduler.now]
            is_poisoned = any(_is_poison(running[key][1]) for key in due_now)
            if is_poisoned or (traits.dies and self._random.random() < traits.dies):
                self._ward.died(list(running))
                process.scheduler.log(process.name, f"engine dies with {len(running)} rows")
                lost, running = list(running), {}
                yield [Reply(key=key, status=0, body=b"sim: died") for key in lost]
                if not traits.restarts or self._random.random() >= traits.restarts:
                    raise EngineDied("sim: died")
                loaded_at = process.scheduler.now + traits.load_seconds
                while process.scheduler.now < loaded_at and not stop.is_set():
                    yield []  # as HttpEngine does, so that the worker saves rows meanwhile
                    process.sleep(_LONGEST_WAIT_SECONDS)
                continue
            replies = [self._reply(running.pop(key)[1]) for key in due_now]
            if replies:
                self._ward.yielded(process, replies)
            yield replies

    def ask(self, call: Call, _stop: Stop | None = None) -> Reply:
        self._process.sleep(self._traits.step_seconds)
        return self._reply(call)

    def parameters(self, _path: str) -> frozenset[str]:
        return frozenset()

    def stats(self) -> EngineStats:
        return EngineStats(steps=self._steps)

    def close(self) -> None:
        pass

    def _reply(self, call: Call) -> Reply:
        asked = read_call(call)
        if FLAKY in asked.prompt and not self._traits.is_mended:
            error = {"message": "flaky", "type": "BadRequestError", "code": 400}
            return Reply(key=call.key, status=400, body=msgspec.json.encode({"error": error}))
        said, chance = answer(asked), self._random
        is_chat = call.path == CHAT_URL
        text = {"message": {"role": "assistant", "content": said}} if is_chat else {"text": said}
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(said)}
        logprobs = {"token_logprobs": [-chance.random()]} if self._traits.varies else None
        body = {
            "id": f"cmpl-{chance.getrandbits(64):016x}",
            "created": int(self._process.scheduler.now),
            "model": "sim",
            "choices": [{"index": 0, "finish_reason": "stop", "logprobs": logprobs, **text}],
            "usage": usage,
        }
        return Reply(key=call.key, status=200, body=msgspec.json.encode(body))


def _is_poison(call: Call) -> bool:
    return POISON.encode() in call.body


def fetch_images(
    fetcher: MediaFetcher, refs: list[MediaRef], longest_seconds: float
) -> list[bytes] | Failure:
    """In place of MediaFetcher.fetch_now: a URL says whether there is an image, whose content is the URL."""
    process: Process = fetcher._background._process  # type: ignore[attr-defined]
    process.sleep(longest_seconds * process.scheduler.random.random())
    if any(BROKEN in ref.place for ref in refs):
        return Failure(code=Code.MEDIA_UNAVAILABLE, message="sim: broken")
    return [ref.place.encode() for ref in refs]


def make_environment(
    process: Process,
    network: Network,
    *,
    engine: Callable[[], SimEngine],
    skew_seconds: float = 0.0,
    grace_seconds: float = 3.0,
    tries_store: bool = False,
    background: type[SimBackground] = SimBackground,
    store: type[SimStore] = SimStore,
) -> Environment:
    """Everything outside of one worker. `tries_store`: The worker finds out whether the store honours preconditions."""
    clock = SimClock(process, skew_seconds)
    chance = process.scheduler.random

    def open_store(url: str) -> Store:
        return store(url, network, process)

    return Environment(
        clock=clock,
        background=background(process, latency_seconds=0.01),
        open_store=open_store,
        probe=check_preconditions if tries_store else lambda _store: None,
        create_engine=lambda _config: engine(),
        identify_model=lambda _config: "sim",
        stopper=Stopper(clock, grace_seconds=grace_seconds),
        new_nonce=lambda: f"{chance.getrandbits(64):016x}",
        show_progress=lambda _telemetry: None,
    )

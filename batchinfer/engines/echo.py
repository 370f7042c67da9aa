"""An engine without a model: it answers with the prompt.

It is for rehearsals (is the data read and written correctly? how fast is the pipeline without a GPU?), for benchmarks
of everything but the engine, and for tests. It needs no further package. It takes so little time that a benchmark
measures the pipeline and not the engine. Use it with::

    batchinfer worker --engine echo …

A token is a word: the text between two single spaces. (Spaces are quick to count.) `max_tokens` cuts the answer after
that many words (finish_reason "length"), `n` gives equal choices, and `logprobs` gives -1.0 for each word. An image is
one word: its size and the beginning of its sha256. With a task for pooling models, the answer is numbers that depend on
nothing but the text (`echo_pooling`). Options:

* `echo_latency_seconds`: mean number of seconds that a request runs. The seconds of each request are random, with an
  exponential distribution. They depend only on the request's key and on `echo_seed`, so they are the same in every
  worker and at every attempt. At most `max_num_seqs` requests run at once; the others wait.
* `echo_tokens` (least, most): the answer has a random number of words in this range, and repeats the prompt's words.
* `echo_load_seconds`: seconds that `open` takes.
* `echo_fail_marker`, `echo_kill_marker`, `echo_hang_marker`: a request whose prompt contains this text is refused,
  kills the engine, or is never answered.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

from batchinfer import __version__
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import EngineDied, EngineStalled, Interrupted
from batchinfer.core.records import (
    Choice,
    Completion,
    EngineInfo,
    EngineStats,
    Failure,
    Media,
    Pooling,
    Request,
    RequestInput,
    RowKey,
    TextPiece,
    TokenLogprob,
)
from batchinfer.core.tasks import is_pooling
from batchinfer.engines import UNLIMITED_LENGTH, RequestSource, Stop
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.echo_pooling import MOST_DIMENSIONS, pooled_of

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = 256
# Seconds between two calls of `RequestSource.take` while slots are free and the source has no request ready.
POLL_SECONDS = 0.02
# Most seconds to sleep before the engine checks the stop signal again.
LONGEST_SLEEP_SECONDS = 0.2
SPACE = " "
WORDS = re.compile(r"^[^ ]*| [^ ]*")


class EchoStream:
    """The answers of a streamed request, whose words come one after the other while the request runs.

    Args:
        completion: The whole answers.
        start: Time at which the first word begins.
        finish: Time at which the last word is complete.
    """

    def __init__(self, completion: Completion, start: float, finish: float) -> None:
        self._key = completion.key
        self._answers = [(each.index, WORDS.findall(each.text)) for each in completion.choices]
        self._start, self._finish = start, finish
        self._num_sent = 0

    def take(self, now: float) -> list[TextPiece]:
        """Return a piece for each word that is due at `now` and has not been returned before."""
        share = 1.0 if now >= self._finish else (now - self._start) / (self._finish - self._start)
        first = self._num_sent
        most = max((len(words) for _, words in self._answers), default=0)
        self._num_sent = max(first, int(share * most))
        return [
            TextPiece(key=self._key, index=index, text=word, num_tokens=1)
            for index, words in self._answers
            for word in words[first : self._num_sent]
        ]

    def is_over(self, now: float) -> bool:
        """Whether all words have been due at `now`."""
        return now >= self._finish


class EchoEngine:
    """Answers every request with its own prompt. Implements Engine in the calling process.

    Args:
        config: Configuration of the engine. Its parallel sizes, GPUs and memory options are ignored.
        clock: Replaces the system's clock.
    """

    def __init__(self, config: EngineConfig | None = None, clock: Clock | None = None) -> None:
        self.config = config or EngineConfig(engine="echo")
        self.max_num_seqs = self.config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        self.max_in_flight = math.ceil(self.max_num_seqs * 1.5)
        self._clock = clock or SystemClock()
        self._steps = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._reset()

    def _reset(self) -> None:
        # Heap of the times at which the slots become free.
        self._slots: list[float] = []
        # Heap of the requests in flight: the time at which each request finishes, its number, and its completion.
        self._running: list[tuple[float, int, Completion]] = []
        self._streams: list[EchoStream] = []
        self._pieces: list[TextPiece] = []
        self._admitted = 0
        self._kill_reason = ""

    def open(self, stop: Stop) -> EngineInfo:
        """Wait for `echo_load_seconds`; there is nothing to load."""
        start = self._clock.monotonic()
        while (left := start + self.config.echo_load_seconds - self._clock.monotonic()) > 0:
            if stop.is_set():
                raise Interrupted("echo: stopped while it was loading")
            self._clock.sleep(min(left, LONGEST_SLEEP_SECONDS))
        return EngineInfo(
            name="echo",
            version=__version__,
            model=self.config.model or "echo",
            max_model_len=self.config.max_model_len or UNLIMITED_LENGTH,
            max_num_seqs=self.max_num_seqs,
            max_in_flight=self.max_in_flight,
            dtype="none",
            revision=self.config.revision or "",
            device="none",
            load_seconds=self._clock.monotonic() - start,
        )

    def close(self) -> None:
        """Drop the requests in flight."""
        self._reset()

    def take_pieces(self) -> list[TextPiece]:
        """See Engine.take_pieces. A piece is a word with the space before it."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def stats(self) -> EngineStats:
        """Return the counters since the engine was created.

        A step is one turn of `generate`'s loop with requests in flight.
        """
        return EngineStats(
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
        )

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """Answer all requests of `source`; see Engine.generate."""
        clock, config = self._clock, self.config
        now = last_progress = clock.monotonic()
        exhausted = False
        self._reset()
        while not stop.is_set():
            if self._kill_reason:
                raise EngineDied(f"echo: {self._kill_reason}", in_flight=self._keys())
            num_free = self.max_in_flight - len(self._running)
            finished: list[Completion] = []
            taken: list[Request] | None = None
            if not exhausted and num_free > 0:
                taken = source.take(num_free)
                exhausted = taken is None
            if taken:
                finished = self._admit(taken, now)
            if self._streams:
                self._advance_streams(now)
            finished += self._finish(now)
            if finished or taken:
                last_progress = now
                self._steps += 1
                yield finished
                now = clock.monotonic()
                continue
            if not self._running:
                if exhausted:
                    return
                yield []
                source.wait(1.0)
                now = last_progress = clock.monotonic()
                continue
            if now - last_progress >= config.stall_seconds and self._running[0][0] == math.inf:
                raise EngineStalled(
                    f"echo: nothing finished for {config.stall_seconds:g} s",
                    in_flight=self._keys(),
                )
            yield []
            is_busy = (exhausted or num_free <= 0) and not self._streams
            longest = LONGEST_SLEEP_SECONDS if is_busy else POLL_SECONDS
            clock.sleep(min(max(self._running[0][0] - clock.monotonic(), 0.0), longest))
            now = clock.monotonic()

    def _advance_streams(self, now: float) -> None:
        self._pieces += [piece for stream in self._streams for piece in stream.take(now)]
        self._streams = [stream for stream in self._streams if not stream.is_over(now)]

    def _keys(self) -> list[RowKey]:
        return [completion.key for _, _, completion in self._running]

    def _admit(self, requests: list[Request], now: float) -> list[Completion]:
        """Start requests, and return the completions of those that finish at once.

        All requests finish at once if no latency, kill marker or hang marker is configured.
        """
        config = self.config
        if not (config.echo_latency_seconds or config.echo_kill_marker or config.echo_hang_marker):
            completions = [self._answer(request) for request in requests]
            for request, completion in zip(requests, completions, strict=True):
                if request.is_streamed:
                    self._streams.append(EchoStream(completion, now, now))
            return self._count(completions)
        finished: list[Completion] = []
        for request in requests:
            text = prompt_text(request)
            completion = self._answer(request)
            self._admitted += 1
            if config.echo_kill_marker and config.echo_kill_marker in text:
                self._kill_reason = f"a prompt held {config.echo_kill_marker!r}"
                heapq.heappush(self._running, (math.inf, self._admitted, completion))
            elif config.echo_hang_marker and config.echo_hang_marker in text:
                heapq.heappush(self._running, (math.inf, self._admitted, completion))
            elif completion.failure:
                finished.append(completion)
            else:
                start = self._start_time(now)
                finish = start + self._latency(request.key)
                if request.is_streamed:
                    self._streams.append(EchoStream(completion, start, finish))
                heapq.heappush(self._slots, finish)
                heapq.heappush(self._running, (finish, self._admitted, completion))
        return self._count(finished)

    def _start_time(self, now: float) -> float:
        """Return the time at which the next request starts.

        This is `now` if a slot is free, else the time at which the first slot becomes free.
        """
        if len(self._slots) < self.max_num_seqs:
            return now
        return max(heapq.heappop(self._slots), now)

    def _finish(self, now: float) -> list[Completion]:
        running = self._running
        finished: list[Completion] = []
        while running and running[0][0] <= now:
            finished.append(heapq.heappop(running)[2])
        return self._count(finished)

    def _count(self, completions: list[Completion]) -> list[Completion]:
        self._prompt_tokens += sum([each.prompt_tokens for each in completions])
        self._completion_tokens += sum([each.completion_tokens for each in completions])
        return completions

    def _latency(self, key: RowKey) -> float:
        mean = self.config.echo_latency_seconds
        if not mean:
            return 0.0
        return -mean * math.log1p(-self._fraction(key, "latency"))

    def _fraction(self, key: RowKey, purpose: str) -> float:
        """Return a number in [0, 1) that depends on nothing but the seed, the row and the purpose."""
        name = f"{self.config.echo_seed}\0{purpose}\0{key[0]}\0{key[1]}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big") / 2**48

    def _answer(self, request: Request) -> Completion:
        text = prompt_text(request)
        config, sampling = self.config, request.sampling
        num_prompt = num_words_of(text)
        failure = self._refusal(request, text, num_prompt)
        if failure:
            return Completion(key=request.key, failure=failure, prompt_tokens=num_prompt)
        if is_pooling(request.task):
            return self._pool(request)
        answer, num_words, reason = text, num_prompt, "stop"
        if config.echo_tokens:
            least, most = config.echo_tokens
            fraction = self._fraction(request.key, "tokens")
            num_words = least + int(fraction * (most - least + 1))
            repeated = text.split(SPACE) * (num_words // num_prompt + 1)
            answer = SPACE.join(repeated[:num_words])
        limit = sampling.max_tokens
        if limit is not None and num_words > limit:
            answer, num_words, reason = first_words(answer, limit), limit, "length"
        logprobs = word_logprobs(answer) if sampling.logprobs is not None else None
        choices = [
            Choice(
                index=index,
                text=answer,
                finish_reason=reason,
                logprobs=logprobs,
                cumulative_logprob=None if logprobs is None else -1.0 * num_words,
                num_tokens=num_words,
            )
            for index in range(sampling.n)
        ]
        prompt_logprobs: list[TokenLogprob | None] | None = None
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = [None, *word_logprobs(text)[1:]]
        return Completion(
            key=request.key,
            choices=choices,
            prompt_tokens=num_prompt,
            completion_tokens=num_words * sampling.n,
            prompt_logprobs=prompt_logprobs,
        )

    def _pool(self, request: Request) -> Completion:
        texts = list(map(prompt_text, request.prompts))
        own = request.pooling or Pooling()
        config = self.config
        pooled = pooled_of(
            texts,
            request.task,
            num_queries=request.num_queries,
            dimensions=config.dimensions if own.dimensions is None else own.dimensions,
            normalize=config.normalize if own.normalize is None else own.normalize,
        )
        return Completion(
            key=request.key, pooled=pooled, prompt_tokens=sum(map(num_words_of, texts))
        )

    def _refusal(self, request: Request, text: str, num_words: int) -> Failure | None:
        config = self.config
        if not num_words:
            return Failure(code="empty_prompt", message="the prompt holds no word")
        most = (config.max_model_len or UNLIMITED_LENGTH) - (not is_pooling(config.task))
        if num_words > most:
            return Failure(
                code="prompt_too_long",
                message=f"the prompt has {num_words} words, the engine takes at most {most}",
            )
        if config.echo_fail_marker and config.echo_fail_marker in text:
            return Failure(
                code="engine_rejected", message=f"the prompt holds {config.echo_fail_marker!r}"
            )
        if request.adapter is not None and request.adapter not in config.loras:
            return Failure(
                code="model_not_found", message=f"the engine has no adapter {request.adapter!r}"
            )
        dimensions = 0 if request.pooling is None else request.pooling.dimensions or 0
        if dimensions > MOST_DIMENSIONS:
            return Failure(
                code="invalid_parameter",
                message=f"dimensions: {dimensions}, expected at most {MOST_DIMENSIONS} from the echo engine",
            )
        if is_pooling(request.task) != is_pooling(config.task):
            return Failure(
                code="wrong_task",
                message=f"the engine was loaded for the task {config.task!r}, not {request.task!r}",
            )
        return None


def prompt_text(request: Request | RequestInput) -> str:
    """Return a request's prompt as a text: its text, its token ids as words, or its last message of a user.

    The texts of a request that has several become one line each. A word for each image follows: its width, height and
    the first digits of its sha256, or its URL.
    """
    if isinstance(request, Request) and request.inputs:
        return "\n".join(map(prompt_text, request.inputs))
    media = request.media if isinstance(request, Request) else None
    images = [f"[image:{image_word(each)}]" for each in media or []]
    return SPACE.join(filter(None, [text_alone(request), *images]))


def image_word(image: Media) -> str:
    """Return the word that stands for an image in a prompt."""
    return image.url or f"{image.width}x{image.height}:{image.digest[:12]}"


def text_alone(request: Request | RequestInput) -> str:
    """Return a prompt as a text, without its images."""
    if request.text is not None:
        return request.text
    if request.token_ids is not None:
        return " ".join(map(str, request.token_ids))
    messages = request.messages or []
    for message in reversed(messages):
        if message.get("role") == "user":
            return content_text(message.get("content"))
    return content_text(messages[-1].get("content")) if messages else ""


def content_text(content: Any) -> str:
    """Return a message's content as a text. The text parts of a list become one line each."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and "text" in part]
        return "\n".join(part["text"] for part in parts)
    return content if isinstance(content, str) else ""


def num_words_of(text: str) -> int:
    r"""Return the number of words in a text. A text of white space alone has no words.

    >>> num_words_of("a b\nc"), num_words_of(" ")
    (2, 0)
    """
    return 0 if not text or text.isspace() else text.count(SPACE) + 1


def first_words(text: str, num_words: int) -> str:
    """Return the beginning of a text, up to the end of word number `num_words`.

    >>> first_words("a b c d", 3)
    'a b c'
    """
    return SPACE.join(text.split(SPACE, num_words)[:num_words])


def word_logprobs(text: str) -> list[TokenLogprob]:
    """Return a log-probability of -1.0 for each word of a text.

    Each token consists of a word and the space before the word. Its list of alternatives holds only this token itself.
    """
    return [
        TokenLogprob(token=word, logprob=-1.0, top=[(word, -1.0)]) for word in WORDS.findall(text)
    ]

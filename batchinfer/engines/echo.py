"""An engine without a model: it answers with the prompt.

It is for rehearsals (is the data read and written correctly? how fast is the pipeline without a GPU?), for benchmarks
of everything but the engine, and for tests. It takes so little time that a benchmark measures the pipeline and not the
engine. Use it with::

    batchinfer worker --engine echo …

A token is a word: the text between two single spaces. (Spaces are quick to count.) `max_tokens` cuts the answer after
that many words (finish_reason "length"), `n` gives equal choices, and `logprobs` gives -1.0 for each word. An image or
a sound is one word: the beginning of the sha256 of its URL. Pooling paths answer with numbers that depend on nothing
but the text. Bodies and refusals have the shape that vLLM's server gives them. Options (`config.EchoOptions`):

* `latency_seconds`: mean number of seconds that a call runs. The seconds of each call are random, with an exponential
  distribution. They depend only on the call's body and on `seed`, so they are the same in every worker and at every
  attempt. At most `max_num_seqs` calls run at once; the others wait.
* `tokens` (least, most): the answer has a random number of words in this range, and repeats the prompt's words.
* `load_seconds`: seconds that `open` takes.
* `fail_marker`, `kill_marker`, `hang_marker`: a call whose prompt contains this text is refused, kills the engine, or
  is never answered.

`EchoEngine` runs in the worker's process. Several replicas, and an engine that can be killed, are `echo_server`s.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import logging
import math
import struct
from collections.abc import Callable, Iterator
from operator import mul
from typing import Any

import msgspec

from batchinfer import __version__
from batchinfer.core.clock import Clock, SystemClock
from batchinfer.core.errors import EngineDied, EngineStalled, Interrupted
from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply, RowKey
from batchinfer.engines import RequestSource, Stop
from batchinfer.engines.config import EngineConfig

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = 256
# Seconds between two calls of `RequestSource.take` while slots are free and the source has no call ready.
POLL_SECONDS = 0.02
# Most seconds to sleep before the engine checks the stop signal again.
LONGEST_SLEEP_SECONDS = 0.2
SPACE = " "
WIDTH = 16
"""Numbers of an embedding, if the body says no other number."""
MOST_DIMENSIONS = 1 << 16
_encode = msgspec.json.encode


class Refused(Exception):
    """The echo engine refuses a call; `reply` becomes its answer."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status

    @property
    def body(self) -> bytes:
        """The body of the refusal, in vLLM's shape."""
        kind = {404: "NotFoundError"}.get(self.status, "BadRequestError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return _encode({"error": error})


# --------------------------------------------------------------------------- the answer to one call


def answer(call: Call, config: EngineConfig) -> Reply:
    """Return the echo engine's reply to a call. Pure: equal calls have equal replies."""
    try:
        found = _answers(call.path)(_read(call), config)
    except Refused as refused:
        return Reply(key=call.key, status=refused.status, body=refused.body)
    return Reply(key=call.key, status=200, body=_encode(found))


def is_marked(call: Call, marker: str | None) -> bool:
    """Whether the call's body contains a marker of the options."""
    return bool(marker) and str(marker).encode() in call.body


def latency_of(call: Call, config: EngineConfig) -> float:
    """Return the seconds that a call runs."""
    mean = config.echo.latency_seconds
    return -mean * math.log1p(-_fraction(call.body, config, "latency")) if mean else 0.0


def _fraction(text: bytes, config: EngineConfig, purpose: str) -> float:
    """Return a number in [0, 1) that depends on nothing but the seed, the text and the purpose."""
    name = f"{config.echo.seed}\0{purpose}\0".encode() + text
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big") / 2**48


def _read(call: Call) -> dict[str, Any]:
    if not call.content_type.startswith("application/json"):
        return {"file": call.body}
    try:
        body = msgspec.json.decode(call.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    return body


def _answers(path: str) -> Callable[[dict[str, Any], EngineConfig], dict[str, Any]]:
    """Return the function that answers calls to a path."""
    found = _PATHS.get(path)
    if found is None:
        raise Refused("Not Found", status=404)
    return found


def _check(body: dict[str, Any], config: EngineConfig, text: str) -> None:
    """Refuse a body that names another model, is marked, or has an empty or too long prompt."""
    model = body.get("model")
    names = {*config.served_names, *config.loras, config.model}
    if model is not None and model not in names:
        raise Refused(f"The model `{model}` does not exist.", param="model", status=404)
    num_words = num_words_of(text)
    if not num_words:
        raise Refused("the prompt holds no word")
    most = longest(config)
    room = most if most is None or config.is_pooling else most - 1
    if room is not None and num_words > room:
        raise Refused(f"the prompt has {num_words} words, at most {room} fit", param="input_tokens")
    marker = config.echo.fail_marker
    if marker and marker in text:
        raise Refused(f"the prompt holds {marker!r}")


def longest(config: EngineConfig) -> int | None:
    """Return the engine's --max-model-len; None if there is none."""
    typed = config.server_options.get("max_model_len")
    return typed if isinstance(typed, int) else None


def _number(body: dict[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is there, which must be a whole number above 0."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Refused(f"{name}: is {value!r}, expected a whole number from 1", param=name)
        return value
    return None


def _words(text: str, body: dict[str, Any], config: EngineConfig) -> tuple[str, int, str]:
    """Return the answer to a prompt, its number of words, and the finish reason."""
    found, num_words = text, num_words_of(text)
    if config.echo.tokens:
        least, most = config.echo.tokens
        fraction = _fraction(text.encode("utf-8", "surrogatepass"), config, "tokens")
        wanted = least + int(fraction * (most - least + 1))
        repeated = text.split(SPACE) * (wanted // num_words + 1)
        found, num_words = SPACE.join(repeated[:wanted]), wanted
    limit = _number(body, "max_completion_tokens", "max_tokens", "max_output_tokens")
    if limit is not None and num_words > limit:
        return SPACE.join(found.split(SPACE, limit)[:limit]), limit, "length"
    return found, num_words, "stop"


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def _head(kind: str, body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    name = hashlib.blake2b(_encode(body), digest_size=8).hexdigest()
    model = body.get("model") or config.served_names[0]
    return {"id": f"echo-{name}", "object": kind, "created": 0, "model": model}


def _chat(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    text = chat_text(body.get("messages"))
    _check(body, config, text)
    content, num_words, reason = _words(text, body, config)
    logprobs = {"content": _word_logprobs(content)} if body.get("logprobs") else None
    count = _number(body, "n") or 1
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": content},
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        for index in range(count)
    ]
    usage = _usage(num_words_of(text), num_words * count)
    return {**_head("chat.completion", body, config), "choices": choices, "usage": usage}


def _completion(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    prompts = texts_of(body.get("prompt"))
    choices: list[dict[str, Any]] = []
    num_prompt = num_answer = 0
    for text in prompts:
        _check(body, config, text)
        content, num_words, reason = _words(text, body, config)
        logprobs = None
        if body.get("logprobs") is not None:
            words = [each["token"] for each in _word_logprobs(content)]
            logprobs = {
                "tokens": words,
                "token_logprobs": [-1.0] * len(words),
                "top_logprobs": [{word: -1.0} for word in words],
                "text_offset": [0] * len(words),
            }
        shown = text + content if body.get("echo") else content
        for _ in range(_number(body, "n") or 1):
            choice = {"index": len(choices), "text": shown, "logprobs": logprobs}
            choices.append({**choice, "finish_reason": reason})
            num_answer += num_words
        num_prompt += num_words_of(text)
    usage = _usage(num_prompt, num_answer)
    return {**_head("text_completion", body, config), "choices": choices, "usage": usage}


def _response(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    given = body.get("input")
    text = given if isinstance(given, str) else chat_text(given)
    _check(body, config, text)
    content, num_words, _ = _words(text, body, config)
    part = {"type": "output_text", "text": content, "annotations": []}
    message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    usage = {"input_tokens": num_words_of(text), "output_tokens": num_words}
    head = _head("response", body, config)
    return {**head, "status": "completed", "output": [message], "usage": usage}


def _sound(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    del config
    return {"text": f"[audio:{hashlib.sha256(body['file']).hexdigest()[:12]}]"}


# --------------------------------------------------------------------------- pooling


def _embeddings(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    width = _number(body, "dimensions") or WIDTH
    if width > MOST_DIMENSIONS:
        raise Refused(f"dimensions: at most {MOST_DIMENSIONS}", param="dimensions")
    is_base64 = body.get("encoding_format") == "base64"
    texts = _checked_texts(body, config)
    data = [
        {
            "index": index,
            "object": "embedding",
            "embedding": _shown(vector_of(text, width), is_base64),
        }
        for index, text in enumerate(texts)
    ]
    return _pooled(body, config, data, texts)


def _pooling(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    texts = _checked_texts(body, config)
    is_base64 = body.get("encoding_format") == "base64"
    data = []
    for index, text in enumerate(texts):
        if body.get("task", "token_embed") == "token_embed":
            rows = [vector_of(word, WIDTH) for word in text.split(SPACE)]
            found = _shown([each for row in rows for each in row], True) if is_base64 else rows
        else:
            found = [share_of(text)]
        data.append({"index": index, "object": "pooling", "data": found})
    return _pooled(body, config, data, texts)


def _classes(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    texts = _checked_texts(body, config)
    data = []
    for index, text in enumerate(texts):
        share = share_of(text)
        label = ("no", "yes")[share > 0.5]
        data.append({"index": index, "label": label, "probs": [1 - share, share], "num_classes": 2})
    return _pooled(body, config, data, texts)


def _scores(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    first = texts_of(body.get("text_1", body.get("queries")))
    second = texts_of(body.get("text_2", body.get("documents", body.get("items"))))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise Refused(f"{len(first)} texts and {len(second)}, expected one or equally many")
    for text in (*first, *second):
        _check(body, config, text)
    data = [
        {"index": index, "object": "score", "score": score_of(*pair)}
        for index, pair in enumerate(zip(first, second, strict=True))
    ]
    return _pooled(body, config, data, [*first, *second])


def _ranks(body: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    query, documents = texts_of(body.get("query")), texts_of(body.get("documents"))
    for text in (*query, *documents):
        _check(body, config, text)
    results = [
        {"index": index, "document": {"text": text}, "relevance_score": score_of(query[0], text)}
        for index, text in enumerate(documents)
    ]
    results.sort(key=lambda each: -each["relevance_score"])
    most = _number(body, "top_n") or len(results)
    usage = _usage(sum(map(num_words_of, (*query, *documents))), 0)
    head = _head("rerank", body, config)
    return {"id": head["id"], "model": head["model"], "usage": usage, "results": results[:most]}


def _checked_texts(body: dict[str, Any], config: EngineConfig) -> list[str]:
    if "messages" in body:
        texts = [chat_text(body["messages"])]
    else:
        texts = texts_of(body.get("input"))
    for text in texts:
        _check(body, config, text)
    return texts


def _pooled(
    body: dict[str, Any], config: EngineConfig, data: list[dict[str, Any]], texts: list[str]
) -> dict[str, Any]:
    usage = _usage(sum(map(num_words_of, texts)), 0)
    return {**_head("list", body, config), "data": data, "usage": usage}


def _shown(numbers: list[float], is_base64: bool) -> list[float] | str:
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    if is_base64:
        return base64.b64encode(packed).decode()
    return list(struct.unpack(f"<{len(numbers)}f", packed))


def vector_of(text: str, width: int) -> list[float]:
    """Return the embedding of a text: numbers of length 1 together, made of the text's hash."""
    seed = text.encode("utf-8", "surrogatepass")
    blocks = -(-width // 16)
    data = b"".join(
        hashlib.blake2b(seed, digest_size=64, salt=struct.pack("<Q", block)).digest()
        for block in range(blocks)
    )
    numbers = [number / 2**31 for number in struct.unpack(f"<{16 * blocks}i", data)[:width]]
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def share_of(text: str) -> float:
    """Return a number from 0 to 1 that depends on the text."""
    return _fraction(text.encode("utf-8", "surrogatepass"), EngineConfig(engine="echo"), "share")


def score_of(query: str, document: str) -> float:
    """Return the cosine of two texts' embeddings."""
    return sum(map(mul, vector_of(query, WIDTH), vector_of(document, WIDTH)))


# --------------------------------------------------------------------------- texts


def texts_of(value: Any) -> list[str]:
    """Return the texts of a field that holds a text, token ids, or a list of either. Token ids become words.

    >>> texts_of("a b"), texts_of([1, 2]), texts_of(["a", [1, 2]])
    (['a b'], ['1 2'], ['a', '1 2'])
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise Refused("the body has no prompt")
    if all(type(each) is int for each in value):
        return [SPACE.join(map(str, value))]
    return [text for each in value for text in texts_of(each)]


def chat_text(messages: Any) -> str:
    """Return what a conversation asks: its last message of a user, or its last message."""
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: is missing", param="messages")
    found = [each for each in messages if isinstance(each, dict)]
    asked = [each for each in found if each.get("role") == "user"] or found[-1:]
    return _content_text(asked[-1].get("content")) if asked else ""


def _content_text(content: Any) -> str:
    """Return a message's content as a text: its texts a line each, and then a word for each image, video or sound."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [part for part in content if isinstance(part, dict)]
    text = "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    words = []
    for part in parts:
        if "text" not in part:
            digest = hashlib.sha256(_encode(part)).hexdigest()[:12]
            words.append(f"[{str(part.get('type', 'part')).partition('_')[0]}:{digest}]")
    return SPACE.join(filter(None, [text, *words]))


def num_words_of(text: str) -> int:
    r"""Return the number of words in a text. A text of white space alone has no words.

    >>> num_words_of("a b\nc"), num_words_of(" ")
    (2, 0)
    """
    return 0 if not text or text.isspace() else text.count(SPACE) + 1


def _word_logprobs(text: str) -> list[dict[str, Any]]:
    """Return a log-probability of -1.0 for each word, which has the space before it."""
    first, *others = text.split(SPACE)
    found = []
    for word in (first, *(SPACE + each for each in others)):
        token = {"token": word, "logprob": -1.0, "bytes": None}
        found.append({**token, "top_logprobs": [token]})
    return found


_PATHS: dict[str, Callable[[dict[str, Any], EngineConfig], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embeddings,
    "/pooling": _pooling,
    "/classify": _classes,
    "/score": _scores,
    "/v1/score": _scores,
    "/rerank": _ranks,
    "/v1/rerank": _ranks,
    "/v2/rerank": _ranks,
    "/v1/audio/transcriptions": _sound,
    "/v1/audio/translations": _sound,
}
"""What answers each path, which are those of vLLM's server."""


# --------------------------------------------------------------------------- the engine


class EchoEngine:
    """Answers every call with its own prompt. Implements Engine in the calling process.

    Args:
        config: Configuration of the engine. Its parallel sizes and GPUs are ignored.
        clock: Replaces the system's clock.
    """

    def __init__(self, config: EngineConfig | None = None, clock: Clock | None = None) -> None:
        self.config = config or EngineConfig(engine="echo")
        typed = self.config.server_options.get("max_num_seqs")
        self.max_num_seqs = typed if isinstance(typed, int) else DEFAULT_MAX_NUM_SEQS
        self.max_in_flight = math.ceil(self.max_num_seqs * 1.5)
        self._clock = clock or SystemClock()
        self._stats = EngineStats()
        self._num_steps = self._prompt_tokens = self._completion_tokens = 0
        self._reset()

    def _reset(self) -> None:
        # Heap of the times at which the slots become free.
        self._slots: list[float] = []
        # Heap of the calls in flight: the time at which each finishes, its number, and its reply.
        self._running: list[tuple[float, int, Reply]] = []
        self._num_admitted = 0
        self._kill_reason = ""

    def open(self, stop: Stop) -> EngineInfo:
        """Wait for `load_seconds`; there is nothing to load."""
        start = self._clock.monotonic()
        while (left := start + self.config.echo.load_seconds - self._clock.monotonic()) > 0:
            if stop.is_set():
                raise Interrupted("echo: stopped while it was loading")
            self._clock.sleep(min(left, LONGEST_SLEEP_SECONDS))
        return EngineInfo(
            name="echo",
            version=__version__,
            model=self.config.model or "echo",
            max_model_len=longest(self.config),
            max_num_seqs=self.max_num_seqs,
            max_in_flight=self.max_in_flight,
            revision=self.config.revision or "",
            device="none",
            load_seconds=self._clock.monotonic() - start,
        )

    def close(self) -> None:
        """Drop the calls in flight."""
        self._reset()

    def parameters(self, path: str) -> frozenset[str]:
        """See Engine.parameters. The echo engine takes every field."""
        del path
        return frozenset()

    def ask(self, call: Call, stop: Stop | None = None) -> Reply:
        """See Engine.ask."""
        del stop
        self._clock.sleep(latency_of(call, self.config))
        return self._counted([answer(call, self.config)])[0]

    def stream(self, call: Call) -> Iterator[bytes]:
        """See Engine.stream. Each event has one word."""
        yield from stream_of(answer(call, self.config))

    def stats(self) -> EngineStats:
        """Return the counters since the engine was created. A step is a turn of `generate` with calls in flight."""
        return EngineStats(
            steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
        )

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        """Answer all calls of `source`; see Engine.generate. A call with the kill marker raises EngineDied."""
        clock, config = self._clock, self.config
        now = last_progress = clock.monotonic()
        exhausted = False
        self._reset()
        while not stop.is_set():
            if self._kill_reason:
                raise EngineDied(f"echo: {self._kill_reason}", in_flight=self._keys())
            num_free = self.max_in_flight - len(self._running)
            finished: list[Reply] = []
            taken: list[Call] | None = None
            if not exhausted and num_free > 0:
                taken = source.take(num_free)
                exhausted = taken is None
            if taken:
                finished = self._admit(taken, now)
            finished += self._finish(now)
            if finished or taken:
                last_progress = now
                self._num_steps += 1
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
            longest = LONGEST_SLEEP_SECONDS if exhausted or num_free <= 0 else POLL_SECONDS
            clock.sleep(min(max(self._running[0][0] - clock.monotonic(), 0.0), longest))
            now = clock.monotonic()

    def _keys(self) -> list[RowKey]:
        return [reply.key for _, _, reply in self._running]

    def _admit(self, calls: list[Call], now: float) -> list[Reply]:
        """Start calls, and return the replies to those that finish at once."""
        echo = self.config.echo
        replies = [answer(call, self.config) for call in calls]
        if not (echo.latency_seconds or echo.kill_marker or echo.hang_marker):
            return self._counted(replies)
        finished: list[Reply] = []
        for call, reply in zip(calls, replies, strict=True):
            self._num_admitted += 1
            finish = math.inf
            if is_marked(call, echo.kill_marker):
                self._kill_reason = f"a prompt held {echo.kill_marker!r}"
            elif not is_marked(call, echo.hang_marker):
                if reply.status != 200:
                    finished.append(reply)
                    continue
                finish = self._start_time(now) + latency_of(call, self.config)
                heapq.heappush(self._slots, finish)
            heapq.heappush(self._running, (finish, self._num_admitted, reply))
        return finished

    def _start_time(self, now: float) -> float:
        """Return the time at which the next call starts: now, or when the first slot becomes free."""
        if len(self._slots) < self.max_num_seqs:
            return now
        return max(heapq.heappop(self._slots), now)

    def _finish(self, now: float) -> list[Reply]:
        finished: list[Reply] = []
        while self._running and self._running[0][0] <= now:
            finished.append(heapq.heappop(self._running)[2])
        return self._counted(finished)

    def _counted(self, replies: list[Reply]) -> list[Reply]:
        for reply in replies:
            usage = _usage_reader.decode(reply.body).usage
            self._prompt_tokens += usage.get("prompt_tokens") or 0
            self._completion_tokens += usage.get("completion_tokens") or 0
        return replies


class _WithUsage(msgspec.Struct):
    usage: dict[str, Any] = {}


_usage_reader = msgspec.json.Decoder(_WithUsage)


def stream_of(reply: Reply) -> Iterator[bytes]:
    """Yield the events of a streamed answer: one for each word of the first choice, then one with the usage."""
    if reply.status != 200:
        yield reply.body
        return
    body = msgspec.json.decode(reply.body)
    for choice in body["choices"]:
        is_chat = "message" in choice
        text = choice["message"]["content"] if is_chat else choice["text"]
        words = [each["token"] for each in _word_logprobs(text)]
        for index, word in enumerate(words):
            reason = choice["finish_reason"] if index == len(words) - 1 else None
            piece = {"index": choice["index"], "finish_reason": reason}
            piece |= {"delta": {"content": word}} if is_chat else {"text": word}
            yield _encode({**body, "choices": [piece], "usage": None})
    yield _encode({**body, "choices": []})

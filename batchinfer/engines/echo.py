"""An engine without a model: it answers with the prompt.

It is for rehearsals (is the data read and written correctly? how fast is the pipeline without a GPU?), for benchmarks
of everything but the engine, and for tests. Use it with::

    batchinfer worker --engine echo …

A token is a word: the text between two single spaces. (Spaces are quick to count.) `max_tokens` cuts the answer after
that many words (finish_reason "length"), and `n` gives equal choices; there are no log-probabilities. An image or a
sound is one word: the beginning of the sha256 of its part of the message. Pooling paths answer with numbers that
depend on nothing but the text. Bodies and refusals have the shape that vLLM's server gives them. Options
(`config.EchoOptions`):

* `latency_seconds`: mean number of seconds that a call runs. The seconds of each call are random, with an exponential
  distribution. They depend only on the call's body, so they are the same in every worker and at every attempt. At most
  `max_num_seqs` calls run at once; the others wait.
* `load_seconds`: seconds that `open` takes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from operator import mul
from typing import Any

import msgspec

from batchinfer import __version__
from batchinfer.core.records import Call, Reply
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.server import IN_FLIGHT_FACTOR
from batchinfer.engines.targets import Answer, Target

DEFAULT_MAX_NUM_SEQS = 256
SPACE = " "
WIDTH = 16
"""Numbers of an embedding, if the body says no other number."""
MOST_DIMENSIONS = 1 << 16
_encode = msgspec.json.encode
_Body = dict[str, Any]


class Refused(Exception):
    """The echo engine refuses a call."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        kind = "NotFoundError" if status == 404 else "BadRequestError"
        self.status = status
        error = {"message": message, "type": kind, "param": param, "code": status}
        self.body = _encode({"error": error})


# --------------------------------------------------------------------------- the answer to one call


def answer(call: Call, config: EngineConfig) -> Reply:
    """Return the echo engine's reply to a call. Pure: equal calls have equal replies."""
    try:
        if call.path not in _PATHS:
            raise Refused("Not Found", status=404)
        body = _read(call)
        name = hashlib.blake2b(call.body, digest_size=8).hexdigest()
        model = body.get("model") or config.served_names[0]
        head = {"id": f"echo-{name}", "object": "echo", "created": 0, "model": model}
        found = _encode(head | _PATHS[call.path](body, config))
    except Refused as refused:
        return Reply(key=call.key, status=refused.status, body=refused.body)
    return Reply(key=call.key, status=200, body=found)


def latency_of(call: Call, config: EngineConfig) -> float:
    """Return the seconds that a call runs."""
    digest = hashlib.blake2b(call.body, digest_size=6).digest()
    fraction = int.from_bytes(digest, "big") / 2**48
    return -config.echo.latency_seconds * math.log1p(-fraction)


def longest(config: EngineConfig) -> int | None:
    """Return the engine's --max-model-len; None if there is none."""
    typed = config.server_options.get("max_model_len")
    return typed if isinstance(typed, int) else None


def most_at_once(config: EngineConfig) -> int:
    """Return the number of calls that the engine runs at once: --max-num-seqs."""
    typed = config.server_options.get("max_num_seqs")
    return typed if isinstance(typed, int) else DEFAULT_MAX_NUM_SEQS


def _read(call: Call) -> _Body:
    if not call.content_type.startswith("application/json"):
        return {"file": call.body}
    try:
        return msgspec.json.decode(call.body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is no JSON object: {error}") from error


def _check(body: _Body, config: EngineConfig, texts: list[str]) -> list[str]:
    """Refuse a body that names another model, or has an empty or too long prompt. Returns the texts."""
    model = body.get("model")
    if model not in {None, *config.served_names, *config.loras, config.model}:
        raise Refused(f"The model `{model}` does not exist.", param="model", status=404)
    most = longest(config)
    for text in texts:
        num_words = num_words_of(text)
        if not num_words:
            raise Refused("the prompt holds no word")
        if most is not None and num_words > most - (not config.is_pooling):
            message = f"the prompt has {num_words} words, of {most} at most"
            raise Refused(message, param="input_tokens")
    return texts


def _number(body: _Body, *names: str) -> int | None:
    """Return the first of these fields that is there, which must be a whole number above 0."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Refused(f"{name}: is {value!r}, expected a whole number from 1", param=name)
        return value
    return None


def _usage(texts: list[str], num_answered: int = 0) -> dict[str, int]:
    prompt = sum(map(num_words_of, texts))
    total = prompt + num_answered
    return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": num_answered}


def _words(text: str, body: _Body) -> tuple[str, int, str]:
    """Return the answer to a prompt, its number of words, and the finish reason."""
    num_words = num_words_of(text)
    limit = _number(body, "max_completion_tokens", "max_tokens", "max_output_tokens")
    if limit is not None and num_words > limit:
        return SPACE.join(text.split(SPACE, limit)[:limit]), limit, "length"
    return text, num_words, "stop"


def _generated(body: _Body, config: EngineConfig) -> _Body:
    """Answer a chat or a completion."""
    is_chat = "prompt" not in body
    texts = [chat_text(body.get("messages"))] if is_chat else texts_of(body["prompt"])
    choices, num_answered = list[_Body](), 0
    for text in _check(body, config, texts):
        found, num_words, reason = _words(text, body)
        shown = text + found if body.get("echo") else found
        choice: _Body = {"text": shown}
        if is_chat:
            choice = {"message": {"role": "assistant", "content": found}}
        choice["logprobs"] = None
        for _ in range(_number(body, "n") or 1):
            choices.append({"index": len(choices), **choice, "finish_reason": reason})
            num_answered += num_words
    return {"choices": choices, "usage": _usage(texts, num_answered)}


def _response(body: _Body, config: EngineConfig) -> _Body:
    given = body.get("input")
    texts = _check(body, config, [given if isinstance(given, str) else chat_text(given)])
    found, num_words, _ = _words(texts[0], body)
    part = {"type": "output_text", "text": found, "annotations": []}
    message = {"type": "message", "role": "assistant", "content": [part]}
    usage = {"input_tokens": num_words_of(texts[0]), "output_tokens": num_words}
    return {"status": "completed", "output": [message], "usage": usage}


def _sound(body: _Body, _: EngineConfig) -> _Body:
    return {"text": f"[audio:{hashlib.sha256(body['file']).hexdigest()[:12]}]"}


# --------------------------------------------------------------------------- pooling


def _pooling(item: Callable[[str, _Body], _Body]) -> Callable[[_Body, EngineConfig], _Body]:
    """Return the function that answers a path for pooling, with one item for each text."""

    def pool(body: _Body, config: EngineConfig) -> _Body:
        is_chat = "messages" in body
        texts = [chat_text(body["messages"])] if is_chat else texts_of(body.get("input"))
        found = [item(text, body) for text in _check(body, config, texts)]
        data = [{"index": index, **each} for index, each in enumerate(found)]
        return {"data": data, "usage": _usage(texts)}

    return pool


def _embedding(text: str, body: _Body) -> _Body:
    width = _number(body, "dimensions") or WIDTH
    if width > MOST_DIMENSIONS:
        raise Refused(f"dimensions: at most {MOST_DIMENSIONS}", param="dimensions")
    return {"object": "embedding", "embedding": _shown([vector_of(text, width)], body)[0]}


def _pooled(text: str, body: _Body) -> _Body:
    if body.get("task", "token_embed") != "token_embed":
        return {"object": "pooling", "data": [share_of(text)]}
    rows = [vector_of(word, WIDTH) for word in text.split(SPACE)]
    if body.get("encoding_format") == "base64":
        return {
            "object": "pooling",
            "data": _shown([[number for row in rows for number in row]], body)[0],
        }
    return {"object": "pooling", "data": _shown(rows, body)}


def _classified(text: str, _: _Body) -> _Body:
    share = share_of(text)
    label = ("no", "yes")[share > 0.5]
    return {"label": label, "probs": [1 - share, share], "num_classes": 2}


def _scores(body: _Body, config: EngineConfig) -> _Body:
    first = texts_of(body.get("text_1", body.get("queries")))
    second = texts_of(body.get("text_2", body.get("documents", body.get("items"))))
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise Refused(f"{len(first)} texts and {len(second)}, expected one or equally many")
    _check(body, config, [*first, *second])
    scores = map(score_of, first, second)
    data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
    return {"data": data, "usage": _usage([*first, *second])}


def _ranks(body: _Body, config: EngineConfig) -> _Body:
    [query, *_], documents = texts_of(body.get("query")), texts_of(body.get("documents"))
    _check(body, config, [query, *documents])
    results: list[_Body] = [
        {"index": at, "document": {"text": text}, "relevance_score": score_of(query, text)}
        for at, text in enumerate(documents)
    ]
    results.sort(key=lambda each: -each["relevance_score"])
    results = results[: _number(body, "top_n")]
    return {"results": results, "usage": _usage([query, *documents])}


def _shown(rows: list[list[float]], body: _Body) -> list[Any]:
    """Return vectors as numbers of 32 bits, or as base64 of their bytes."""
    packed = [struct.pack(f"<{len(row)}f", *row) for row in rows]
    if body.get("encoding_format") == "base64":
        return [base64.b64encode(each).decode() for each in packed]
    return [struct.unpack(f"<{len(each) // 4}f", each) for each in packed]


def vector_of(text: str, width: int) -> list[float]:
    """Return the embedding of a text: numbers of length 1 together, made of the text's hash."""
    data = hashlib.shake_128(text.encode("utf-8", "surrogatepass")).digest(4 * width)
    numbers = [number / 2**31 for number in struct.unpack(f"<{width}i", data)]
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def share_of(text: str) -> float:
    """Return a number from 0 to 1 that depends on the text."""
    return (vector_of(text, 2)[0] + 1) / 2


def score_of(query: str, document: str) -> float:
    """Return the cosine of two texts' embeddings."""
    return math.fsum(map(mul, vector_of(query, WIDTH), vector_of(document, WIDTH)))


_PATHS: dict[str, Callable[[_Body, EngineConfig], _Body]] = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions"), _generated),
    "/v1/responses": _response,
    "/v1/embeddings": _pooling(_embedding),
    "/pooling": _pooling(_pooled),
    "/classify": _pooling(_classified),
    **dict.fromkeys(("/score", "/v1/score"), _scores),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _ranks),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), _sound),
}
"""What answers each path, which are those of vLLM's server."""


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
    found = [each for each in messages or [] if isinstance(each, dict)]
    if not found:
        raise Refused("messages: is missing", param="messages")
    asked = [each for each in found if each.get("role") == "user"] or found
    content = asked[-1].get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [part for part in content if isinstance(part, dict)]
    texts = [str(part["text"]) for part in parts if "text" in part]
    words = ["\n".join(texts)] if texts else []
    for part in parts:
        if "text" not in part:
            digest = hashlib.sha256(_encode(part)).hexdigest()[:12]
            words.append(f"[{str(part.get('type')).partition('_')[0]}:{digest}]")
    return SPACE.join(words)


def num_words_of(text: str) -> int:
    r"""Return the number of words in a text. A text of white space alone has no words.

    >>> num_words_of("a b\nc"), num_words_of(" ")
    (2, 0)
    """
    return 0 if not text or text.isspace() else text.count(SPACE) + 1


def tokens_of(text: str) -> list[str]:
    """Return the words of a text, each with the space before it.

    >>> tokens_of("a b")
    ['a', ' b']
    """
    first, *others = text.split(SPACE)
    return [first, *(SPACE + each for each in others)]


def stream_of(reply: Reply) -> Iterator[bytes]:
    """Yield the events of a streamed answer: one for each word of a choice, then one with the usage."""
    if reply.status != 200:
        yield reply.body
        return
    body = msgspec.json.decode(reply.body)
    for choice in body["choices"]:
        is_chat = "message" in choice
        left = tokens_of(choice["message"]["content"] if is_chat else choice["text"])
        while left:
            word = left.pop(0)
            part: _Body = {"delta": {"content": word}} if is_chat else {"text": word}
            reason = None if left else choice["finish_reason"]
            piece = {"index": choice["index"], "finish_reason": reason, **part}
            yield _encode({**body, "choices": [piece], "usage": None})
    yield _encode({**body, "choices": []})


# --------------------------------------------------------------------------- the engine


class EchoTarget(Target):
    """What answers in this process instead of a server. It is open when `load_seconds` are over."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        num_seqs = most_at_once(config)
        super().__init__(name, "", math.ceil(num_seqs * IN_FLIGHT_FACTOR))
        self._config = config
        self._running = asyncio.Semaphore(num_seqs)
        self._loaded = time.monotonic() + config.echo.load_seconds

    async def look(self, config: EngineConfig) -> str:
        """See Target.look."""
        del config
        self.is_ready = time.monotonic() >= self._loaded
        return ""

    async def get(self, path: str, most_seconds: float = 0.0) -> Answer:
        """Answer what `HttpEngine` asks a server when it opens."""
        del most_seconds
        facts = {
            "/version": {"version": __version__},
            "/v1/models": {"data": [{"max_model_len": longest(self._config)}]},
        }
        return Answer(200, _encode(facts[path])) if path in facts else Answer(404, b"")

    async def post(self, call: Call, timeout_seconds: float | None = None) -> Answer:
        """Answer a call."""
        del timeout_seconds
        if seconds := latency_of(call, self._config):
            async with self._running:
                await asyncio.sleep(seconds)
        reply = answer(call, self._config)
        return Answer(reply.status, reply.body)

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        """Answer a call word by word."""
        for event in stream_of(answer(call, self._config)):
            yield event

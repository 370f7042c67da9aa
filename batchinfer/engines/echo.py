"""An engine without a model: it answers with the prompt.

It is for rehearsals (is the data read and written correctly? how fast is the pipeline without a GPU?), for benchmarks
of everything but the engine, and for tests. Use it with::

    batchinfer worker --engine echo …

A token is a word: the text between two single spaces. `max_tokens` cuts the answer after that many words (finish_reason
"length"), and `n` gives equal choices; there are no log-probabilities, and responses are never cut. An image or a sound
is one word: the beginning of the sha256 of its part of the message. Pooling paths answer with numbers that depend on
nothing but the text. Bodies and refusals have the shape that vLLM's server gives them.

`EngineConfig.echo_latency_seconds` is the mean number of seconds that a call runs. The seconds of each call are random,
with an exponential distribution. They depend only on the call's body, so they are the same in every worker and at every
attempt. At most `max_num_seqs` calls run at once; the others wait.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import math
from array import array
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from batchinfer import __version__
from batchinfer.core.records import Call, Reply
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.targets import Answer, Target, slots_for

DEFAULT_MAX_NUM_SEQS = 256
SPACE = " "
WIDTH = 16
"""Numbers of a vector, if the body says no other number."""
_PROMPTS = ("messages", "prompt", "input", "text_1", "query", "text_2", "documents")
"""Fields that hold a prompt or a part of one."""
_LIMITS = ("max_completion_tokens", "max_tokens")
_encode = msgspec.json.encode
_Body = dict[str, Any]


class Refused(ValueError):
    """The echo engine refuses a call."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.body = _encode({"error": {"message": message, "param": param, "code": status}})


# --------------------------------------------------------------------------- the answer to one call


def answer(call: Call, config: EngineConfig) -> Reply:
    """Return the echo engine's reply to a call. Pure: equal calls have equal replies."""
    try:
        body = {"prompt": f"[audio:{_digest(call.body)}]"}
        if call.content_type.startswith("application/json"):
            body = msgspec.json.decode(call.body, type=dict[str, Any])
        found = _answer(call.path.rpartition("/")[2], body, config)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        refused = error if isinstance(error, Refused) else Refused(f"not a request: {error!r}")
        return Reply(key=call.key, status=refused.status, body=refused.body)
    model = body.get("model") or config.served_names[0]
    head = {"id": f"echo-{_digest(call.body)}", "object": "echo", "created": 0, "model": model}
    return Reply(key=call.key, status=200, body=_encode(head | found))


def latency_of(call: Call, config: EngineConfig) -> float:
    """Return the seconds that a call runs."""
    fraction = int(_digest(call.body), 16) / 2**48
    return -config.echo_latency_seconds * math.log1p(-fraction)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _answer(kind: str, body: _Body, config: EngineConfig) -> _Body:
    """Return what the body of an answer has of its own.

    Args:
        kind: End of the call's path.
        body: Body of the call.
        config: Configuration of the engine.

    Raises:
        Refused: vLLM's server would refuse the call as well.
    """
    model, most = body.get("model"), config.typed_number("max_model_len")
    if model not in {None, *config.served_names, *config.loras, config.model}:
        raise Refused(f"The model `{model}` does not exist.", "model", 404)
    texts = [text for name in _PROMPTS if name in body for text in texts_of(body[name])]
    num_words = [num_words_of(text) for text in texts]
    if not all(num_words) or not texts:
        raise Refused("the prompt holds no word")
    if most is not None and max(num_words) > most - (not config.is_pooling):
        raise Refused(f"a prompt of {max(num_words)} words, of {most} at most", "input_tokens")
    if kind in ("transcriptions", "translations"):
        return {"text": texts[0]}
    if kind == "responses":
        content = [{"type": "output_text", "text": texts[0]}]
        message = {"type": "message", "role": "assistant", "content": content}
        return {"status": "completed", "output": [message]}
    usage = {"prompt_tokens": sum(num_words), "completion_tokens": 0}
    if kind == "completions":
        found = {"choices": _choices(texts, body, usage)}
    elif kind == "rerank":
        scores = [share_of(texts[0] + text) for text in texts[1:]]
        items = [{"index": n, "relevance_score": score} for n, score in enumerate(scores)]
        found = {"results": sorted(items, key=lambda item: -item["relevance_score"])}
    else:
        if kind == "score":
            texts = [texts[0] + text for text in texts[1:]]
        found = {"data": [{"index": n, **_pooled(kind, x, body)} for n, x in enumerate(texts)]}
    return {**found, "usage": {**usage, "total_tokens": sum(usage.values())}}


def _choices(texts: list[str], body: _Body, usage: dict[str, int]) -> list[_Body]:
    """Return the choices of a chat or a completion, and count their words."""
    choices: list[_Body] = []
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    if limit is not None and not (isinstance(limit, int) and limit > 0):
        raise Refused(f"max_tokens: {limit!r}, expected a number above 0", "max_tokens")
    for text in texts:
        # Only a text that is cut is taken apart: the words of a large one take many times its memory.
        found, num_words = text, num_words_of(text)
        if is_cut := limit is not None and limit < num_words:
            found, num_words = SPACE.join(text.split(SPACE, limit)[:limit]), limit
        choice: _Body = {"message": {"role": "assistant", "content": found}}
        if "prompt" in body:
            choice = {"text": text + found if body.get("echo") else found}
        choice["finish_reason"] = "length" if is_cut else "stop"
        for _ in range(body.get("n") or 1):
            choices.append({"index": len(choices), **choice})
            usage["completion_tokens"] += num_words
    return choices


def _pooled(kind: str, text: str, body: _Body) -> _Body:
    """Return what a pooling model says of a text."""
    if kind in ("embeddings", "pooling"):
        words = text.split(SPACE) if kind == "pooling" else [text]
        vectors = [vector_of(word, body.get("dimensions") or WIDTH) for word in words]
        shown: Any = vectors if kind == "pooling" else vectors[0]
        if body.get("encoding_format") == "base64":
            shown = base64.b64encode(array("f", itertools.chain(*vectors))).decode()
        return {"data" if kind == "pooling" else "embedding": shown}
    share = share_of(text)
    if kind == "classify":
        return {"label": ("no", "yes")[share > 0.5], "probs": [1 - share, share]}
    if kind != "score":
        raise Refused("Not Found", None, 404)
    return {"score": share}


def vector_of(text: str, width: int) -> list[float]:
    """Return the embedding of a text: numbers of length 1 together, made of the text's hash."""
    data = hashlib.shake_128(text.encode("utf-8", "surrogatepass")).digest(4 * width)
    numbers = [number - 2**31 for number in array("I", data)]
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def share_of(text: str) -> float:
    """Return a number from 0 to 1 that depends on the text."""
    return (vector_of(text, 2)[0] + 1) / 2


# --------------------------------------------------------------------------- texts


def texts_of(value: Any) -> list[str]:
    """Return the texts of a field: a text, token ids, a conversation, or a list of these. Token ids become words.

    >>> texts_of("a b"), texts_of([1, 2]), texts_of(["a", [1, 2]])
    (['a b'], ['1 2'], ['a', '1 2'])
    """
    if isinstance(value, str):
        return [value]
    if value and all(type(each) is int for each in value):
        return [SPACE.join(map(str, value))]
    if value and isinstance(value[0], dict):
        return [_chat_text(value)]
    return [text for each in value for text in texts_of(each)]


def _chat_text(messages: list[_Body]) -> str:
    """Return what a conversation asks: its last message of a user, or its last message."""
    asked = [each for each in messages if each.get("role") == "user"] or messages
    content = asked[-1].get("content") or ""
    if isinstance(content, str):
        return content
    texts = [str(part["text"]) for part in content if "text" in part]
    words = ["\n".join(texts)] if texts else []
    for part in content:
        if "text" not in part:
            kind = str(part.get("type")).partition("_")[0]
            words.append(f"[{kind}:{_digest(_encode(part))}]")
    return SPACE.join(words)


def num_words_of(text: str) -> int:
    r"""Return the number of words in a text. A text of white space alone has no words.

    >>> num_words_of("a b\nc"), num_words_of(" ")
    (2, 0)
    """
    return 0 if not text or text.isspace() else text.count(SPACE) + 1


def stream_of(reply: Reply) -> Iterator[bytes]:
    """Yield the events of a streamed chat: one for each word, then one with the usage. A refusal is yielded whole."""
    if reply.status != 200:
        yield reply.body
        return
    body = msgspec.json.decode(reply.body)
    for choice in body["choices"]:
        words = choice["message"]["content"].split(SPACE)
        for at, word in enumerate(words):
            delta = {"content": SPACE * (at > 0) + word}
            reason = choice["finish_reason"] if at == len(words) - 1 else None
            piece = {"index": choice["index"], "finish_reason": reason, "delta": delta}
            yield _encode({**body, "choices": [piece], "usage": None})
    yield _encode({**body, "choices": []})


# --------------------------------------------------------------------------- the engine


class EchoTarget(Target):
    """What answers in this process instead of a server."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        num_seqs = config.typed_number("max_num_seqs") or DEFAULT_MAX_NUM_SEQS
        super().__init__(name, "", slots_for(num_seqs))
        self._config = config
        self._running = asyncio.Semaphore(num_seqs)

    async def look(self, _config: EngineConfig) -> str:
        """See Target.look."""
        self.is_ready = True
        return ""

    async def get(self, _path: str, _most_seconds: float = 0.0) -> Answer:
        """Answer what `HttpEngine` asks a server when it opens."""
        models = [{"max_model_len": self._config.typed_number("max_model_len")}]
        return Answer(200, _encode({"version": __version__, "data": models}))

    async def post(self, call: Call) -> Answer:
        """Answer a call."""
        if seconds := latency_of(call, self._config):
            async with self._running:
                await asyncio.sleep(seconds)
        reply = answer(call, self._config)
        return Answer(reply.status, reply.body)

    async def events(self, call: Call) -> AsyncGenerator[bytes]:
        """Answer a call word by word."""
        for event in stream_of(answer(call, self._config)):
            yield event

"""Translates requests for embeddings into the OpenAI API's terms, and the API's answers into completions. Pure."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import RowError
from batchinfer.core.records import Completion, Failure, Pooled, Pooling, Request, RequestInput
from batchinfer.core.tasks import EMBED, SCORE
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.openai_requests import BrokenAnswer, decode_body

EMBEDDINGS_PATH = "/embeddings"


def embeddings_body(request: Request, config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """Return the path below the endpoint's URL, and the body, that ask for the embeddings of a request's texts.

    Raises:
        RowError: a text is empty, or the endpoint cannot be asked for the task.
    """
    if request.task != EMBED and not (request.task == SCORE and request.num_queries):
        raise RowError("wrong_task", f"the OpenAI API does not do the task {request.task!r}")
    own = request.pooling or Pooling()
    dimensions = config.dimensions if own.dimensions is None else own.dimensions
    normalize = config.normalize if own.normalize is None else own.normalize
    body: dict[str, Any] = {"model": config.model, "encoding_format": "float"}
    if request.prompts[0].messages is not None:  # vLLM's addition to the API
        chats = [each.messages for each in request.prompts]
        body["messages"] = chats if len(chats) > 1 else chats[0]
        body |= request.chat_options or {}
    else:
        inputs = list(map(_input_of, request.prompts))
        body["input"] = inputs if len(inputs) > 1 else inputs[0]
    if dimensions is not None:
        body["dimensions"] = dimensions
    if normalize is not None:  # vLLM's addition to the API
        body["use_activation"] = normalize
    return EMBEDDINGS_PATH, body | (own.extra or {})


def _input_of(prompt: Request | RequestInput) -> str | list[int]:
    value = prompt.token_ids if prompt.text is None else prompt.text
    if not value:
        raise RowError("empty_prompt", "the prompt is empty")
    return value


class _AnswerVector(msgspec.Struct, gc=False):
    embedding: list[float] | str
    index: int = 0


class _VectorUsage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None


class VectorAnswer(msgspec.Struct, gc=False):
    """The body of an answer, as far as it is used."""

    data: list[_AnswerVector]
    usage: _VectorUsage | None = None


_decoder = codec.json_decoder(VectorAnswer)


def read_vectors(data: bytes) -> VectorAnswer:
    """Read the body of an answer to a request for embeddings. See `decode_body`."""
    return decode_body(_decoder, data)


def vectors_completion(request: Request, data: bytes, seconds: tuple[float, float]) -> Completion:
    """Convert the body of an answer to a completion.

    Args:
        request: The request that the body answers.
        data: The body.
        seconds: Seconds that the request waited here, and seconds that the endpoint took.

    Raises:
        BrokenAnswer: the body is no JSON, or not in the API's form.
    """
    answer = read_vectors(data)
    failure, pooled = None, []
    try:
        vectors = [
            _numbers(each.embedding) for each in sorted(answer.data, key=lambda each: each.index)
        ]
        if len(vectors) != len(request.prompts) or not all(vectors):
            message = f"the endpoint gave {len(vectors)} of {len(request.prompts)} embeddings"
            failure = Failure(code="engine_rejected", message=message)
        elif request.task == SCORE:
            pooled = _cosines(vectors, request.num_queries)
        else:
            pooled = [_pooled(vector) for vector in vectors]
    except (ValueError, struct.error, OverflowError) as error:
        raise BrokenAnswer(f"a vector that is not in the API's form ({error})") from error
    usage = answer.usage or _VectorUsage()
    return Completion(
        key=request.key,
        failure=failure,
        pooled=pooled,
        prompt_tokens=usage.prompt_tokens or 0,
        queue_seconds=seconds[0],
        generation_seconds=seconds[1],
    )


def _numbers(vector: list[float] | str) -> list[float]:
    """Return a vector's numbers. Some endpoints give base64 whatever they are asked for."""
    if isinstance(vector, list):
        return vector
    data = base64.b64decode(vector, validate=True)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def _pooled(numbers: list[float]) -> Pooled:
    return Pooled(data=struct.pack(f"<{len(numbers)}f", *numbers), width=len(numbers))


def _cosines(vectors: list[list[float]], num_queries: int) -> list[Pooled]:
    queries, documents = vectors[:num_queries], vectors[num_queries:]
    if len(queries) == 1:
        queries *= len(documents)
    return [_pooled([_cosine(*pair)]) for pair in zip(queries, documents, strict=True)]


def _cosine(one: list[float], other: list[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / ((math.hypot(*one) * math.hypot(*other)) or 1.0)

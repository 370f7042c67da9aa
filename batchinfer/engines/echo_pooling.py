"""The answers of the echo engine to requests for a pooling model: numbers that depend on nothing but the text."""

from __future__ import annotations

import hashlib
import math
import struct
from operator import mul

from batchinfer.core.records import Pooled
from batchinfer.core.tasks import CLASSIFY, EMBED, SCORE, TOKEN_EMBED

WIDTH = 16
"""Numbers of an embedding, if the options say no other number."""
MOST_DIMENSIONS = 1 << 16
"""Most numbers of an embedding that a request may ask for."""
LABELS = ("no", "yes")


def pooled_of(
    texts: list[str], task: str, *, num_queries: int, dimensions: int | None, normalize: bool | None
) -> list[Pooled]:
    """Return the numbers for each text, or the score of each pair of texts.

    Args:
        texts: The texts of one request.
        task: Task of the request.
        num_queries: As in `Request.num_queries`.
        dimensions: Numbers of an embedding.
        normalize: Whether embeddings have length 1; None counts as yes.
    """
    width = dimensions or WIDTH
    is_unit = normalize is not False
    if task == EMBED:
        return [_pooled(_vector(text, width, is_unit=is_unit), width) for text in texts]
    if task == TOKEN_EMBED:
        return [
            _pooled(
                [
                    number
                    for word in text.split(" ")
                    for number in _vector(word, width, is_unit=is_unit)
                ],
                width,
            )
            for text in texts
        ]
    if task == CLASSIFY:
        found = []
        for text in texts:
            share = _share(text)
            label = LABELS[share > 0.5]
            found.append(Pooled(data=_bytes([1 - share, share]), width=2, label=label))
        return found
    if task == SCORE and num_queries:
        vectors = [_vector(text, width, is_unit=True) for text in texts]
        queries, documents = vectors[:num_queries], vectors[num_queries:]
        queries = queries * len(documents) if len(queries) == 1 else queries
        pairs = zip(queries, documents, strict=True)
        return [_pooled([sum(map(mul, query, document))], 1) for query, document in pairs]
    return [_pooled([_share(text)], 1) for text in texts]


def _vector(text: str, width: int, *, is_unit: bool) -> list[float]:
    seed = text.encode("utf-8", "surrogatepass")
    blocks = -(-width // 16)
    data = b"".join(
        hashlib.blake2b(seed, digest_size=64, salt=struct.pack("<Q", block)).digest()
        for block in range(blocks)
    )
    numbers = [number / 2**31 for number in struct.unpack(f"<{16 * blocks}i", data)[:width]]
    length = math.hypot(*numbers) if is_unit else 1.0
    return [number / length for number in numbers]


def _share(text: str) -> float:
    """Return a number from 0 to 1."""
    return (_vector(text, 1, is_unit=False)[0] + 1) / 2


def _pooled(numbers: list[float], width: int) -> Pooled:
    return Pooled(data=_bytes(numbers), width=width)


def _bytes(numbers: list[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)

"""The numbers of pooling models in output lines: how they are written, and how they are read. Pure."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator

import msgspec

from batchinfer.core.records import Pooled
from batchinfer.core.tasks import CLASSIFY, EMBED, REWARD, SCORE, TOKEN_EMBED
from batchinfer.prompts import PromptConfig

Vector = list[float] | str
"""A vector in an output line: its numbers, or base64 of their little-endian float32 bytes."""
_NUMBER_BYTES = 4
_DIGITS = 9
"""Significant digits that tell every float32 from all others."""


class OutputVectors(msgspec.Struct, omit_defaults=True, gc=False):
    """What an output line says about one text, or about one pair of texts. Only the fields of the task are set."""

    embedding: Vector | None = None
    token_embeddings: list[Vector] | None = None
    label: str | None = None
    probs: list[float | None] | None = None
    score: float | None = None
    reward: float | None = None
    rewards: list[list[float]] | None = None

    def shown(self, most: int) -> str:
        """Return a text for people with up to `most` numbers."""
        if self.label is not None:
            return self.label
        numbers: list[float | None] = [
            *(number for vector in self._own_vectors() for number in numbers_in(vector)),
            *(number for number in (self.score, self.reward) if number is not None),
            *(number for row in self.rewards or () for number in row),
        ]
        return ", ".join("null" if each is None else f"{each:.4g}" for each in numbers[:most])

    @property
    def dimension(self) -> int:
        """Length of the vectors; 0 if there is none."""
        return next(map(length_of, self._own_vectors()), 0)

    def _own_vectors(self) -> list[Vector]:
        return [self.embedding] if self.embedding is not None else self.token_embeddings or []


def is_base64(config: PromptConfig) -> bool:
    """Whether a run's output lines hold vectors as base64."""
    return config.embedding_format == "base64"


def shown_vectors(pooled: Pooled, task: str, *, as_base64: bool) -> OutputVectors:
    """Return the numbers for one text as an output line shows them."""
    if task == EMBED:
        return OutputVectors(embedding=write_vector(pooled.data, as_base64=as_base64))
    if task == TOKEN_EMBED:
        parts = _parts(pooled)
        return OutputVectors(
            token_embeddings=[write_vector(part, as_base64=as_base64) for part in parts]
        )
    numbers = numbers_of(pooled.data)
    if task == CLASSIFY:
        return OutputVectors(label=pooled.label, probs=list(numbers))
    if task == SCORE:
        return OutputVectors(score=numbers[0])
    if task == REWARD and len(numbers) == 1:
        return OutputVectors(reward=numbers[0])
    return OutputVectors(rewards=[numbers_of(part) for part in _parts(pooled)])


def write_vector(data: bytes, *, as_base64: bool) -> Vector:
    """Return a vector as it stands in an output line. `data` are its numbers as little-endian float32."""
    return base64.b64encode(data).decode() if as_base64 else numbers_of(data)


def numbers_of(data: bytes) -> list[float]:
    """Return float32 numbers as Python's floats, rounded to as few digits as keep them apart.

    Reading one of them as float32 gives the same bytes again. Without numpy they are not rounded.

    >>> numbers_of(bytes.fromhex("cdcccc3d0000803f"))
    [0.100000001, 1.0]
    """
    try:
        import numpy as np
    except ImportError:
        return _plain_numbers(data)
    exact = np.frombuffer(data, "<f4")
    numbers = exact.astype(np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.abs(numbers))))
        rounded = np.rint(numbers * scale) / scale
        is_same = rounded.astype(np.float32) == exact
    found: list[float] = np.where(is_same, rounded, numbers).tolist()
    return found


def _plain_numbers(data: bytes) -> list[float]:
    numbers = array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _parts(pooled: Pooled) -> Iterator[bytes]:
    size = pooled.width * _NUMBER_BYTES
    return (pooled.data[start : start + size] for start in range(0, len(pooled.data), size))


def read_bytes(vector: Vector) -> bytes:
    """Return a vector of an output line as bytes of little-endian float32.

    Raises:
        ValueError: the text is no base64 of whole numbers.
    """
    if isinstance(vector, str):
        data = base64.b64decode(vector, validate=True)
        if len(data) % _NUMBER_BYTES:
            raise ValueError(
                f"a vector of {len(data)} bytes, expected a multiple of {_NUMBER_BYTES}"
            )
        return data
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def numbers_in(vector: Vector) -> list[float]:
    """Return the numbers of a vector of an output line."""
    return numbers_of(read_bytes(vector)) if isinstance(vector, str) else vector


def length_of(vector: Vector) -> int:
    """Return the number of a vector's numbers."""
    return len(read_bytes(vector)) // _NUMBER_BYTES if isinstance(vector, str) else len(vector)

"""The columns that `collect` makes of the numbers of pooling models. Vectors become Arrow arrays without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from batchinfer.core.errors import InputError
from batchinfer.core.tasks import CLASSIFY, EMBED, REWARD, SCORE, TOKEN_EMBED
from batchinfer.formats.vectors import OutputVectors, Vector, read_bytes

_SINGLE = {
    EMBED: ("embedding",),
    TOKEN_EMBED: ("token_embeddings",),
    CLASSIFY: ("label", "probs"),
    SCORE: ("score",),
    REWARD: ("reward", "rewards"),
}
"""Columns of a table with one text a row, by task."""
_REQUESTS = {EMBED: ("embedding", "score"), SCORE: ("embedding", "score")}
"""Columns of a run of requests, which may be of several tasks, where they differ from `_SINGLE`."""
PLURALS = {"embedding": "embeddings", "score": "scores", "label": "labels", "probs": "probs"}
"""Names of the columns of a table whose rows hold several texts."""
_VECTORS = frozenset({"embedding", "embeddings", "token_embeddings"})


def single_names(task: str, *, is_of_requests: bool) -> list[str]:
    """Return the columns that hold what the model says about one text."""
    names = _REQUESTS.get(task) if is_of_requests else None
    return list(names or _SINGLE[task])


def list_names(task: str) -> list[str]:
    """Return the columns that hold lists of what the model says about the texts of a request."""
    return [PLURALS.get(name, name) for name in single_names(task, is_of_requests=True)]


def single_columns(found: Sequence[OutputVectors | None], names: Sequence[str]) -> dict[str, Any]:
    """Return the columns with one text a row; None stands for a row without an answer."""
    nothing = OutputVectors()
    columns: dict[str, Any] = {}
    for name in names:
        values = [getattr(each or nothing, name) for each in found]
        if name == "embedding":
            values = vector_array(values)
        elif name == "token_embeddings":
            values = vector_lists(values)
        columns[name] = values
    return columns


def list_columns(found: Sequence[Sequence[OutputVectors]], names: Sequence[str]) -> dict[str, Any]:
    """Return the columns with lists of several texts a row. Texts without a value of a column are left out of it."""
    singles = {plural: name for name, plural in PLURALS.items()}
    columns: dict[str, Any] = {}
    for plural in names:
        name = singles[plural]
        values: list[Any] = [
            [value for each in row if (value := getattr(each, name)) is not None] for row in found
        ]
        columns[plural] = vector_lists(values) if plural in _VECTORS else values
    return columns


def vector_array(vectors: Sequence[Vector | None]) -> Any:
    """Return vectors of one length as an Arrow array of fixed-size lists of float32.

    Raises:
        InputError: the vectors have several lengths, or one is no vector.
    """
    import pyarrow as pa

    try:
        data = [None if vector is None else read_bytes(vector) for vector in vectors]
    except ValueError as error:
        raise InputError(
            f"an output line holds a vector that cannot be read ({error})",
            hint="did another program write the outputs? `batchinfer verify --deep` tells",
        ) from error
    sizes = {len(each) for each in data if each is not None}
    if not sizes:
        return pa.nulls(len(vectors))
    if len(sizes) > 1:
        lengths = ", ".join(str(size // 4) for size in sorted(sizes))
        raise InputError(
            f"the run's vectors have different lengths ({lengths}), which no column can hold",
            hint="`collect --format lines` writes the output lines as they are",
        )
    (size,) = sizes
    blank = bytes(size)
    buffer = pa.py_buffer(b"".join([blank if each is None else each for each in data]))
    numbers = pa.Array.from_buffers(pa.float32(), len(data) * size // 4, [None, buffer])
    mask = pa.array([each is None for each in data])
    return pa.FixedSizeListArray.from_arrays(numbers, size // 4, mask=mask)


def vector_lists(rows: Sequence[Sequence[Vector] | None]) -> Any:
    """Return lists of vectors of one length as an Arrow array.

    Raises:
        InputError: as in `vector_array`.
    """
    import pyarrow as pa

    flat = vector_array([vector for row in rows for vector in row or ()])
    ends = list(accumulate(len(row or ()) for row in rows))
    starts = [0, *ends[:-1]] if ends else []
    offsets = [None if row is None else start for row, start in zip(rows, starts, strict=True)]
    return pa.ListArray.from_arrays(pa.array([*offsets, ends[-1] if ends else 0], pa.int32()), flat)


def column_types(dimension: int, *, is_half: bool, has_lists: bool) -> dict[str, Any]:
    """Return the Arrow type of each column.

    Args:
        dimension: Numbers of each vector; 0 for vectors of any length.
        is_half: Whether vectors are float16 instead of float32.
        has_lists: Whether a table row holds several texts.
    """
    import pyarrow as pa

    number = pa.float16() if is_half else pa.float32()
    vector = pa.list_(number, dimension) if dimension else pa.list_(number)
    numbers = pa.list_(pa.float32())
    return {
        "embedding": vector,
        "embeddings": pa.list_(vector),
        "token_embeddings": pa.list_(vector),
        "probs": pa.list_(numbers) if has_lists else numbers,
        "labels": pa.list_(pa.string()),
        "score": pa.float32(),
        "scores": numbers,
        "reward": pa.float32(),
        "rewards": pa.list_(numbers),
    }

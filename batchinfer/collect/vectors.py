"""Vectors as Arrow columns: of bodies, where they are base64 of float32 or JSON numbers."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from batchinfer.collect.answers import Answers

_LENGTH = r"""CASE WHEN regexp_matches(v, '^\s*\[\s*\[') THEN -1
WHEN v[1] = '"' THEN length(trim(v, '"=')) * 3 // 16 ELSE json_array_length(v) END"""
_ALL = "coalesce(list_transform(items, lambda i: i.embedding), [embedding])"
_LENGTHS = f"list_transform({_ALL}, lambda v: {_LENGTH})"


class VectorColumn:
    """A column of vectors: its name and type, which are those of all rows.

    Args:
        answers: The answers, some of which have vectors.
        task: The run's task.
        column: The column that holds them as JSON texts: `embedding`, or `embeddings` if a row may have several.
    """

    def __init__(self, answers: Answers, task: str, column: str) -> None:
        import pyarrow as pa

        self.column, is_list = column, column == "embeddings"
        least, most = answers.one(f"min(list_min({_LENGTHS}))", f"max(list_max({_LENGTHS}))")
        self._is_nested = least < 0
        self._is_number = task == "reward" and least == most == 1
        names = {True: "reward", False: "embedding"}
        self.name = names[task == "reward" and (self._is_number or self._is_nested)]
        if self._is_nested:
            self.name = {"reward": "rewards", "embedding": "token_embeddings"}[self.name]
        elif is_list:
            self.name += "s"
        self.type = pa.list_(pa.float32(), most if least == most > 0 else -1)
        if self._is_number:
            self.type = pa.float32()
        for is_so in (self._is_nested, is_list):
            self.type = pa.list_(self.type) if is_so else self.type

    def array(self, table: Any) -> Any:
        """Return this column of a table as an Arrow array, of that of the JSON texts."""
        import pyarrow as pa

        return pa.array(map(self._value, table[self.name].to_pylist()), self.type)

    def _value(self, text: Any) -> Any:
        import numpy as np

        if text is None or isinstance(text, list):
            return text and list(map(self._value, text))
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            value = np.frombuffer(base64.b64decode(value), "<f4")
        if self._is_nested and not isinstance(value[0], list):
            return [value]
        return value[0] if self._is_number else value

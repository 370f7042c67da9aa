"""Whether finished answers keep the run's JSON schema, some rules of which xgrammar and other backends ignore."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class AnswerSchema:
    """A JSON schema that answers are validated against. It fetches no schema from elsewhere.

    Args:
        schema: The schema. One that is none itself is kept by nothing: `is_usable` is False.
    """

    def __init__(self, schema: Any) -> None:
        import jsonschema
        import referencing

        self.is_usable = False
        """Whether answers can be validated."""
        if isinstance(schema, Mapping):
            kind = jsonschema.validators.validator_for(schema)
            self.is_usable = not list(kind(kind.META_SCHEMA).iter_errors(schema))
            self._validator = kind(schema, registry=referencing.Registry())

    def array(self, texts: Any, reasons: Any) -> Any:
        """Return whether the answers of an Arrow column are valid: a truth value a row, or a list of them.

        Null for an answer that did not end by itself, and where the schema refers to another place.
        """
        import pyarrow as pa

        is_list = pa.types.is_list(texts.type)
        kind = pa.list_(pa.bool_()) if is_list else pa.bool_()
        found = map(self._is_valid, texts.to_pylist(), reasons.to_pylist())
        return pa.array(found, kind)

    def _is_valid(self, text: Any, reason: Any) -> Any:
        from referencing.exceptions import Unresolvable

        if isinstance(text, list):
            reasons = reason if isinstance(reason, list) else [reason] * len(text)
            return list(map(self._is_valid, text, reasons))
        if text is None or reason != "stop":
            return None
        try:
            return bool(self._validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            return False
        except Unresolvable:
            return None


def num_broken(column: Any) -> int:
    """Return how many answers of such a column break the schema."""
    from pyarrow import compute, types

    flat = compute.list_flatten(column) if types.is_list(column.type) else column
    return compute.sum(compute.invert(flat)).as_py() or 0

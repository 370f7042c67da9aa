"""Answers that are JSON as columns, and whether they keep the schema that the run asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from batchinfer.collect.answers import Answers, arrow_reader, quoted
from batchinfer.collect.structures import find_structure, merged, of_schema, settled, spelled
from batchinfer.core.json_text import MAX_DEPTH, is_deep

VALID = "answer_valid"


class JsonAnswers:
    """The columns of answers that are JSON: `columns`, expressions by their names. Other answers have nulls there.

    An object's members are columns, named after them; other values, and lists of answers, are the column `answer`.

    Args:
        answers: The answers.
        schema: JSON schema of the run; None if it has none.
        is_list: Whether rows have several answers.
    """

    def __init__(self, answers: Answers, schema: Any, *, is_list: bool) -> None:
        self.num_broken = 0
        """Number of finished answers that break the schema, so far."""
        self.validator: Any = _validator(schema) if isinstance(schema, Mapping) else None
        text = _shallow(answers)
        rows = f"(SELECT {text}::JSON AS json FROM (SELECT unnest(text_list) AS t FROM answers))"
        found = find_structure(answers.sql, f"(FROM {rows} WHERE json IS NOT NULL)")
        found = settled(merged(found, of_schema(schema)))
        value = (
            f"list_transform(text_list, lambda t: json_transform({text}::JSON, {spelled(found)}))"
        )
        value += "" if is_list else "[1]"
        fields = found if isinstance(found, dict) and not is_list else {}
        self.columns = {f"answer_{name}": f"{value}.{quoted(name)}" for name in fields} or {
            "answer": value
        }
        self.json_texts = [f"answer_{name}" for name, kind in fields.items() if kind == "JSON"]
        self.json_texts += ["answer"] if found == "JSON" else []

    def valid(self, texts: Any, reasons: Any) -> Any:
        """Return whether answers keep the schema, as an Arrow array; null for those that did not end by themselves.

        Args:
            texts: The texts of some rows, or lists of texts.
            reasons: Their finish reasons, or lists of them.
        """
        import pyarrow as pa

        found = list(map(self._is_valid, texts.to_pylist(), reasons.to_pylist()))
        return pa.array(found, pa.list_(pa.bool_()) if pa.types.is_list(texts.type) else pa.bool_())

    def _is_valid(self, text: Any, reason: Any) -> Any:
        from referencing.exceptions import Unresolvable

        if isinstance(text, list):
            return list(map(self._is_valid, text, reason))
        if text is None or reason != "stop":
            return None
        try:
            is_valid = bool(self.validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            is_valid = False
        except Unresolvable:  # the schema points to another place
            return None
        self.num_broken += not is_valid
        return is_valid


def _shallow(answers: Answers) -> str:
    """Return the SQL for a text `t` if it is JSON. DuckDB fails at JSON that is nested too deep."""
    brackets = "length(t) - length(translate(t, '[{', ''))"
    texts = f"SELECT DISTINCT t FROM (SELECT unnest(text_list) AS t FROM answers) WHERE {brackets} > {MAX_DEPTH}"
    deep = [
        hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        for batch in arrow_reader(answers.sql, texts)
        for text in batch.column(0).to_pylist()
        if is_deep(text.encode())
    ]
    unless = f" AND md5(t) NOT IN {(*deep, '')}" if deep else ""
    return f"CASE WHEN json_valid(t){unless} THEN t END"


def _validator(schema: Mapping[str, Any]) -> Any:
    """Return a validator that fetches no schema from elsewhere; None if the schema is none."""
    import jsonschema
    import referencing

    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError:
        return None
    return kind(schema, registry=referencing.Registry())


def schema_of(body: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether a run's own body fields ask for JSON, and the schema that they give; None if they give none."""
    asked, constraint = body.get("response_format") or {}, body.get("structured_outputs") or {}
    schema = (asked.get("json_schema") or {}).get("schema", constraint.get("json"))
    if isinstance(schema, str):
        schema = json.loads(schema)
    is_json = asked.get("type") == "json_object" or constraint.get("json_object")
    return schema is not None or bool(is_json), schema

"""Columns that SQL over the answers' bodies does not give: members of JSON values, vectors, and the source's.

A column of JSON values has the type that all of its values share. Where they share none, it is JSON text. No value
becomes another: no float stands for an integer that it would round, and no number for a text. The source's columns are
read again from parquet files that are unchanged; else they are JSON values of the job's chunks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchinfer.collect.answers import Answers, quoted
from batchinfer.collect.table_files import grouped
from batchinfer.core.errors import ConfigError, InputError, near
from batchinfer.core.json_text import is_deep
from batchinfer.core.records import Job
from batchinfer.split.files import opened

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20
_BATCH_ROWS = 4096
"""Most bytes and rows of the source's files that are read at once."""

MAX_NAMES = 100
"""Most names of an object. One with more is probably a map with arbitrary keys, and stays JSON text."""
_MOST_LEAVES = 1000
"""Most names of a member at all depths, each with its types. One with more is a map with arbitrary keys, too."""
_LARGE = r"(^|[\[,:{\s-])[0-9]{%d,}([,\]}\s]|$)|[0-9]{200,}|[eE]\+?[0-9]{3,}"
"""Integers of so many digits, or numbers beyond float64."""
_STRING = r'"([^"\\]|\\.)*"'
_FLOAT_DIGITS, _INT_DIGITS = 16, 19
_MOST_LEVELS = 40
"""Levels of arrays and objects that make a column. Readers of parquet take no more than 100, two for a list."""

_EXAMPLES = {"string": "", "integer": 0, "number": 0.5, "boolean": True}
"""Values of the simple types of a JSON schema."""

Shape = Any
"""As `json_group_structure` gives it: the name of a type, a list of one shape, or shapes by the names of members."""


class JsonColumns:
    """The columns of JSON objects in `answers`.

    Args:
        sql: Connection with the answers.
        answers: The answers.
        value: SQL of the JSON values. Those that are no objects count as null.
        example: An object with values of the types that members should have where all of their values fit.
        most_names: Most names beside the example's that all objects together may have, else they have no columns.
    """

    def __init__(
        self,
        sql: Any,
        answers: Answers,
        value: str,
        example: Mapping[str, Any] | None = None,
        *,
        most_names: float = math.inf,
    ) -> None:
        self._value = f"CASE WHEN json_type({value}) = 'OBJECT' THEN {value} END"
        values = f"(SELECT {self._value} AS v, _row FROM part)"
        # Values that bring a new name or type are enough to tell a member's type.
        found, seen = defaultdict[str, list[str]](list), defaultdict[str, set[Any]](set)
        odd = dict[str, Shape]()
        members = "unnest(json_keys(v)) AS name, unnest(json_extract(v, '$.*')) AS member"
        query = f"""SELECT name, json_structure(member)::VARCHAR, any_value(member)::VARCHAR
            FROM (SELECT _row, {members}, generate_subscripts(json_keys(v), 1) AS place FROM {values})
            GROUP BY 1, 2 ORDER BY min(row(_row, place))"""
        for name, structure, text in answers.in_parts(query):
            texts = found[name]
            if is_deep(structure.encode()) or len(seen[name]) > _MOST_LEAVES:
                odd[name] = "JSON"
            elif new := set(_leaves(json.loads(structure))) - seen[name]:
                seen[name] |= new
                texts.append(f"{{{json.dumps(name)}:{text}}}")
        given = [text for name, texts in found.items() if name not in odd for text in texts]
        given.append(json.dumps(example or {}))
        query = "SELECT json_group_structure(v::JSON) FROM (SELECT unnest($1) AS v)"
        [shared] = sql.execute(query, [given]).fetchall()[0]
        shared = json.loads(shared) if example or len(given) > 1 else {}
        shape: dict[str, Shape] = {**dict.fromkeys(found), **shared, **odd}
        if len(shape.keys() - (example or {}).keys()) > most_names:
            logger.warning("JSON answers have more than %d names together: no columns", most_names)
            shape = {}
        count = Counter(map(str.casefold, shape))
        self.kinds, numbers = dict[str, Shape](), defaultdict[int, list[str]](list)
        for name, kind in shape.items():
            types = {"JSON"} if not name or count[name.casefold()] > 1 else set[str]()
            signed = _signed(kind, types)
            types.update({"JSON"} if is_deep(json.dumps(kind).encode(), _MOST_LEVELS) else ())
            self.kinds[name] = "JSON" if "JSON" in types else signed
            if "JSON" not in types and types & {"DOUBLE", "UBIGINT", "HUGEINT", "UHUGEINT"}:
                numbers[_FLOAT_DIGITS if "DOUBLE" in types else _INT_DIGITS].append(name)
        for digits, names in numbers.items():
            paths = f"[{', '.join(map(_pointer, names))}]"
            members = f"unnest(json_extract(v, {paths}))::VARCHAR AS text, generate_subscripts({paths}, 1) AS place"
            is_large = (
                rf"regexp_matches(regexp_replace(text, '{_STRING}', '', 'g'), '{_LARGE % digits}')"
            )
            query = f"SELECT DISTINCT place FROM (SELECT {members} FROM {values}) WHERE {is_large}"
            self.kinds |= {names[place - 1]: "JSON" for [place] in answers.in_parts(query)}

    @property
    def json_texts(self) -> list[str]:
        """Names of the columns that are JSON text."""
        return [name for name, kind in self.kinds.items() if kind == "JSON"]

    @property
    def struct(self) -> str:
        """SQL of a struct of all members but those that are JSON text."""
        kinds = {name: kind for name, kind in self.kinds.items() if kind != "JSON"}
        shape = quoted(json.dumps(kinds), "'")
        return f"json_transform({self._value}, {shape})" if kinds else "NULL"

    def columns(self, struct: str) -> dict[str, str]:
        """Return the SQL of each column by its name, where the relation has `self.struct` under the name `struct`."""
        return {
            name: f"nullif(json_extract({self._value}, {_pointer(name)})::VARCHAR, 'null')"
            if kind == "JSON"
            else f"struct_extract({struct}, {quoted(name, chr(39))})"
            for name, kind in self.kinds.items()
        }


def _leaves(shape: Shape, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the paths to the simple types of a shape, each with the type."""
    if isinstance(shape, str):
        yield path, shape
        return
    yield path, type(shape).__name__
    for name, each in shape.items() if isinstance(shape, dict) else (("[]", one) for one in shape):
        yield from _leaves(each, (*path, name))


def _pointer(name: str) -> str:
    """Return the SQL of the path to a member of a JSON value."""
    return quoted("/" + name.replace("~", "~0").replace("/", "~1"), "'")


def _signed(shape: Shape, types: set[str]) -> Shape:
    """Return a shape with one type for all integers. Its types are added to a set.

    JSON stands for objects that Arrow or DuckDB cannot hold.
    """
    if isinstance(shape, str):
        types.add(shape)
        return "BIGINT" if shape.endswith(("BIGINT", "HUGEINT")) else shape
    if isinstance(shape, list):
        return [_signed(shape[0], types)]
    names = {name.casefold() for name in shape}
    if len(names) < len(shape) or len(names) > MAX_NAMES or not all(names):
        types.add("JSON")
    return {name: _signed(kind, types) for name, kind in shape.items()}


# --------------------------------------------------------------------------- the schema of a run


def schema_of(body: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether a run's own body fields ask for JSON, and the schema that they give; None if they give none."""
    # For speech, `response_format` is the name of a format.
    fields = body.get("response_format"), body.get("structured_outputs")
    asked, constraint = (each if isinstance(each, Mapping) else {} for each in fields)
    named = asked.get("json_schema")
    schema = (named if isinstance(named, Mapping) else {}).get("schema", constraint.get("json"))
    if isinstance(schema, str):
        with contextlib.suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    is_json = asked.get("type") == "json_object" or constraint.get("json_object")
    return schema is not None or bool(is_json), schema


def example_of(schema: Any) -> dict[str, Any]:
    """Return values of the members to which a schema gives simple types."""
    members = schema.get("properties") if isinstance(schema, Mapping) else None
    return {
        name: _EXAMPLES[member["type"]]
        for name, member in (members if isinstance(members, Mapping) else {}).items()
        if isinstance(member, Mapping) and str(member.get("type")) in _EXAMPLES
    }


# --------------------------------------------------------------------------- vectors

_FLOATS = """CASE WHEN v[1] = '"' THEN floats_of(v) ELSE TRY_CAST(v::JSON AS FLOAT[]) END"""
_LENGTH = r"""CASE WHEN regexp_matches(v, '^\s*\[\s*\[') THEN -1
WHEN v[1] = '"' THEN length(trim(v, '"=')) * 3 // 16 ELSE json_array_length(v) END"""
_IS_VECTOR = """(v[1] = '"' OR NOT regexp_matches(v, '["tf]'))"""
"""Base64, or JSON without texts and truth values, which DuckDB would take for numbers."""
_ALL = "coalesce(list_transform(items, lambda i: i.embedding), [embedding])"
_LENGTHS = f"list_transform({_ALL}, lambda v: {_LENGTH})"


def vector_column(answers: Answers, task: str, column: str, value: str) -> tuple[str, str]:
    """Return name and SQL of the column of vectors, with the type of all rows. What is no vector becomes null.

    Args:
        answers: The answers, some of which have vectors. Their connection has the function `floats_of`.
        task: The run's task.
        column: The column that holds them as JSON texts: `embedding`, or `embeddings` if a row may have several.
        value: SQL of that column.
    """
    is_list = column == "embeddings"
    query = f"SELECT unnest([min(list_min({_LENGTHS})), max(list_max({_LENGTHS}))]) FROM part"
    lengths = [length for [length] in answers.in_parts(query) if length is not None]
    least, most = min(lengths), max(lengths)
    is_nested, is_number = least < 0, task == "reward" and least == most == 1
    vector = f"TRY_CAST({_FLOATS} AS FLOAT[{most if least == most > 0 else ''}])"
    name = "reward" if task == "reward" and (is_number or is_nested) else "embedding"
    if is_nested:
        vector = f"CASE WHEN {_LENGTH} < 0 THEN TRY_CAST(v::JSON AS FLOAT[][]) END"
        name = "token_embeddings" if name == "embedding" else "rewards"
    elif is_number:
        vector += "[1]"
    values = value if is_list else f"[{value}]"
    every = f"list_transform({values}, lambda v: CASE WHEN {_IS_VECTOR} THEN {vector} END)"
    return f"{name}s" if is_list and not is_nested else name, every if is_list else f"({every})[1]"


def floats_of(texts: Any) -> Any:
    """Return the vectors of an Arrow array of base64 texts in quotes; null for a text that is none."""
    import numpy as np
    import pyarrow as pa

    def vector(text: str | None) -> Any:
        try:
            return text and np.frombuffer(b64decode(text.strip('"'), validate=True), "<f4")
        except ValueError:
            return None

    return pa.array(map(vector, texts.to_pylist()), pa.list_(pa.float32()))


# --------------------------------------------------------------------------- the source's files


def chosen(columns: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names of the columns that are asked for, of all without any.

    Raises:
        ConfigError: one of them is not known.
    """
    for name in columns:
        if name not in known:
            names = ", ".join(known[:30])
            raise ConfigError(
                f"--columns: the source has no column {name!r}, expected some of {names}{near(name, known)}",
                hint="check the spelling",
            )
    return list(dict.fromkeys(columns or known))


class ParquetSource:
    """The columns of a job's parquet files, which must be those that the job was made of.

    Raises:
        ConfigError: the source has no such column.
        Exception: a file is gone, has changed or cannot be read; a column has several types in the files, or one of
            which Arrow takes no rows.
    """

    def __init__(self, job: Job, columns: Sequence[str]) -> None:
        import pyarrow as pa

        from batchinfer.split.parquet_rows import read_footer

        self._files, footers = job.files, list[Any]()
        for file in self._files:
            with opened(file.url) as there:
                footer, digest = read_footer(there)
            if digest != file.digest:
                raise InputError(f"{file.url}: has changed since the split")
            footers.append(footer)
        schemas = [footer.schema.to_arrow_schema().remove_metadata() for footer in footers]
        self._types = pa.unify_schemas(schemas)
        names = chosen(columns, [name for name in job.columns if name in self._types.names])
        self.schema = pa.schema([self._types.field(name) for name in names])
        self.schema.empty_table().take(pa.array([], pa.int64()))
        groups = (each.row_group(index) for each in footers for index in range(each.num_row_groups))
        parts = (group.column(index) for group in groups for index in range(group.num_columns))
        own = tuple(f"{name}." for name in names)
        size = sum(
            x.total_uncompressed_size for x in parts if f"{x.path_in_schema}.".startswith(own)
        )
        num_rows = sum(footer.num_rows for footer in footers)
        self._at_once = min(_BATCH_ROWS, max(1, _BLOCK_BYTES * num_rows // max(1, size)))
        """Number of rows whose columns have limited bytes, by the mean. Texts that repeat count as one."""

    def tables(self) -> Iterator[tuple[int, Any]]:
        """Yield all rows in order, as Arrow tables of limited bytes, each with the number of its first row."""
        first = 0
        for table in grouped(self._batches(), self._at_once):
            yield first, table
            first += len(table)

    def _batches(self) -> Iterator[Any]:
        import pyarrow as pa
        from pyarrow import dataset

        kind = dataset.ParquetFileFormat()
        for file in self._files:
            with opened(file.url) as there:
                rows = dataset.FileSystemDataset([kind.make_fragment(there)], self._types, kind)
                for batch in rows.to_batches(
                    columns=self.schema.names,
                    batch_size=self._at_once,
                    batch_readahead=1,
                    use_threads=False,
                ):
                    yield pa.table(batch)


def open_parquet(job: Job, columns: Sequence[str]) -> ParquetSource | None:
    """Return the columns of the job's parquet files; None if these are gone, have changed, or are not all it has.

    Raises:
        ConfigError: the source has no such column.
    """
    if not job.files or any(each.format != "parquet" for each in job.sources):
        return None
    try:
        return ParquetSource(job, columns)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the source, the chunks have its rows
        logger.info("the source cannot be read again (%s)", error)
        return None

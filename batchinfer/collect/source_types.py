"""Turns the JSON values of a source's column back into an Arrow array of the type that `split` read them from.

This is the reverse of split/arrow_values.py, whose table lists the JSON form of each type. job.json holds the types.
NaN and infinite values, which became null, stay null.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from batchinfer.core.errors import InputError

_UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def read_schema(text: str) -> dict[str, Any]:
    """Return the type of each column that the field `schema` of a job.json holds.

    Raises:
        InputError: the installed pyarrow cannot read the schema.
    """
    import pyarrow as pa

    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    except (pa.ArrowException, OSError, binascii.Error) as error:
        raise InputError(
            f"job.json: field schema: pyarrow {pa.__version__} cannot read it ({error})",
            hint="upgrade pyarrow",
        ) from error
    return {field.name: field.type for field in schema}


def cell_type(kind: Any) -> Any:
    """Return the Arrow type of a column's CSV cells, which hold the JSON values: numbers, flags, else text."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return cell_type(kind.value_type)
    if types.is_floating(kind):
        return pa.float64()
    return kind if types.is_integer(kind) or types.is_boolean(kind) else pa.string()


def build_array(values: Sequence[Any], kind: Any) -> Any:
    """Return an Arrow array of type `kind` from the decoded JSON values of a column.

    Raises:
        ValueError, TypeError, OverflowError, pyarrow.ArrowException: a value is not the JSON form of this type, or the
            type is not known.
    """
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _build_extension(values, kind)
    if types.is_dictionary(kind):
        return build_array(values, kind.value_type).dictionary_encode().cast(kind)
    if types.is_map(kind):
        return _build_map(values, kind)
    if types.is_struct(kind):
        return _build_struct(values, kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _build_list(values, kind)
    for is_kind, build, allowed in _flat_types():
        if is_kind(kind):
            _check_types(values, allowed)
            return build(values, kind)
    raise TypeError(f"the type {kind} is not known")


def _check_types(values: Sequence[Any], allowed: tuple[type, ...]) -> None:
    """Raise TypeError unless every value is None or has one of the types. pyarrow would turn 1.5 into the integer 1."""
    others = set(map(type, values)).difference(allowed, (type(None),))
    if others:
        raise TypeError(f"a value is of type {others.pop().__name__}")


# --------------------------------------------------------------------------- flat types


def _plain(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    return pa.array(values, kind)


def _halves(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.float32()).cast(kind)


def _from_text(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.string()).cast(kind)


def _binary(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    decode = functools.partial(base64.b64decode, validate=True)
    return pa.array([None if value is None else decode(value) for value in values], kind)


def _times(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    moments = [None if value is None else f"1970-01-01T{value}" for value in values]
    return pa.array(moments, pa.string()).cast(pa.timestamp(kind.unit)).cast(kind)


def _timestamps(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa
    from pyarrow import compute

    found = pa.array(values, pa.string()).cast(kind)
    if kind.tz is None or all(value is None or value.endswith("Z") for value in values):
        return found
    # The offset in the text has no seconds, but zones had them in former times. The difference between the local time
    # in the text and the local time of what was read is what the offset lacks.
    local = compute.utf8_slice_codeunits(pa.array(values, pa.string()), 0, _local_length(kind))
    lacking = compute.subtract(local.cast(pa.timestamp(kind.unit)), compute.local_timestamp(found))
    return compute.add(found, lacking)


def _local_length(kind: Any) -> int:
    """Return the number of characters of a timestamp's text before its offset."""
    digits = len(str(_UNITS_PER_SECOND[kind.unit])) - 1
    return len("2024-02-29T23:59:59") + (1 + digits if digits else 0)


def _durations(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    units = _UNITS_PER_SECOND[kind.unit]

    def count(text: str) -> int:
        if not (text.startswith("PT") and text.endswith("S")):
            raise ValueError(f"{text!r} is no duration in seconds")
        whole = Decimal(text[2:-1]) * units
        if whole != int(whole):
            raise ValueError(f"{text!r} has more digits than the type")
        return int(whole)

    counts = [None if value is None else count(value) for value in values]
    return pa.array(counts, pa.int64()).cast(kind)


_Builder = Callable[[Sequence[Any], Any], Any]


@functools.cache
def _flat_types() -> tuple[tuple[Callable[[Any], bool], _Builder, tuple[type, ...]], ...]:
    """Return for each family of flat types its test, its builder, and the Python types of its JSON values."""
    from pyarrow import types

    def is_any(*names: str) -> Callable[[Any], bool]:
        checks = [check for name in names if (check := getattr(types, f"is_{name}", None))]
        return lambda kind: any(check(kind) for check in checks)

    return (
        (is_any("string", "large_string", "string_view"), _plain, (str,)),
        (is_any("null"), _plain, ()),
        (is_any("boolean"), _plain, (bool,)),
        (is_any("integer"), _plain, (int,)),
        (is_any("float16"), _halves, (float,)),
        (is_any("floating"), _plain, (float,)),
        (is_any("decimal", "date"), _from_text, (str,)),
        (is_any("time"), _times, (str,)),
        (is_any("timestamp"), _timestamps, (str,)),
        (is_any("duration"), _durations, (str,)),
        (is_any("binary", "large_binary", "fixed_size_binary", "binary_view"), _binary, (str,)),
    )


# --------------------------------------------------------------------------- nested types


def _absent(values: Sequence[Any]) -> Any:
    """Return Arrow's mask of the values that are null."""
    import pyarrow as pa

    return pa.array([value is None for value in values], pa.bool_())


def _build_list(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    _check_types(values, (list,))
    if pa.types.is_fixed_size_list(kind):
        gap = [None] * kind.list_size
        if any(value is not None and len(value) != kind.list_size for value in values):
            raise ValueError(f"a list has not the length {kind.list_size}")
        flat = list(itertools.chain.from_iterable(gap if one is None else one for one in values))
        items = build_array(flat, kind.value_type)
        return pa.FixedSizeListArray.from_arrays(items, type=kind, mask=_absent(values))
    flat = list(itertools.chain.from_iterable(value or () for value in values))
    items = build_array(flat, kind.value_type)
    make = pa.ListArray if pa.types.is_list(kind) else pa.LargeListArray
    offsets = pa.array(_offsets(values), pa.int32() if make is pa.ListArray else pa.int64())
    return make.from_arrays(offsets, items, type=kind, mask=_absent(values))


def _offsets(values: Sequence[Any]) -> list[int]:
    return [0, *itertools.accumulate(len(value or ()) for value in values)]


def _build_struct(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    _check_types(values, (dict,))
    fields = [kind.field(index) for index in range(kind.num_fields)]
    names = {field.name for field in fields}
    unknown = next((name for row in values if row for name in row if name not in names), None)
    if unknown is not None:
        raise ValueError(f"an object has the unknown key {unknown!r}")
    if not fields:
        return pa.array(values, kind)
    parts = [
        build_array([None if row is None else row.get(field.name) for row in values], field.type)
        for field in fields
    ]
    return pa.StructArray.from_arrays(parts, fields=fields, mask=_absent(values))


def _build_map(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    _check_types(values, (dict, list))
    pairs: list[Any] = []
    for value in values:
        pairs += value.items() if isinstance(value, dict) else value or ()
    keys = build_array([key for key, _ in pairs], kind.key_type)
    items = build_array([item for _, item in pairs], kind.item_type)
    offsets = pa.array(_offsets(values), pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=_absent(values))


def _build_extension(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    if kind.extension_name != "arrow.uuid":
        storage = build_array(values, kind.storage_type)
    else:
        parts = [None if value is None else uuid.UUID(value).bytes for value in values]
        storage = pa.array(parts, kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, storage)

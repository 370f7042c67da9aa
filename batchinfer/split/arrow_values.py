"""Converts Arrow columns to Python values for JSON, in one fixed form for each type.

=========================== ==========================================================================
Arrow                       JSON
=========================== ==========================================================================
bool, integers              true/false; a number with every digit (64 bits, signed or not)
float16, float32, float64   a number that gives the same float back; NaN and infinities: null, counted
decimal                     a string, never with an exponent
string kinds                a string
binary kinds                a string: base64 with padding
date, time                  a string: 2024-02-29, 23:59:59.123456 (as many digits as the type has)
timestamp                   a string: 2024-02-29T23:59:59.123456, with Z or an offset where it has a zone
duration                    a string: ISO 8601 in seconds, PT-1.5S
list kinds, struct          an array, an object
map                         an object; with keys that are not strings an array of [key, value] pairs
dictionary, run-end, ext.   as the values or the storage below (arrow.uuid: its usual text)
=========================== ==========================================================================

Other types (unions, intervals) and values that these forms cannot hold raise `ColumnError`. Invalid UTF-8 raises
UnicodeDecodeError.

Nested columns are converted level by level, and objects become structs instead of dicts: `split` should take at most
half the CPU of `datasets` (docs/performance.md), and pyarrow's `to_pylist` of nested columns is too slow for that.
"""

from __future__ import annotations

import functools
import itertools
import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa

Convert = Callable[[Any], list[Any]]
"""A function that turns an Arrow array into a list with one Python value for each element, for msgspec to encode."""

_UTC = frozenset({"utc", "etc/utc", "z", "+00:00", "gmt", "etc/gmt"})
_UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799  # years 1 to 9999
_SECONDS_PER_DAY = 86_400


def _compute() -> Any:
    """Return pyarrow.compute, imported on first use: many jobs do not need it.

    The import takes a tenth of a small job's CPU.
    """
    import pyarrow.compute

    return pyarrow.compute


class ColumnError(Exception):
    """A column, or a value in it, cannot be written as JSON. Callers add the column's name to the message."""


class NullFloats:
    """A counter of NaN and infinite values in one column. Such values become null."""

    def __init__(self) -> None:
        self.count = 0


def make_converter(kind: Any, nulls: NullFloats) -> Convert:
    """Return the function that converts arrays of one Arrow type.

    Args:
        kind: The `pyarrow.DataType`.
        nulls: A counter. The returned function adds the NaN and infinite values that it meets.

    Raises:
        ColumnError: The type has no exact JSON form, or is a struct with a field name twice.
    """
    for is_kind, make in _MAKERS:
        if is_kind(kind):
            return make(kind, nulls)
    raise ColumnError(f"type {kind} has no exact JSON form")


def holds_bytes(kind: Any) -> bool:
    """Return whether values of this Arrow type are bytes or contain bytes. Bytes become base64."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name != "arrow.uuid" and holds_bytes(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return holds_bytes(kind.value_type)
    return _is_bytes(kind) or any(
        holds_bytes(kind.field(index).type) for index in range(kind.num_fields)
    )


def make_nullable(kind: Any) -> Any:
    """Return the Arrow type with nullable values in lists, maps and structs, because NaN becomes null there too."""
    types = pa.types
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([pa.field(field.name, make_nullable(field.type)) for field in fields])
    if types.is_map(kind):
        items = make_nullable(kind.item_type)
        return pa.map_(make_nullable(kind.key_type), items, kind.keys_sorted)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        field = pa.field(kind.value_field.name, make_nullable(kind.value_type))
        if types.is_fixed_size_list(kind):
            return pa.list_(field, kind.list_size)
        return pa.list_(field) if types.is_list(kind) else pa.large_list(field)
    return kind


def make_record_type(names: Sequence[str]) -> Callable[..., Any]:
    """Return a function that makes one JSON object from its values, given in the order of `names`.

    Raises:
        ColumnError: `names` holds a name twice.
    """
    return _record_type(tuple(names))


@functools.cache
def _record_type(names: tuple[str, ...]) -> Callable[..., Any]:
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ColumnError(f"field {twice!r} is there twice")
    fields = [f"f{index}" for index in range(len(names))]
    try:
        # gc=False: decoded data holds no reference cycles, so the garbage collector has nothing to find.
        return msgspec.defstruct(
            "Row", fields, rename=dict(zip(fields, names, strict=True)), gc=False
        )
    except ValueError:  # msgspec refuses names that JSON must escape, such as one with a quote
        return lambda *values: dict(zip(names, values, strict=True))


# --------------------------------------------------------------------------- flat types


def _plain(array: Any) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return values


def _make_plain(_kind: Any, _nulls: NullFloats) -> Convert:
    return _plain


def _make_integers(kind: Any, _nulls: NullFloats) -> Convert:
    code = ("B", "H", "I", "Q") if pa.types.is_unsigned_integer(kind) else ("b", "h", "i", "q")
    return functools.partial(
        _numbers, code=dict(zip((8, 16, 32, 64), code, strict=True))[kind.bit_width]
    )


def _numbers(array: Any, *, code: str) -> list[Any]:
    """Return the numbers of an array. Without nulls they are read from Arrow's memory: faster than `to_pylist`."""
    if array.null_count or not len(array):
        return _plain(array)
    width = array.type.bit_width // 8
    start = array.offset * width
    view: Any = memoryview(array.buffers()[1])[start : start + len(array) * width]
    values: list[Any] = view.cast("B").cast(code).tolist()
    return values


def _make_floats(kind: Any, nulls: NullFloats) -> Convert:
    code = "f" if kind.bit_width == 32 else "d"

    def convert(array: Any) -> list[Any]:
        # A float32 becomes the Python float (64 bits) of the same value. A reader of the JSON gets the exact number
        # back, with either width.
        values = _numbers(array, code=code)
        if not array.null_count and math.isfinite(
            sum(values)
        ):  # if the sum is finite, all terms are finite
            return values
        is_finite = _compute().is_finite(array)
        num_odd = is_finite.false_count
        if num_odd:
            nulls.count += num_odd
            values = _plain(_compute().if_else(is_finite, array, None))
        return values

    return convert


def _make_halves(_kind: Any, nulls: NullFloats) -> Convert:
    convert = _make_floats(pa.float32(), nulls)
    return lambda array: convert(array.cast(pa.float32()))


def _make_decimals(_kind: Any, _nulls: NullFloats) -> Convert:
    return lambda array: [None if value is None else f"{value:f}" for value in array.to_pylist()]


# --------------------------------------------------------------------------- times


def _check_years(array: Any, units_per_second: float) -> None:
    bounds = (
        _compute()
        .min_max(array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64()))
        .as_py()
    )
    first, last = bounds["min"], bounds["max"]
    if first is not None and (
        first / units_per_second < _FIRST_SECOND or last / units_per_second >= _LAST_SECOND + 1
    ):
        raise ColumnError(f"a {array.type} is outside the years 1 to 9999")


def _make_dates(kind: Any, _nulls: NullFloats) -> Convert:
    units = 1 / _SECONDS_PER_DAY if pa.types.is_date32(kind) else 1000

    def convert(array: Any) -> list[Any]:
        _check_years(array, units)
        return _plain(array.cast(pa.string()))

    return convert


def _make_times(_kind: Any, _nulls: NullFloats) -> Convert:
    return lambda array: _plain(array.cast(pa.string()))


def _make_timestamps(kind: Any, _nulls: NullFloats) -> Convert:
    units = _UNITS_PER_SECOND[kind.unit]
    text = "%Y-%m-%dT%H:%M:%S"  # Arrow prints %S with as many decimals as the unit has
    is_utc = kind.tz is not None and kind.tz.lower() in _UTC
    if is_utc:
        text += "Z"
    elif kind.tz is not None:
        text += "%Ez"

    def convert(array: Any) -> list[Any]:
        _check_years(array, units)
        if (
            is_utc
        ):  # an array without a zone needs no time zone database, which the machine may lack
            array = array.cast(pa.timestamp(kind.unit))
        try:
            return _plain(_compute().strftime(array, format=text))
        except pa.ArrowInvalid as error:
            raise ColumnError(
                f"time zone {kind.tz!r} is unknown to this machine ({error})"
            ) from error

    return convert


def _make_durations(kind: Any, _nulls: NullFloats) -> Convert:
    units = _UNITS_PER_SECOND[kind.unit]
    digits = len(str(units)) - 1

    def text(value: int) -> str:
        seconds, rest = divmod(abs(value), units)
        fraction = f"{rest:0{digits}d}".rstrip("0") if rest else ""
        return f"PT{'-' if value < 0 else ''}{seconds}{'.' if fraction else ''}{fraction}S"

    def convert(array: Any) -> list[Any]:
        values = _plain(array.cast(pa.int64()))
        return [None if value is None else text(value) for value in values]

    return convert


# --------------------------------------------------------------------------- nested types


def _cut(array: Any, flat: list[Any]) -> list[list[Any] | None]:
    """Cut the flattened values of a list array (`flat`) into one list for each row; a null row gives None."""
    if not array.null_count and (
        pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    ):
        offsets = _numbers(array.offsets, code="i" if pa.types.is_list(array.type) else "q")
        base = offsets[0]
        if base:
            return [flat[start - base : end - base] for start, end in itertools.pairwise(offsets)]
        return [flat[start:end] for start, end in itertools.pairwise(offsets)]
    lengths = _compute().list_value_length(array).to_pylist()
    ends = itertools.accumulate(length or 0 for length in lengths)
    return [
        None if length is None else flat[end - length : end]
        for length, end in zip(lengths, ends, strict=True)
    ]


def _make_lists(kind: Any, nulls: NullFloats) -> Convert:
    convert = make_converter(kind.value_type, nulls)
    return lambda array: _cut(array, convert(array.flatten()))


def _make_structs(kind: Any, nulls: NullFloats) -> Convert:
    fields = [kind.field(index) for index in range(kind.num_fields)]
    record = make_record_type([field.name for field in fields])
    converters = [make_converter(field.type, nulls) for field in fields]

    def convert(array: Any) -> list[Any]:
        if not converters:
            return [{} if is_valid else None for is_valid in _plain(array.is_valid())]
        children = array.flatten()  # children get the nulls and the slice of their parent
        parts = [part(child) for part, child in zip(converters, children, strict=True)]
        values = list(map(record, *parts))
        if array.null_count:
            are_valid = _plain(array.is_valid())
            return [
                value if is_valid else None
                for value, is_valid in zip(values, are_valid, strict=True)
            ]
        return values

    return convert


def _make_maps(kind: Any, nulls: NullFloats) -> Convert:
    convert_keys = make_converter(kind.key_type, nulls)
    convert_items = make_converter(kind.item_type, nulls)
    pair = pa.struct(
        [pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]
    )
    as_object = _is_text(kind.key_type)

    def to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ColumnError("a map has the same key twice")
        return value

    def convert(array: Any) -> list[Any]:
        entries = pa.StructArray.from_arrays([array.keys, array.items], fields=list(pair))
        lists = pa.ListArray.from_buffers(
            pa.list_(pair), len(array), array.buffers()[:2], offset=array.offset, children=[entries]
        )
        keys, items = lists.flatten().flatten()
        pairs = list(zip(convert_keys(keys), convert_items(items), strict=True))
        rows = _cut(lists, pairs)
        if as_object:
            return [None if row is None else to_object(row) for row in rows]
        return rows

    return convert


# --------------------------------------------------------------------------- wrappers


def _make_dictionaries(kind: Any, nulls: NullFloats) -> Convert:
    convert = make_converter(kind.value_type, nulls)
    return lambda array: convert(array.dictionary_decode())


def _make_run_ends(kind: Any, nulls: NullFloats) -> Convert:
    convert = make_converter(kind.value_type, nulls)
    return lambda array: convert(_compute().run_end_decode(array))


def _make_extensions(kind: Any, nulls: NullFloats) -> Convert:
    if kind.extension_name == "arrow.uuid":
        return lambda array: [
            None if value is None else str(uuid.UUID(bytes=value))
            for value in array.storage.to_pylist()
        ]
    convert = make_converter(kind.storage_type, nulls)
    return lambda array: convert(array.storage)


def _is_any(*names: str) -> Callable[[Any], bool]:
    """Return a test for types that any of pyarrow's `is_NAME` accepts. Older pyarrow may lack some of them."""
    checks = [check for name in names if (check := getattr(pa.types, f"is_{name}", None))]
    return lambda kind: any(check(kind) for check in checks)


_is_text = _is_any("string", "large_string", "string_view")
_is_bytes = _is_any("binary", "large_binary", "fixed_size_binary", "binary_view")

_MAKERS: Iterable[tuple[Callable[[Any], bool], Callable[[Any, NullFloats], Convert]]] = (
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _make_extensions),
    (_is_text, _make_plain),
    (_is_any("null", "boolean"), _make_plain),
    (_is_bytes, _make_plain),
    (_is_any("integer"), _make_integers),
    (_is_any("float16"), _make_halves),
    (_is_any("float32", "float64"), _make_floats),
    (_is_any("decimal"), _make_decimals),
    (_is_any("date"), _make_dates),
    (_is_any("time"), _make_times),
    (_is_any("timestamp"), _make_timestamps),
    (_is_any("duration"), _make_durations),
    (_is_any("map"), _make_maps),
    (
        _is_any("list", "large_list", "fixed_size_list", "list_view", "large_list_view"),
        _make_lists,
    ),
    (_is_any("struct"), _make_structs),
    (_is_any("dictionary"), _make_dictionaries),
    (_is_any("run_end_encoded"), _make_run_ends),
)

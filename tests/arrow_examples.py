"""An array of every Arrow type that parquet can hold, and of some that only memory holds."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid

import numpy as np
import pyarrow as pa

D = decimal.Decimal
UUIDS = pa.array([uuid.UUID(int=1).bytes, uuid.UUID(int=2**127).bytes], pa.uuid())
WHOLE = [
    pa.array([True, None, False]),
    pa.array([None, None], pa.null()),
    pa.array([-128, None, 127], pa.int8()),
    pa.array([65535, 0], pa.uint16()),
    pa.array([-(2**31)], pa.int32()),
    pa.array([2**63 - 1, -(2**63), None, 2**53 + 1]),
    pa.array([2**64 - 1, None, 2**63], pa.uint64()),
    pa.array([7, None, 7]).dictionary_encode(),
]
REAL = [
    pa.array([0.1, 1.0, -0.0, 5e-324, 1.7976931348623157e308, 1e16, 1e22, 123456789.125]),
    pa.array([0.1, 3.4028235e38, 1.5, None], pa.float32()),
    pa.array(np.array([1.5, 65504, -0.0], np.float16)),
    pa.array([math.nan, 1.0, math.inf, -math.inf]),
    pa.array([D("12345678901234567890.123456789"), D("0E-9"), None, D("-1E-9")]),
    pa.array([D("-1.50")], pa.decimal32(5, 2)),
    pa.array([D(10) ** 60], pa.decimal256(76, 0)),
]
TEXTS = [
    pa.array(["", None, 'a"b\\c/d', "\u2028\u2029\x85", "\x00\x1f\x7f", "\b\t\n\f\r", "é😀<&>"]),
    pa.array(["é", "x" * 100_000], pa.large_string()),
    pa.array(["x", None], pa.string_view()),
    pa.array(["b", "a", None, "b", "\u2028"]).dictionary_encode(),
    pa.array(['{"a": 1}', None]).cast(pa.json_()),
    pa.array([b"\x00\xff", b"", None, b"abc", b"\xfb\xff\xfe"]),
    pa.array([b"ab", None], pa.binary(2)),
    pa.array([b"a"], pa.large_binary()),
    pa.array([b"a", None], pa.binary_view()),
    UUIDS,
]
TIMES = [
    pa.array([dt.date(2024, 2, 29), dt.date(1, 1, 1), None, dt.date(9999, 12, 31)]),
    pa.array([dt.date(1969, 12, 31)], pa.date64()),
    pa.array([0, 86399], pa.time32("s")),
    pa.array([dt.time(23, 59, 59, 999000)], pa.time32("ms")),
    pa.array([1, None], pa.time64("us")),
    pa.array([1000], pa.time64("ns")),
    pa.array([0, None], pa.timestamp("s")),
    pa.array([-1], pa.timestamp("ms")),
    pa.array([1_700_000_000_123_456_000, -1000, None], pa.timestamp("ns")),
    pa.array([1_700_000_000_123_456], pa.timestamp("us", "UTC")),
    pa.array([1_700_000_000_123, 1_690_000_000_000], pa.timestamp("ms", "Europe/Paris")),
    pa.array([0, 1_700_000_000_000_001_000], pa.timestamp("ns", "America/St_Johns")),
    pa.array([0], pa.timestamp("us", "+05:30")),
    pa.array([1_500_001_000, -1000, 0, None], pa.duration("ns")),
    pa.array([90, -90, 86400 * 400], pa.duration("s")),
]
NESTED = [
    pa.array([[1, None], [], None, [2, 3]]),
    pa.array([[["a"], []], None, [None]]),
    pa.array([[1], None, [2, 3]], pa.large_list(pa.int8())),
    pa.array([[0.1, 2], None, [3, 4]], pa.list_(pa.float32(), 2)),
    pa.array([[b"\xff", None], None]),
    pa.array([[math.nan, 1.0], [math.inf]]),
    pa.array(
        [{"x": 1, "at": 1000}, None],
        pa.struct([("x", pa.int8()), ("at", pa.timestamp("ns", "UTC"))]),
    ),
    pa.array([{"bytes": b"\xff", "path": None}, None, {"bytes": None, "path": "p"}]),
    pa.array([[{"role": "user", "content": "a\u2028"}, None], []]),
    pa.array([{"a": True, "b/c": False}, {"a": False, "b/c": None}, None]),
    pa.array([{'quote " and \\': 1, "line\nbreak": "x"}]),
    pa.array([[("k", 1), ("k", None)], None, []], pa.map_(pa.string(), pa.int64())),
    pa.array([[(dt.date(2024, 2, 29), b"\xff")]], pa.map_(pa.date32(), pa.binary())),
    pa.array(
        [[[("\u2028", [D("1.50")])]]], pa.list_(pa.map_(pa.string(), pa.list_(pa.decimal128(5, 2))))
    ),
    pa.ListArray.from_arrays([0, 2], UUIDS),
    pa.ListArray.from_arrays([0, 2, 2, 3], pa.array(["a", "b", "c"]).dictionary_encode()),
]
EVERY_TYPE = [*WHOLE, *REAL, *TEXTS, *TIMES, *NESTED]

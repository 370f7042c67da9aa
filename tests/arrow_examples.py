"""An array of every Arrow type that parquet can hold, with the JSON text of each of its values."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid

import numpy as np
import pyarrow as pa

D = decimal.Decimal
POINT = pa.struct([("x", pa.int8()), ("at", pa.timestamp("ns", "UTC"))])

FLAT = [
    (pa.array([True, None, False]), ["true", "null", "false"]),
    (pa.array([None, None, None], pa.null()), ["null", "null", "null"]),
    (pa.array([-128, None, 127], pa.int8()), ["-128", "null", "127"]),
    (pa.array([65535, 0], pa.uint16()), ["65535", "0"]),
    (pa.array([-(2**31)], pa.int32()), ["-2147483648"]),
    (
        pa.array([2**63 - 1, -(2**63), None, 2**53 + 1]),
        ["9223372036854775807", "-9223372036854775808", "null", "9007199254740993"],
    ),
    (
        pa.array([2**64 - 1, None, 2**63], pa.uint64()),
        ["18446744073709551615", "null", "9223372036854775808"],
    ),
    (
        pa.array([0.1, 1.0, -0.0, 5e-324, 1.7976931348623157e308, 1e16, 1e22, 123456789.125]),
        [
            *("0.1", "1.0", "-0.0", "5e-324", "1.7976931348623157e308", "1e16", "1e22"),
            "123456789.125",
        ],
    ),
    (
        pa.array([0.1, 3.4028235e38, 1.5, None], pa.float32()),
        ["0.10000000149011612", "3.4028234663852886e38", "1.5", "null"],
    ),
    (pa.array(np.array([1.5, 65504, -0.0], np.float16)), ["1.5", "65504.0", "-0.0"]),
    (pa.array([math.nan, 1.0, math.inf, -math.inf]), ["null", "1.0", "null", "null"]),
    (
        pa.array([D("12345678901234567890.123456789"), D("0E-9"), None, D("-1E-9")]),
        ['"12345678901234567890.123456789"', '"0.000000000"', "null", '"-0.000000001"'],
    ),
    (pa.array([D("-1.50")], pa.decimal32(5, 2)), ['"-1.50"']),
    (pa.array([D(10) ** 60], pa.decimal256(76, 0)), ['"1' + "0" * 60 + '"']),
]
TEXTS = [
    (
        pa.array(["", None, 'a"b\\c/d', "\u2028\u2029\x85", "\x00\x1f\x7f", "\b\t\n\f\r"]),
        [
            *('""', "null", '"a\\"b\\\\c/d"', '"\u2028\u2029\x85"'),
            *('"\\u0000\\u001f\x7f"', '"\\b\\t\\n\\f\\r"'),
        ],
    ),
    (pa.array(["é", "😀", "<&>"], pa.large_string()), ['"é"', '"😀"', '"<&>"']),
    (pa.array(["x", None], pa.string_view()), ['"x"', "null"]),
    (
        pa.array(["b", "a", None, "b", "\u2028"]).dictionary_encode(),
        ['"b"', '"a"', "null", '"b"', '"\u2028"'],
    ),
    (pa.array([7, None, 7]).dictionary_encode(), ["7", "null", "7"]),
    (
        pa.array([b"\x00\xff", b"", None, b"abc", b"\xfb\xff\xfe"]),
        ['"AP8="', '""', "null", '"YWJj"', '"+//+"'],
    ),
    (pa.array([b"ab", None], pa.binary(2)), ['"YWI="', "null"]),
    (pa.array([b"a"], pa.large_binary()), ['"YQ=="']),
    (
        pa.array([uuid.UUID(int=1).bytes, None], pa.binary(16)).cast(pa.uuid()),
        ['"00000000-0000-0000-0000-000000000001"', "null"],
    ),
]
TIMES = [  # parquet knows no seconds: they come back as milliseconds
    (
        pa.array([dt.date(2024, 2, 29), dt.date(1, 1, 1), None, dt.date(9999, 12, 31)]),
        ['"2024-02-29"', '"0001-01-01"', "null", '"9999-12-31"'],
    ),
    (pa.array([dt.date(1969, 12, 31)], pa.date64()), ['"1969-12-31"']),
    (pa.array([0, 86399], pa.time32("s")), ['"00:00:00.000"', '"23:59:59.000"']),
    (pa.array([dt.time(23, 59, 59, 999000)], pa.time32("ms")), ['"23:59:59.999"']),
    (pa.array([1, None], pa.time64("us")), ['"00:00:00.000001"', "null"]),
    (pa.array([1], pa.time64("ns")), ['"00:00:00.000000001"']),
    (pa.array([0, None], pa.timestamp("s")), ['"1970-01-01T00:00:00.000"', "null"]),
    (pa.array([-1], pa.timestamp("ms")), ['"1969-12-31T23:59:59.999"']),
    (
        pa.array([1_700_000_000_123_456_789, -1, None], pa.timestamp("ns")),
        ['"2023-11-14T22:13:20.123456789"', '"1969-12-31T23:59:59.999999999"', "null"],
    ),
    (
        pa.array([1_700_000_000_123_456], pa.timestamp("us", "UTC")),
        ['"2023-11-14T22:13:20.123456Z"'],
    ),
    (
        pa.array([1_700_000_000_123, 1_690_000_000_000], pa.timestamp("ms", "Europe/Paris")),
        ['"2023-11-14T23:13:20.123+01:00"', '"2023-07-22T06:26:40.000+02:00"'],
    ),
    (
        pa.array([0, 1_700_000_000_000_000_001], pa.timestamp("ns", "America/St_Johns")),
        ['"1969-12-31T20:30:00.000000000-03:30"', '"2023-11-14T18:43:20.000000001-03:30"'],
    ),
    (pa.array([0], pa.timestamp("us", "+05:30")), ['"1970-01-01T05:30:00.000000+05:30"']),
    (
        pa.array([1_500_000_001, -1, 0, None], pa.duration("ns")),
        ['"PT1.500000001S"', '"PT-0.000000001S"', '"PT0S"', "null"],
    ),
    (pa.array([90, -90], pa.duration("s")), ['"PT90S"', '"PT-90S"']),
]
NESTED = [
    (
        pa.array([[1, None], [], None, [2, 3]]),
        ["[1,null]", "[]", "null", "[2,3]"],
    ),
    (pa.array([[["a"], []], None, [None]]), ['[["a"],[]]', "null", "[null]"]),
    (pa.array([[1], None, [2, 3]], pa.large_list(pa.int8())), ["[1]", "null", "[2,3]"]),
    (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)), ["[1,2]", "null", "[3,4]"]),
    (pa.array([[b"\xff"]]), ['["/w=="]']),
    (pa.array([[math.nan, 1.0], [math.inf]]), ["[null,1.0]", "[null]"]),
    (
        pa.array([{"x": 1, "at": 1}, None, {"x": None, "at": None}], POINT),
        [
            '{"x":1,"at":"1970-01-01T00:00:00.000000001Z"}',
            "null",
            '{"x":null,"at":null}',
        ],
    ),
    (
        pa.array([[{"role": "user", "content": "a\u2028"}, None], []]),
        ['[{"role":"user","content":"a\u2028"},null]', "[]"],
    ),
    (
        pa.array([{"a": True, "b/c": False}, {"a": False, "b/c": None}, None]),
        ['{"a":true,"b/c":false}', '{"a":false,"b/c":null}', "null"],
    ),
    (
        pa.array([{'quote " and \\': 1, "line\nbreak": "x"}]),
        ['{"quote \\" and \\\\":1,"line\\nbreak":"x"}'],
    ),
    (
        pa.array([[("k", 1), ("l", None)], None, []], pa.map_(pa.string(), pa.int64())),
        ['{"k":1,"l":null}', "null", "{}"],
    ),
    (
        pa.array([[("\u2028", [D("1.50")])]], pa.map_(pa.string(), pa.list_(pa.decimal128(5, 2)))),
        ['{"\u2028":["1.50"]}'],
    ),
    (
        pa.array([[(1, "x"), (1, None)], None, []], pa.map_(pa.int64(), pa.string())),
        ['[[1,"x"],[1,null]]', "null", "[]"],
    ),
    (
        pa.array([[(dt.date(2024, 2, 29), b"\xff")]], pa.map_(pa.date32(), pa.binary())),
        ['[["2024-02-29","/w=="]]'],
    ),
]
EVERY_TYPE = [*FLAT, *TEXTS, *TIMES, *NESTED]

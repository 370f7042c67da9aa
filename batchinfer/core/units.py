"""Numbers written for people, in the same way in the terminal and on the report page. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime

NONE = "\N{EN DASH}"


def count(number: float | None) -> str:
    """Write a number, rounded to a whole one, with commas between thousands. None becomes a dash.

    >>> count(1234567), count(None) == NONE
    ('1,234,567', True)
    """
    return NONE if number is None else f"{round(number):,}"


def many(number: int, word: str) -> str:
    """Write a number and its noun, which gets an s unless the number is 1.

    >>> many(1, "worker"), many(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def short(number: float) -> str:
    """Write a number with up to three significant digits, and with k, M or G for large numbers.

    >>> [short(n) for n in (0, 0.123, 7.25, 950, 12345, 3.2e6, 7e9)]
    ['0', '0.123', '7.25', '950', '12.3k', '3.2M', '7G']
    """
    if not math.isfinite(number):
        return NONE
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}" if abs(number) < 999.5 * size else f"{number:.3g}"
    return f"{number:.3g}"


def money(dollars: float | None) -> str:
    """Write an amount in dollars.

    >>> money(1234.5), money(0.0123), money(2.5e-06)
    ('$1,234.50', '$0.0123', '< $0.0001')
    """
    if dollars is None:
        return NONE
    if 0 < dollars < 0.0001:
        return "< $0.0001"
    return f"${dollars:,.2f}" if dollars >= 0.1 or dollars == 0 else f"${dollars:.3g}"


def duration(seconds: float) -> str:
    """Write a time span, given in seconds, in its two largest units.

    >>> [duration(s) for s in (5, 125, 3 * 3600 + 120, 90000)]
    ['5 s', '2 min 5 s', '3 h 2 min', '1 d 1 h']
    """
    if not math.isfinite(seconds):
        return NONE
    left = max(0, round(seconds))
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number or parts:
            parts.append((number, unit))
    return " ".join(f"{number} {unit}" for number, unit in parts[:2] if number) or "0 s"


def percent(part: float, whole: float | None) -> str:
    """Write `part` as percent of `whole`, rounded down: 100 % is never shown when something is missing.

    Likewise, a `part` above 0 is never shown as 0 %.

    >>> percent(1, 3), percent(9999, 10000), percent(0, 0) == NONE
    ('33.3 %', '99.9 %', True)
    """
    if not whole:
        return NONE
    share = math.floor(1000 * part / whole) / 10
    if part > 0 and not share:
        return "< 0.1 %"
    return f"{share:.0f} %" if share == int(share) else f"{share:.1f} %"


def moment(unix_seconds: float) -> str:
    """Write a time, given in Unix seconds, as date, hour and minute in UTC.

    >>> moment(0)
    '1970-01-01 00:00 UTC'
    """
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return NONE


def size(num_bytes: int) -> str:
    """Write a number of bytes with a fitting unit.

    >>> size(1536)
    '1.5 KiB'
    """
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"

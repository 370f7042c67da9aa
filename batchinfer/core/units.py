"""Numbers as people read them, the same in the terminal and on the page. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime

NONE = "\N{EN DASH}"


def count(number: float | None) -> str:
    """A whole number with separators; a dash for none.

    >>> count(1234567), count(None) == NONE
    ('1,234,567', True)
    """
    return NONE if number is None else f"{round(number):,}"


def many(number: int, word: str) -> str:
    """A number and its word.

    >>> many(1, "worker"), many(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def short(number: float | None) -> str:
    """A number in three digits, with k, M or G.

    >>> [short(n) for n in (0, 0.123, 7.25, 950, 12345, 3.2e6, 7e9)]
    ['0', '0.123', '7.25', '950', '12.3k', '3.2M', '7G']
    """
    if number is None or not math.isfinite(number):
        return NONE
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}" if abs(number) < 999.5 * size else f"{number:.3g}"
    return f"{number:.3g}"


def money(dollars: float | None) -> str:
    """An amount in dollars.

    >>> money(1234.5), money(0.0123), money(2.5e-06)
    ('$1,234.50', '$0.0123', '< $0.0001')
    """
    if dollars is None:
        return NONE
    if 0 < dollars < 0.0001:
        return "< $0.0001"
    return f"${dollars:,.2f}" if dollars >= 0.1 or dollars == 0 else f"${dollars:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds in the two largest units that apply.

    >>> [duration(s) for s in (5, 125, 3 * 3600 + 120, 90000)]
    ['5 s', '2 min 5 s', '3 h 2 min', '1 d 1 h']
    """
    if seconds is None or not math.isfinite(seconds):
        return NONE
    left = max(0, round(seconds))
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number or parts:
            parts.append((number, unit))
    return " ".join(f"{number} {unit}" for number, unit in parts[:2] if number) or "0 s"


def percent(part: float, whole: float | None) -> str:
    """A share in percent: 100 % only when nothing is missing, 0 % only for nothing.

    >>> percent(1, 3), percent(9999, 10000), percent(0, 0) == NONE
    ('33.3 %', '99.9 %', True)
    """
    if not whole:
        return NONE
    share = math.floor(1000 * part / whole) / 10
    if part > 0 and not share:
        return "< 0.1 %"
    return f"{share:.0f} %" if share == int(share) else f"{share:.1f} %"


def moment(unix_seconds: float | None) -> str:
    """A time in UTC.

    >>> moment(0)
    '1970-01-01 00:00 UTC'
    """
    if unix_seconds is None:
        return NONE
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return NONE


def size(num_bytes: int) -> str:
    """A number of bytes, with a unit.

    >>> size(1536)
    '1.5 KiB'
    """
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"

"""Units: bytes, seconds and joules internally, formatted text only for display."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping

from trimtab.core.errors import ValueGivenError
from trimtab.core.validation import number

METRIC_UNITS = ("share", "percent", "relative")  # Of differences of a validation metric.

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|min|h|d)\s*")


def parse_duration(field: str, text: str) -> float:
    """Return seconds for `90s`, `15min`, `36h` or `2d`; `ValueGivenError` for another text, or zero."""
    found = _duration(text)
    if found is None:
        raise ValueGivenError(field, got=repr(text), expected="a duration such as 90s, 15min, 36h or 2d")
    return number(field, found, low=0, open_low=True)


def parse_moment(field: str, text: str, now_s: float) -> float:
    """Return seconds since 1970 for `2026-03-02T06:00+01:00`, or for a duration from now such as `36h`."""
    after_s = _duration(text)
    if after_s is not None:
        return now_s + number(field, after_s, low=0, open_low=True)
    expected = "an ISO 8601 time with an offset from UTC, such as 2026-03-02T06:00+01:00, or a duration such as 36h"
    try:
        return time_of(text)
    except ValueError as error:
        raise ValueGivenError(field, got=f"{text!r:.40} ({error})", expected=expected) from None


def time_of(text: str) -> float:
    """Return seconds since 1970 for `2026-03-02T06:00+01:00` or `...Z`; `ValueError` without an offset from UTC."""
    try:
        found = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("not an ISO 8601 time") from None
    if found.tzinfo is None:
        raise ValueError("no offset from UTC")
    return found.timestamp()


def format_moment(time_s: float) -> str:
    """Return a UTC time such as `2026-03-02T05:00+00:00`."""
    try:
        return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="minutes")
    except (OverflowError, ValueError, OSError):  # The time is infinite or outside the calendar.
        return f"{time_s:g} s"


def _duration(text: str) -> float | None:
    match = _DURATION.fullmatch(text)
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?I?B?)\s*", re.IGNORECASE)


def parse_bytes(field: str, value: str | int | float) -> int:
    """Return bytes for `8 * 2**30`, `"8GiB"` (binary) or `"8GB"` (decimal); `ValueGivenError` for other values."""
    if not isinstance(value, str):
        return int(number(field, value, low=1, high=2**62))
    match = _PATTERN.fullmatch(value)
    factor = _BYTES.get(match[2].upper()) if match else None
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise ValueGivenError(field, got=repr(value), expected="a positive size such as '8GiB' or '500MB'")
    return int(number(field, float(match[1]) * factor, high=2**62))


def format_bytes(value: float | None) -> str:
    """Return `1.5 GiB`; `unknown` for None."""
    if value is None or not math.isfinite(value):
        return "unknown"
    units = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    return _scaled(value, units) or f"{value:.0f} B"


def format_seconds(value: float | None) -> str:
    """Return `350 ms`, `12.3 s`, `4 min 10 s`; `unknown` for None, `never` for infinity."""
    if value is None or math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "never"
    if value < 1e-3:
        return f"{_digits(value * 1e6)} µs"
    if value < 1:
        return f"{_digits(value * 1e3)} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds} s" if minutes < 120 else f"{value / 3600:.2f} h"


def format_joules(value: float | None) -> str:
    """Return `350 mJ`, `12.3 J`, `4.2 kJ`, `1.5 kWh` (from a megajoule up); `unknown` for None."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if abs(value) >= 1e6:
        return f"{_digits(value / 3.6e6)} kWh"
    if abs(value) >= 1e3:
        return f"{_digits(value / 1e3)} kJ"
    return f"{_digits(value)} J" if abs(value) >= 1 else f"{_digits(value * 1e3)} mJ"


def format_grams(value: float | None) -> str:
    """Return `350 mg`, `12.3 g`, `4.2 kg`, `1.5 t`; `unknown` for None."""
    if value is None or not math.isfinite(value):
        return "unknown"
    units = {"t": 1e6, "kg": 1e3, "g": 1.0}
    return (_scaled(value, units) or f"{_digits(value * 1e3)} mg") if value else "0 g"


def format_count(value: float | None) -> str:
    """Return `7.78 G`, `512`, `3.1 k`; `unknown` for None."""
    if value is None or not math.isfinite(value):
        return "unknown"
    return _scaled(value, {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}) or _digits(value)


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """Return a value in the first unit that is not larger; "" if all are."""
    return next((f"{_digits(value / size)} {unit}" for unit, size in units.items() if abs(value) >= size), "")


def _digits(value: float) -> str:
    """Return three significant digits, and whole numbers instead of `1e+03` from a thousand up."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"

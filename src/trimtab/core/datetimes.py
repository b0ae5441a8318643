"""Points in time and durations: parsing of command-line values, and formatting."""

from __future__ import annotations

import datetime
import re

from trimtab.core.errors import ValueGivenError
from trimtab.core.validation import number

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|min|h|d)\s*")


def parse_duration(field: str, text: str) -> float:
    """Return seconds for `90s`, `15min`, `36h` or `2d`.

    Raises:
        ValueGivenError: not a duration, or not positive.
    """
    found = _duration(text)
    if found is None:
        raise ValueGivenError(field, got=repr(text), expected="a duration such as 90s, 15min, 36h or 2d")
    return number(field, found, low=0, open_low=True)


def parse_moment(field: str, text: str, now_s: float) -> float:
    """Return seconds since 1970 for `2026-03-02T06:00+01:00`, or for a duration from now such as `36h`.

    Raises:
        ValueGivenError: neither of the two, or a time without an offset from UTC.
    """
    after_s = _duration(text)
    if after_s is not None:
        return now_s + number(field, after_s, low=0, open_low=True)
    expected = "an ISO 8601 time with an offset from UTC, such as 2026-03-02T06:00+01:00, or a duration such as 36h"
    try:
        return time_of(text)
    except ValueError as error:
        raise ValueGivenError(field, got=f"{text!r:.40} ({error})", expected=expected) from None


def time_of(text: str) -> float:
    """Return seconds since 1970 for `2026-03-02T06:00+01:00` or a time that ends with `Z`.

    Raises:
        ValueError: the text is not a time, or has no offset from UTC.
    """
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

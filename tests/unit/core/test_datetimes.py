"""Moments are read with their offset, durations with their unit, and nothing is guessed."""

from __future__ import annotations

import datetime
import math

import pytest
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.units import format_moment, parse_duration, parse_moment, time_of

NOW = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15min", 900), ("1.5h", 5400), (" 2 d ", 172800), (".5h", 1800)]
)
def test_a_duration(text, seconds):
    assert parse_duration("--takes", text) == seconds
    assert parse_moment("--by", text, NOW) == NOW + seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1h30min", "1 week", "0h", "1e3s", "nan s"])
def test_what_is_no_duration(text):
    with raises(ValueGivenError, code="value.invalid", field="--takes"):
        parse_duration("--takes", text)


@pytest.mark.parametrize(
    ("text", "after_s"),
    [("2026-03-01T06:00+00:00", 6 * 3600), ("2026-03-01T06:00Z", 6 * 3600), ("2026-03-01T06:00+01:00", 5 * 3600)],
)
def test_a_moment(text, after_s):
    assert parse_moment("--by", text, NOW) == NOW + after_s


@pytest.mark.parametrize(
    ("text", "says"),
    [("2026-03-01T06:00", "offset"), ("2026-02-30T06:00Z", "ISO 8601"), ("", "ISO 8601")],
)
def test_what_is_no_time_says_why(text, says):
    assert time_of(" 2026-03-01T06:00Z\n") == NOW + 6 * 3600
    with pytest.raises(ValueError, match=says):
        time_of(text)


@pytest.mark.parametrize("text", ["2026-03-01T06:00", "tomorrow", "0s", ""])
def test_what_is_no_moment(text):
    with raises(ValueGivenError, code="value.invalid", field="--by"):
        parse_moment("--by", text, NOW)


def test_a_moment_is_shown_in_utc_also_where_no_calendar_has_it():
    assert format_moment(NOW + 60) == "2026-03-01T00:01+00:00"
    assert (format_moment(math.inf), format_moment(1e20)) == ("inf s", "1e+20 s")

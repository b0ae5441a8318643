"""Units, durations and points in time: parsing and formatting."""

from __future__ import annotations

import datetime
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.units import (
    format_bytes,
    format_count,
    format_grams,
    format_moment,
    format_seconds,
    parse_bytes,
    parse_duration,
    parse_moment,
    time_of,
)

FACTORS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
FACTORS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
NOW = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()


@given(st.integers(1, 10**5), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_a_size_is_its_number_times_its_unit(number, unit, space, lower):
    written = f"{space}{number}{space}{unit}{space}"
    assert parse_bytes("memory", written.lower() if lower else written) == number * FACTORS[unit]


SIZES = [("1.5GiB", 3 * 2**29), (".5 KB", 500), ("2.", 2), (2.9, 2), ("0.001 KB", 1), (2**53, 2**53)]


@pytest.mark.parametrize(("written", "expected"), SIZES)
def test_fractions_and_numbers_are_sizes(written, expected):
    assert parse_bytes("memory", written) == expected


NO_SIZES = ["", "GiB", "8 G", "8Gi", "8iB", "-8GiB", "1e3GiB", "8 GiB free", "1,5GiB", "0", "0.1", "0.0001KB", "inf"]
NO_SIZES += ["9" * 400 + "GiB", "9999999999TiB", 0, -5, 0.5, math.inf, math.nan, True, None, [8], 2**62 + 1, 1e300]


@pytest.mark.parametrize("value", NO_SIZES, ids=lambda value: str(value)[:12])
def test_an_invalid_size_is_refused_by_name(value):
    with raises(ValueGivenError, code="value.invalid", field="my field"):
        parse_bytes("my field", value)


SHOWN = {
    format_bytes: [
        *[(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (-1536, "-1.5 KiB"), (80 * 2**30, "80 GiB")],
        *[(1000 * 2**20, "1000 MiB"), (5000 * 2**40, "5000 TiB"), (None, "unknown"), (math.inf, "unknown")],
    ],
    format_seconds: [
        *[(0.0, "0 µs"), (4.2e-7, "0.42 µs"), (999.9e-6, "1000 µs"), (0.001, "1 ms"), (0.9996, "1000 ms")],
        *[(1.0, "1 s"), (12.34, "12.3 s"), (119.9, "120 s"), (120, "2 min 0 s"), (7199, "119 min 59 s")],
        *[(7200, "2.00 h"), (36_000, "10.00 h"), (None, "unknown"), (math.nan, "unknown"), (math.inf, "never")],
    ],
    format_count: [
        *[(7.78e9, "7.78 G"), (512, "512"), (999.7, "1000"), (3100, "3.1 k"), (999_999, "1000 k")],
        *[(5e18, "5000 P"), (None, "unknown"), (math.nan, "unknown")],
    ],
    format_grams: [
        *[(None, "unknown"), (0, "0 g"), (0.35, "350 mg"), (12.34, "12.3 g"), (4200, "4.2 kg"), (-2e6, "-2 t")]
    ],
}


@pytest.mark.parametrize("shows", SHOWN)
def test_figures_as_shown(shows):
    assert [(value, shows(value)) for value, _ in SHOWN[shows]] == SHOWN[shows]


IN_SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@given(st.floats(1e-6, 1e7))
def test_figures_shown_are_right_to_three_digits(value):
    words = format_seconds(value).split()
    total = sum(float(number) * IN_SECONDS[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert math.isclose(total, value, rel_tol=0.0051)
    number = round(1e6 * value) + 1
    assert abs(parse_bytes("shown", format_bytes(number)) - number) <= 0.00501 * number + 1  # whole bytes


@given(st.floats(1e-3, 1e17))
def test_large_figures_carry_no_exponent(value):
    for shown in (format_count(value), format_bytes(value), format_seconds(value)):
        assert re.fullmatch(r"\d+(\.\d+)?( ?[A-Za-zµ]+)?( \d+ s)?", shown), shown


DURATIONS = [("90s", 90), ("15min", 900), ("1.5h", 5400), (" 2 d ", 172800), (".5h", 1800)]
MOMENTS = [("2026-03-01T06:00+00:00", 6), ("2026-03-01T06:00Z", 6), ("2026-03-01T06:00+01:00", 5)]


@pytest.mark.parametrize(("text", "seconds"), DURATIONS)
def test_durations(text, seconds):
    assert parse_duration("--takes", text) == seconds
    assert parse_moment("--by", text, NOW) == NOW + seconds


@pytest.mark.parametrize(("text", "after_h"), MOMENTS)
def test_points_in_time(text, after_h):
    assert parse_moment("--by", text, NOW) == time_of(f" {text}\n") == NOW + 3600 * after_h


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1h30min", "1 week", "0h", "1e3s", "nan s", "2026-03-01T06:00"])
def test_invalid_durations_and_points_in_time_are_refused(text):
    with raises(ValueGivenError, code="value.invalid", field="--takes"):
        parse_duration("--takes", text)
    with raises(ValueGivenError, code="value.invalid", field="--by"):
        parse_moment("--by", text, NOW)


@pytest.mark.parametrize(("text", "word"), [("2026-03-01T06:00", "offset"), ("2026-02-30T06:00Z", "ISO 8601")])
def test_the_reason_for_refusing_a_time_is_given(text, word):
    with pytest.raises(ValueError, match=word):
        time_of(text)


def test_a_point_in_time_is_shown_in_utc_also_beyond_the_calendar():
    assert format_moment(NOW + 60) == "2026-03-01T00:01+00:00"
    assert (format_moment(math.inf), format_moment(1e20)) == ("inf s", "1e+20 s")

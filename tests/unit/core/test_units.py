"""Units are words only at the edge: what is parsed, and what is shown."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.units import format_bytes, format_count, format_grams, format_seconds, parse_bytes

FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(st.integers(1, 10**5), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_a_size_is_its_number_times_its_unit(number, unit, space, lower):
    written = f"{space}{number}{space}{unit}{space}"
    assert parse_bytes("memory", written.lower() if lower else written) == number * FACTORS[unit]


@given(st.integers(1, 2**53))
def test_a_number_is_bytes(number):
    assert parse_bytes("memory", number) == number


@pytest.mark.parametrize(
    ("written", "expected"), [("1.5GiB", 3 * 2**29), (".5 KB", 500), ("2.", 2), (2.9, 2), ("0.001 KB", 1)]
)
def test_fractions(written, expected):
    assert parse_bytes("memory", written) == expected


@pytest.mark.parametrize(
    "written",
    [
        "",
        "GiB",
        "8 G",
        "8Gi",
        "8iB",
        "-8GiB",
        "1e3GiB",
        "8GiB!",
        "8 GiB free",
        "1,5GiB",
        "0",
        "0.1",
        "0.0001KB",
        "inf",
        "9" * 400 + "GiB",
        "9999999999TiB",
    ],
    ids=lambda written: written[:12],
)
def test_what_is_no_size_is_refused_by_name(written):
    with raises(ValueGivenError, code="value.invalid", field="my field") as caught:
        parse_bytes("my field", written)
    assert caught.value.field == "my field"


@pytest.mark.parametrize("value", [0, -5, 0.5, math.inf, math.nan, True, None, [8], 2**62 + 1, 1e300], ids=str)
def test_a_number_that_is_no_size_is_refused(value):
    with pytest.raises(ValueGivenError):
        parse_bytes("memory", value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (2**30, "1 GiB"),
        (80 * 2**30, "80 GiB"),
        (1000 * 2**20, "1000 MiB"),
        (5000 * 2**40, "5000 TiB"),
        (None, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_bytes_as_shown(value, shown):
    assert format_bytes(value) == shown


@given(st.integers(1, 2**60))
def test_bytes_shown_are_right_to_three_digits(number):
    assert abs(parse_bytes("shown", format_bytes(number)) - number) <= 0.00501 * number + 1  # whole bytes


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0 µs"),
        (4.2e-7, "0.42 µs"),
        (999.9e-6, "1000 µs"),
        (0.001, "1 ms"),
        (0.35, "350 ms"),
        (0.9996, "1000 ms"),
        (1.0, "1 s"),
        (12.34, "12.3 s"),
        (119.9, "120 s"),
        (120, "2 min 0 s"),
        (250, "4 min 10 s"),
        (7199, "119 min 59 s"),
        (7200, "2.00 h"),
        (36_000, "10.00 h"),
        (None, "unknown"),
        (math.nan, "unknown"),
        (math.inf, "never"),
    ],
)
def test_seconds_as_shown(value, shown):
    assert format_seconds(value) == shown


IN_SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@given(st.floats(1e-6, 1e7))
def test_seconds_shown_are_right_to_three_digits(value):
    words = format_seconds(value).split()
    total = sum(float(number) * IN_SECONDS[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert math.isclose(total, value, rel_tol=0.0051)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (7.78e9, "7.78 G"),
        (512, "512"),
        (999.7, "1000"),
        (3100, "3.1 k"),
        (999_999, "1000 k"),
        (3.12e14, "312 T"),
        (5e18, "5000 P"),
        (None, "unknown"),
        (math.nan, "unknown"),
    ],
)
def test_counts_as_shown(value, shown):
    assert format_count(value) == shown


@given(st.floats(1e-3, 1e17))
def test_large_figures_carry_no_exponent(value):
    for shown in (format_count(value), format_bytes(value), format_seconds(value)):
        assert re.fullmatch(r"\d+(\.\d+)?( ?[A-Za-zµ]+)?( \d+ s)?", shown), shown


@pytest.mark.parametrize(
    ("grams", "shown"),
    [(None, "unknown"), (0, "0 g"), (0.35, "350 mg"), (12.34, "12.3 g"), (4200, "4.2 kg"), (-2e6, "-2 t")],
)
def test_grams(grams, shown):
    assert format_grams(grams) == shown

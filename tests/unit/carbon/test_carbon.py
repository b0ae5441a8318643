"""Carbon is energy times intensity, over the right hours, of one kind, and not known where either is not."""

from __future__ import annotations

import datetime
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.carbon.intensity import Carbon, Intensity, carbon_of, constant, of_csv, sum_carbon
from trimtab.core.energy_reading import Energy, Provenance, absent_energy
from trimtab.core.errors import FormatError, ValueGivenError

KWH = 3.6e6
ABSENT = absent_energy("no meter", 60)
TRACE = "time,g_per_kwh\n2026-03-01T00:00Z,100\n2026-03-01T01:00Z,300\n2026-03-01T02:00Z,50\n"
MIDNIGHT = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()


def used(joules: float, seconds: float, kind: Provenance = Provenance.MEASURED) -> Energy:
    return Energy(seconds, joules, kind, ("a meter",))


def test_a_constant_is_grams_per_kilowatt_hour():
    found = carbon_of(MIDNIGHT, used(2 * KWH, 3600), constant(350, "average"))
    assert (found.grams, found.kind, found.provenance) == (700.0, "average", Provenance.MEASURED)
    assert "700 g" in found.describe()


@pytest.mark.parametrize(
    ("begin_s", "seconds", "grams"),
    [
        (0, 3600, 100.0),
        (1800, 3600, 200.0),  # half an hour of each
        (3600, 3600, 300.0),
        (1800, 2 * 3600, (0.5 * 100 + 300 + 0.5 * 50) / 2),
        (2 * 3600, 3600, 50.0),  # the last one holds as long as the one before it
    ],
)
def test_a_trace_is_weighed_by_its_hours(begin_s, seconds, grams):
    found = carbon_of(MIDNIGHT + begin_s, used(KWH, seconds), of_csv(TRACE, "marginal"))
    assert found.grams == pytest.approx(grams)


@given(st.lists(st.floats(0, 2000), min_size=2, max_size=8), st.floats(0, 1), st.floats(0.01, 1))
def test_a_stretch_is_the_sum_of_its_parts(figures, begins, lasts):
    intensity = Intensity("average", tuple((3600.0 * i, g) for i, g in enumerate(figures)), 3600.0 * len(figures))
    whole_s = 3600.0 * len(figures)
    begin_s = begins * whole_s / 2
    seconds = lasts * whole_s / 2
    whole = carbon_of(begin_s, used(KWH, seconds), intensity)
    parts = sum_carbon(carbon_of(begin_s + i * seconds / 2, used(KWH / 2, seconds / 2), intensity) for i in range(2))
    assert parts.grams == pytest.approx(whole.grams, rel=1e-9, abs=1e-9)
    assert min(figures) - 1e-6 <= whole.grams <= max(figures) + 1e-6


@pytest.mark.parametrize(("begin_s", "seconds"), [(-1, 10), (2.5 * 3600, 3600), (5 * 3600, 1)])
def test_hours_of_which_nothing_is_known_are_refused(begin_s, seconds):
    with raises(ValueGivenError, code="value.invalid", field="carbon.time"):
        carbon_of(MIDNIGHT + begin_s, used(KWH, seconds), of_csv(TRACE, "average"))


def test_what_is_not_measured_has_no_carbon():
    known, unknown = (carbon_of(MIDNIGHT, each, constant(100, "average")) for each in (used(KWH, 60), ABSENT))
    for found in (unknown, sum_carbon([known, unknown])):
        assert (found.grams, found.provenance, found.reason) == (None, Provenance.ABSENT, "no meter")


def test_what_is_estimated_stays_so():
    energies = used(KWH, 60), used(KWH, 60, Provenance.ESTIMATED)
    parts = [carbon_of(MIDNIGHT, each, constant(100, "average")) for each in energies]
    assert [part.provenance for part in parts] == [Provenance.MEASURED, Provenance.ESTIMATED]
    found = sum_carbon(parts)
    assert (found.grams, found.provenance) == (200.0, Provenance.ESTIMATED)
    assert "200 g" in found.describe()


def test_average_and_marginal_are_never_added():
    one, other = (Carbon(1.0, kind, Provenance.MEASURED) for kind in ("average", "marginal"))
    assert sum_carbon([one, one]).grams == 2.0
    for parts in ([one, other], []):
        with raises(ValueGivenError, code="value.invalid", field="carbon"):
            sum_carbon(parts)


@pytest.mark.parametrize(
    ("grams", "kind", "field"),
    [
        *((100, kind, "carbon.kind") for kind in ("", "mean", None)),
        *((grams, "average", "carbon.g_per_kwh") for grams in (-1, math.nan, math.inf, "100")),
    ],
)
def test_a_constant_that_is_none_or_of_no_kind_is_refused(grams, kind, field):
    with raises(ValueGivenError, code="value.invalid", field=field):
        constant(grams, kind)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (("time,", "hour,"), "csv.columns", "carbon"),
        (("2026-03-01T01:00Z", "2026-03-01T01:00"), "csv.time", "carbon:3"),
        (("2026-03-01T01:00Z", "one o'clock"), "csv.time", "carbon:3"),
        (("2026-03-01T02:00Z", "2026-03-01T01:00Z"), "csv.order", "carbon:4"),
        (("300", "nan"), "csv.number", "carbon:3"),
        (("300", ""), "csv.number", "carbon:3"),
        (("300", "-5"), "csv.number", "carbon:3"),
        (("\n2026-03-01T01:00Z,300\n2026-03-01T02:00Z,50", ""), "csv.columns", "carbon"),
    ],
)
def test_an_invalid_file_is_refused_by_its_line(change, code, field):
    with raises(FormatError, code=code, field=field):
        of_csv(TRACE.replace(*change), "average")


def test_offsets_are_read_so_that_an_hour_of_a_changed_clock_is_not_there_twice():
    text = "time,g_per_kwh\n2026-10-25T02:00+02:00,100\n2026-10-25T02:00+01:00,300\n"
    found = of_csv(text, "average")
    assert [after[0] - before[0] for before, after in zip(found.steps, found.steps[1:], strict=False)] == [3600.0]

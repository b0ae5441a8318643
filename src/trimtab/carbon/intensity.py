"""CO2 equivalent of energy: joules times the average or the marginal carbon intensity of a grid.

The average intensity covers all generation that feeds the grid; the marginal intensity covers an additional
kilowatt-hour. Figures of the two kinds are never added.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trimtab.core import validation
from trimtab.core.energy_reading import Energy, Provenance
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.units import format_moment, time_of

KINDS = ("average", "marginal")
JOULES_PER_KWH = 3.6e6
COLUMNS = ("time", "g_per_kwh")
_NO_THOUSANDS = "Write numbers without a thousands separator: 1234, not 1,234."


@dataclass(frozen=True)
class Intensity:
    """Carbon intensity in grams per kWh, as a step function of time.

    Args:
        kind: "average" or "marginal".
        steps: (seconds since 1970, grams per kWh) in order; each value holds until the next.
        until_s: end of the last step, in seconds since 1970; infinite for a constant.

    Raises:
        ValueGivenError: an unknown kind, no steps, steps out of order, or an invalid value.
    """

    kind: str
    steps: tuple[tuple[float, float], ...]
    until_s: float = math.inf

    def __post_init__(self) -> None:
        validation.one_of("carbon.kind", self.kind, KINDS)
        times = [time_s for time_s, _ in self.steps]
        if not times or any(not before < after for before, after in itertools.pairwise([*times, self.until_s])):
            expected = "at least one time, in ascending order"
            raise ValueGivenError("carbon.steps", got=f"times {times!r:.80}", expected=expected)
        for _, grams in self.steps:
            validation.number("carbon.g_per_kwh", grams, low=0)

    def covers(self, begin_s: float, end_s: float) -> bool:
        """Return True if the intensity is known for a whole interval of positive length."""
        return self.steps[0][0] <= begin_s < end_s <= self.until_s

    def spans(self, begin_s: float, end_s: float) -> Iterator[tuple[float, float, float]]:
        """Yield begin, end and grams per kWh of the steps between two times."""
        for (at_s, grams), (next_s, _) in itertools.pairwise((*self.steps, (self.until_s, 0.0))):
            if at_s < end_s and next_s > begin_s:
                yield max(at_s, begin_s), min(next_s, end_s), grams

    def mean(self, begin_s: float, end_s: float) -> float:
        """Return the mean in grams per kWh; `ValueGivenError` if the intensity is not known for the whole interval."""
        if not self.covers(begin_s, end_s):
            begin, end, first, last = map(format_moment, (begin_s, end_s, self.steps[0][0], self.until_s))
            expected = f"an interval within the known carbon intensity, {first} to {last}"
            raise ValueGivenError("carbon.time", got=f"the interval {begin} to {end}", expected=expected)
        return sum(grams * (end - begin) for begin, end, grams in self.spans(begin_s, end_s)) / (end_s - begin_s)


def constant(g_per_kwh: float, kind: str) -> Intensity:
    """Return a constant intensity."""
    return Intensity(kind, ((-math.inf, g_per_kwh),))


def of_csv(text: str, kind: str) -> Intensity:
    """Return the intensity of a CSV with columns `time` and `g_per_kwh`, in order.

    Times are ISO 8601 with an offset from UTC (`2026-03-01T00:30+01:00`, or `Z`), because an hour is ambiguous
    without it when daylight saving ends. The last value holds as long as the one before it.

    Raises:
        FormatError: the text is not such a CSV, a time is not later than its predecessor, or a value is invalid.
    """
    expected = f"at least two rows with the columns {' and '.join(COLUMNS)}"
    try:
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise FormatError("carbon", got=f"invalid CSV ({error})", expected=expected, code="csv.invalid") from None
    steps: list[tuple[float, float]] = []
    for line, row in enumerate(rows, 2):
        where = f"carbon:{line}"
        if None in row:  # An unquoted 1,234 makes two cells, and would be read as 1.
            found = f"more cells than columns ({', '.join(row[None])!r:.40})"
            raise FormatError(
                where, got=found, expected="one cell per column", hint=_NO_THOUSANDS, code="csv.extra_cell"
            )
        if not row.keys() >= set(COLUMNS):
            raise FormatError("carbon", got=f"columns {', '.join(row)}", expected=expected, code="csv.columns")
        try:
            at_s = time_of(row["time"] or "")
        except ValueError as error:
            given = f"{row['time']!r:.40} ({error})"
            expected_time = "an ISO 8601 time with an offset from UTC, such as 2026-03-01T00:30+01:00"
            raise FormatError(where, got=given, expected=expected_time, code="csv.time") from None
        steps.append((at_s, _grams(row["g_per_kwh"] or "", where)))
        if len(steps) > 1 and not steps[-2][0] < steps[-1][0]:
            found = f"{format_moment(steps[-1][0])} after {format_moment(steps[-2][0])}"
            raise FormatError(where, got=found, expected="times in ascending order", code="csv.order")
    if len(steps) < 2:
        raise FormatError("carbon", got=f"{len(steps)} rows", expected=expected, code="csv.columns")
    return Intensity(kind, tuple(steps), 2 * steps[-1][0] - steps[-2][0])


def _grams(text: str, where: str) -> float:
    found = None if "_" in text else number_or_none(text)  # Python's digit grouping (1_000) is not valid in a CSV.
    if found is None or not 0 <= found < math.inf:
        expected = "a finite number of grams per kWh, at least 0"
        hint = _NO_THOUSANDS if "," in text else ""
        raise FormatError(where, got=f"{text!r:.40}", expected=expected, hint=hint, code="csv.number")
    return found


def number_or_none(text: str) -> float | None:
    """Return the number that a text consists of, or None."""
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Carbon:
    """Grams of CO2 equivalent.

    Args:
        grams: None if the energy is unknown.
        reason: reason for a missing figure, or "".
    """

    grams: float | None
    kind: str
    provenance: Provenance
    reason: str = ""

    def describe(self) -> str:
        """Return a text such as `120 g CO2e (average carbon intensity, measured energy)`."""
        if self.grams is None:
            return f"unknown: {self.reason}"
        return f"{self.grams:.3g} g CO2e ({self.kind} carbon intensity, {self.provenance} energy)"


def carbon_of(begin_s: float, energy: Energy, intensity: Intensity) -> Carbon:
    """Return the carbon of energy used from a time on, in seconds since 1970; `ValueGivenError` as of `mean`."""
    if energy.joules is None:
        return Carbon(None, intensity.kind, Provenance.ABSENT, energy.reason)
    grams = energy.joules / JOULES_PER_KWH * intensity.mean(begin_s, begin_s + energy.seconds)
    return Carbon(grams, intensity.kind, energy.provenance)


def sum_carbon(parts: Iterable[Carbon]) -> Carbon:
    """Return the sum of carbon figures; `ValueGivenError` if there are none, or both kinds of intensity occur."""
    found = tuple(parts)
    kinds = sorted({part.kind for part in found})
    if len(kinds) != 1:
        given = f"{' and '.join(kinds) or 'no'} intensity"
        raise ValueGivenError("carbon", got=given, expected="figures of a single kind of carbon intensity")
    if missing := [part for part in found if part.grams is None]:
        return missing[0]
    is_estimated = any(part.provenance is Provenance.ESTIMATED for part in found)
    grams = math.fsum(part.grams or 0.0 for part in found)
    return Carbon(grams, kinds[0], Provenance.ESTIMATED if is_estimated else Provenance.MEASURED)

"""CO2 equivalent of energy: joules times the average or the marginal carbon intensity of a grid.

The average intensity covers all generation that feeds the grid; the marginal intensity covers the generation of an
additional kilowatt-hour. Figures of the two kinds are never added.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core import validation
from trimtab.core.energy_reading import Energy, Provenance
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.units import format_moment, time_of

KINDS = ("average", "marginal")
JOULES_PER_KWH = 3.6e6
COLUMNS = ("time", "g_per_kwh")


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
        if not self.steps or any(not begin_s < end_s for begin_s, end_s, _ in self.spans()):
            times = [time_s for time_s, _ in self.steps]
            raise ValueGivenError(
                "carbon.steps", got=f"times {times!r:.80}", expected="at least one time, in ascending order"
            )
        for _, grams in self.steps:
            validation.number("carbon.g_per_kwh", grams, low=0)

    def spans(self) -> Iterator[tuple[float, float, float]]:
        """Yield begin, end and grams per kWh of every step."""
        ends = (*(time_s for time_s, _ in self.steps[1:]), self.until_s)
        for (begin_s, grams), end_s in zip(self.steps, ends, strict=True):
            yield begin_s, end_s, grams

    def mean(self, begin_s: float, end_s: float) -> float:
        """Return the mean intensity between two times, in grams per kWh.

        Raises:
            ValueGivenError: the intensity is not known for the whole interval.
        """
        if not self.steps[0][0] <= begin_s < end_s <= self.until_s:
            known = f"{_moment(self.steps[0][0])} to {_moment(self.until_s)}"
            raise ValueGivenError(
                "carbon.time",
                got=f"the interval {_moment(begin_s)} to {_moment(end_s)}",
                expected=f"an interval within the known carbon intensity, {known}",
                hint="Provide carbon intensity for the whole interval.",
            )
        grams = 0.0
        for begins_s, ends_s, per_kwh in self.spans():
            if begins_s < end_s and ends_s > begin_s:
                grams += per_kwh * (min(end_s, ends_s) - max(begin_s, begins_s))
        return grams / (end_s - begin_s)


def constant(g_per_kwh: float, kind: str) -> Intensity:
    """Return a constant intensity."""
    return Intensity(kind, ((-math.inf, validation.number("carbon.g_per_kwh", g_per_kwh, low=0)),))


def of_csv(text: str, kind: str) -> Intensity:
    """Return the intensity of a CSV with columns `time` and `g_per_kwh`, in order.

    Times are ISO 8601 with an offset from UTC (`2026-03-01T00:30+01:00`, or `Z`), because an hour is ambiguous
    without it when daylight saving ends. The last value holds as long as the one before it.

    Raises:
        FormatError: columns are missing, a time has no offset or is not later than its predecessor, or a value is
            invalid.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise FormatError(
            "carbon",
            problem=f"The carbon intensity is not valid CSV: {error}.",
            hint=f"Provide a CSV with the columns {' and '.join(COLUMNS)}.",
            code="csv.invalid",
        ) from None
    _refuse_extra_cells(rows)
    if len(rows) < 2 or not set(COLUMNS) <= set(rows[0]):
        given = f"{len(rows)} rows with the columns {', '.join(map(str, rows[0]))}" if rows else "no rows"
        expected = f"at least two rows with the columns {' and '.join(COLUMNS)}"
        raise FormatError("carbon", got=given, expected=expected, code="csv.columns")
    steps = tuple((_seconds(row["time"], line), _grams(row["g_per_kwh"], line)) for line, row in enumerate(rows, 2))
    for line, (before, after) in enumerate(itertools.pairwise(steps), 3):
        if not before[0] < after[0]:
            given = f"{_moment(after[0])} after {_moment(before[0])}"
            raise FormatError(f"carbon:{line}", got=given, expected="times in ascending order", code="csv.order")
    return Intensity(kind, steps, 2 * steps[-1][0] - steps[-2][0])


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


def carbon_of(parts: Iterable[tuple[float, Energy]], intensity: Intensity) -> Carbon:
    """Return the carbon of intervals (begin in seconds since 1970, energy); `ValueGivenError` for unknown intensity."""
    grams, kinds = [], set[Provenance]()
    for begin_s, energy in parts:
        if energy.joules is None:
            return Carbon(None, intensity.kind, Provenance.ABSENT, energy.reason)
        per_kwh = intensity.mean(begin_s, begin_s + energy.seconds)
        grams.append(energy.joules / JOULES_PER_KWH * per_kwh)
        kinds.add(energy.provenance)
    if not grams:
        return Carbon(None, intensity.kind, Provenance.ABSENT, "no energy was measured")
    estimated = Provenance.ESTIMATED in kinds
    return Carbon(math.fsum(grams), intensity.kind, Provenance.ESTIMATED if estimated else Provenance.MEASURED)


def sum_carbon(parts: Iterable[Carbon]) -> Carbon:
    """Return the sum of carbon figures; `ValueGivenError` if there are none, or both kinds of intensity occur."""
    found = tuple(parts)
    kinds = sorted({part.kind for part in found})
    if len(kinds) != 1:
        given = " and ".join(kinds) or "nothing"
        expected = "figures of a single kind of carbon intensity, because the kinds cannot be added"
        raise ValueGivenError("carbon", got=f"{given} intensity", expected=expected)
    if missing := [part.reason for part in found if part.grams is None]:
        return Carbon(None, kinds[0], Provenance.ABSENT, missing[0])
    estimated = any(part.provenance is Provenance.ESTIMATED for part in found)
    grams = math.fsum(part.grams or 0.0 for part in found)
    return Carbon(grams, kinds[0], Provenance.ESTIMATED if estimated else Provenance.MEASURED)


def _figure(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)  # Python's digit grouping (1_000) is not valid in a CSV.
    except ValueError:
        return None


def _seconds(text: str | None, line: int) -> float:
    expected = "an ISO 8601 time with an offset from UTC, such as 2026-03-01T00:30+01:00"
    try:
        return time_of(text or "")
    except ValueError as error:
        raise FormatError(f"carbon:{line}", got=f"{text!r:.40} ({error})", expected=expected, code="csv.time") from None


def _refuse_extra_cells(rows: Sequence[Mapping[str | None, Any]]) -> None:
    """Raise for a row with more cells than columns: an unquoted `1,234` makes two cells, and would be read as 1."""
    for line, row in enumerate(rows, 2):
        if extra := row.get(None):
            raise FormatError(
                f"carbon:{line}",
                got=f"more cells than columns ({', '.join(map(str, extra))!r:.40})",
                expected="one cell per column",
                hint="Write numbers without a thousands separator: 1234, not 1,234.",
                code="csv.extra_cell",
            )


def _grams(text: str | None, line: int) -> float:
    found = _figure(text or "")
    if found is None or not 0 <= found < math.inf:
        hint = "Write the number without a thousands separator: 1234, not 1,234." if "," in (text or "") else ""
        expected = "a finite number of grams per kWh, at least 0"
        raise FormatError(f"carbon:{line}", got=f"{text!r:.40}", expected=expected, hint=hint, code="csv.number")
    return found


def _moment(time_s: float) -> str:
    return format_moment(time_s) if math.isfinite(time_s) else "always"

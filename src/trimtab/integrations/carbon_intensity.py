"""Sources of carbon intensity forecasts: constants and files; see `carbon_services` for web services.

Training starts whatever fails: `forecast_or_reason` returns a forecast or the reason for its absence.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimtab.core.bounded_read import CSV_BYTES, read_bytes
from trimtab.core.carbon import KINDS, Intensity, constant, of_csv
from trimtab.core.datetimes import format_moment
from trimtab.core.errors import FormatError, TrimtabError, ValueGivenError
from trimtab.integrations.http_json import forecast_error

MOST_FILE_BYTES = CSV_BYTES
LITTLE_S = 1e-3  # Tolerance for equal times, in seconds.


class IntensitySource(Protocol):
    """A source of carbon intensity forecasts."""

    @property
    def name(self) -> str:
        """Name of the source in reports."""

    def forecast(self, now_s: float) -> Intensity:
        """Return a forecast without gaps that includes `now_s`. It may begin earlier.

        Args:
            now_s: seconds since 1970.

        Raises:
            TrimtabError: no forecast is available; the message contains no secrets.
        """


@dataclass(frozen=True)
class ConstantIntensity:
    """A constant intensity, so that no hour is better than others."""

    g_per_kwh: float
    kind: str

    @property
    def name(self) -> str:
        """Name of the source in reports."""
        return f"a constant of {self.g_per_kwh:g} g/kWh"

    def forecast(self, now_s: float) -> Intensity:
        """Return the constant forecast."""
        return constant(self.g_per_kwh, self.kind)


@dataclass(frozen=True)
class CsvIntensity:
    """A CSV file in the format of `trimtab.core.carbon.of_csv`, with regular times.

    The smallest distance between two rows is the length of a step; a larger distance is a gap. The forecast is the part
    without gaps around the current time.
    """

    path: str | os.PathLike[str]
    kind: str

    @property
    def name(self) -> str:
        """Name of the source in reports."""
        return Path(self.path).name

    def forecast(self, now_s: float) -> Intensity:
        """Return the file's forecast around `now_s`."""
        try:
            text = read_bytes(Path(self.path), "a CSV file in UTF-8", limit=MOST_FILE_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise FormatError(
                "carbon",
                problem=f"The carbon intensity file {self.path} is not UTF-8 text.",
                hint="Save it as a CSV file in UTF-8.",
                code="file.not_text",
            ) from None
        except FormatError as error:
            if error.code == "file.unreadable":
                raise forecast_error(
                    f"The carbon intensity file cannot be read: {error}", "intensity.unreadable"
                ) from None
            raise
        found = of_csv(text, self.kind)
        period_s = min(after[0] - before[0] for before, after in itertools.pairwise(found.steps))
        return known_around(now_s, self.kind, found.steps, period_s)


def named(given: str, kind: str | None) -> ConstantIntensity | CsvIntensity:
    """Return the source for a command line argument: a constant in g/kWh, or the path of a CSV file.

    Raises:
        ValueGivenError: `kind` is missing.
    """
    if kind is None:
        raise ValueGivenError(
            "carbon.kind",
            problem=f"The carbon intensity {given} has no kind.",
            hint=f"Pass the kind {' or '.join(KINDS)}, as in --carbon-kind average.",
            code="carbon.kind_missing",
        )
    try:
        return ConstantIntensity(float(given), kind)
    except ValueError:
        return CsvIntensity(given, kind)


def forecast_or_reason(source: IntensitySource, now_s: float | None = None) -> tuple[Intensity | None, str]:
    """Return a forecast and "", or None and the reason; never raises.

    Args:
        source: the source.
        now_s: seconds since 1970; None for the current time.
    """
    try:
        return source.forecast(time.time() if now_s is None else now_s), ""
    except TrimtabError as error:
        why = error.problem or str(error)
    except Exception as error:  # A user-defined source; its error text may contain a token.
        why = f"The source raised {type(error).__name__}."
    return None, f"no carbon intensity forecast from {_name(source)}. {why}"


def known_around(now_s: float, kind: str, steps: Iterable[tuple[float, float]], period_s: float) -> Intensity:
    """Return the part of a forecast without gaps that includes `now_s`.

    Args:
        now_s: seconds since 1970.
        kind: "average" or "marginal".
        steps: (seconds since 1970, grams per kWh), in order.
        period_s: length of a step in seconds.

    Raises:
        DataMissingError: the forecast does not include `now_s`.
        ValueGivenError: a step is invalid, or steps are out of order.
    """
    found = list(steps)
    if not found:
        raise forecast_error("The forecast is empty.", "intensity.empty")
    whole = Intensity(kind, tuple(found), found[-1][0] + period_s)  # Validates all steps before they are selected.
    holes = [at for at, (a, b) in enumerate(itertools.pairwise(found), 1) if b[0] - a[0] > period_s + LITTLE_S]
    for begin, end in itertools.pairwise([0, *holes, len(found)]):
        part = found[begin:end]
        if part[0][0] <= now_s < part[-1][0] + period_s:
            return Intensity(kind, tuple(part), whole.until_s if end == len(found) else part[-1][0] + period_s)
    known = f"{format_moment(found[0][0])} to {format_moment(whole.until_s)}"
    raise forecast_error(f"The forecast, from {known}, does not cover {format_moment(now_s)}.", "intensity.not_current")


def _name(source: IntensitySource) -> str:
    try:
        return str(source.name)
    except Exception:
        return type(source).__name__

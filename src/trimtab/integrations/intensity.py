"""Where a forecast of carbon intensity is from: a constant or a file here, public services in `carbon_services`.

Whatever goes wrong, training starts: `forecast_or_reason` gives a forecast, or says why there is none.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimtab.core.carbon import KINDS, Intensity, constant, of_csv
from trimtab.core.errors import DataMissingError, FormatError, TrimtabError, ValueGivenError
from trimtab.core.files import CSV_BYTES, read_bytes
from trimtab.integrations.web import missing

MOST_FILE_BYTES = CSV_BYTES
LITTLE_S = 1e-3  # by which two times of one moment may differ


class IntensitySource(Protocol):
    """Something that knows how many grams a kilowatt-hour will be made with."""

    @property
    def name(self) -> str:
        """What outputs call it."""

    def forecast(self, now_s: float) -> Intensity:
        """Return what is known, which now is part of; it may begin earlier, and holds no hour that is missing.

        Args:
            now_s: seconds since 1970.

        Raises:
            TrimtabError: it is not to be had; says why, and holds no secret.
        """


@dataclass(frozen=True)
class ConstantIntensity:
    """One figure for all time, by which no hour is better than another."""

    g_per_kwh: float
    kind: str

    @property
    def name(self) -> str:
        """What outputs call it."""
        return f"a constant of {self.g_per_kwh:g} g/kWh"

    def forecast(self, now_s: float) -> Intensity:
        """Return it."""
        return constant(self.g_per_kwh, self.kind)


@dataclass(frozen=True)
class CsvIntensity:
    """A file as `trimtab.core.carbon.of_csv` reads it, with rows as far apart as its two nearest.

    Where two rows are further apart, one is missing: what is known is then the rows in a row that now is part of.
    """

    path: str | os.PathLike[str]
    kind: str

    @property
    def name(self) -> str:
        """What outputs call it."""
        return Path(self.path).name

    def forecast(self, now_s: float) -> Intensity:
        """Return what the file says of the time around now."""
        try:
            text = read_bytes(Path(self.path), "a CSV in UTF-8", limit=MOST_FILE_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise FormatError("carbon", given="a file that is no text", expected="a CSV in UTF-8") from None
        except FormatError as error:
            if error.code == "file.unreadable":
                raise missing(f"a file that cannot be read ({error.given})") from None
            raise
        found = of_csv(text, self.kind)
        period_s = min(after[0] - before[0] for before, after in itertools.pairwise(found.steps))
        return known_around(now_s, self.kind, found.steps, period_s)


def named(given: str, kind: str | None) -> ConstantIntensity | CsvIntensity:
    """Return what a command names: grams per kWh for all time, or a CSV file of them.

    Raises:
        ValueGivenError: it is not said of which kind it is.
    """
    if kind is None:
        raise ValueGivenError("carbon.kind", given="nothing", expected=f"which one it is: {' or '.join(KINDS)}")
    try:
        return ConstantIntensity(float(given), kind)
    except ValueError:
        return CsvIntensity(given, kind)


def forecast_or_reason(source: IntensitySource, now_s: float | None = None) -> tuple[Intensity | None, str]:
    """Return a forecast and "", or None and why there is none; never raises.

    Args:
        now_s: seconds since 1970; None: by the clock.
    """
    try:
        return source.forecast(time.time() if now_s is None else now_s), ""
    except DataMissingError as error:
        why = error.given
    except TrimtabError as error:
        why = str(error)
    except Exception as error:  # a source of somebody else's: what it says of itself may hold its token
        why = f"it raised {type(error).__name__}"
    return None, f"no forecast from {_name(source)}: {why}"


def known_around(now_s: float, kind: str, steps: Iterable[tuple[float, float]], period_s: float) -> Intensity:
    """Return the steps in a row, none missing between, that a moment is part of.

    Args:
        steps: (seconds since 1970, grams per kWh), in order, each of `period_s` or as long as to the next.

    Raises:
        DataMissingError: nothing is known of that moment. ValueGivenError: steps that are none, or not in order.
    """
    found = list(steps)
    if not found:
        raise missing("a forecast of no hour")
    whole = Intensity(kind, tuple(found), found[-1][0] + period_s)  # is checked before it is cut
    holes = [at for at, (a, b) in enumerate(itertools.pairwise(found), 1) if b[0] - a[0] > period_s + LITTLE_S]
    for begin, end in itertools.pairwise([0, *holes, len(found)]):
        part = found[begin:end]
        if part[0][0] <= now_s < part[-1][0] + period_s:
            return Intensity(kind, tuple(part), whole.until_s if end == len(found) else part[-1][0] + period_s)
    raise missing("a forecast that does not hold the present hour")


def _name(source: IntensitySource) -> str:
    try:
        return str(source.name)
    except Exception:
        return type(source).__name__

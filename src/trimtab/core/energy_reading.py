"""Energy in joules with provenance: measured, estimated or absent."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.core.errors import ValueGivenError
from trimtab.core.units import format_joules

OTHER_RANKS = "the energy of other ranks"  # Not included in the joules of a single rank.

# Device counters are updated every 1 to 100 ms, so shorter windows are meaningless.
WINDOW_S = 1.0


class Provenance(enum.StrEnum):
    """Source of joules: a device's counter, watts given by the user, or none."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    ABSENT = "absent"


@dataclass(frozen=True)
class Energy:
    """Energy used in a time interval.

    Args:
        seconds: length of the interval.
        joules: None if and only if the energy is absent.
        provenance: source of the joules.
        sources: counters read.
        reason: reason for absent joules, or "".

    Raises:
        ValueGivenError: joules are invalid, or contradict the provenance.
    """

    seconds: float
    joules: float | None
    provenance: Provenance
    sources: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        is_absent = self.provenance is Provenance.ABSENT
        known = self.joules is not None and 0 < self.joules < math.inf
        if is_absent != (self.joules is None) or not (is_absent or known):
            given = f"joules={self.joules} with provenance {self.provenance}"
            expected = "positive joules, or None with provenance absent"
            raise ValueGivenError("energy", got=given, expected=expected)

    @property
    def watts(self) -> float | None:
        """Mean power; None if unknown."""
        return None if self.joules is None or not self.seconds > 0 else self.joules / self.seconds

    def describe(self) -> str:
        """Return a text like `12 J, measured (rapl package-0)` or `not measured: <reason>`."""
        if self.joules is None:
            return f"not measured: {self.reason}"
        return f"{format_joules(self.joules)}, {self.provenance} ({', '.join(self.sources)})"


def absent_energy(reason: str, seconds: float = 0.0) -> Energy:
    """Return the energy of an interval without a measurement."""
    return Energy(seconds, None, Provenance.ABSENT, (), reason)


def sum_energy(parts: Iterable[Energy], *, in_turn: bool = False) -> Energy:
    """Return the sum of several energies: absent if any is absent, estimated if any is estimated, otherwise measured.

    Of devices or ranks over the same time, or `in_turn` of consecutive intervals, whose seconds are added.
    """
    found = tuple(parts)
    seconds = [part.seconds for part in found]
    whole_s = math.fsum(seconds) if in_turn else max(seconds, default=0.0)
    if missing := [part.reason for part in found if part.joules is None]:
        return absent_energy("; ".join(dict.fromkeys(missing)), whole_s)
    if not found:
        return absent_energy("no energy was measured")
    estimated = any(part.provenance is Provenance.ESTIMATED for part in found)
    sources = tuple(dict.fromkeys(source for part in found for source in part.sources))
    joules = math.fsum(part.joules or 0.0 for part in found)
    return Energy(whole_s, joules, Provenance.ESTIMATED if estimated else Provenance.MEASURED, sources)


@dataclass(frozen=True)
class PowerLimit:
    """A device's power limit in watts, as reported by the driver, with the allowed range; None if not reported."""

    device: str
    watts: float
    lowest_w: float | None = None
    highest_w: float | None = None


@dataclass(frozen=True)
class MeterFacts:
    """Description of the energy meter.

    Args:
        provenance: provenance of the joules.
        sources: counters in use.
        idle_w: watts of the machine while this process was idle for a second, included in every figure; None if
            unknown.
        reason: reason for the lack of a meter, or "".
        uncounted: computing devices without measurement, with reasons.
        limits: power limits of the devices.
        left_out: weight of energy dropped from the objective for lack of a meter.
    """

    provenance: Provenance
    sources: tuple[str, ...] = ()
    idle_w: float | None = None
    reason: str = "no meter was searched for"
    uncounted: tuple[str, ...] = ()
    limits: tuple[PowerLimit, ...] = ()
    left_out: float = 0.0

    @property
    def is_absent(self) -> bool:
        """True without a meter."""
        return self.provenance is Provenance.ABSENT

    def told(self, joules: float) -> str:
        """Return joules as text, marked as estimated if they are."""
        estimated = " (estimated)" if self.provenance is Provenance.ESTIMATED else ""
        return f"{format_joules(joules)}{estimated}"

    def describe(self) -> str:
        """Return the description for reports."""
        if self.is_absent:
            left = f". Its weight of {self.left_out:.2g} in the objective was set to 0" if self.left_out else ""
            return f"not measured: {self.reason}{left}"
        idle = "" if self.idle_w is None else f"; includes {self.idle_w:.3g} W of idle power"
        without = f"; not included: {'; '.join(self.uncounted)}" if self.uncounted else ""
        return f"{self.provenance} ({', '.join(self.sources)}){idle}{without}"


NO_METER = MeterFacts(Provenance.ABSENT)

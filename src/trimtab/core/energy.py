"""Joules, with where each is from: measured, estimated, or absent, which is neither zero nor a guess."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.core.errors import ValueGivenError
from trimtab.core.units import format_joules

OTHER_RANKS = "what other ranks read"  # is not in one rank's joules

# Counters of devices are renewed every millisecond to every tenth of a second: a shorter window says nothing.
WINDOW_S = 1.0


class Provenance(enum.StrEnum):
    """How joules are known: read off a device's counter, made of watts that were given, or not at all."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    ABSENT = "absent"


@dataclass(frozen=True)
class Energy:
    """What a stretch of time took.

    Args:
        seconds: how long it was. joules: None where they are not known, and only there. provenance: how they are.
        sources: the counters behind them. reason: why they are absent, or "".

    Raises:
        ValueGivenError: joules that are none, or that do not fit what is said of them.
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
            expected = "joules above zero, or none where they are absent"
            raise ValueGivenError("energy", given=f"{self.joules} J, {self.provenance}", expected=expected)

    @property
    def watts(self) -> float | None:
        """Mean power, or None where it is not known."""
        return None if self.joules is None or not self.seconds > 0 else self.joules / self.seconds

    def describe(self) -> str:
        """Return `12 J, measured (rapl package-0)`, or `not measured: why`."""
        if self.joules is None:
            return f"not measured: {self.reason}"
        return f"{format_joules(self.joules)}, {self.provenance} ({', '.join(self.sources)})"


def absent(reason: str, seconds: float = 0.0) -> Energy:
    """Return what a stretch took of which nothing is known."""
    return Energy(seconds, None, Provenance.ABSENT, (), reason)


def summed(parts: Iterable[Energy], *, in_turn: bool = False) -> Energy:
    """Return what several took: devices or ranks at one time, or stretches `in_turn`.

    Absent as soon as one is; estimated as soon as one is.
    """
    found = tuple(parts)
    seconds = [part.seconds for part in found]
    whole_s = math.fsum(seconds) if in_turn else max(seconds, default=0.0)
    if missing := [part.reason for part in found if part.joules is None]:
        return absent("; ".join(dict.fromkeys(missing)), whole_s)
    if not found:
        return absent("nothing was read")
    estimated = any(part.provenance is Provenance.ESTIMATED for part in found)
    sources = tuple(dict.fromkeys(source for part in found for source in part.sources))
    joules = math.fsum(part.joules or 0.0 for part in found)
    return Energy(whole_s, joules, Provenance.ESTIMATED if estimated else Provenance.MEASURED, sources)


@dataclass(frozen=True)
class PowerLimit:
    """What a device's driver says of its power limit: watts now, and between which it may be set; None: not told."""

    device: str
    watts: float
    lowest_w: float | None = None
    highest_w: float | None = None


@dataclass(frozen=True)
class MeterFacts:
    """Which meter there was.

    Args:
        provenance: of what it counts. sources: what it reads. idle_w: of the machine as it was found, over a second in
            which this process did nothing; it is in every figure. None: not known.
        reason: why there is none, or "". uncounted: what computes too, and is not in its joules, each with why.
        limits: of the devices' power. left_out: the weight that an objective gave energy, where there is no meter and
            the others were to count alone.
    """

    provenance: Provenance
    sources: tuple[str, ...] = ()
    idle_w: float | None = None
    reason: str = "not looked for"
    uncounted: tuple[str, ...] = ()
    limits: tuple[PowerLimit, ...] = ()
    left_out: float = 0.0

    @property
    def is_absent(self) -> bool:
        """Whether nothing is counted."""
        return self.provenance is Provenance.ABSENT

    def told(self, joules: float) -> str:
        """Return joules that it counted in words; of an estimate they say so."""
        estimated = " (estimated)" if self.provenance is Provenance.ESTIMATED else ""
        return f"{format_joules(joules)}{estimated}"

    def describe(self) -> str:
        """Return how outputs name it."""
        if self.is_absent:
            left = (
                f"; its weight of {self.left_out:.2g} is left out, the others are renormalised" if self.left_out else ""
            )
            return f"not measured: {self.reason}{left}"
        idle = "" if self.idle_w is None else f"; idle {self.idle_w:.3g} W, which is in every figure"
        without = f"; without {'; '.join(self.uncounted)}" if self.uncounted else ""
        return f"{self.provenance} by {', '.join(self.sources)}{idle}{without}"


NO_METER = MeterFacts(Provenance.ABSENT)

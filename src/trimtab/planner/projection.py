"""Projection of a speed-up over time (math: section 8; eqs. 21 to 23 of the paper, corrected).

The paper converts "26% less time" to x1.26, but 26.2% less is x1.355; and x1.26 per cycle of five months doubles in
15.0 months, not 14.8. Equal gains in every cycle are the paper's assumption, not a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core.validation import number
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval

CYCLE_MONTHS = 5.0  # as in the paper


@dataclass(frozen=True)
class Net:
    """Eq. 21 from measured seconds: `net = gain / (1 + overhead)`.

    Args:
        gain: throughput without recomputation, relative to the reference.
        overhead: recomputation time, relative to a step without.
        net: measured speed-up.
    """

    gain: float
    overhead: float
    net: float


def net_speedup(throughput_gain: float, recompute_overhead: float) -> float:
    """Return `throughput_gain / (1 + recompute_overhead)` [21].

    Args:
        throughput_gain: throughput of a step without recomputation, relative to the reference.
        recompute_overhead: recomputation time as a fraction of that step.

    Raises:
        ValueGivenError: the gain is not positive, or the overhead is negative.
    """
    gain = number("throughput_gain", throughput_gain, low=0, open_low=True)
    return gain / (1 + number("recompute_overhead", recompute_overhead, low=0))


def net_of(reference_s: float, plan_s: float, recompute_s: float) -> Net:
    """Return eq. 21 for measured steps.

    Args:
        reference_s: seconds of the reference's step.
        plan_s: seconds of the plan's step.
        recompute_s: seconds of recomputation in the plan's step.

    Raises:
        ValueGivenError: seconds are not positive, or recomputation takes the whole step.
    """
    reference_s = number("reference_s", reference_s, low=0, open_low=True)
    plan_s = number("plan_s", plan_s, low=0, open_low=True)
    without_s = plan_s - number("recompute_s", recompute_s, low=0)
    number("plan_s - recompute_s", without_s, low=0, open_low=True)
    gain, overhead = reference_s / without_s, recompute_s / without_s
    return Net(gain, overhead, net_speedup(gain, overhead))


def speedup_of_time_saved(share: float) -> float:
    """Return `1 / (1 - share)`: 26.2% less time is x1.355.

    Raises:
        ValueGivenError: the fraction is outside [0, 1).
    """
    left = 1 - number("share", share, low=0)
    return 1 / number("1 - share", left, low=0, open_low=True)


def efficiency_after(months: float, speedup: float, cycle_months: float = CYCLE_MONTHS) -> float:
    """Return `speedup ** (months / cycle_months)`: efficiency relative to today, assuming equal gains per cycle [22].

    Raises:
        ValueGivenError: `months` is negative, or `speedup` or `cycle_months` is not positive.
    """
    speedup = number("speedup", speedup, low=0, open_low=True)
    cycles = number("months", months, low=0) / number("cycle_months", cycle_months, low=0, open_low=True)
    return float(speedup**cycles)


def doubling_months(speedup: float, cycle_months: float = CYCLE_MONTHS) -> float:
    """Return `cycle_months * ln 2 / ln speedup`; infinite without a gain [23].

    Raises:
        ValueGivenError: `speedup` or `cycle_months` is not positive.
    """
    speedup = number("speedup", speedup, low=0, open_low=True)
    cycle_months = number("cycle_months", cycle_months, low=0, open_low=True)
    return cycle_months * math.log(2) / math.log(speedup) if speedup > 1 else math.inf


def unprojected(speedup: Interval, changes: bool) -> str:
    """Return the reason why a measured speed-up supports no projection, or "".

    Args:
        speedup: measured speed-up.
        changes: the plan changes something.
    """
    if not changes:
        return "the plan changes nothing, so there is no gain to project"
    if speedup.n < MIN_PAIRS_FOR_VERDICT or not (speedup.low > 0 and math.isfinite(speedup.high)):
        return "too few rounds were timed"
    if speedup.low <= 1:
        slower = speedup.high < 1
        return "the steps of the plan take longer" if slower else "the speed-up is not significant"
    return ""

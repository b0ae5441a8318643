"""What a speed-up would come to (math: section 8; eqs. 21 to 23 of the paper, corrected).

The paper reads "26% less time" as x1.26, and 26.2% less is x1.355; and of x1.26 a cycle of five months doubles in 15.0
months, not 14.8. That every cycle brings as much as the first is its assumption, and nothing measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core.checks import number
from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT, Interval

CYCLE_MONTHS = 5.0  # the paper's


@dataclass(frozen=True)
class Net:
    """Eq. 21 from measured seconds: `net = gain / (1 + overhead)`.

    Args:
        gain: throughput over the reference's if nothing were computed again. overhead: of computing it again, over a
            step without. net: what is left, which is the measured speed-up.
    """

    gain: float
    overhead: float
    net: float


def net_speedup(throughput_gain: float, recompute_overhead: float) -> float:
    """Return `throughput_gain / (1 + recompute_overhead)` [21].

    Args:
        throughput_gain: of a step that recomputes nothing, over the reference's. recompute_overhead: a share of it.

    Raises:
        ValueGivenError: a gain that is not above 0, or an overhead below.
    """
    gain = number("throughput_gain", throughput_gain, low=0, open_low=True)
    return gain / (1 + number("recompute_overhead", recompute_overhead, low=0))


def net_of(reference_s: float, plan_s: float, recompute_s: float) -> Net:
    """Return eq. 21 for steps of these seconds.

    Args:
        recompute_s: of the plan's.

    Raises:
        ValueGivenError: seconds that are not above 0, or more of them recomputed than there are.
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
        ValueGivenError: not a share from 0 to below 1.
    """
    left = 1 - number("share", share, low=0)
    return 1 / number("1 - share", left, low=0, open_low=True)


def efficiency_after(months: float, speedup: float, cycle_months: float = CYCLE_MONTHS) -> float:
    """Return `speedup ** (months / cycle_months)`: efficiency over today's, if every cycle brings as much [22].

    Raises:
        ValueGivenError: months below 0, or a speed-up or a cycle not above 0.
    """
    speedup = number("speedup", speedup, low=0, open_low=True)
    cycles = number("months", months, low=0) / number("cycle_months", cycle_months, low=0, open_low=True)
    return float(speedup**cycles)


def doubling_months(speedup: float, cycle_months: float = CYCLE_MONTHS) -> float:
    """Return `cycle_months * ln 2 / ln speedup`; infinite where nothing is gained [23].

    Raises:
        ValueGivenError: a speed-up or a cycle not above 0.
    """
    speedup = number("speedup", speedup, low=0, open_low=True)
    cycle_months = number("cycle_months", cycle_months, low=0, open_low=True)
    return cycle_months * math.log(2) / math.log(speedup) if speedup > 1 else math.inf


def unprojected(speedup: Interval, changes: bool) -> str:
    """Return why nothing is projected by a measured speed-up, or "" where it is one.

    Args:
        changes: whether the plan that it is of changes anything.
    """
    if not changes:
        return "the plan changes nothing: there is no gain that could go on"
    if speedup.n < MIN_PAIRS_FOR_VERDICT or not (speedup.low > 0 and math.isfinite(speedup.high)):
        return "too few laps tell how fast its steps are"
    if speedup.low <= 1:
        slower = speedup.high < 1
        return "its steps take longer" if slower else "the steps of both cannot be told apart"
    return ""

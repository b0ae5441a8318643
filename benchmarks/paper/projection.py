"""Projection of a speed-up over time (math: section 8; eqs. 21 to 23 of the paper, corrected).

The paper converts "26% less time" to x1.26, but 26.2% less is x1.355; and x1.26 per cycle of five months doubles in
15.0 months, not 14.8. Equal gains in every cycle are the paper's assumption, not a measurement.
"""

from __future__ import annotations

import math

from trimtab.core.validation import number

CYCLE_MONTHS = 5.0  # as in the paper


def net_speedup(throughput_gain: float, recompute_overhead: float) -> float:
    """Return `throughput_gain / (1 + recompute_overhead)`, both relative to a step without recomputation [21].

    Raises:
        ValueGivenError: the gain is not positive, or the overhead is negative.
    """
    gain = number("throughput_gain", throughput_gain, low=0, open_low=True)
    return gain / (1 + number("recompute_overhead", recompute_overhead, low=0))


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

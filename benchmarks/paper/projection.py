"""Projection of a speed-up over time (math: section 8; eqs. 21 to 23 of the paper, corrected).

The paper converts "26% less time" to x1.26, but 26.2% less is x1.355; and x1.26 per cycle of five months doubles in
15.0 months, not 14.8. Equal gains in every cycle are the paper's assumption, not a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.step_phases import TimedGain
from trimtab.core.validation import number
from trimtab.experiments.phase_attribution import is_distorted, speedup
from trimtab.experiments.report import formatting as say
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
    """Return `throughput_gain / (1 + recompute_overhead)`, both relative to a step without recomputation [21].

    Raises:
        ValueGivenError: the gain is not positive, or the overhead is negative.
    """
    gain = number("throughput_gain", throughput_gain, low=0, open_low=True)
    return gain / (1 + number("recompute_overhead", recompute_overhead, low=0))


def net_of(reference_s: float, plan_s: float, recompute_s: float) -> Net:
    """Return eq. 21 for measured steps.

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
    """Return the reason why a measured speed-up supports no projection, or ""."""
    if not changes:
        return "the plan changes nothing, so there is no gain to project"
    if speedup.n < MIN_PAIRS_FOR_VERDICT or not (speedup.low > 0 and math.isfinite(speedup.high)):
        return "too few rounds were timed"
    if speedup.low <= 1:
        slower = speedup.high < 1
        return "the steps of the plan take longer" if slower else "the speed-up is not significant"
    return ""


def projection_sentences(gain: TimedGain) -> tuple[str, ...]:
    """Return eqs. 21 to 23 computed from step times without phase timing, if the speed-up is significant."""
    measured = speedup(gain)
    net, doubling = _net(gain, measured), _doubling(gain, measured)
    return f"Net speed-up [21], from rounds in one process: {net}", f"Doubling [22, 23], from these rounds: {doubling}"


def _net(gain: TimedGain, measured: Interval) -> str:
    if not gain.changes:
        return "the plan changes nothing."
    if measured.n < MIN_PAIRS_FOR_VERDICT:
        return f"{say.ratio(measured.mean)} from {measured.n} rounds, too few for an interval."
    if measured.low <= 1 <= measured.high:
        return f"the difference in step time is not significant ({say.ratio(measured.mean)})."
    within = ""
    if math.isfinite(measured.low) and math.isfinite(measured.high):
        within = f" (95% {say.ratio(measured.low)} to {say.ratio(measured.high)})"
    if is_distorted(gain):
        return (
            f"{say.ratio(measured.mean)}{within}; phase timing distorts the step, so the overhead of recomputation "
            "is unknown."
        )
    plan_s = math.fsum(map(gain.plan.mean_s, gain.plan.has))
    found = net_of(measured.mean * plan_s, plan_s, gain.plan.mean_s("recompute"))
    return (
        f"{say.ratio(found.net)}{within}: {say.ratio(found.gain)} without recomputation, divided by 1 plus the "
        f"recomputation overhead of {say.share(found.overhead)} from phase timing."
    )


def _doubling(gain: TimedGain, measured: Interval) -> str:
    if reason := unprojected(measured, bool(gain.changes)):
        figure = f" ({say.ratio(measured.mean)})" if gain.changes else ""
        return f"{reason}{figure}, so nothing is projected."
    return (
        f"with a speed-up of {say.ratio(measured.mean)} in every cycle of {CYCLE_MONTHS:g} months, efficiency doubles "
        f"{_months(measured.mean)}{_by_its_interval(measured)}, and after a year it is "
        f"{say.ratio(efficiency_after(12.0, measured.mean))} of today's. The equal gain of every cycle and the length "
        "of a cycle are assumptions, not measurements."
    )


def _by_its_interval(measured: Interval) -> str:
    if measured.n < MIN_PAIRS_FOR_VERDICT or measured.high == math.inf:
        return ""
    return f" (95% interval: {_months(measured.high)} to {_months(measured.low)})"


def _months(speedup: float) -> str:
    return f"after {doubling_months(speedup):.1f} months"


def with_doubling(rows: Iterable[Mapping[str, Any]], gains: Sequence[TimedGain]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `gain_rows`, with the months to double after the speed-up of every gain.

    Args:
        rows: flat rows of a comparison or a phase table.
        gains: gains of the rows, in their order.
    """
    left = iter(gains)
    for row in rows:
        yield dict(row)
        if row["metric"] == "step_speedup":
            head = {key: row[key] for key in ("task", "ranks", "device")}
            yield {"metric": "doubling_months", **head, "cycle_months": CYCLE_MONTHS} | _months_row(next(left))


def _months_row(gain: TimedGain) -> dict[str, Any]:
    """Return the projected months with their interval; None with a reason if the speed-up is not significant."""
    measured = speedup(gain)
    if reason := unprojected(measured, bool(gain.changes)):
        return {"mean": None, "low": None, "high": None, "n": measured.n, "reason": reason}
    mean, low, high = map(doubling_months, (measured.mean, measured.high, measured.low))
    return {"mean": mean, "low": low, "high": high, "n": measured.n}

"""Time until an evaluation reaches a value, in paired runs: ratios, and bounds where a time is not known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.units import METRIC_UNITS
from trimtab.experiments import result_table
from trimtab.experiments.result_table import Evaluated, ResultTable
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, is_gain, ratio_interval, resolution

EQUAL_LOSS = 0.5  # Percent of a loss, or points or percent of a metric; the paper's limit on quality (math: section 8).


@dataclass(frozen=True)
class QualityMetric:
    """The evaluation by which trainings are compared.

    Args:
        name: name of the value that `Loop.evaluate` returns ("evaluation" for a single number).
        higher_is_better: True for metrics such as accuracy, False for metrics such as perplexity.
        unit: unit of differences. "share": values from 0 to 1, differences in points. "percent": values from 0 to 100,
            differences in points. "relative": differences in percent of the baseline. Default: "share" if higher is
            better, else "relative".
        targets: values to reach, easiest first.
    """

    name: str
    higher_is_better: bool = True
    unit: str = ""
    targets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.unit:
            object.__setattr__(self, "unit", "share" if self.higher_is_better else "relative")
        validation.one_of("metric.unit", self.unit, METRIC_UNITS)
        targets = tuple(validation.number("metric.targets", target) for target in self.targets)
        if list(targets) != sorted(set(targets), reverse=not self.higher_is_better):
            order = "rising" if self.higher_is_better else "falling"
            raise ValueGivenError("metric.targets", got=f"{targets}", expected=f"{order} values, the easiest first")

    def meets(self, value: float, target: float) -> bool:
        """Return True if a value is at the target or better."""
        return value >= target if self.higher_is_better else value <= target

    def difference(self, ours: float, theirs: float) -> float:
        """Return the difference of two values in points, or in percent of the second; positive is better."""
        scale = {"share": 100.0, "percent": 1.0, "relative": 100.0 / abs(theirs) if theirs else math.inf}[self.unit]
        return (ours - theirs) * scale * (1 if self.higher_is_better else -1)

    @property
    def unit_in_words(self) -> str:
        """The unit of differences for reports."""
        return " percent" if self.unit == "relative" else " points"


@dataclass(frozen=True)
class Crossing:
    """When an arm reached a target.

    Args:
        seconds: seconds of training, interpolated between evaluations; infinite if the target was not reached.
        is_early: True if the first evaluation was beyond the target, so that `seconds` is an upper bound.
        least_s: seconds until the last evaluation short of the target; a lower bound.
    """

    seconds: float
    is_early: bool
    least_s: float


def crossing(points: Sequence[Evaluated], metric: QualityMetric, target: float) -> Crossing:
    """Return the first crossing of a target that the next evaluation confirms.

    The last evaluation alone does not count, because no later evaluation confirms it.
    """
    met = [metric.meets(point.value, target) for point in points]
    short = [point.seconds for point, is_met in zip(points, met, strict=True) if not is_met]
    if (at := next((i for i in range(len(points) - 1) if met[i] and met[i + 1]), None)) is None:
        return Crossing(math.inf, False, short[-1] if short else 0.0)
    if at == 0:
        return Crossing(points[0].seconds, True, 0.0)
    before, after = points[at - 1], points[at]
    share = (target - before.value) / (after.value - before.value) if after.value != before.value else 1.0
    return Crossing(before.seconds + share * (after.seconds - before.seconds), False, before.seconds)


@dataclass(frozen=True)
class TargetSpeed:
    """Speed of an arm relative to another arm in the time to a target.

    Args:
        target: value to reach.
        arm, against: names of the arms.
        charged_s: seconds of planning that are added to the arm's time.
        speed: the ratio of times, above 1 if the arm was faster; None if a time is not known.
        at_least, at_most: bounds on the ratio if `speed` is None.
        arm_s, against_s: seconds to the target, by pair; infinite if not reached.
        is_gain, is_harm: verdicts, from the ratio or from bounds; False below five pairs.
    """

    target: float
    arm: str
    against: str
    charged_s: float
    speed: Interval | None
    at_least: float | None
    at_most: float | None
    arm_s: tuple[float, ...]
    against_s: tuple[float, ...]
    is_gain: bool
    is_harm: bool

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.arm_s)

    @property
    def reached(self) -> tuple[int, int]:
        """Number of runs that reached the target: of the arm, and of the other arm."""
        return sum(map(math.isfinite, self.arm_s)), sum(map(math.isfinite, self.against_s))

    @property
    def verdict(self) -> str:
        """Return "gain", "harm", "no gain" or "no verdict"."""
        if self.is_gain or self.is_harm:
            return "gain" if self.is_gain else "harm"
        return "no gain" if self.speed is not None and self.n >= MIN_PAIRS_FOR_VERDICT else "no verdict"

    @property
    def bound(self) -> str:
        """The bounds in words; "" with a ratio."""
        if self.speed is not None:
            return ""
        if self.at_least is not None:
            return f">= {self.at_least:.2f}x"
        return "never reached" if self.at_most is None else f"<= {self.at_most:.2f}x"


def time_to_target(
    table: ResultTable,
    metric: QualityMetric,
    target: float,
    arm: str,
    against: str,
    *,
    charged_s: float = 0.0,
    control: Interval | None = None,
) -> TargetSpeed | None:
    """Return the comparison of times to a target; None without a pair of evaluated runs.

    Args:
        charged_s: seconds of planning that count as time of `arm`.
        control: ratio of two runs of the baseline, for the resolution of the timing.
    """
    pairs = []
    for seed in table.seeds_of(against):
        points = [result_table.evaluations(table, each, metric.name, seed) for each in (arm, against)]
        if all(points):
            pairs.append((crossing(points[0], metric, target), crossing(points[1], metric, target)))
    if not pairs:
        return None
    ours_s, theirs_s = (tuple(pair[side].seconds + (0, charged_s)[side == 0] for pair in pairs) for side in (0, 1))
    known = all(map(math.isfinite, (*ours_s, *theirs_s))) and not any(a.is_early or b.is_early for a, b in pairs)
    found = ratio_interval([b / a for a, b in zip(ours_s, theirs_s, strict=True)]) if known else None
    # Bounds of every pair: the other arm took at least or at most so long, and the arm at most or at least so long.
    low = [_least(b) / (a.seconds + charged_s) for a, b in pairs]
    high = [b.seconds / least if (least := a.least_s + charged_s) > 0 else math.inf for a, b in pairs]
    below, above = _interval(low), _interval(high)
    edge = found or below
    gains = edge is not None and edge.n >= MIN_PAIRS_FOR_VERDICT and is_gain(edge, control)
    edge = found or above
    harms = (
        edge is not None and edge.n >= MIN_PAIRS_FOR_VERDICT and edge.high < 1 and 1 - edge.mean > resolution(control)
    )
    at_least = min(low) if found is None and min(low) > 0 and math.isfinite(min(low)) else None
    at_most = max(high) if found is None and at_least is None and math.isfinite(max(high)) else None
    return TargetSpeed(
        target, arm, against, charged_s, found, at_least, at_most, ours_s, theirs_s, gains, harms and not gains
    )


def _least(found: Crossing) -> float:
    """Return the seconds that the other arm took at least."""
    return 0.0 if found.is_early else found.seconds if math.isfinite(found.seconds) else found.least_s


def _interval(ratios: Sequence[float]) -> Interval | None:
    """Return the interval of bounds; None if a bound is zero or infinite."""
    return ratio_interval(ratios) if all(0 < ratio < math.inf for ratio in ratios) else None

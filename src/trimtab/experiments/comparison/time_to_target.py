"""Time to target of paired arms, with bounds for censored runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.record import RunRecord
from trimtab.experiments.comparison.comparison_result import NO_VERDICT, Ratio, TargetRow, Verdict
from trimtab.experiments.comparison.comparison_statistics import (
    Pair,
    Races,
    as_ratio,
    curve,
    error_of_run,
    failures,
    full_pairs,
    given_rows,
    is_beyond,
    time_to_target,
)
from trimtab.experiments.comparison.ratio_rows import joules_to
from trimtab.experiments.comparison.verdicts import speed_verdict
from trimtab.planner.statistics import Interval, ratio_interval

OTHER_EARLY = "not measured: the other arm reached the target before its first evaluation"


@dataclass(frozen=True)
class PlanningCharge:
    """Planning and search cost added to an arm's training; joules are None if unknown."""

    seconds: float
    joules: float | None = None


@dataclass(frozen=True)
class _Pair:
    """Seconds to target of an arm (charge included) and of the other arm, with censoring.

    A failed arm never reached the target.

    Args:
        ours, theirs: seconds to target; infinite if not reached.
        ours_early, theirs_early: True if crossed by the first evaluation, so that the time is an upper bound.
        cap_s: lower bound of the other arm's time if it did not reach the target.
        charge_s: charged seconds, a lower bound of the arm's time.
        cut_s: seconds (charge included) until a cap stopped the arm before a crossing; infinite if not stopped.
    """

    ours: float
    theirs: float
    ours_early: bool
    theirs_early: bool
    cap_s: float
    charge_s: float = 0.0
    cut_s: float = math.inf

    @property
    def least_s(self) -> float:
        """Lower bound of the arm's seconds."""
        return self.charge_s if self.ours_early else min(self.ours, self.cut_s)


@dataclass(frozen=True)
class _SpeedUpBounds:
    """Bounds of a speed-up with an unknown value, or the reason `why` for their absence."""

    at_least: float | None = None
    at_most: float | None = None
    why: str = ""

    @property
    def said(self) -> str:
        """The text for the `bound` field of a row."""
        if self.at_least is not None:
            return f">= {self.at_least:.2f}x"
        return self.why if self.at_most is None else f"<= {self.at_most:.2f}x"


def target_row(
    races: Races,
    arm: str,
    against: str,
    plan_kind: str,
    target: float,
    metric: str,
    higher_is_better: bool,
    charge: PlanningCharge | None,
    control: Interval | None = None,
    *,
    meter: MeterFacts = NO_METER,
) -> TargetRow | None:
    """Return the comparison of times to a target, with the charge added to the arm.

    Returns None without a pair of full runs.

    Args:
        races: records by seed and arm.
        arm, against: names of the arms.
        plan_kind: "equivalent" or "tuned" for plans, "" for recipes.
        target: value of the metric to reach.
        metric: name of the metric.
        higher_is_better: direction of the metric.
        charge: planning cost added to the arm, or None.
        control: A/A interval of the reference.
        meter: energy meter of the runs; joules are reported only with a meter.
    """
    records = full_pairs(races, arm, against)
    if not records:
        return None
    charge_s = charge.seconds if charge is not None else 0.0
    pairs = [_pair(*pair, metric, target, higher_is_better, charge_s) for pair in records]
    ratio, limits, verdict = _judge(pairs, control, arm, against)
    if said := failures(races, arm, against):
        verdict = Verdict(NO_VERDICT, f"{said}: {verdict.sentence}", "arm.failed")
    spent = [] if meter.is_absent else _joules(records, pairs, charge or PlanningCharge(0.0, 0.0))
    spent_ratios = [ours / theirs for ours, theirs in spent]
    return TargetRow(
        target=target,
        arm=arm,
        against=against,
        plan_kind=plan_kind,
        charged=charge is not None,
        ratio=ratio,
        bound=limits.said,
        reached_arm=sum(math.isfinite(pair.ours) for pair in pairs),
        reached_against=sum(math.isfinite(pair.theirs) for pair in pairs),
        n=len(pairs),
        left_censored=sum(pair.ours_early or pair.theirs_early for pair in pairs),
        arm_s=tuple(pair.ours for pair in pairs),
        against_s=tuple(pair.theirs for pair in pairs),
        verdict=verdict,
        arm_samples=max(given_rows(record) for record, _ in records),
        against_samples=max(given_rows(other) for _, other in records),
        arm_j=tuple(ours for ours, _ in spent),
        against_j=tuple(theirs for _, theirs in spent),
        energy=as_ratio(ratio_interval(spent_ratios), spent_ratios) if len(spent_ratios) == len(pairs) else None,
        at_least=limits.at_least,
        at_most=limits.at_most,
        failed=said,
    )


def _joules(records: list[Pair], pairs: list[_Pair], charge: PlanningCharge) -> list[tuple[float, float]]:
    """Return the joules to target of pairs with uncensored times and energy figures."""
    found: list[tuple[float, float]] = []
    if charge.joules is None:
        return found
    for (record, other), pair in zip(records, pairs, strict=True):
        if not (pair.ours_early or pair.theirs_early):
            ours, theirs = joules_to(record, pair.ours - charge.seconds), joules_to(other, pair.theirs)
            found += [] if ours is None or theirs is None else [(charge.joules + ours, theirs)]
    return found


def _pair(
    record: RunRecord, other: RunRecord, metric: str, target: float, higher_is_better: bool, charge_s: float
) -> _Pair:
    ours, ours_early = time_to_target(record, metric, target, higher_is_better)
    theirs, theirs_early = time_to_target(other, metric, target, higher_is_better)
    # If the other arm failed after its crossing, its time to the crossing is the most that may count against it.
    cap_s = theirs if math.isfinite(theirs) else _not_yet_s(other, metric, target, higher_is_better)
    was_cut = math.isinf(ours) and not error_of_run(record) and record.end is not None and record.end.reason == "cap"
    cut_s = _not_yet_s(record, metric, target, higher_is_better) + charge_s if was_cut else math.inf
    ours, theirs = (math.inf if error_of_run(run) else seconds for run, seconds in ((record, ours), (other, theirs)))
    return _Pair(ours + charge_s, theirs, ours_early, theirs_early, cap_s, charge_s, cut_s)


def _not_yet_s(record: RunRecord, metric: str, target: float, higher_is_better: bool) -> float:
    """Return the time of an arm's last evaluation short of the target.

    Training after that evaluation does not rule out a crossing, because a crossing is interpolated from the evaluation
    before.
    """
    points = curve(record, metric)
    before = len(points)
    while before and is_beyond(points[before - 1][2], target, higher_is_better):
        before -= 1
    return points[before - 1][1] if before else 0.0


def _judge(
    pairs: list[_Pair], control: Interval | None, arm: str, against: str
) -> tuple[Ratio | None, _SpeedUpBounds, Verdict]:
    """Return (ratio, limits, verdict), with either a ratio or limits."""
    if (loss := _sure_loss(pairs, control, arm, against)) is not None:
        return None, *loss
    ratios = [min(pair.cap_s, pair.theirs) / pair.ours for pair in pairs]
    if unknown := _unknown(pairs) or (None if min(ratios) > 0 else _SpeedUpBounds(at_least=0.0)):
        return (
            None,
            unknown,
            Verdict(NO_VERDICT, unknown.said, "target.not_reached" if unknown.why else "target.censored"),
        )
    ratio = as_ratio(ratio_interval(ratios), ratios)
    verdict = speed_verdict(ratio, control, arm, against)
    is_behind = any(math.isinf(pair.theirs) for pair in pairs)
    if not is_behind and not any(pair.ours_early for pair in pairs):
        return ratio, _SpeedUpBounds(), verdict
    # All ratios are lower bounds here, and so is their mean. If the other arm did not reach the target, its time is
    # unbounded, so the smallest ratio is reported; otherwise the interval's lower end.
    least = min(ratios) if is_behind or ratio.low is None else ratio.low
    if verdict.kind == "gain" and least < 1 and ratio.low is not None:
        least = ratio.low  # The verdict rests on this bound; a bound below 1 would contradict the gain.
    limits = _SpeedUpBounds(at_least=_down(least))
    why = (
        "the other arm had not reached the target when it ended"
        if is_behind
        else "the arm had reached the target by its first evaluation"
    )
    if verdict.kind == "gain":
        return None, limits, Verdict("gain", f"{arm} is faster than {against}, {limits.said}: {why}", "speed.gain")
    return None, limits, Verdict(NO_VERDICT, f"{limits.said}: {why}", "target.censored")


def _sure_loss(
    pairs: list[_Pair], control: Interval | None, arm: str, against: str
) -> tuple[_SpeedUpBounds, Verdict] | None:
    """Return (limits, verdict) if the arm is certainly slower than the other arm, otherwise None.

    Bounds suffice to show a loss. A crossing by the first evaluation gives an upper bound on the other arm's time, and
    the charge is a lower bound for the arm. A cap before the crossing also gives a lower bound for the arm.
    """
    cut = sum(math.isfinite(pair.cut_s) for pair in pairs)
    if not cut and not any(pair.ours_early or pair.theirs_early for pair in pairs):
        return None
    if not (ratios := _most(pairs)):
        return None
    most = as_ratio(ratio_interval(ratios), ratios)
    if most.high is None or speed_verdict(most, control, arm, against).kind != "harm":
        return None
    limits = _SpeedUpBounds(at_most=_up(most.high))
    if cut:
        why = f"the time cap stopped the arm before the target in {cut} of {len(pairs)} pairs"
    else:
        why = (
            "the charged planning alone takes longer"
            if any(p.ours_early for p in pairs)
            else "the other arm had reached the target by its first evaluation"
        )
    return limits, Verdict("harm", f"{arm} is slower than {against}, {limits.said}: {why}", "speed.harm")


def _down(ratio: float) -> float:
    """Return a lower bound, rounded down to a hundredth."""
    return math.floor(100 * ratio + 1e-9) / 100


def _up(ratio: float) -> float:
    """Return an upper bound, rounded up to a hundredth."""
    return math.ceil(100 * ratio - 1e-9) / 100


def _most(pairs: list[_Pair]) -> list[float]:
    """Return the upper bound of the speed-up by pair, or [] if any bound is unknown."""
    known = all(0 < pair.least_s < math.inf and pair.theirs < math.inf for pair in pairs)
    return [pair.theirs / pair.least_s for pair in pairs] if known else []


def _unknown(pairs: list[_Pair]) -> _SpeedUpBounds | None:
    """Return limits if some pair lacks the arm's time or a lower bound for the other arm; otherwise None."""
    never = [math.isinf(pair.ours) for pair in pairs]
    if any(never) and (most := _most(pairs)):
        return _SpeedUpBounds(at_most=_up(max(most)))
    if all(never):
        is_neither = all(math.isinf(pair.theirs) for pair in pairs)
        return _SpeedUpBounds(why="never reached by either arm" if is_neither else "never reached")
    if any(never):
        return _SpeedUpBounds(why="reached in some pairs only")
    return _SpeedUpBounds(why=OTHER_EARLY) if any(pair.theirs_early for pair in pairs) else None

"""Seconds to the rungs of the ladder, with what censoring leaves to be said."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core.energy import NO_METER, MeterFacts
from trimtab.core.record import RunRecord
from trimtab.decide.statistics import Interval, ratio_interval
from trimtab.experiments.comparison.energy_rows import joules_to
from trimtab.experiments.comparison.result import NO_VERDICT, Ratio, TargetRow, Verdict
from trimtab.experiments.comparison.stats import (
    Pair,
    Races,
    as_ratio,
    curve,
    failed,
    failures,
    given_rows,
    is_beyond,
    time_to_target,
    whole,
)
from trimtab.experiments.comparison.verdicts import speed_verdict

OTHER_EARLY = "not measured: the other crossed before its first evaluation"


@dataclass(frozen=True)
class Charge:
    """What an arm is charged beside its training: seconds of planning and search, and their joules; None: not known."""

    seconds: float
    joules: float | None = None


@dataclass(frozen=True)
class _Pair:
    """Seconds to a target of an arm (charge included) and of another, and what is known of them.

    An arm that failed never reached it. `early`: crossed by the first evaluation, so that the time is an upper bound.
    `cap_s`: how long the other is known to have taken at least, where it never reached it. `charge_s`: what is charged,
    which an arm takes however early it crosses. `cut_s`: how long the arm had taken when it was stopped by a cap before
    it crossed (charge included); infinite where it was not.
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
        """Seconds that the arm took at the least."""
        return self.charge_s if self.ours_early else min(self.ours, self.cut_s)


@dataclass(frozen=True)
class _Limits:
    """What is known of a speed that is not known itself: at least or at most so much, else `why` it is neither."""

    at_least: float | None = None
    at_most: float | None = None
    why: str = ""

    @property
    def said(self) -> str:
        """It as a row's `bound`."""
        if self.at_least is not None:
            return f">= {self.at_least:.2f}x"
        return self.why if self.at_most is None else f"<= {self.at_most:.2f}x"


def target_row(
    races: Races,
    arm: str,
    against: str,
    tier: str,
    target: float,
    metric: str,
    higher_is_better: bool,
    charge: Charge | None,
    control: Interval | None = None,
    *,
    meter: MeterFacts = NO_METER,
) -> TargetRow | None:
    """Return one rung of the ladder; what the arm is charged is added to it.

    None when the two were to run to the end in no race.

    Args:
        meter: of the races, whose joules are told.
    """
    records = whole(races, arm, against)
    if not records:
        return None
    charge_s = charge.seconds if charge is not None else 0.0
    pairs = [_pair(*pair, metric, target, higher_is_better, charge_s) for pair in records]
    ratio, limits, verdict = _judge(pairs, control, arm, against)
    if said := failures(races, arm, against):
        verdict = Verdict(NO_VERDICT, f"{said}: {verdict.sentence}")
    spent = [] if meter.is_absent else _joules(records, pairs, charge or Charge(0.0, 0.0))
    spent_ratios = [ours / theirs for ours, theirs in spent]
    return TargetRow(
        target=target,
        arm=arm,
        against=against,
        tier=tier,
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
        arm_rows=max(given_rows(record) for record, _ in records),
        against_rows=max(given_rows(other) for _, other in records),
        arm_j=tuple(ours for ours, _ in spent),
        against_j=tuple(theirs for _, theirs in spent),
        energy=as_ratio(ratio_interval(spent_ratios), spent_ratios) if len(spent_ratios) == len(pairs) else None,
        at_least=limits.at_least,
        at_most=limits.at_most,
        failed=said,
    )


def _joules(records: list[Pair], pairs: list[_Pair], charge: Charge) -> list[tuple[float, float]]:
    """Return the joules to the target of pairs whose seconds to it are known exactly, where they were counted."""
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
    # Where the other failed after it had crossed, no more than that time may be counted against it.
    cap_s = theirs if math.isfinite(theirs) else _not_yet_s(other, metric, target, higher_is_better)
    was_cut = math.isinf(ours) and not failed(record) and record.end is not None and record.end.reason == "cap"
    cut_s = _not_yet_s(record, metric, target, higher_is_better) + charge_s if was_cut else math.inf
    ours, theirs = (math.inf if failed(run) else seconds for run, seconds in ((record, ours), (other, theirs)))
    return _Pair(ours + charge_s, theirs, ours_early, theirs_early, cap_s, charge_s, cut_s)


def _not_yet_s(record: RunRecord, metric: str, target: float, higher_is_better: bool) -> float:
    """Return how long an arm trained without a crossing: to its last evaluation that is not beyond the target.

    What it trained for after that rules none out: a crossing is told from the evaluation before it.
    """
    points = curve(record, metric)
    before = len(points)
    while before and is_beyond(points[before - 1][2], target, higher_is_better):
        before -= 1
    return points[before - 1][1] if before else 0.0


def _judge(
    pairs: list[_Pair], control: Interval | None, arm: str, against: str
) -> tuple[Ratio | None, _Limits, Verdict]:
    """Return (ratio, limits, verdict): one of ratio and limits."""
    if (loss := _sure_loss(pairs, control, arm, against)) is not None:
        return None, *loss
    ratios = [min(pair.cap_s, pair.theirs) / pair.ours for pair in pairs]
    if unknown := _unknown(pairs) or (None if min(ratios) > 0 else _Limits(at_least=0.0)):
        return None, unknown, Verdict(NO_VERDICT, unknown.said)
    ratio = as_ratio(ratio_interval(ratios), ratios)
    verdict = speed_verdict(ratio, control, arm, against)
    is_behind = any(math.isinf(pair.theirs) for pair in pairs)
    if not is_behind and not any(pair.ours_early for pair in pairs):
        return ratio, _Limits(), verdict
    # Each such ratio is a lower bound, and so is their mean. How long the other would have taken is anyone's guess, so
    # that there the least of them is what can be said; else the interval's lower end.
    least = min(ratios) if is_behind or ratio.low is None else ratio.low
    if verdict.kind == "gain" and least < 1 and ratio.low is not None:
        least = ratio.low  # what the verdict rests on: a least that says "slower" would speak against it
    limits = _Limits(at_least=_down(least))
    why = "the other had not come there when it ended" if is_behind else "it had crossed by its first evaluation"
    if verdict.kind == "gain":
        return None, limits, Verdict("gain", f"{arm} is faster than {against}, {limits.said}: {why}")
    return None, limits, Verdict(NO_VERDICT, f"{limits.said}: {why}")


def _sure_loss(pairs: list[_Pair], control: Interval | None, arm: str, against: str) -> tuple[_Limits, Verdict] | None:
    """Return (limits, verdict) where the arm surely took longer than the other, or None.

    Times that are bounds show a loss all the same. Where an arm had crossed by its first evaluation they are upper
    ones: the other's as it stands, the arm's by what it took at the least. Where a cap stopped the arm before it
    crossed, it took that long at the least.
    """
    cut = sum(math.isfinite(pair.cut_s) for pair in pairs)
    if not cut and not any(pair.ours_early or pair.theirs_early for pair in pairs):
        return None
    if not (ratios := _most(pairs)):
        return None
    most = as_ratio(ratio_interval(ratios), ratios)
    if most.high is None or speed_verdict(most, control, arm, against).kind != "harm":
        return None
    limits = _Limits(at_most=_up(most.high))
    if cut:
        why = f"its cap stopped it before it was there in {cut} of {len(pairs)} pairs"
    else:
        why = "what is charged alone takes longer" if any(p.ours_early for p in pairs) else "the other crossed at once"
    return limits, Verdict("harm", f"{arm} is slower than {against}, {limits.said}: {why}")


def _down(ratio: float) -> float:
    """Return a lower bound, rounded down to a hundredth."""
    return math.floor(100 * ratio + 1e-9) / 100


def _up(ratio: float) -> float:
    """Return an upper bound, rounded up to a hundredth."""
    return math.ceil(100 * ratio - 1e-9) / 100


def _most(pairs: list[_Pair]) -> list[float]:
    """Return how many times as fast as the other the arm can be in each pair at the most; []: of some it is unknown."""
    known = all(0 < pair.least_s < math.inf and pair.theirs < math.inf for pair in pairs)
    return [pair.theirs / pair.least_s for pair in pairs] if known else []


def _unknown(pairs: list[_Pair]) -> _Limits | None:
    """Return what pairs allow in which it is not known how long the arm took, or the other at the least; else None."""
    never = [math.isinf(pair.ours) for pair in pairs]
    if any(never) and (most := _most(pairs)):
        return _Limits(at_most=_up(max(most)))
    if all(never):
        is_neither = all(math.isinf(pair.theirs) for pair in pairs)
        return _Limits(why="never reached by either" if is_neither else "never reached")
    if any(never):
        return _Limits(why="reached in some pairs only")
    return _Limits(why=OTHER_EARLY) if any(pair.theirs_early for pair in pairs) else None

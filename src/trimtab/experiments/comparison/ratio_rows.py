"""Ratios with their verdicts: throughput, quality and memory of one arm against another's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from trimtab.core.record import RunRecord
from trimtab.decide.statistics import Interval, mean_interval, ratio_interval
from trimtab.experiments.comparison.result import NO_VERDICT, Ratio, RatioRow, Verdict
from trimtab.experiments.comparison.stats import (
    ALIKE,
    Races,
    as_ratio,
    cpu_ratios,
    curve,
    failures,
    given_rows,
    throughput_ratios,
    to_the_end,
)
from trimtab.experiments.comparison.verdicts import control_verdict, non_inferiority, quality_verdict, speed_verdict

# Counted again, the peak of the same step differs by up to 1%.
SAME_PEAK = 0.02


def throughput_row(races: Races, arm: str, against: str, tier: str, control: Interval | None) -> RatioRow | None:
    """Return the throughput ratio of an arm over another; None without a common race.

    The arm "self" is the control: it is held against nothing but itself.
    """
    ratios = throughput_ratios(races, arm, against)
    if not ratios:
        return None
    ratio = as_ratio(ratio_interval(ratios), ratios)
    verdict = control_verdict(ratio) if arm == "self" else speed_verdict(ratio, control, arm, against)
    cpu, ends = _cpu(races, arm, against, len(ratios)), len(to_the_end(races, arm, against))
    return row_unless_failed(RatioRow("throughput", arm, against, tier, ratio, verdict, cpu, ends), races)


def do_no_harm_row(races: Races, arm: str, against: str, tier: str) -> RatioRow | None:
    """Return the throughput ratio of a plan over the tuned loop that it was made for; None without a common race."""
    ratios = throughput_ratios(races, arm, against)
    if not ratios:
        return None
    ratio = as_ratio(ratio_interval(ratios), ratios)
    whole = len(to_the_end(races, arm, against))
    row = RatioRow("do_no_harm", arm, against, tier, ratio, non_inferiority(ratio), whole=whole)
    return row_unless_failed(row, races)


def row_unless_failed(row: RatioRow, races: Races) -> RatioRow:
    """Return the row, or one without a verdict that says so where one of its arms failed in some race."""
    said = failures(races, row.arm, row.against)
    return replace(row, verdict=_of_what_ran(said), failed=said) if said else row


def unless_failed(verdict: Verdict, races: Races, *arms: str) -> Verdict:
    """Return the verdict, or none where one of the arms failed in some race."""
    said = failures(races, *arms)
    return _of_what_ran(said) if said else verdict


def _of_what_ran(said: str) -> Verdict:
    return Verdict(NO_VERDICT, f"{said}: the figure is of what ran")


def _cpu(races: Races, arm: str, against: str, pairs: int) -> Ratio | None:
    """Return the ratio in processor time, only where it is of the same pairs."""
    ratios = cpu_ratios(races, arm, against)
    return as_ratio(ratio_interval(ratios), ratios) if len(ratios) == pairs else None


def quality_row(
    races: Races,
    arm: str,
    against: str,
    tier: str,
    metric: str,
    higher_is_better: bool,
    unit: str,
    *,
    at_equal_rows: bool = False,
) -> RatioRow | None:
    """Return the difference of the held-out metric (better > 0): points of a share or a percentage, else percent.

    Tier S is judged at equal samples; tier F, which may train on fewer, at the end of both, which a cap on the time
    may be. None for tier F as soon as one run of a pair stopped for another reason: the pairs that are left would be
    selected by their outcome. Nothing is relative to a metric of zero: no verdict then.

    Args:
        unit: of the metric, as `Metric` has it: "share", "percent" or "relative". at_equal_rows: whether tier F is
            judged there too, at the last rows that are nearly alike: windows of several batches end beyond them.
    """
    pairs = to_the_end(races, arm, against)
    if tier == "F" and not all(_ran_out(record) for pair in pairs for record in pair):
        return None
    how = _at_the_ends if tier == "F" and not at_equal_rows else _last_alike if tier == "F" else _last_common
    differences, compared = [], []
    for ours, theirs in pairs:
        mine, yours = by_rows(ours, metric), by_rows(theirs, metric)
        if (last := how(mine, yours)) is not None:
            differences.append(difference(mine[last[0]], yours[last[1]], higher_is_better, unit))
            compared.append((last[1], given_rows(theirs)))
    if not differences:
        return None
    interval = mean_interval(differences)
    ratio = as_ratio(interval, differences)
    verdict = quality_verdict(ratio, tier, unit)
    verdict = replace(verdict, sentence=f"{verdict.sentence}{_short_of_the_end(compared)}")
    return row_unless_failed(RatioRow("final_metric_difference", arm, against, tier, ratio, verdict), races)


def _short_of_the_end(compared: Iterable[tuple[int, int]]) -> str:
    """Say where metrics are compared, (rows, rows that were to be trained on): "" where that is the end of training."""
    rows, given = min(compared, key=lambda pair: pair[0] / max(pair[1], 1))
    return "" if rows >= (1 - ALIKE) * given else f", after {rows:,} of {given:,} rows"


def _at_the_ends(mine: Collection[int], yours: Collection[int]) -> tuple[int, int] | None:
    """Return the last rows of each, or None."""
    return (max(mine), max(yours)) if mine and yours else None


def _last_common(mine: Collection[int], yours: Collection[int]) -> tuple[int, int] | None:
    """Return the last rows that both were evaluated after, or None."""
    last = max({*mine} & {*yours}, default=None)
    return None if last is None else (last, last)


def _last_alike(mine: Collection[int], yours: Collection[int]) -> tuple[int, int] | None:
    """Return the last rows of each that are within `ALIKE` of one another, or None."""
    pairs = [(ours, theirs) for ours in mine for theirs in yours if abs(ours - theirs) <= ALIKE * theirs]
    return max(pairs, key=lambda pair: (min(pair), -abs(pair[0] - pair[1])), default=None)


def difference(ours: float, theirs: float, higher_is_better: bool, unit: str) -> float:
    """Return how much better ours is, in points of a share or a percentage, else in percent of theirs."""
    better = ours - theirs if higher_is_better else theirs - ours
    if unit == "relative":
        return 100.0 * better / abs(theirs) if theirs else math.nan
    return better * (100.0 if unit == "share" else 1.0)


def _ran_out(record: RunRecord) -> bool:
    return record.end is not None and record.end.reason in ("budget", "cap")


def by_rows(record: RunRecord, metric: str) -> dict[int, float]:
    """Return a held-out metric by the rows that were trained on before."""
    return {rows: value for rows, _, value in curve(record, metric)}


def memory_row(races: Races, arm: str, against: str, tier: str, ours: int, theirs: int) -> RatioRow:
    """Return the ratio of peaks, measured once each: counted allocations, so no interval."""
    ratio = counted(ours / theirs)
    return row_unless_failed(RatioRow("peak_memory", arm, against, tier, ratio, memory_verdict(ratio, against)), races)


def counted(value: float) -> Ratio:
    """Return a ratio of counts."""
    return Ratio(value, None, None, 1, (value,), counted=True)


def memory_verdict(ratio: Ratio, against: str) -> Verdict:
    """Return gain, harm or no gain of a ratio of two counted peaks."""
    value = ratio.mean
    kind = "gain" if value < 1 - SAME_PEAK else ("harm" if value > 1 + SAME_PEAK else "no gain")
    return Verdict(kind, f"{value:.3f}x the peak of {against}")

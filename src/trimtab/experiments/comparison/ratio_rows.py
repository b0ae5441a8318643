"""Ratios with verdicts: throughput, quality and memory of an arm against another arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from trimtab.core.energy_reading import NO_METER, WINDOW_S, Energy, MeterFacts, Provenance
from trimtab.core.record import RunRecord
from trimtab.core.serialization import from_jsonable
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.comparison_result import NO_VERDICT, Ratio, RatioRow, Verdict
from trimtab.experiments.comparison.comparison_statistics import (
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
from trimtab.experiments.comparison.verdicts import (
    clear_side,
    control_verdict,
    non_inferiority,
    quality_verdict,
    ratio_in_words,
    speed_verdict,
    too_few,
    without_control,
)
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, mean_interval, ratio_interval, resolution

# Repeated measurements of the peak of the same step differ by up to 1%.
SAME_PEAK = 0.02


def throughput_row(races: Races, arm: str, against: str, plan_kind: str, control: Interval | None) -> RatioRow | None:
    """Return the throughput ratio of two arms, or None without a common run.

    The arm "self" is the A/A control and gets the control's verdict.
    """
    ratios = throughput_ratios(races, arm, against)
    if not ratios:
        return None
    ratio = as_ratio(ratio_interval(ratios), ratios)
    verdict = control_verdict(ratio) if arm == "self" else speed_verdict(ratio, control, arm, against)
    cpu, ends = _cpu(races, arm, against, len(ratios)), len(to_the_end(races, arm, against))
    return row_unless_failed(RatioRow("throughput", arm, against, plan_kind, ratio, verdict, cpu, ends), races)


def do_no_harm_row(races: Races, arm: str, against: str, plan_kind: str) -> RatioRow | None:
    """Return the throughput ratio of a plan over its hand-tuned loop, or None without a common run."""
    ratios = throughput_ratios(races, arm, against)
    if not ratios:
        return None
    ratio = as_ratio(ratio_interval(ratios), ratios)
    whole = len(to_the_end(races, arm, against))
    row = RatioRow("do_no_harm", arm, against, plan_kind, ratio, non_inferiority(ratio), whole=whole)
    return row_unless_failed(row, races)


def row_unless_failed(row: RatioRow, races: Races) -> RatioRow:
    """Return the row, with its verdict replaced if an arm failed in some run."""
    said = failures(races, row.arm, row.against)
    return replace(row, verdict=_of_what_ran(said), failed=said) if said else row


def unless_failed(verdict: Verdict, races: Races, *arms: str) -> Verdict:
    """Return the verdict, or "no verdict" if an arm failed in some run."""
    said = failures(races, *arms)
    return _of_what_ran(said) if said else verdict


def _of_what_ran(said: str) -> Verdict:
    return Verdict(NO_VERDICT, f"{said}: the figure covers the remaining runs", "arm.failed")


def _cpu(races: Races, arm: str, against: str, pairs: int) -> Ratio | None:
    """Return the ratio in CPU time if recorded for all pairs, otherwise None."""
    ratios = cpu_ratios(races, arm, against)
    return as_ratio(ratio_interval(ratios), ratios) if len(ratios) == pairs else None


def quality_row(
    races: Races,
    arm: str,
    against: str,
    plan_kind: str,
    metric: str,
    higher_is_better: bool,
    unit: str,
    *,
    at_equal_samples: bool = False,
) -> RatioRow | None:
    """Return the difference of the held-out metric (above 0 is better), in points or percent.

    The comparison is of pairs of runs with the same seed, one run of each arm (a compared setting: the baseline, a
    plan or a recipe):

    - An equivalent plan or a recipe is compared at the last evaluation after equal numbers of samples.
    - A tuned plan may train on fewer samples, and is compared at the last evaluations of both runs. The runs must have
      used up their samples or their time limit. If any run of these pairs stopped for another reason, the result is
      None: the pairs that remain would be selected by their outcome.

    Args:
        races: records by seed and arm.
        arm: name of the arm.
        against: name of the arm to compare with.
        plan_kind: "equivalent" for an equivalent plan, "tuned" for a tuned plan, "" for a recipe.
        metric: name of the metric.
        higher_is_better: direction of the metric.
        unit: unit of the metric: "share", "percent" or "relative".
        at_equal_samples: True to compare a tuned plan at nearly equal numbers of samples. Equal numbers are rare,
            because a step of several batches can exceed the run's number of samples.

    Returns:
        The difference with its verdict; None without a pair to compare. A relative difference to a metric of zero is
        undefined and has no verdict.
    """
    pairs = to_the_end(races, arm, against)
    if plan_kind == "tuned" and not all(_ran_out(record) for pair in pairs for record in pair):
        return None
    how = (
        _at_the_ends
        if plan_kind == "tuned" and not at_equal_samples
        else _last_alike
        if plan_kind == "tuned"
        else _last_common
    )
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
    verdict = quality_verdict(ratio, plan_kind, unit)
    verdict = replace(verdict, sentence=f"{verdict.sentence}{_short_of_the_end(compared)}")
    return row_unless_failed(RatioRow("final_metric_difference", arm, against, plan_kind, ratio, verdict), races)


def _short_of_the_end(compared: Iterable[tuple[int, int]]) -> str:
    """Return the position of the comparison in training as text, or "" for the end of training."""
    rows, given = min(compared, key=lambda pair: pair[0] / max(pair[1], 1))
    return "" if rows >= (1 - ALIKE) * given else f", after {rows:,} of {given:,} samples"


def _at_the_ends(mine: Collection[int], yours: Collection[int]) -> tuple[int, int] | None:
    """Return the samples at the last evaluation of both arms, or None."""
    return (max(mine), max(yours)) if mine and yours else None


def _last_common(mine: Collection[int], yours: Collection[int]) -> tuple[int, int] | None:
    """Return the samples at the last common evaluation, or None."""
    last = max({*mine} & {*yours}, default=None)
    return None if last is None else (last, last)


def _last_alike(mine: Collection[int], yours: Collection[int]) -> tuple[int, int] | None:
    """Return the samples at the last evaluations within `ALIKE` of each other, or None."""
    pairs = [(ours, theirs) for ours in mine for theirs in yours if abs(ours - theirs) <= ALIKE * theirs]
    return max(pairs, key=lambda pair: (min(pair), -abs(pair[0] - pair[1])), default=None)


def difference(ours: float, theirs: float, higher_is_better: bool, unit: str) -> float:
    """Return the improvement in points for a fraction or percentage, otherwise in percent of the other value."""
    better = ours - theirs if higher_is_better else theirs - ours
    if unit == "relative":
        return 100.0 * better / abs(theirs) if theirs else math.nan
    return better * (100.0 if unit == "share" else 1.0)


def _ran_out(record: RunRecord) -> bool:
    return record.end is not None and record.end.reason in ("budget", "cap")


def by_rows(record: RunRecord, metric: str) -> dict[int, float]:
    """Return a held-out metric by number of samples trained on."""
    return {rows: value for rows, _, value in curve(record, metric)}


def memory_row(races: Races, arm: str, against: str, plan_kind: str, ours: int, theirs: int) -> RatioRow:
    """Return the ratio of peak memory; peaks are counted allocations, so there is no interval."""
    ratio = ratio_of_counts(ours / theirs)
    return row_unless_failed(
        RatioRow("peak_memory", arm, against, plan_kind, ratio, memory_verdict(ratio, against)), races
    )


def ratio_of_counts(value: float) -> Ratio:
    """Return a ratio of counts."""
    return Ratio(value, None, None, 1, (value,), counted=True)


def memory_verdict(ratio: Ratio, against: str) -> Verdict:
    """Return gain, harm or no gain for a ratio of two peaks."""
    value = ratio.mean
    kind = "gain" if value < 1 - SAME_PEAK else ("harm" if value > 1 + SAME_PEAK else "no gain")
    code = {"gain": "memory.lower", "harm": "memory.higher", "no gain": "memory.equal"}[kind]
    return Verdict(kind, f"{value:.3f}x the peak of {against}", code)


# Energy of arms from records: joules per sample, joules to target, and ratios to another arm.

# Key in a header's detail: the description of the energy meter.
METER = "meter"
# Minimum fraction of an arm's seconds with measured energy, to extrapolate the remainder by mean power.
_KNOWN = 0.5


def meter_of(races: comparison_statistics.Races) -> MeterFacts:
    """Return the energy meter shared by all runs, or an absent meter if runs used different meters."""
    headers = (record.header for race in races.values() for record in race.values())
    found = [from_jsonable(MeterFacts, header.detail[METER]) for header in headers if header.detail.get(METER)]
    if len({(each.provenance, each.sources) for each in found}) > 1:
        return MeterFacts(Provenance.ABSENT, reason="runs were measured by different meters, which are not combined")
    return _as_all_say(found) if found else NO_METER


def _as_all_say(found: Sequence[MeterFacts]) -> MeterFacts:
    """Return the combined meter of several processes: median idle power, common limits, union of uncounted devices."""
    first, idle = found[0], [each.idle_w for each in found if each.idle_w is not None]
    return replace(
        first,
        idle_w=statistics.median(idle) if idle else None,
        uncounted=tuple(dict.fromkeys(what for each in found for what in each.uncounted)),
        limits=tuple(limit for limit in first.limits if all(limit in each.limits for each in found)),
    )


def of_planning(spent: Mapping[str, Energy], meter: MeterFacts) -> dict[str, Energy]:
    """Return planning energy by plan, limited to plans measured by the same meter as the paired runs."""
    counted = (meter.provenance, meter.sources)
    return {
        key: each
        for key, each in spent.items()
        if each.joules is not None and (each.provenance, each.sources) == counted
    }


def watts(record: RunRecord) -> float | None:
    """Return an arm's mean power over blocks with known energy, or None if these cover less than half of the time."""
    blocks = comparison_statistics.blocks(record)
    known = [block for block in blocks if math.isfinite(block.energy_j)]
    seconds, all_s = (math.fsum(block.seconds for block in each) for each in (known, blocks))
    return math.fsum(block.energy_j for block in known) / seconds if seconds > _KNOWN * all_s else None


def short_blocks(record: RunRecord) -> tuple[int, int]:
    """Return (blocks too short for the energy meter, all blocks) of an arm, without the first block."""
    found = comparison_statistics.blocks(record)
    found = found[1:] or found
    short = [block for block in found if math.isnan(block.energy_j) and block.seconds < WINDOW_S]
    return len(short), len(found)


def joules_to(record: RunRecord, seconds: float) -> float | None:
    """Return the energy of the first `seconds` of training, with unmeasured blocks at the arm's mean power."""
    power_w = watts(record)
    if power_w is None or not math.isfinite(seconds):
        return None
    joules, left_s = [], seconds
    for block in comparison_statistics.blocks(record):
        share = min(1.0, left_s / block.seconds) if block.seconds > 0 else 0.0
        whole = block.energy_j if math.isfinite(block.energy_j) else power_w * block.seconds
        joules.append(share * whole)
        left_s -= block.seconds
        if left_s <= 0:
            break
    return math.fsum(joules)


def energy_control(races: comparison_statistics.Races) -> Interval | None:
    """Return the A/A interval of the reference's energy, or None without a control or after a failure."""
    ratios = comparison_statistics.energy_ratios(races, "self", "reference")
    return ratio_interval(ratios) if len(ratios) > 1 and not comparison_statistics.failed_in(races, "self") else None


def energy_row(
    races: comparison_statistics.Races,
    arm: str,
    against: str,
    plan_kind: str,
    meter: MeterFacts,
    control: Interval | None,
) -> RatioRow | None:
    """Return the ratio of joules per sample (below 1 is better), or None without energy figures.

    Args:
        races: records by seed and arm.
        arm, against: names of the arms.
        plan_kind: "equivalent", "tuned" or "".
        meter: the meter of the runs, from `meter_of`.
        control: the A/A interval, from `energy_control`.
    """
    ratios = [] if meter.is_absent else comparison_statistics.energy_ratios(races, arm, against)
    if not ratios:
        return None
    ratio = comparison_statistics.as_ratio(ratio_interval(ratios), ratios)
    if meter.provenance is Provenance.MEASURED:
        verdict = energy_verdict(ratio, control, arm, against)
    else:
        sentence = "estimated from a given power, so the ratio only reflects the times"
        verdict = Verdict(NO_VERDICT, sentence, "energy.estimated")
    return row_unless_failed(RatioRow("energy", arm, against, plan_kind, ratio, verdict), races)


def energy_verdict(ratio: Ratio, control: Interval | None, arm: str, against: str) -> Verdict:
    """Return gain, harm or no gain; no verdict below five pairs of the ratio or of the A/A control."""
    found = f"{arm} takes {ratio_in_words(ratio)} the energy of {against}"
    if comparison_statistics.bounds(ratio) is None:
        return too_few(ratio)
    if control is None or control.n < MIN_PAIRS_FOR_VERDICT:
        return without_control(control, f"{ratio_in_words(ratio)} the energy")
    # Samples per joule are judged like samples per second: above 1 is better.
    side = clear_side(ratio.inverse, Interval(1 / control.mean, 1 / control.high, 1 / control.low, control.n))
    if isinstance(side, Verdict):
        return side
    if side:
        kind = "gain" if side > 0 else "harm"
        return Verdict(kind, found, f"energy.{kind}")
    sentence = f"{found}, not significant; the A/A control resolves {100 * resolution(control):.2g}%"
    return Verdict("no gain", sentence, "energy.not_significant")

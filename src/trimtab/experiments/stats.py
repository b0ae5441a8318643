"""From the records of races to ratios and times to target (math: section 8). Reads records, nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trimtab.core.record import BRIEF, RunRecord
from trimtab.decide.statistics import (
    MIN_PAIRS_FOR_VERDICT,
    Interval,
    mean_interval,
    ratio_interval,
    resolution,
)
from trimtab.experiments.result import Ratio, RatioRow, TargetRow, Verdict

Races = Mapping[int, Mapping[str, RunRecord]]  # seed -> arm name -> record
NON_INFERIOR = 0.97
QUALITY = 0.5  # points of accuracy, or percent of perplexity


def as_ratio(interval: Interval, pairs: Sequence[float]) -> Ratio:
    """Return an interval with its raw pairs; no bounds below two."""
    bounded = interval.n >= 2
    return Ratio(
        interval.mean, interval.low if bounded else None, interval.high if bounded else None, interval.n, tuple(pairs)
    )


def paired(races: Races, arm: str, against: str) -> list[tuple[RunRecord, RunRecord]]:
    """Return (arm, against) of every race both ran without an error, by seed."""
    both = [(race[arm], race[against]) for _, race in sorted(races.items()) if arm in race and against in race]
    return [(ours, theirs) for ours, theirs in both if not failed(ours) and not failed(theirs)]


def to_the_end(races: Races, arm: str, against: str) -> list[tuple[RunRecord, RunRecord]]:
    """Return the pairs in which neither was only timed for a few steps."""
    return [pair for pair in paired(races, arm, against) if not any(map(is_brief, pair))]


def is_brief(record: RunRecord) -> bool:
    """Return whether an arm was only timed for a few steps."""
    return bool(record.header.detail.get(BRIEF))


def failed(record: RunRecord) -> str:
    """Return the error an arm left its race with, or ""."""
    return str(record.end.detail.get("error", "")) if record.end and record.end.reason == "error" else ""


def throughput_ratios(races: Races, arm: str, against: str) -> list[float]:
    """Return rows per second of `arm` over `against`, per race, over the rows both trained on after the first block."""
    ratios = []
    for ours, theirs in paired(races, arm, against):
        rows = min(_trained_rows(ours), _trained_rows(theirs))
        if rows > 0:
            ratios.append(_seconds_for(theirs, rows) / _seconds_for(ours, rows))
    return ratios


def step_seconds(record: RunRecord, rows_per_step: int) -> float:
    """Return seconds per `rows_per_step` rows of one arm, its first block left out."""
    rows = _trained_rows(record)
    return _seconds_for(record, rows) / rows * rows_per_step if rows else math.nan


def _blocks(record: RunRecord) -> list[tuple[int, float]]:
    blocks = [(int(e.detail["rows"]), float(e.detail["seconds"])) for e in record.events if e.name == "block"]
    return blocks[1:] if len(blocks) > 1 else blocks


def _trained_rows(record: RunRecord) -> int:
    return sum(rows for rows, _ in _blocks(record))


def _seconds_for(record: RunRecord, rows: int) -> float:
    """Return the seconds the first `rows` rows took, the last block in proportion."""
    left, seconds = rows, 0.0
    for block_rows, block_s in _blocks(record):
        if block_rows >= left:
            return seconds + block_s * left / block_rows
        left, seconds = left - block_rows, seconds + block_s
    return seconds


def curve(record: RunRecord, metric: str) -> tuple[tuple[int, float, float], ...]:
    """Return (rows, train seconds, metric) of every evaluation."""
    return tuple((e.rows, e.train_s, e.metrics[metric]) for e in record.evaluations)


def time_to_target(record: RunRecord, metric: str, target: float, higher_is_better: bool) -> tuple[float, bool]:
    """Return (seconds, left-censored): the first of two consecutive evaluations beyond the target, interpolated.

    Infinity when it was never reached. A crossing at the very first evaluation is left-censored: its time is that
    evaluation's. The last evaluation alone does not count: nothing confirms it.
    """
    points = curve(record, metric)
    sign = 1 if higher_is_better else -1
    met = [sign * value >= sign * target for _, _, value in points]
    for i, (_, seconds, value) in enumerate(points):
        if not met[i] or (i + 1 < len(points) and not met[i + 1]) or i + 1 == len(points):
            continue
        if i == 0:
            return seconds, True
        _, before_s, before = points[i - 1]
        share = (target - before) / (value - before) if value != before else 1.0
        return before_s + share * (seconds - before_s), False
    return math.inf, False


def target_row(
    races: Races,
    arm: str,
    against: str,
    tier: str,
    target: float,
    metric: str,
    higher_is_better: bool,
    charge_s: float | None,
    control: Interval | None = None,
) -> TargetRow | None:
    """Return one rung of the ladder; `charge_s` seconds of planning and search are added to the arm when given.

    None when the two never ran to the end in one race.
    """
    ours, theirs, left = [], [], 0
    pairs = to_the_end(races, arm, against)
    if not pairs:
        return None
    for record, other in pairs:
        mine, mine_left = time_to_target(record, metric, target, higher_is_better)
        yours, yours_left = time_to_target(other, metric, target, higher_is_better)
        ours.append(mine + (charge_s or 0.0))
        theirs.append(yours)
        left += mine_left or yours_left
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if math.isfinite(a) and math.isfinite(b)]
    censored = len(both) < len(ours)
    ratios = [b / a for a, b in both]
    ratio = None if censored or not ratios else as_ratio(ratio_interval(ratios), ratios)
    bound = _bound([other for _, other in pairs], ours, theirs) if censored else ""
    reached = sum(map(math.isfinite, ours)), sum(map(math.isfinite, theirs))
    verdict = speed_verdict(ratio, control, arm, against) if ratio else Verdict("no verdict", bound or "never reached")
    charged = charge_s is not None
    return TargetRow(
        target,
        arm,
        against,
        tier,
        charged,
        ratio,
        bound,
        *reached,
        len(ours),
        left,
        tuple(ours),
        tuple(theirs),
        verdict,
    )


def _bound(others: Sequence[RunRecord], ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Say what censored pairs allow: how much faster the arm is at least, when only the other never got there."""
    if all(map(math.isinf, ours)):
        return "never reached" if not all(map(math.isinf, theirs)) else "never reached by either"
    if any(map(math.isinf, ours)):
        return "reached in some pairs only"
    caps = [float(other.end.detail["train_s"]) if other.end else 0.0 for other in others]
    least = [min(cap, b) / a for cap, a, b in zip(caps, ours, theirs, strict=True)]
    return f">= {min(least):.2f}x"


def throughput_row(races: Races, arm: str, against: str, tier: str, control: Interval | None) -> RatioRow | None:
    """Return the throughput ratio of an arm over another; None without a common race."""
    ratios = throughput_ratios(races, arm, against)
    if not ratios:
        return None
    ratio = as_ratio(ratio_interval(ratios), ratios)
    return RatioRow("throughput", arm, against, tier, ratio, speed_verdict(ratio, control, arm, against))


def speed_verdict(ratio: Ratio, control: Interval | None, arm: str, against: str) -> Verdict:
    """Return gain, harm, no gain, or no verdict below five pairs."""
    if ratio.n < MIN_PAIRS_FOR_VERDICT or ratio.low is None or ratio.high is None:
        return Verdict("no verdict", f"{ratio.n} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}")
    figures = f"{ratio.mean:.2f}x (95% {ratio.low:.2f} to {ratio.high:.2f}, n={ratio.n})"
    resolved = resolution(control)
    if ratio.low > 1 and ratio.mean - 1 > resolved:
        return Verdict("gain", f"{arm} is {figures} as fast as {against}")
    if ratio.high < 1 and 1 - ratio.mean > resolved:
        return Verdict("harm", f"{arm} is slower than {against}: {figures}")
    return Verdict("no gain", f"{arm} against {against}: {figures}; the A/A control resolves {100 * resolved:.1f}%")


def non_inferiority(ratio: Ratio) -> Verdict:
    """Return whether the interval's lower end is at least 0.97 ("do no harm")."""
    if ratio.n < MIN_PAIRS_FOR_VERDICT or ratio.low is None:
        return Verdict("no verdict", f"{ratio.n} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}")
    figures = f"{ratio.mean:.3f}x, lower end {ratio.low:.3f}, bar {NON_INFERIOR}"
    return Verdict("no gain" if ratio.low >= NON_INFERIOR else "harm", f"do no harm: {figures}")


def quality_row(
    races: Races, arm: str, against: str, tier: str, metric: str, higher_is_better: bool
) -> RatioRow | None:
    """Return the difference of the held-out metric: points for accuracy, else percent (better > 0).

    Tier S is judged at equal samples; tier F, which may train on fewer, at the end of both.
    """
    differences = []
    for ours, theirs in to_the_end(races, arm, against):
        mine, yours = dict(_by_rows(ours, metric)), dict(_by_rows(theirs, metric))
        common = mine.keys() & yours.keys()
        if tier == "F" and mine and yours and _ran_out(ours):
            differences.append(_difference(mine[max(mine)], yours[max(yours)], higher_is_better))
        elif tier != "F" and common:
            differences.append(_difference(mine[max(common)], yours[max(common)], higher_is_better))
    if not differences:
        return None
    interval = mean_interval(differences)
    ratio = as_ratio(interval, differences)
    return RatioRow("final_metric_difference", arm, against, tier, ratio, _quality_verdict(ratio, tier))


def _difference(ours: float, theirs: float, higher_is_better: bool) -> float:
    return (ours - theirs) * (100.0 if higher_is_better else -100.0 / theirs)


def _ran_out(record: RunRecord) -> bool:
    return record.end is not None and record.end.reason == "budget"


def _by_rows(record: RunRecord, metric: str) -> list[tuple[int, float]]:
    return [(rows, value) for rows, _, value in curve(record, metric)]


def _quality_verdict(ratio: Ratio, tier: str) -> Verdict:
    if ratio.n < MIN_PAIRS_FOR_VERDICT or ratio.low is None or ratio.high is None:
        return Verdict("no verdict", f"{ratio.n} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}")
    figures = f"{ratio.mean:+.2f} (95% {ratio.low:+.2f} to {ratio.high:+.2f}), limit {QUALITY}"
    if ratio.low < -QUALITY:
        kind = "harm" if ratio.high < -QUALITY else "no verdict"
        return Verdict(kind, f"quality not shown to be equal: {figures}")
    if tier == "S" and ratio.high > QUALITY:
        return Verdict("no verdict", f"quality not shown to be equal: {figures}")
    return Verdict("gain" if tier == "F" and ratio.low > 0 else "no gain", f"quality within the limit: {figures}")


def memory_row(arm: str, against: str, tier: str, ours: int, theirs: int) -> RatioRow:
    """Return the ratio of peaks, measured once each: exact allocation counts, so no interval."""
    value = ours / theirs
    kind = "gain" if value < 0.99 else ("harm" if value > 1.01 else "no gain")
    ratio = Ratio(value, None, None, 1, (value,), counted=True)
    return RatioRow("peak_memory", arm, against, tier, ratio, Verdict(kind, f"{value:.3f}x the peak of {against}"))

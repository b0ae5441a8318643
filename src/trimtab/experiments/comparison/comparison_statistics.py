"""Ratios and times to target, computed from the records of paired runs (math: section 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.record import BRIEF, RunRecord, RunSummary
from trimtab.experiments.comparison.comparison_result import Ratio
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval

Races = Mapping[int, Mapping[str, RunRecord]]  # seed -> arm name -> record
# Key in a header's detail: the sample budget of the arm.
GIVEN_ROWS = "given_rows"
ALIKE = 0.02  # Tolerance of equal sample counts: steps of several batches can exceed a budget.


Pair = tuple[RunRecord, RunRecord]


def paired_records(races: Races, arm: str, against: str) -> list[Pair]:
    """Return the (arm, against) records of every seed without an error in either, by seed.

    `failures` describes the seeds left out.
    """
    return [pair for pair in _both(races, arm, against) if not any(map(error_of_run, pair))]


def to_the_end(races: Races, arm: str, against: str) -> list[Pair]:
    """Return the pairs of full runs without a failure in either arm."""
    return [pair for pair in full_pairs(races, arm, against) if not any(map(error_of_run, pair))]


def full_pairs(races: Races, arm: str, against: str) -> list[Pair]:
    """Return the pairs of full runs (not only timed for a few steps), including pairs with a failed arm."""
    return [pair for pair in _both(races, arm, against) if not any(map(is_brief, pair))]


def _both(races: Races, arm: str, against: str) -> list[Pair]:
    return [(race[arm], race[against]) for _, race in sorted(races.items()) if arm in race and against in race]


def failures(races: Races, *arms: str) -> str:
    """Return, for every failed arm, a phrase such as `equivalent_plan failed in 1 of 5 runs`, or "" without failures.

    The remaining runs of a failed arm were selected by their outcome, so a ratio is reported but no verdict.
    """
    return " and ".join(f"{arm} failed {where}" for arm in arms if (where := failed_in(races, arm)))


def failed_in(races: Races, arm: str) -> str:
    """Return a phrase such as `in 1 of 5 runs` for an arm that failed, or ""."""
    errors = [error_of_run(race[arm]) for race in races.values() if arm in race]
    return f"in {sum(map(bool, errors))} of {len(errors)} runs" if any(errors) else ""


def failed_with(races: Races, arm: str) -> str:
    """Return a phrase such as `in 1 of 5 runs (the loss is nan)` with an arm's first error, or ""."""
    errors = [text for race in races.values() if arm in race and (text := error_of_run(race[arm]))]
    return f"{failed_in(races, arm)} ({errors[0]:.200})" if errors else ""


def is_brief(record: RunRecord) -> bool:
    """Return True if an arm was only timed for a few steps."""
    return bool(record.header.detail.get(BRIEF))


def error_of_run(record: RunRecord) -> str:
    """Return the error that ended an arm's run, including a non-finite metric, or ""."""
    if record.end is None:
        return ""
    if record.end.reason == "diverged":
        return str(record.end.detail.get("error") or "its held-out metric was not finite")
    return str(record.end.detail.get("error", "")) if record.end.reason == "error" else ""


def given_rows(record: RunRecord) -> int:
    """Return the sample budget of an arm; older records without a budget give the number of samples trained on."""
    trained = record.end.detail.get("rows", 0) if record.end else 0
    return int(record.header.detail.get(GIVEN_ROWS, trained))


def curve(record: RunRecord, metric: str) -> tuple[tuple[int, float, float], ...]:
    """Return (samples, training seconds, metric) of every evaluation."""
    return tuple((e.samples, e.train_s, e.metrics[metric]) for e in record.evaluations)


def as_ratio(interval: Interval, pairs: Sequence[float]) -> Ratio:
    """Return a `Ratio` from an interval and the raw ratios of all pairs; with fewer than two pairs it has no bounds."""
    bounded = interval.n >= 2
    return Ratio(
        interval.mean, interval.low if bounded else None, interval.high if bounded else None, interval.n, tuple(pairs)
    )


def bounds(ratio: Ratio) -> tuple[float, float] | None:
    """Return the confidence interval a verdict may use, or None below the minimum number of pairs."""
    if ratio.n < MIN_PAIRS_FOR_VERDICT or ratio.low is None or ratio.high is None:
        return None
    return ratio.low, ratio.high


@dataclass(frozen=True)
class RunBlock:
    """Samples, wall seconds, CPU seconds and joules of an arm in a round; NaN if not measured."""

    rows: int
    seconds: float
    cpu_s: float = math.nan
    energy_j: float = math.nan


def throughput_ratios(races: Races, arm: str, against: str) -> list[float]:
    """Return, per seed, the ratio of samples per second of `arm` to `against` over the rounds both completed."""
    return _ratios(races, arm, against, "seconds")


def cpu_ratios(races: Races, arm: str, against: str) -> list[float]:
    """Return, per seed with CPU times, the ratio of samples per CPU second of `arm` to `against`."""
    return _ratios(races, arm, against, "cpu_s")


def energy_ratios(races: Races, arm: str, against: str) -> list[float]:
    """Return, per seed, the ratio of joules per sample of `arm` to `against` over rounds measured for both."""
    found = []
    for pair in paired_records(races, arm, against):
        laps = zip(*_common(*map(blocks, pair)), strict=True)
        known = [lap for lap in laps if all(math.isfinite(block.energy_j) for block in lap)]
        ours, theirs = (_rate([lap[side] for lap in known], "energy_j") for side in (0, 1))
        found += [theirs / ours] if ours > 0 and theirs > 0 else []
    return found


def step_joules(record: RunRecord, samples_per_step: int) -> float:
    """Return joules per `samples_per_step` samples of an arm without its first block; NaN if not measured."""
    found = blocks(record)
    rate = _rate([b for b in found[1:] or found if math.isfinite(b.energy_j)], "energy_j")
    return samples_per_step / rate if rate > 0 else math.nan


def step_seconds(record: RunRecord, samples_per_step: int) -> float:
    """Return seconds per `samples_per_step` samples of an arm, without its first block unless there is no second."""
    found = blocks(record)
    rate = _rate(found[1:] or found, "seconds")
    return samples_per_step / rate if rate > 0 else math.nan


def _ratios(races: Races, arm: str, against: str, clock: str) -> list[float]:
    pairs = (_common(blocks(ours), blocks(theirs)) for ours, theirs in paired_records(races, arm, against))
    rates = [(_rate(ours, clock), _rate(theirs, clock)) for ours, theirs in pairs]
    return [ours / theirs for ours, theirs in rates if ours > 0 and theirs > 0]


def _common(ours: list[RunBlock], theirs: list[RunBlock]) -> tuple[list[RunBlock], list[RunBlock]]:
    """Return the blocks of the rounds both arms completed, so that paired blocks ran at about the same time.

    The first round fills caches and selects kernels. It is excluded unless an arm has only one round.
    """
    laps = min(len(ours), len(theirs))
    first = 1 if laps > 1 else 0
    return ours[first:laps], theirs[first:laps]


def _rate(laps: Sequence[RunBlock], clock: str) -> float:
    """Return samples per unit of `clock`; NaN without samples or without a positive clock reading."""
    rows = sum(block.rows for block in laps)
    seconds = math.fsum(getattr(block, clock) for block in laps)
    return rows / seconds if rows and seconds > 0 else math.nan


def blocks(record: RunRecord | RunSummary) -> list[RunBlock]:
    """Return the blocks of an arm, in order."""
    details = [event.detail for event in record.events if event.name == "block"]
    return [
        RunBlock(int(d["rows"]), float(d["seconds"]), _number(d.get("cpu_s")), _number(d.get("energy_j")))
        for d in details
    ]


def trained(record: RunSummary) -> tuple[int, float]:
    """Return (samples, seconds) of training, from a run's steps or from the blocks of an arm in a paired run.

    Steps with an unknown number of samples count as 0 samples.
    """
    if record.steps:
        return record.steps.trained()
    laps = blocks(record)
    return sum(lap.rows for lap in laps), math.fsum(lap.seconds for lap in laps)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def is_beyond(value: float, target: float, higher_is_better: bool) -> bool:
    """Return True if a metric meets a target."""
    return value >= target if higher_is_better else value <= target


def time_to_target(record: RunRecord, metric: str, target: float, higher_is_better: bool) -> tuple[float, bool]:
    """Return (seconds, left-censored) of the interpolated crossing of a target, confirmed by the next evaluation.

    Seconds are infinite if the target was not reached. A crossing at the very first evaluation is left-censored and
    takes the time of that evaluation. The last evaluation alone does not count, because no later evaluation confirms
    it.
    """
    return time_of_crossing(curve(record, metric), target, higher_is_better)


def time_of_crossing(
    points: Sequence[tuple[int, float, float]], target: float, higher_is_better: bool
) -> tuple[float, bool]:
    """Return (seconds, left-censored) for a curve of (samples, seconds, metric), like `time_to_target`."""
    met = [is_beyond(value, target, higher_is_better) for _, _, value in points]
    for i, (_, seconds, value) in enumerate(points):
        if not met[i] or (i + 1 < len(points) and not met[i + 1]) or i + 1 == len(points):
            continue
        if i == 0:
            return seconds, True
        _, before_s, before = points[i - 1]
        share = (target - before) / (value - before) if value != before else 1.0
        return before_s + share * (seconds - before_s), False
    return math.inf, False

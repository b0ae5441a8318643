"""Gain in the early, middle and late third of training, by the samples of every run, from records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab.core.record import RunRecord
from trimtab.experiments.comparison.comparison_result import Ratio, ThirdRow
from trimtab.experiments.comparison.comparison_statistics import ALIKE, Races, as_ratio, blocks, curve, to_the_end
from trimtab.planner.statistics import mean_interval, ratio_interval, share_interval

THIRDS = ("early", "middle", "late")
_EDGES = (0.0, 1 / 3, 2 / 3, 1.0)
_NO_PROGRESS = "the metric did not improve in this third in every pair"
_NOT_SEEN = "the metric was first evaluated after this third"


@dataclass(frozen=True)
class _TrainingCurve:
    """A run over its fraction of samples: piecewise linear curves of seconds and of the metric (higher is better)."""

    rows: int
    seconds: tuple[tuple[float, float], ...]
    goodness: tuple[tuple[float, float], ...]

    def taken_s(self, begin: float, end: float) -> float:
        """Return the seconds between two fractions of the run."""
        return _at(self.seconds, end) - _at(self.seconds, begin)

    def of_a_sample_s(self, begin: float, end: float) -> float:
        """Return the seconds per sample between two fractions of the run."""
        return self.taken_s(begin, end) / (end - begin) / self.rows

    def progress(self, begin: float, end: float) -> float:
        """Return the improvement of the metric between two fractions of the run."""
        return _at(self.goodness, end) - _at(self.goodness, begin)


def third_rows(
    races: Races, arm: str, against: str, plan_kind: str, metric: str, higher_is_better: bool, unit: str
) -> list[ThirdRow]:
    """Return a row for every third of training, from pairs in which both arms ran to the end of their budget.

    A run's first block, with cold caches, is excluded; progress excludes the time before the first evaluation.
    Progress
    is a difference of fractions or percentages, or of logarithms for a relative metric such as perplexity.

    Args:
        races: records by seed and arm.
        arm, against: names of the arms.
        plan_kind: "equivalent", "tuned" or "".
        metric: name of the metric.
        higher_is_better: direction of the metric.
        unit: unit of the metric, as in `Metric`.
    """

    def course(record: RunRecord) -> _TrainingCurve:
        return _course(record, metric, _goodness(higher_is_better, unit))

    pairs = [pair for pair in to_the_end(races, arm, against) if all(map(_is_whole, pair))]
    courses = [(course(ours), course(theirs)) for ours, theirs in pairs]
    if not courses:
        return []
    warm = max((course.seconds[1][0] for pair in courses for course in pair if len(course.seconds) > 2), default=0.0)
    saved = _saved(courses, warm)
    found = [_row(courses, third, warm, arm, against, plan_kind) for third in THIRDS]
    return [replace(row, saved=share) for row, share in zip(found, saved, strict=True)]


def _saved(courses: Sequence[tuple[_TrainingCurve, _TrainingCurve]], warm: float) -> list[Ratio | None]:
    """Return every third's fraction of the saved seconds; a first block that was excluded is extrapolated.

    Returns None for every third if the saving is not significant or the arms train on different numbers of samples.
    Seconds are per sample, because steps of several batches can exceed the budget slightly.
    """
    begins, ends = [max(begin, warm) for begin in _EDGES[:-1]], _EDGES[1:]
    are_unlike = any(abs(ours.rows / theirs.rows - 1) > ALIKE for ours, theirs in courses)
    if are_unlike or any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return [None] * len(ends)
    each = [
        [(theirs.of_a_sample_s(begin, end) - ours.of_a_sample_s(begin, end)) / 3 for ours, theirs in courses]
        for begin, end in zip(begins, ends, strict=True)
    ]
    wholes = [math.fsum(of_run) for of_run in zip(*each, strict=True)]
    if not mean_interval(wholes).low > 0:
        return [None] * len(ends)
    mean_s = math.fsum(wholes) / len(wholes)
    return [as_ratio(share_interval(third, wholes), [seconds / mean_s for seconds in third]) for third in each]


def _row(
    courses: Sequence[tuple[_TrainingCurve, _TrainingCurve]],
    third: str,
    first_block: float,
    arm: str,
    against: str,
    plan_kind: str,
) -> ThirdRow:
    begin, end = _EDGES[THIRDS.index(third)], _EDGES[THIRDS.index(third) + 1]
    warm = max(begin, first_block)
    seen = max(begin, *(course.goodness[0][0] if course.goodness else 1.0 for pair in courses for course in pair))
    speeds = [_speed(ours, warm, end) / _speed(theirs, warm, end) for ours, theirs in courses if warm < end]
    if seen >= end:
        return ThirdRow(third, arm, against, plan_kind, _ratio(speeds), None, None, _NOT_SEEN)
    made = [(ours.progress(seen, end), theirs.progress(seen, end)) for ours, theirs in courses]
    if not all(each > 0 for pair in made for each in pair):
        return ThirdRow(third, arm, against, plan_kind, _ratio(speeds), None, None, _NO_PROGRESS)
    progress = [ours / theirs for ours, theirs in made]
    sooner = [theirs.taken_s(seen, end) / ours.taken_s(seen, end) for ours, theirs in courses]
    both = [each * sooner_by for each, sooner_by in zip(progress, sooner, strict=True)]
    return ThirdRow(third, arm, against, plan_kind, _ratio(speeds), _ratio(progress), _ratio(both))


def _speed(course: _TrainingCurve, begin: float, end: float) -> float:
    return course.rows * (end - begin) / course.taken_s(begin, end)


def _ratio(pairs: Sequence[float]) -> Ratio | None:
    return as_ratio(ratio_interval(pairs), pairs) if pairs else None


def _is_whole(record: RunRecord) -> bool:
    return record.end is not None and record.end.reason == "budget" and sum(b.rows for b in blocks(record)) > 0


def _course(record: RunRecord, metric: str, goodness: Callable[[float], float]) -> _TrainingCurve:
    found = blocks(record)
    rows = sum(block.rows for block in found)
    ends = itertools.accumulate(block.rows for block in found)
    times = itertools.accumulate(block.seconds for block in found)
    seconds = ((0.0, 0.0), *((end / rows, taken_s) for end, taken_s in zip(ends, times, strict=True)))
    seen = tuple((at / rows, goodness(value)) for at, _, value in curve(record, metric))
    return _TrainingCurve(rows, seconds, seen)


def _goodness(higher_is_better: bool, unit: str) -> Callable[[float], float]:
    sign = 1.0 if higher_is_better else -1.0

    def of(value: float) -> float:
        if unit != "relative":
            return sign * value
        return sign * math.log(value) if value > 0 else math.nan

    return of


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the linear interpolation at x; beyond the last point, the last value."""
    for (left, before), (right, after) in itertools.pairwise(points):
        if left <= x <= right and right > left:
            return before + (after - before) * (x - left) / (right - left)
    return points[-1][1] if points else math.nan

"""Results of experiments as a long table with columns arm, seed, round, metric, value and unit.

Comparisons and ablations are queries on this table, so a new figure needs no new class of rows.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.core.errors import FormatError
from trimtab.planner.statistics import Interval, mean_interval, paired_ratios, rank_interval, ratio_interval

SCHEMA = 1
_SAME_SAMPLES = 1.05  # Arms end at the end of a block, so equal numbers of samples may differ by a few steps.
BASELINE, PLANNED, TUNED = "baseline", "plan", "tuned plan"
CONTROL = "baseline again"  # Arm of the baseline's second run, the A/A control.


class Row(NamedTuple):
    """A measured value.

    Args:
        arm: name of the loop that was measured.
        seed: seed of the paired run; -1 for values outside of paired runs, such as peak memory.
        round: index of the block or step within the run; -1 for values of the whole run.
        metric: name of the quantity.
        value: the value.
        unit: unit of the value.
    """

    arm: str
    seed: int
    round: int
    metric: str
    value: float
    unit: str


@dataclass(frozen=True)
class ResultTable:
    """Rows of a result, stored as columns, which keeps files of thousands of rows small.

    Args:
        arms, seeds, rounds, metrics, values, units: the columns. Values are None if not finite, as JSON requires.
    """

    arms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()
    values: tuple[float | None, ...] = ()
    units: tuple[str, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise FormatError("table.schema", got=repr(self.schema), expected=str(SCHEMA))
        columns = (self.arms, self.seeds, self.rounds, self.metrics, self.values, self.units)
        if len({len(column) for column in columns}) > 1:
            raise FormatError("table", got="columns of different lengths", expected="one length")

    @classmethod
    def of(cls, rows: Iterable[Row]) -> ResultTable:
        """Return a table of rows."""
        finite = [row._replace(value=row.value if math.isfinite(row.value) else None) for row in rows]  # type: ignore[arg-type]
        return cls(*zip(*finite, strict=True)) if finite else cls()

    def __len__(self) -> int:
        return len(self.arms)

    def __iter__(self) -> Iterator[Row]:
        columns = zip(self.arms, self.seeds, self.rounds, self.metrics, self.values, self.units, strict=True)
        for arm, seed, number, metric, value, unit in columns:
            yield Row(arm, seed, number, metric, math.nan if value is None else value, unit)

    @functools.cached_property
    def _index(self) -> dict[tuple[str, str], list[Row]]:
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self:
            found.setdefault((row.metric, row.arm), []).append(row)
        return found

    def select(self, metric: str, arm: str, seed: int | None = None) -> list[Row]:
        """Return the rows of a metric and arm in order; of a single seed, if given."""
        return [row for row in self._index.get((metric, arm), ()) if seed in (None, row.seed)]

    def joined(self, others: Iterable[ResultTable]) -> ResultTable:
        """Return a table of the rows of all tables, in order."""
        return ResultTable.of(row for table in (self, *others) for row in table)

    def value(self, metric: str, arm: str, seed: int = -1) -> float | None:
        """Return the last value of a metric, arm and seed; None without one."""
        found = [row.value for row in self.select(metric, arm, seed)]
        return found[-1] if found else None

    def seeds_of(self, arm: str) -> list[int]:
        """Return the seeds of an arm's paired runs with timed blocks."""
        return sorted({row.seed for row in self.select(SECONDS, arm)})


# Metrics of paired runs, with their units. A round is a block of steps.
SECONDS, CPU_SECONDS, SAMPLES, LOSS, ENERGY = "seconds", "cpu_seconds", "samples", "loss", "energy"
# Metrics of a single step, measured apart from paired runs.
PEAK, FLOPS = "peak_memory", "flops_per_sample"
UNITS = {SECONDS: "s", CPU_SECONDS: "s", SAMPLES: "samples", LOSS: "", ENERGY: "J", PEAK: "B", FLOPS: "FLOP"}
EVALUATION = "evaluation:"  # Prefix of the metrics of evaluations, in the round after which they were made.


def speed_of_pair(table: ResultTable, arm: str, against: str, seed: int, *, metric: str = SECONDS) -> Interval | None:
    """Return the speed of `arm` relative to `against` in a paired run, by interleaved rounds; None below two rounds.

    Rounds run in sequence. The first timed round is left out, because of one-time costs.

    Args:
        metric: SECONDS, CPU_SECONDS, or ENERGY for the ratio of samples per joule.
    """
    ours, theirs = (_cost_per_sample(table, each, seed, metric) for each in (arm, against))
    rounds = [number for number in ours if number in theirs][1:]
    if len(rounds) < 2:
        return None
    return rank_interval(paired_ratios([ours[each] for each in rounds], [theirs[each] for each in rounds]))


def _cost_per_sample(table: ResultTable, arm: str, seed: int, metric: str) -> dict[int, float]:
    """Return the value of a metric per sample of an arm, by round."""
    samples = {row.round: row.value for row in table.select(SAMPLES, arm, seed)}
    taken = [row for row in table.select(metric, arm, seed) if row.value > 0]
    return {row.round: row.value / samples[row.round] for row in taken if samples.get(row.round)}


def speeds(table: ResultTable, arm: str, against: str, *, metric: str = SECONDS) -> dict[int, float]:
    """Return the speed of `arm` relative to `against` by seed, for all pairs with both."""
    found = {}
    for seed in table.seeds_of(against):
        if (pair := speed_of_pair(table, arm, against, seed, metric=metric)) is not None:
            found[seed] = pair.mean
    return found


def memory(table: ResultTable, arm: str, against: str) -> float | None:
    """Return the peak memory of an arm relative to another; None if unknown."""
    ours, theirs = table.value(PEAK, arm), table.value(PEAK, against)
    return None if ours is None or not theirs else ours / theirs


def speed(table: ResultTable, arm: str, against: str, *, metric: str = SECONDS) -> Interval | None:
    """Return the speed of `arm` relative to `against`, with the t interval over paired runs; None without pairs."""
    pairs = list(speeds(table, arm, against, metric=metric).values())
    return ratio_interval(pairs) if pairs else None


def per_sample(table: ResultTable, arm: str, metric: str = SECONDS) -> list[float]:
    """Return the median of a metric per sample over the rounds of an arm, without the first, by seed."""
    found = (list(_cost_per_sample(table, arm, seed, metric).values()) for seed in table.seeds_of(arm))
    return [statistics.median(values[1:] or values) for values in found if values]


def loss_curve(table: ResultTable, arm: str, seed: int) -> list[tuple[float, float]]:
    """Return (samples trained on, mean loss of the round) of an arm; non-finite losses are left out."""
    number, found = 0.0, []
    losses = {row.round: row.value for row in table.select(LOSS, arm, seed)}
    for row in table.select(SAMPLES, arm, seed):
        number += row.value
        if math.isfinite(losses.get(row.round, math.nan)):
            found.append((number, losses[row.round]))
    return found


def loss_difference(table: ResultTable, arm: str, against: str) -> Interval | None:
    """Return the relative difference of the mean loss over the last third of training, in percent; positive is worse.

    Of the samples that both arms have trained on. None without losses of both arms.
    """
    found = []
    for seed in table.seeds_of(against):
        curves = [loss_curve(table, each, seed) for each in (arm, against)]
        ends = [curve[-1][0] for curve in curves if curve]
        if len(ends) < 2:
            continue
        begin, end = min(ends) * 2 / 3, min(ends)
        last = [[loss for samples, loss in curve if begin < samples <= end] for curve in curves]
        if not all(last):  # Few blocks, and the last of one arm is a few steps longer.
            last = [[loss for samples, loss in curve if begin < samples <= end * _SAME_SAMPLES] for curve in curves]
        if all(last) and (theirs := statistics.fmean(last[1])) != 0:
            found.append(100 * (statistics.fmean(last[0]) - theirs) / abs(theirs))
    return mean_interval(found) if found else None


class Evaluated(NamedTuple):
    """A value of an evaluation, with the samples and seconds of training before it."""

    samples: float
    seconds: float
    value: float


def evaluations(table: ResultTable, arm: str, name: str, seed: int) -> list[Evaluated]:
    """Return the evaluations of an arm in order."""
    after = {row.round: row.value for row in table.select(f"{EVALUATION}{name}", arm, seed)}
    seconds = {row.round: row.value for row in table.select(SECONDS, arm, seed)}
    found, samples_before, seconds_before = [], 0.0, 0.0
    for row in table.select(SAMPLES, arm, seed):
        samples_before += row.value
        seconds_before += seconds.get(row.round, 0.0)
        if row.round in after:
            found.append(Evaluated(samples_before, seconds_before, after[row.round]))
    return found


def common_values(table: ResultTable, arm: str, against: str, name: str) -> list[tuple[float, float]]:
    """Return the last evaluations of two arms after equal numbers of samples, by seed; without seeds that have none."""
    found = []
    for seed in table.seeds_of(against):
        points = [_evaluated_points(table, each, name, seed) for each in (arm, against)]
        if all(points):
            end = min(each[-1].samples for each in points)
            ours, theirs = (min(each, key=lambda point: abs(point.samples - end)) for each in points)
            if max(ours.samples, theirs.samples) <= _SAME_SAMPLES * min(ours.samples, theirs.samples):
                found.append((ours.value, theirs.value))
    return found


def _evaluated_points(table: ResultTable, arm: str, name: str, seed: int) -> list[Evaluated]:
    """Return every evaluation of an arm, and the evaluation after its last step."""
    trained, seconds = (math.fsum(row.value for row in table.select(each, arm, seed)) for each in (SAMPLES, SECONDS))
    last = [row.value for row in table.select(f"{EVALUATION}{name}", arm, seed) if row.round < 0]
    return [*evaluations(table, arm, name, seed), *(Evaluated(trained, seconds, value) for value in last[-1:])]


def final_values(table: ResultTable, arm: str) -> dict[str, dict[int, float]]:
    """Return the last evaluation of an arm, by name and seed."""
    found: dict[str, dict[int, float]] = {}
    for row in table:
        if row.arm == arm and row.metric.startswith(EVALUATION):
            found.setdefault(row.metric.removeprefix(EVALUATION), {})[row.seed] = row.value
    return found

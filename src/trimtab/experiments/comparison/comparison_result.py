"""Result of a comparison: the content of `report.json`, read by every report. Values only.

Ratios are "arm over other arm", as in benchmarks: above 1 is better for throughput, below 1 for time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trimtab.core.energy_reading import NO_METER, Energy, MeterFacts
from trimtab.core.memory_model import StepMemory
from trimtab.core.step_phases import TimedGain
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Trial

RESULT_SCHEMA = 7
NO_HARM = "no harm"  # Verdict of a plan that passed the non-inferiority test.
NO_VERDICT = "no verdict"  # Verdict if the figures decide nothing.
# Patterns for sentences in reports written before these rows had fields for a bound and for failures.
_BOUND = re.compile(r"([<>])= (\d+(?:\.\d+)?)x")
_FAILED = " failed in "


@dataclass(frozen=True)
class Ratio:
    """A paired ratio: geometric mean with a 95% t interval on log ratios (math: section 8).

    Args:
        mean: geometric mean of the ratios.
        low, high: bounds of the interval; None below 2 pairs. A verdict needs 5 pairs, a claim 8.
        n: number of pairs.
        pairs: the raw ratios.
        counted: True for a ratio of counts (bytes allocated). Counts repeat to within 1% (`SAME_PEAK`), so the ratio
            has no interval.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    pairs: tuple[float, ...]
    counted: bool = False

    @property
    def inverse(self) -> Ratio:
        """The reciprocal ratio, for example of speeds from times."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return Ratio(1 / self.mean, low, high, self.n, tuple(1 / pair for pair in self.pairs), self.counted)

    def to_the(self, power: float) -> Ratio:
        """Return the ratio raised to a positive power."""
        low, high = (None if end is None else end**power for end in (self.low, self.high))
        return Ratio(self.mean**power, low, high, self.n, tuple(pair**power for pair in self.pairs), self.counted)


@dataclass(frozen=True)
class Verdict:
    """Conclusion from an interval.

    Args:
        kind: "gain", "no gain", "harm", "no harm" or "no verdict"; for interactions "more together", "less together",
            "none found" or "no verdict".
        sentence: the conclusion with its figures.
        code: stable identifier of the reason, such as "speed.gain" or "pairs.too_few"; "" in reports of older versions.
    """

    kind: str
    sentence: str
    code: str = ""


@dataclass(frozen=True)
class ArmCurve:
    """Held-out curve of an arm for a seed: (samples, training seconds, metric) at every evaluation."""

    seed: int
    points: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class Arm:
    """Results of an arm (a recipe or a plan) over all seeds.

    Args:
        name: reference, self (the A/A control), strict, paper, strong, muon, equivalent_plan, tuned_plan, strong_plan.
        label: name shown in reports.
        plan_kind: "" for recipes, "equivalent" for an equivalent plan, "tuned" for a tuned plan.
        source: the file with the training loop.
        step_s: median seconds per batch of the task, by seed.
        terms_per_s: throughput in loss terms per second, by seed.
        peak_bytes: peak memory of a step, from a separate measurement, or None.
        phases_s: seconds per batch by phase.
        mfu: model FLOP/s utilisation: FLOP/s of the reference's step over the peak in `Comparison.peak_source`.
        hfu: hardware FLOP/s utilisation: FLOP/s of the arm's own step over the same peak.
        final_metric: held-out metric at the end, by seed.
        final_samples: samples trained on at the end.
        curves: held-out curves, by seed.
        search_s: seconds of planning and search added to charged figures.
        error: error of a failed arm, or None.
        joules: joules per batch of the task, by seed with energy figures.
        watts: mean power, by seed with energy figures.
        short_blocks: number of blocks too short for the energy meter.
        blocks: number of blocks with an energy measurement.
        precision: compute precision of matrix products, or "" if unknown.
    """

    name: str
    label: str
    plan_kind: str
    source: str
    step_s: tuple[float, ...]
    terms_per_s: tuple[float, ...]
    peak_bytes: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    hfu: float | None = None
    final_metric: tuple[float, ...] = ()
    final_samples: int = 0
    curves: tuple[ArmCurve, ...] = ()
    search_s: float = 0.0
    error: str | None = None
    joules: tuple[float, ...] = ()
    watts: tuple[float, ...] = ()
    short_blocks: int = 0
    blocks: int = 0
    precision: str = ""


@dataclass(frozen=True)
class RatioRow:
    """Comparison of an arm with another arm on a metric.

    Args:
        metric: throughput, do_no_harm, peak_memory, energy (joules per sample) or final_metric_difference.
        ratio: the ratio; for final_metric_difference, differences in points or percent (see `Comparison.unit`).
        cpu: ratio of throughput per CPU second of the process, if recorded in every pair.
        whole: number of pairs run to the end of the budget, the rest being timed for a few steps; None if irrelevant.
        failed: failed arms with the number of failed runs, or ""; read it with `failure_of`.
    """

    metric: str
    arm: str
    against: str
    plan_kind: str
    ratio: Ratio
    verdict: Verdict
    cpu: Ratio | None = None
    whole: int | None = None
    failed: str = ""

    @property
    def shown(self) -> Verdict:
        """The verdict under its current name; older reports name a passed "do no harm" test "no gain"."""
        was_named_otherwise = self.metric == "do_no_harm" and self.verdict.kind == "no gain"
        return replace(self.verdict, kind=NO_HARM) if was_named_otherwise else self.verdict


@dataclass(frozen=True)
class TargetRow:
    """Time to a target, for an arm and another arm.

    Args:
        ratio: seconds of the other arm over seconds of the arm (above 1: the arm is faster), over pairs in which both
            reached the target.
        bound: a bound such as ">= 3.10x" if an arm was censored in some pair (then without an interval).
        at_least, at_most: the speed-up in `bound`, rounded outward to a hundredth; read them with `limits_of`.
        failed: failed arms with the number of failed runs, or ""; read it with `failure_of`.
        reached_arm, reached_against: number of the `n` pairs in which the target was reached.
        left_censored: number of pairs with a crossing at the first evaluation.
        arm_s, against_s: seconds to target by pair (infinite: not reached, or the run failed).
        arm_samples, against_samples: sample budget (0: not recorded).
        arm_j, against_j: joules to target of pairs with both crossings and energy figures, including planning if
            charged.
        energy: ratio of the joules, arm over other arm, if known for every pair.
    """

    target: float
    arm: str
    against: str
    plan_kind: str
    charged: bool
    ratio: Ratio | None
    bound: str
    reached_arm: int
    reached_against: int
    n: int
    left_censored: int
    arm_s: tuple[float, ...]
    against_s: tuple[float, ...]
    verdict: Verdict
    arm_samples: int = 0
    against_samples: int = 0
    arm_j: tuple[float, ...] = ()
    against_j: tuple[float, ...] = ()
    energy: Ratio | None = None
    at_least: float | None = None
    at_most: float | None = None
    failed: str = ""


def limits_of(row: TargetRow) -> tuple[float | None, float | None]:
    """Return the lower and upper bound of an arm's speed-up; None for an unknown bound.

    Rows written before the fields existed are read from the `bound` text.
    """
    told = _BOUND.match(row.bound) if row.at_least is None and row.at_most is None else None
    if told is None:
        return row.at_least, row.at_most
    return (float(told[2]), None) if told[1] == ">" else (None, float(told[2]))


def limit_in_words(at_least: float | None, at_most: float | None) -> str:
    """Return `at least 3.10x` or `at most 0.80x`; "" if neither bound is known."""
    if at_least is not None:
        return f"at least {at_least:.2f}x"
    return "" if at_most is None else f"at most {at_most:.2f}x"


def failure_of(row: RatioRow | TargetRow) -> str:
    """Return a phrase such as `equivalent_plan failed in 1 of 5 runs`, or "" without failures.

    Rows written before the field existed are read from the start of the verdict's sentence.
    """
    said = row.verdict.sentence
    return row.failed or (said.partition(": ")[0] if _FAILED in said else "")


@dataclass(frozen=True)
class ThirdRow:
    """Comparison over a third of training, by samples of a run.

    Args:
        third: "early", "middle" or "late".
        speed: ratio of samples per second, arm over other arm; None if unknown.
        progress: ratio of the held-out metric's improvement over the third; None if unknown.
        progress_per_s: the ratio of improvement per second; None if unknown.
        why: the reason for unknown ratios.
        saved: fraction of a run's saved seconds that falls in the third; None if a saving is not significant or the
            arms train on different numbers of samples.
    """

    third: str
    arm: str
    against: str
    plan_kind: str
    speed: Ratio | None
    progress: Ratio | None
    progress_per_s: Ratio | None
    why: str = ""
    saved: Ratio | None = None


@dataclass(frozen=True)
class Comparison:
    """Complete result of a comparison, as shown in a report.

    Args:
        headline: the main verdict.
        unit: unit of the metric, as in `Metric`: "relative" differences are in percent, all other units in points.
        planning_s: seconds spent on all plans.
        resolution: A/A interval (reference against arm "self"), or None.
        plans: plans by key of `PLAN_ARMS`.
        trials: all planning trials, including infeasible trials.
        data_source: name, origin and sha256 of the data.
        command: command line to reproduce the result.
        environment: machine and versions.
        memory: memory of a step by arm, by part and over time.
        notes: caveats (left-censored targets, stopped arms, missing measurements).
        num_ranks: number of ranks per arm.
        batch_size: batch size over all ranks; None in older reports.
        meter: the energy meter, or the reason for its absence.
        planning_energy: energy of planning by plan, if counted by the same meter.
        gain: seconds of the reference and of the plan by phase, from interleaved steps; None if not measured.
        thirds: comparison by thirds of training.
    """

    task: str
    description: str
    headline: Verdict
    metric: str
    higher_is_better: bool
    unit: str
    terms: str
    targets: tuple[float, ...]
    num_pairs: int
    arms: tuple[Arm, ...]
    ratios: tuple[RatioRow, ...]
    target_rows: tuple[TargetRow, ...]
    resolution: Ratio | None
    plans: Mapping[str, Plan]
    trials: tuple[Trial, ...]
    planning_s: float
    data_source: Mapping[str, str]
    command: str
    environment: Mapping[str, str]
    created: str
    peak_source: str = "unknown"
    memory: Mapping[str, StepMemory] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    num_ranks: int = 1
    meter: MeterFacts = NO_METER
    planning_energy: Mapping[str, Energy] = field(default_factory=dict)
    gain: TimedGain | None = None
    thirds: tuple[ThirdRow, ...] = ()
    batch_size: int | None = None
    schema: int = RESULT_SCHEMA

    def arm(self, name: str) -> Arm | None:
        """Return an arm by name, or None."""
        return next((arm for arm in self.arms if arm.name == name), None)

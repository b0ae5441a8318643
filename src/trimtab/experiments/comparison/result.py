"""The result of a comparison: what `report.json` holds and every rendering reads. Values only.

Ratios read "ours over theirs" as in benchmarks: above 1 is better for throughput, below 1 for time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.energy import NO_METER, Energy, MeterFacts
from trimtab.core.phases import Gain
from trimtab.core.plan import Plan
from trimtab.core.profile import Trial
from trimtab.core.step_memory import StepMemory

RESULT_SCHEMA = 6
NO_HARM = "no harm"  # the verdict of a plan that was shown to do a tuned loop none
NO_VERDICT = "no verdict"  # where the figures allow none to be given
# What sentences say, of rows that were written before they had fields for it.
_BOUND = re.compile(r"([<>])= (\d+(?:\.\d+)?)x")
_FAILED = " failed in "


@dataclass(frozen=True)
class Ratio:
    """A paired ratio: geometric mean with a 95% t interval on log ratios (math: section 8).

    `low` and `high` are None below 2 pairs; a verdict needs 5 pairs, a claim 8. `pairs` are the raw ratios.
    `counted` marks a ratio of counts (bytes allocated), which repeat to within 1% (`SAME_PEAK`): it has no interval.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    pairs: tuple[float, ...]
    counted: bool = False

    @property
    def inverse(self) -> Ratio:
        """What it is the other way round: of times, of speeds."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return Ratio(1 / self.mean, low, high, self.n, tuple(1 / pair for pair in self.pairs), self.counted)

    def to_the(self, power: float) -> Ratio:
        """Return it with so many times its logarithm, of a power above 0."""
        low, high = (None if end is None else end**power for end in (self.low, self.high))
        return Ratio(self.mean**power, low, high, self.n, tuple(pair**power for pair in self.pairs), self.counted)


@dataclass(frozen=True)
class Verdict:
    """What the figures allow to be said: kind is "gain", "no gain", "harm", "no harm" or "no verdict"."""

    kind: str
    sentence: str


@dataclass(frozen=True)
class ArmCurve:
    """One arm's held-out curve for one seed: (rows, train seconds, metric) at each evaluation."""

    seed: int
    points: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class Arm:
    """One recipe as it ran.

    Args:
        name: reference, self (the A/A control), strict, paper, strong, muon, plan_S, plan_F, strong_plan.
        label: what a person reads. tier: "" for recipes, "S" or "F" for our plans. source: the file that runs it.
        step_s: median seconds per batch of the task, one per seed. terms_per_s: throughput, one per seed.
        peak_bytes: peak of a step, separate pass, or None. phases_s: seconds per batch by phase.
        mfu, hfu: FLOP/s of the reference's step and of the arm's own, over the peak named in `Comparison.peak_source`.
        final_metric: held-out metric at the end, one per seed. final_rows: the rows it had then trained on.
        search_s: seconds of planning and search that the charged figures add.
        joules, watts: per batch of the task, and mean power, one per seed in which they were counted.
        short_blocks, blocks: its blocks that were too short for a meter, and all that joules were asked of.
        precision: what its matrix products compute in, or "" where that is not known.
    """

    name: str
    label: str
    tier: str
    source: str
    step_s: tuple[float, ...]
    terms_per_s: tuple[float, ...]
    peak_bytes: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    hfu: float | None = None
    final_metric: tuple[float, ...] = ()
    final_rows: int = 0
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
    """One comparison of an arm against another.

    The metric is throughput, do_no_harm, peak_memory, energy (joules per row) or final_metric_difference.

    For final_metric_difference `ratio` holds differences (points or percent, see `Comparison.unit`), no ratios.
    `cpu`: throughput per second of processor time of the whole process, where it was recorded in every pair.
    `whole`: of the pairs, those that ran to the end of the budget; the others were timed for a few steps. None where
    that makes no difference.
    `failed`: which arm failed and in how many races, "" where none did; read it by `failure_of`.
    """

    metric: str
    arm: str
    against: str
    tier: str
    ratio: Ratio
    verdict: Verdict
    cpu: Ratio | None = None
    whole: int | None = None
    failed: str = ""

    @property
    def shown(self) -> Verdict:
        """The verdict by its name: of "do no harm" that holds, older reports say "no gain"."""
        was_named_otherwise = self.metric == "do_no_harm" and self.verdict.kind == "no gain"
        return Verdict(NO_HARM, self.verdict.sentence) if was_named_otherwise else self.verdict


@dataclass(frozen=True)
class TargetRow:
    """Time to one rung of the ladder.

    Args:
        ratio: theirs over ours in seconds (above 1: ours is faster), over the pairs in which both reached it.
        bound: when an arm was censored in some pair: a sentence such as ">= 3.10x" (no interval then).
        at_least, at_most: the speed in it, rounded outward to a hundredth; read them by `limits_of`.
        failed: which arm failed and in how many races, "" where none did; read it by `failure_of`.
        reached_arm, reached_against, n: how many of n pairs reached it. left_censored: crossed at the first evaluation.
        arm_s, against_s: seconds to target per pair (inf: never, or it failed).
        arm_rows, against_rows: rows each was to train on (0: not recorded).
        arm_j, against_j: joules to target of the pairs in which both reached it and they were counted, those of
            planning among them where it is charged. energy: their ratio, ours over theirs, where that is every pair.
    """

    target: float
    arm: str
    against: str
    tier: str
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
    arm_rows: int = 0
    against_rows: int = 0
    arm_j: tuple[float, ...] = ()
    against_j: tuple[float, ...] = ()
    energy: Ratio | None = None
    at_least: float | None = None
    at_most: float | None = None
    failed: str = ""


def limits_of(row: TargetRow) -> tuple[float | None, float | None]:
    """Return how many times as fast an arm is at the least and at the most; None: no such bound is known.

    Of a row that was written before it had these, what its sentence says.
    """
    told = _BOUND.match(row.bound) if row.at_least is None and row.at_most is None else None
    if told is None:
        return row.at_least, row.at_most
    return (float(told[2]), None) if told[1] == ">" else (None, float(told[2]))


def limit_in_words(at_least: float | None, at_most: float | None) -> str:
    """Return `at least 3.10x` or `at most 0.80x`; "" where neither is known."""
    if at_least is not None:
        return f"at least {at_least:.2f}x"
    return "" if at_most is None else f"at most {at_most:.2f}x"


def failure_of(row: RatioRow | TargetRow) -> str:
    """Return `plan_S failed in 1 of 5 races`, or "" where no arm did.

    Of a row that was written before it had that, what the sentence of its verdict begins with.
    """
    said = row.verdict.sentence
    return row.failed or (said.partition(": ")[0] if _FAILED in said else "")


@dataclass(frozen=True)
class ThirdRow:
    """A third of training, by the rows of each run: "early", "middle" or "late".

    Args:
        speed: rows per second, ours over theirs. progress: of the held-out metric over that third, ours over theirs;
            progress_per_s: the same per second. saved: share of the seconds that a whole run saves; None as well where
            it is not clear that it does, or it trains on other rows. None: not known, and `why` not.
    """

    third: str
    arm: str
    against: str
    tier: str
    speed: Ratio | None
    progress: Ratio | None
    progress_per_s: Ratio | None
    why: str = ""
    saved: Ratio | None = None


@dataclass(frozen=True)
class Comparison:
    """Everything a report shows.

    Args:
        headline: the verdict, first thing read. unit: the metric's, as `Metric` has it: "relative" differences are in
            percent, others in points. planning_s: of all plans. resolution: A/A interval as a ratio row (arm "self"),
            or None.
        plans: key of `PLAN_ARMS` -> plan. trials: every planning trial, infeasible ones too.
        data_source: name, origin, sha256. command: reproduces this. environment: machine and versions.
        memory: arm -> what its step holds, by part and over time.
        notes: anything a reader must know (left-censored targets, stopped arms, what was not measured).
        num_ranks: processes that each arm was trained by together. batch_rows: of a step, of all of them; None: not
            written down, in reports of before.
        meter: what counted joules, or why nothing did. planning_energy: of what `planning_s` of a plan is the seconds
            of, where the same meter counted it.
        gain: seconds of the reference and of the plan by phase, in turns; None: not measured. thirds: of training.
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
    gain: Gain | None = None
    thirds: tuple[ThirdRow, ...] = ()
    batch_rows: int | None = None
    schema: int = RESULT_SCHEMA

    def arm(self, name: str) -> Arm | None:
        """Return an arm by name, or None."""
        return next((arm for arm in self.arms if arm.name == name), None)

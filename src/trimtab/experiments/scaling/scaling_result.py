"""Scaling results: throughput, efficiency and waiting time from timed jobs (math: section 8).

A round is a job for every number of ranks in sequence; efficiency is paired within a round. Values only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.core import validation
from trimtab.core.hardware import Link
from trimtab.core.record import read_together
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, mean_interval, ratio_interval, resolution

# "weak": every rank has the task's batch size. "strong": the ranks share a batch.
MODES = ("weak", "strong")
RECIPES = {
    "baseline": "the plain loop in DistributedDataParallel with default settings",
    "self": "the baseline again (A/A control)",
    "plan": "the equivalent plan",
    "plan_batch": "the plan with an adaptive batch size",
}
PLAN_KINDS = {"baseline": "", "self": "", "plan": "equivalent", "plan_batch": "tuned"}
SCALING_SCHEMA = 3


@dataclass(frozen=True)
class TimedBlocks:
    """Timed blocks of steps: samples of all ranks, and seconds of the slowest rank."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        validation.positive_and_finite("timed.rows", self.rows)
        validation.positive_and_finite("timed.seconds", self.seconds)

    @property
    def samples_per_s(self) -> float:
        """Samples per second over all ranks."""
        return sum(self.rows) / math.fsum(self.seconds)


@dataclass(frozen=True)
class PlanSharding:
    """Sharding of a plan on a rank.

    Args:
        zero_stage: ZeRO stage; None for a single process.
        reduces_once: True if gradients are reduced once per step instead of once per micro-batch.
        micro_batch: samples per micro-batch.
        num_micro_batches: micro-batches per step, for the plan's own batch size.
        reduce_dtype: data type of gradient communication.
        predicted_bytes: predicted peak bytes of a rank; None if unknown or predicted for a single process.
    """

    zero_stage: int | None
    reduces_once: bool
    micro_batch: int
    num_micro_batches: int
    reduce_dtype: str
    predicted_bytes: int | None = None


@dataclass(frozen=True)
class TimedArm:
    """A loop in a job.

    Args:
        recipe: key of `RECIPES`.
        mode: one of `MODES`; on a single rank both are equal, and the mode is "weak".
        together: blocks with communication.
        alone: blocks of the same loop on all ranks at once without communication; None if the loop would differ.
        window_samples: mean samples per step over all ranks.
        says: description of sharding and gradient communication.
        settled: True if the batch size was stable before timing.
        sharing: sharding of a plan.
        peak_bytes: peak bytes of the rank with the largest peak, without other loops in memory; None if not counted.
    """

    recipe: str
    mode: str
    together: TimedBlocks
    alone: TimedBlocks | None
    window_samples: float
    says: str = ""
    settled: bool = True
    sharing: PlanSharding | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class RefusedRecipe:
    """A recipe without timings on a number of ranks, with the reason.

    Args:
        recipe: key of `RECIPES`.
        mode: one of `MODES`.
        ranks: number of ranks.
        why: the reason.
        nonfinite: True if loss or parameters became non-finite; False if there was no plan.
    """

    recipe: str
    mode: str
    ranks: int
    why: str
    nonfinite: bool = False


@dataclass(frozen=True)
class ScalingJob:
    """Timings of a launch on a number of ranks; a JSON value.

    Args:
        ranks: number of ranks.
        round: number of the round.
        arms: timed loops.
        crowded: oversubscribed resource, "cores" or "devices", or "".
        link: measured link, once per number of ranks.
        threads: threads per rank.
        device: "cpu" or "cuda".
        refused: recipes without timings.
        environment: environment of rank 0; empty in older jobs.
    """

    ranks: int
    round: int
    arms: tuple[TimedArm, ...]
    crowded: str = ""
    link: Link | None = None
    threads: int = 1
    device: str = "cpu"
    refused: tuple[RefusedRecipe, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCALING_SCHEMA

    def arm(self, recipe: str, mode: str) -> TimedArm | None:
        """Return an arm; on a single rank regardless of the mode."""
        wanted = "weak" if self.ranks == 1 else mode
        return next((arm for arm in self.arms if (arm.recipe, arm.mode) == (recipe, wanted)), None)


@dataclass(frozen=True)
class ScalingRow:
    """A recipe on a number of ranks, over all rounds.

    Args:
        recipe: key of `RECIPES`.
        mode: one of `MODES`.
        ranks: number of ranks.
        window_samples: mean samples per step over all ranks: the effective batch size.
        samples_per_s: samples per second over all ranks.
        efficiency: throughput(n) / (n throughput(1)); None on a single rank or without a single-rank timing.
        waiting: fraction of a step absent without communication: transfers, copies for them, and waiting for other
            ranks;
            None if not timed.
        crowded: oversubscribed resource; if not "", the row shows correctness only.
        says: descriptions of the plans over all rounds.
        pairs: efficiency of every round with both timings and the same number of threads per rank.
        resolution: smallest significant effect on efficiency, from the A/A control; None without a control.
        settled: True if batch sizes were stable in all rounds.
        sharings: sharding of the plans over all rounds.
        peak_bytes: largest peak over all rounds; None if not counted.
    """

    recipe: str
    mode: str
    ranks: int
    window_samples: float
    samples_per_s: Interval
    efficiency: Interval | None
    waiting: Interval | None
    crowded: str
    says: str = ""
    pairs: tuple[float, ...] = ()
    resolution: float | None = None
    settled: bool = True
    sharings: tuple[PlanSharding, ...] = ()
    peak_bytes: int | None = None

    @property
    def has_verdict(self) -> bool:
        """True if there are enough rounds for an interval, and no oversubscription."""
        return len(self.pairs) >= MIN_PAIRS_FOR_VERDICT and not self.crowded

    @property
    def window_s(self) -> float:
        """Seconds per step."""
        return self.window_samples / self.samples_per_s.mean


@dataclass(frozen=True)
class Scaling:
    """Scaling table of a task.

    Args:
        task: name of the task.
        rows: rows of the table.
        links: measured links.
        environment: machine and versions.
        threads: numbers of threads per rank.
        refused: recipes without timings.
        linked: number of ranks of each link; empty in older tables.
    """

    task: str
    rows: tuple[ScalingRow, ...]
    links: tuple[Link, ...] = ()
    environment: dict[str, str] | None = None
    threads: tuple[int, ...] = ()
    refused: tuple[RefusedRecipe, ...] = ()
    linked: tuple[int, ...] = ()
    schema: int = SCALING_SCHEMA


def summarise(task: str, jobs: Sequence[ScalingJob], environment: dict[str, str] | None = None) -> Scaling:
    """Return the table of a task's jobs: recipes and modes in order, by number of ranks.

    Args:
        task: name of the task.
        jobs: all jobs.
        environment: used if no job recorded an environment.
    """
    rows = [
        row
        for mode in MODES
        for recipe in RECIPES
        for ranks in sorted({job.ranks for job in jobs})
        if (ranks > 1 or mode == "weak") and (row := _row(jobs, recipe, mode, ranks))
    ]
    links = {job.ranks: job.link for job in jobs if job.link is not None}
    threads = tuple(sorted({job.threads for job in jobs}))
    refused = dict.fromkeys(each for job in jobs for each in job.refused)
    ordered = tuple(sorted(refused, key=lambda each: (MODES.index(each.mode), each.ranks)))
    where = read_together(job.environment for job in jobs) or environment
    numbers = tuple(sorted(links))
    return Scaling(task, tuple(rows), tuple(map(links.__getitem__, numbers)), where, threads, ordered, numbers)


def _row(jobs: Sequence[ScalingJob], recipe: str, mode: str, ranks: int) -> ScalingRow | None:
    found = [(job, arm) for job in jobs if job.ranks == ranks and (arm := job.arm(recipe, mode)) is not None]
    if not found:
        return None
    ratios = _efficiencies(jobs, recipe, mode, ranks)
    waiting = [
        1 - arm.together.samples_per_s / arm.alone.samples_per_s
        for _, arm in found
        if ranks > 1 and arm.alone is not None
    ]
    return ScalingRow(
        recipe,
        mode,
        ranks,
        math.fsum(arm.window_samples for _, arm in found) / len(found),
        ratio_interval([arm.together.samples_per_s for _, arm in found]),
        ratio_interval(list(ratios.values())) if ratios else None,
        mean_interval(waiting) if waiting else None,
        next((job.crowded for job, _ in found if job.crowded), ""),
        " / ".join(dict.fromkeys(arm.says for _, arm in found)),
        tuple(ratios.values()),
        _resolution(jobs, mode, ranks),
        all(arm.settled for _, arm in found),
        tuple(dict.fromkeys(arm.sharing for _, arm in found if arm.sharing is not None)),
        max((arm.peak_bytes for _, arm in found if arm.peak_bytes is not None), default=None),
    )


def _efficiencies(jobs: Sequence[ScalingJob], recipe: str, mode: str, ranks: int) -> dict[int, float]:
    """Return the efficiency by round, for rounds with a single-rank job with the same number of threads."""
    alone = {(job.round, job.threads): arm for job in jobs if job.ranks == 1 and (arm := job.arm(recipe, mode))}
    return {
        job.round: arm.together.samples_per_s / (ranks * alone[job.round, job.threads].together.samples_per_s)
        for job in jobs
        if job.ranks == ranks > 1 and (job.round, job.threads) in alone and (arm := job.arm(recipe, mode))
    }


def _resolution(jobs: Sequence[ScalingJob], mode: str, ranks: int) -> float | None:
    """Return the smallest significant effect on efficiency, from the control over the baseline."""
    control, base = (_efficiencies(jobs, recipe, mode, ranks) for recipe in ("self", "baseline"))
    pairs = [control[number] / base[number] for number in control.keys() & base.keys()]
    return resolution(ratio_interval(pairs)) if len(pairs) >= MIN_PAIRS_FOR_VERDICT else None

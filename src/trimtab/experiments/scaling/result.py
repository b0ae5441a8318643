"""What more ranks are worth: throughput, scaling efficiency and what is waited for, from timed jobs (math: section 8).

A round is one job of each number of ranks, one after the other; efficiency is paired within it. Values only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.core import checks
from trimtab.core.link import Link
from trimtab.core.record import read_together
from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT, Interval, mean_interval, ratio_interval, resolution

# "weak": every rank has the task's batch. "strong": ranks share it.
MODES = ("weak", "strong")
RECIPES = {
    "baseline": "the plain loop in DistributedDataParallel, as torch has it by default",
    "self": "the baseline once more, the A/A control",
    "plan": "trimtab's plan, same maths",
    "plan_batch": "trimtab's plan, batch freed",
}
TIERS = {"baseline": "", "self": "", "plan": "S", "plan_batch": "F"}
SCALING_SCHEMA = 2


@dataclass(frozen=True)
class Timed:
    """Blocks of windows: rows of all ranks, and seconds of the slowest one."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        checks.positive_and_finite("timed.rows", self.rows)
        checks.positive_and_finite("timed.seconds", self.seconds)

    @property
    def rows_per_s(self) -> float:
        """Rows of all ranks per second."""
        return sum(self.rows) / math.fsum(self.seconds)


@dataclass(frozen=True)
class Sharing:
    """What a plan has a rank do.

    Args:
        zero_stage: None of one process. micro_batch: rows. num_micro_batches: k, of a window of the plan's own batch.
        reduce_dtype: that gradients are sent in. told_bytes: that a rank is predicted to hold at most; None: not known,
            or known of one process alone.
    """

    zero_stage: int | None
    reduces_once: bool
    micro_batch: int
    num_micro_batches: int
    reduce_dtype: str
    told_bytes: int | None = None


@dataclass(frozen=True)
class TimedArm:
    """One loop in one job.

    Args:
        recipe: of `RECIPES`. mode: of `MODES`; of one rank both are the same, and it is "weak".
        together: its blocks. alone: those of the same loop on every rank at once, each without the others: what is
            computed, and no communication; None where that is another loop.
        window_rows: of all ranks, the mean. says: how the plan shares the model and sends gradients. settled: whether
            its batch stayed before it was timed. sharing: of a plan. peak_bytes: counted, of the rank that held most,
            with no other loop beside it; None: not counted.
    """

    recipe: str
    mode: str
    together: Timed
    alone: Timed | None
    window_rows: float
    says: str = ""
    settled: bool = True
    sharing: Sharing | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Refused:
    """A recipe that jobs of so many ranks have no times of, and why.

    Args:
        nonfinite: whether its loss or parameters became NaN or infinite; else there was no plan.
    """

    recipe: str
    mode: str
    ranks: int
    why: str
    nonfinite: bool = False


@dataclass(frozen=True)
class Job:
    """What one launch of so many ranks timed; a JSON value.

    Args:
        crowded: what ranks share that should have one each, "cores" or "devices"; or "". link: as timed, once.
            threads: of each rank. device: "cpu" or "cuda". refused: plans that there are none of. environment: of its
            first rank; of jobs that were timed before it was kept, nothing.
    """

    ranks: int
    round: int
    arms: tuple[TimedArm, ...]
    crowded: str = ""
    link: Link | None = None
    threads: int = 1
    device: str = "cpu"
    refused: tuple[Refused, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCALING_SCHEMA

    def arm(self, recipe: str, mode: str) -> TimedArm | None:
        """Return an arm; of one rank whatever the mode."""
        wanted = "weak" if self.ranks == 1 else mode
        return next((arm for arm in self.arms if (arm.recipe, arm.mode) == (recipe, wanted)), None)


@dataclass(frozen=True)
class ScalingRow:
    """A recipe on so many ranks, over all rounds.

    Args:
        rows_per_s: of all ranks. window_rows: of all ranks, the mean: the effective batch.
        efficiency: throughput(n) / (n throughput(1)); None of one rank, or where one rank was not timed. pairs: of each
            round that has both, of ranks with as many threads.
        waiting: share of a window that the same loop does not take without the others: sending, what is copied for it,
            and ranks that are waited for; None where it was not timed.
        crowded: as of its jobs: where it is not "", the row is of correctness only.
        says: of the plan, each that some round had. resolution: the least effect on efficiency that the A/A control
            tells from none; None where there is no control. sharings: of the plan, each that some round had.
        peak_bytes: counted, the most of any round; None: not counted.
    """

    recipe: str
    mode: str
    ranks: int
    window_rows: float
    rows_per_s: Interval
    efficiency: Interval | None
    waiting: Interval | None
    crowded: str
    says: str = ""
    pairs: tuple[float, ...] = ()
    resolution: float | None = None
    settled: bool = True
    sharings: tuple[Sharing, ...] = ()
    peak_bytes: int | None = None

    @property
    def has_verdict(self) -> bool:
        """Whether its efficiency is of rounds enough for an interval, and of ranks that share nothing."""
        return len(self.pairs) >= MIN_PAIRS_FOR_VERDICT and not self.crowded

    @property
    def window_s(self) -> float:
        """Seconds of a window."""
        return self.window_rows / self.rows_per_s.mean


@dataclass(frozen=True)
class Scaling:
    """The table of a task.

    Args:
        links: as jobs timed them. linked: how many ranks each of them joins; in tables of before not written down.
    """

    task: str
    rows: tuple[ScalingRow, ...]
    links: tuple[Link, ...] = ()
    environment: dict[str, str] | None = None
    threads: tuple[int, ...] = ()
    refused: tuple[Refused, ...] = ()
    linked: tuple[int, ...] = ()
    schema: int = SCALING_SCHEMA


def summarise(task: str, jobs: Sequence[Job], environment: dict[str, str] | None = None) -> Scaling:
    """Return the table of a task's jobs: recipes and modes in order, by ranks.

    Args:
        environment: where no job says its own.
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


def _row(jobs: Sequence[Job], recipe: str, mode: str, ranks: int) -> ScalingRow | None:
    found = [(job, arm) for job in jobs if job.ranks == ranks and (arm := job.arm(recipe, mode)) is not None]
    if not found:
        return None
    ratios = _efficiencies(jobs, recipe, mode, ranks)
    waiting = [
        1 - arm.together.rows_per_s / arm.alone.rows_per_s for _, arm in found if ranks > 1 and arm.alone is not None
    ]
    return ScalingRow(
        recipe,
        mode,
        ranks,
        math.fsum(arm.window_rows for _, arm in found) / len(found),
        ratio_interval([arm.together.rows_per_s for _, arm in found]),
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


def _efficiencies(jobs: Sequence[Job], recipe: str, mode: str, ranks: int) -> dict[int, float]:
    """Return efficiency by round, of the rounds that have one rank too, of as many threads."""
    alone = {(job.round, job.threads): arm for job in jobs if job.ranks == 1 and (arm := job.arm(recipe, mode))}
    return {
        job.round: arm.together.rows_per_s / (ranks * alone[job.round, job.threads].together.rows_per_s)
        for job in jobs
        if job.ranks == ranks > 1 and (job.round, job.threads) in alone and (arm := job.arm(recipe, mode))
    }


def _resolution(jobs: Sequence[Job], mode: str, ranks: int) -> float | None:
    """Return the least effect on efficiency that can be told from none: of the control over the baseline."""
    control, base = (_efficiencies(jobs, recipe, mode, ranks) for recipe in ("self", "baseline"))
    pairs = [control[number] / base[number] for number in control.keys() & base.keys()]
    return resolution(ratio_interval(pairs)) if len(pairs) >= MIN_PAIRS_FOR_VERDICT else None

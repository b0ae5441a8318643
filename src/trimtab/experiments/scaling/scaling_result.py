"""Scaling results from timed jobs: throughput, efficiency and waiting time, as text and as flat rows (math: section 8).

A round is a job for every number of ranks in sequence; efficiency is paired within a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from trimtab.core import validation
from trimtab.core.hardware import Link
from trimtab.core.record import read_together
from trimtab.core.units import format_bytes, format_seconds
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


_TIMED = ("scaling", "recipe", "ranks", "batch", "samples/s", "efficiency (95%)", "waiting", "step")
_COLUMNS = (*_TIMED, "stage", "micro-batches", "reduced in", "peak per rank", "predicted", "n")


def tables(found: Scaling) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return tables of text by title, headers first; equivalent plans and adaptive batch sizes are separate."""
    parts = {
        "Equivalent plan": [row for row in found.rows if PLAN_KINDS[row.recipe] != "tuned"],
        "Adaptive batch size": [row for row in found.rows if PLAN_KINDS[row.recipe] == "tuned"],
    }
    refused = tuple(map(_refused_cells, found.refused))
    return {
        title: (_COLUMNS, *map(_cells, rows), *(refused if title == "Equivalent plan" else ()))
        for title, rows in parts.items()
        if rows
    }


def _refused_cells(row: RefusedRecipe) -> tuple[str, ...]:
    found = (
        row.mode if row.ranks > 1 else "",
        row.recipe,
        f"{row.ranks}",
        "",
        f"{'non-finite' if row.nonfinite else 'no plan'}: see notes",
    )
    return (*found, *("" for _ in _COLUMNS[len(found) :]))


def _why(row: RefusedRecipe) -> str:
    return row.why if row.nonfinite else f"no plan meets the limit: {row.why}"


def _cells(row: ScalingRow) -> tuple[str, ...]:
    return (
        row.mode if row.ranks > 1 else "",
        row.recipe,
        f"{row.ranks}" + (f" (share {row.crowded})" if row.crowded else ""),
        f"{row.window_samples:.0f}",
        f"{row.samples_per_s.mean:.4g}",
        _efficiency(row),
        "" if row.waiting is None else _share(row.waiting),
        format_seconds(row.window_s),
        *(_each(row, part) for part in (_stage, _split, _sent)),
        "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        _each(row, _told),
        str(_num(row)),
    )


def _num(row: ScalingRow) -> int:
    """Return the number of rounds behind the efficiency; on a single rank, the number of timed rounds."""
    return row.samples_per_s.n if row.efficiency is None else len(row.pairs)


def _each(row: ScalingRow, said: Callable[[PlanSharding], str]) -> str:
    """Return the descriptions of the plans over all rounds."""
    return " / ".join(dict.fromkeys(said(each) for each in row.sharings))


def _stage(each: PlanSharding) -> str:
    return "" if each.zero_stage is None else f"{each.zero_stage}{'' if each.reduces_once else ', each reduced'}"


def _split(each: PlanSharding) -> str:
    return f"{each.num_micro_batches} x {each.micro_batch}"


def _sent(each: PlanSharding) -> str:
    return "" if each.zero_stage is None else each.reduce_dtype


def _told(each: PlanSharding) -> str:
    return "" if each.predicted_bytes is None else format_bytes(each.predicted_bytes)


def _efficiency(row: ScalingRow) -> str:
    """Return the efficiency with its interval, or the value of every round if there are too few rounds."""
    if row.efficiency is None:
        return ""
    found = row.efficiency
    if not row.has_verdict:
        return ", ".join(f"{100 * pair:.1f}%" for pair in row.pairs)
    return f"{100 * found.mean:.1f}% ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _share(value: Interval) -> str:
    half = "" if value.n < MIN_PAIRS_FOR_VERDICT else f" ± {50 * (value.high - value.low):.1f}"
    return f"{100 * value.mean:.1f}%{half}"


def text(found: Scaling) -> str:
    """Return the tables with caveats for a terminal."""
    parts = [f"{title}\n{_aligned(rows)}" for title, rows in tables(found).items()]
    return "\n\n".join([*parts, "\n".join(notes(found))])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def notes(found: Scaling) -> list[str]:
    """Return the caveats of the table."""
    recipes = list(dict.fromkeys(row.recipe for row in found.rows))
    said = [f"{recipe}: {RECIPES[recipe]}" for recipe in recipes]
    said += [f"{row.recipe}, {_where(row.ranks, row.mode)}: {row.says}" for row in found.rows if row.says]
    said += [f"{row.recipe}, {_where(row.ranks, row.mode)}: {_why(row)}" for row in found.refused]
    said += [f"link: {link.name}, {_speed(link)}" for link in found.links]
    said.append(f"threads of a rank: {', '.join(map(str, found.threads))}")
    said.append("waiting: fraction of a step that the same loop does not need without communication")
    if any(row.peak_bytes is not None for row in found.rows):
        said.append("peak: largest over ranks, counted in separate steps, without timing")
    controls = {f"{row.ranks} ranks, {row.mode}": row.resolution for row in found.rows if row.resolution is not None}
    said += [f"{where}: the A/A control resolves {100 * least:.1f}%" for where, least in controls.items()]
    if any(PLAN_KINDS[row.recipe] == "tuned" for row in found.rows):
        said.append("an adaptive batch size may need more or fewer samples to reach a loss; this is not measured here")
    if any(not row.settled for row in found.rows):
        said.append("the adaptive batch size was still changing in some round; the figure is for its size then")
    if shared := {row.crowded for row in found.rows if row.crowded}:
        said.append(f"ranks that share {' or '.join(shared)} do not measure scaling")
    if any(_num(row) < MIN_PAIRS_FOR_VERDICT for row in found.rows):
        said.append(
            f"fewer than {MIN_PAIRS_FOR_VERDICT} rounds: efficiencies of all rounds are shown, without a verdict"
        )
    return said


def _where(ranks: int, mode: str) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks, {mode}"


def _speed(link: Link) -> str:
    return f"{format_seconds(link.latency_s)} per hop, {link.bytes_per_s / 1e6:.4g} MB/s"


def benchmark_object(found: Scaling, link: str | None) -> dict[str, object]:
    """Return the object printed by `trimtab scale --json`; the arguments are those of `benchmark_rows`."""
    rows = list(benchmark_rows(found, link))
    return {"schema": 1, "name": "scale", "environment": found.environment or {}, "rows": rows}


def benchmark_rows(found: Scaling, link: str | None) -> Iterable[dict[str, object]]:
    """Yield a flat row for every recipe and number of ranks.

    Args:
        found: the table.
        link: name of the link, such as "local" or "slow"; None for the measured link of the row's ranks.
    """
    names = {ranks: each.name for ranks, each in zip(found.linked, found.links, strict=False)}
    for row in found.rows:
        yield {
            "metric": "scaling_efficiency",
            "task": found.task,
            "scaling": row.mode,
            "ranks": row.ranks,
            "link": names.get(row.ranks, "") if link is None else link,
            "recipe": row.recipe,
            "plan_kind": PLAN_KINDS[row.recipe],
            "effective_batch": row.window_samples,
            "samples_per_s": row.samples_per_s.mean,
            "window_s": row.window_s,
            **_bounds(row),
            "pairs": list(row.pairs),
            "n": len(row.pairs),
            "resolution": row.resolution,
            "waiting_share": None if row.waiting is None else row.waiting.mean,
            "threads": list(found.threads),
            "shares": row.crowded,
            "says": row.says,
            "peak_bytes": row.peak_bytes,
            "plans": [asdict(each) for each in row.sharings],
        }
    for refused in found.refused:
        yield {
            "metric": "scaling_efficiency",
            "task": found.task,
            "scaling": refused.mode,
            "ranks": refused.ranks,
            "link": names.get(refused.ranks, "") if link is None else link,
            "recipe": refused.recipe,
            "plan_kind": PLAN_KINDS[refused.recipe],
            "mean": None,
            "n": 0,
            "refused": refused.why,
        }


def _bounds(row: ScalingRow) -> dict[str, float | None]:
    found = row.efficiency
    bounds = (found.low, found.high) if found is not None and row.has_verdict else (None, None)
    return {"mean": None if found is None else found.mean, "low": bounds[0], "high": bounds[1]}

"""What more ranks are worth: throughput, scaling efficiency and what is waited for, from timed jobs (math: section 8).

A round is one job of each number of ranks, one after the other; efficiency is paired within it. Values only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.core.link import Link
from trimtab.core.units import format_seconds
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
SCALING_SCHEMA = 1


@dataclass(frozen=True)
class Timed:
    """Blocks of windows: rows of all ranks, and seconds of the slowest one."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def rows_per_s(self) -> float:
        """Rows of all ranks per second."""
        return sum(self.rows) / math.fsum(self.seconds)


@dataclass(frozen=True)
class TimedArm:
    """One loop in one job.

    Args:
        recipe: of `RECIPES`. mode: of `MODES`; of one rank both are the same, and it is "weak".
        together: its blocks. alone: those of the same loop on every rank at once, each without the others: what is
            computed, and no communication; None where that is another loop.
        window_rows: of all ranks, the mean. says: how the plan shares the model and sends gradients. settled: whether
            its batch stayed before it was timed.
    """

    recipe: str
    mode: str
    together: Timed
    alone: Timed | None
    window_rows: float
    says: str = ""
    settled: bool = True


@dataclass(frozen=True)
class Job:
    """What one launch of so many ranks timed; a JSON value.

    Args:
        crowded: what ranks share that should have one each, "cores" or "devices"; or "". link: as timed, once.
            threads: of each rank. device: "cpu" or "cuda".
    """

    ranks: int
    round: int
    arms: tuple[TimedArm, ...]
    crowded: str = ""
    link: Link | None = None
    threads: int = 1
    device: str = "cpu"
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
            tells from none; None where there is no control.
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

    @property
    def has_verdict(self) -> bool:
        """Whether its efficiency is of rounds enough for an interval."""
        return len(self.pairs) >= MIN_PAIRS_FOR_VERDICT

    @property
    def window_s(self) -> float:
        """Seconds of a window."""
        return self.window_rows / self.rows_per_s.mean


@dataclass(frozen=True)
class Scaling:
    """The table of a task."""

    task: str
    rows: tuple[ScalingRow, ...]
    links: tuple[Link, ...] = ()
    environment: dict[str, str] | None = None
    threads: tuple[int, ...] = ()
    schema: int = SCALING_SCHEMA


def summarise(task: str, jobs: Sequence[Job], environment: dict[str, str] | None = None) -> Scaling:
    """Return the table of a task's jobs: recipes and modes in order, by ranks."""
    rows = [
        row
        for mode in MODES
        for recipe in RECIPES
        for ranks in sorted({job.ranks for job in jobs})
        if (ranks > 1 or mode == "weak") and (row := _row(jobs, recipe, mode, ranks))
    ]
    links = {job.ranks: job.link for job in jobs if job.link is not None}
    threads = tuple(sorted({job.threads for job in jobs}))
    return Scaling(task, tuple(rows), tuple(links[ranks] for ranks in sorted(links)), environment, threads)


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


_COLUMNS = ("scaling", "recipe", "ranks", "batch", "rows/s", "efficiency (95%)", "waiting", "a window", "n")


def tables(found: Scaling) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return tables as text by what they are of, each one's head first; what keeps the maths is apart from the rest."""
    parts = {
        "Same maths": [row for row in found.rows if TIERS[row.recipe] != "F"],
        "Batch freed": [row for row in found.rows if TIERS[row.recipe] == "F"],
    }
    return {title: (_COLUMNS, *map(_cells, rows)) for title, rows in parts.items() if rows}


def _cells(row: ScalingRow) -> tuple[str, ...]:
    return (
        row.mode if row.ranks > 1 else "",
        row.recipe,
        f"{row.ranks}" + (f" (share {row.crowded})" if row.crowded else ""),
        f"{row.window_rows:.0f}",
        f"{row.rows_per_s.mean:.4g}",
        _efficiency(row),
        "" if row.waiting is None else _share(row.waiting),
        format_seconds(row.window_s),
        str(row.rows_per_s.n),
    )


def _efficiency(row: ScalingRow) -> str:
    """Return it with its interval; of too few rounds for one, what each of them was."""
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
    """Return the tables for a terminal, with what has to be known beside them."""
    parts = [f"{title}\n{_aligned(rows)}" for title, rows in tables(found).items()]
    return "\n\n".join([*parts, "\n".join(notes(found))])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def notes(found: Scaling) -> list[str]:
    """Return what has to be known beside the table."""
    recipes = list(dict.fromkeys(row.recipe for row in found.rows))
    said = [f"{recipe}: {RECIPES[recipe]}" for recipe in recipes]
    said += [f"{row.recipe}, {_where(row)}: {row.says}" for row in found.rows if row.says]
    said += [f"link: {link.name}, {_speed(link)}" for link in found.links]
    said.append(f"threads of a rank: {', '.join(map(str, found.threads))}")
    said.append("waiting: of a window, what the same loop does not take without the other ranks")
    controls = {f"{row.ranks} ranks, {row.mode}": row.resolution for row in found.rows if row.resolution is not None}
    said += [f"of {where} the A/A control tells {100 * least:.1f}% from nothing" for where, least in controls.items()]
    if any(TIERS[row.recipe] == "F" for row in found.rows):
        said.append("a freed batch takes other samples to a loss, which are not measured here")
    if any(not row.settled for row in found.rows):
        said.append("a freed batch had not settled in some round: it is as it was then")
    if shared := {row.crowded for row in found.rows if row.crowded}:
        said.append(f"ranks that share {' or '.join(shared)} say that it runs, and nothing of scaling")
    if any(row.rows_per_s.n < MIN_PAIRS_FOR_VERDICT for row in found.rows):
        said.append(f"fewer than {MIN_PAIRS_FOR_VERDICT} rounds: each one's efficiency, and no verdict")
    return said


def _where(row: ScalingRow) -> str:
    return "one rank" if row.ranks == 1 else f"{row.ranks} ranks, {row.mode}"


def _speed(link: Link) -> str:
    return f"{format_seconds(link.latency_s)} a hop, {link.bytes_per_s / 1e6:.4g} MB/s"


def benchmark_rows(found: Scaling, link: str) -> Iterable[dict[str, object]]:
    """Yield a flat row of each recipe and number of ranks.

    Args:
        link: what it is called: "local", "slow".
    """
    for row in found.rows:
        yield {
            "metric": "scaling_efficiency",
            "task": found.task,
            "scaling": row.mode,
            "ranks": row.ranks,
            "link": link,
            "recipe": row.recipe,
            "tier": TIERS[row.recipe],
            "effective_batch": row.window_rows,
            "rows_per_s": row.rows_per_s.mean,
            "window_s": row.window_s,
            **_bounds(row),
            "pairs": list(row.pairs),
            "n": len(row.pairs),
            "resolution": row.resolution,
            "waiting_share": None if row.waiting is None else row.waiting.mean,
            "threads": list(found.threads),
            "shares": row.crowded,
            "says": row.says,
        }


def _bounds(row: ScalingRow) -> dict[str, float | None]:
    found = row.efficiency
    bounds = (found.low, found.high) if found is not None and row.has_verdict else (None, None)
    return {"mean": None if found is None else found.mean, "low": bounds[0], "high": bounds[1]}

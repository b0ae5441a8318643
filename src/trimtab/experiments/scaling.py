"""Scaling: jobs on several numbers of ranks as result tables, their efficiency and waiting time (math: section 8).

A round is a job for every number of ranks in sequence; efficiency is paired within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trimtab.core.errors import FormatError
from trimtab.core.hardware import Link
from trimtab.core.record import read_together
from trimtab.core.units import format_bytes, format_seconds
from trimtab.experiments import result_table
from trimtab.experiments.result_table import BASELINE, CONTROL, PEAK, PLANNED, ResultTable
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, mean_interval, ratio_interval, resolution
from trimtab.plans.plan import Plan

# "weak": every rank has the whole batch of the loop. "strong": the ranks share a batch.
MODES = ("weak", "strong")
ALONE = " without communication"  # Suffix of the name of an arm that runs on all ranks at once, each by itself.
SCHEMA, FILE = 4, "scaling.json"


@dataclass(frozen=True)
class ScalingJob:
    """Measured values of a launch on a number of ranks.

    Args:
        ranks: number of ranks.
        round: number of the round.
        tables: table by mode; on a single rank both modes are equal, and the mode is "weak".
        failures: reasons of arms without times, by mode and arm.
        plans: the plans, by mode.
        crowded: oversubscribed resource, "cores" or "devices", or "".
        link: measured link, once per number of ranks.
        threads: threads per rank.
        environment: environment of rank 0.
    """

    ranks: int
    round: int
    tables: Mapping[str, ResultTable]
    failures: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    plans: Mapping[str, Plan] = field(default_factory=dict)
    crowded: str = ""
    link: Link | None = None
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def samples_per_s(self, arm: str, mode: str) -> float | None:
        """Return the samples per second of an arm over all ranks; None without times."""
        table = self.tables.get("weak" if self.ranks == 1 else mode)
        found = [] if table is None else result_table.per_sample(table, arm)
        return 1 / statistics.median(found) if found else None

    def peak_bytes(self, arm: str, mode: str) -> float | None:
        """Return the peak memory of an arm on the rank with the largest peak."""
        table = self.tables.get("weak" if self.ranks == 1 else mode)
        return None if table is None else table.value(PEAK, arm)


@dataclass(frozen=True)
class ScalingRow:
    """An arm on a number of ranks, over all rounds.

    Args:
        arm, mode, ranks: what was timed.
        samples_per_s: samples per second over all ranks.
        pairs: efficiency throughput(n) / (n throughput(1)) of every round with both and equal threads per rank.
        waiting: fraction of a step that the loop does not need without communication: transfers, copies for them, and
            waiting for other ranks; None if not timed.
        resolution: smallest significant effect on efficiency, from the A/A control; None without a control.
        peak_bytes: largest peak over all rounds; None if not counted.
        crowded: oversubscribed resource; if not "", the row shows correctness only.
    """

    arm: str
    mode: str
    ranks: int
    samples_per_s: Interval
    pairs: tuple[float, ...]
    waiting: Interval | None
    resolution: float | None
    peak_bytes: float | None
    crowded: str

    @property
    def efficiency(self) -> Interval | None:
        """Efficiency with its interval; None on a single rank or without times on one."""
        return ratio_interval(self.pairs) if self.pairs else None

    @property
    def has_verdict(self) -> bool:
        """True if there are enough rounds for an interval, and no oversubscription."""
        return len(self.pairs) >= MIN_PAIRS_FOR_VERDICT and not self.crowded


@dataclass(frozen=True)
class Scaling:
    """Result of `trimtab scale`: all jobs of a loop. `print` shows the table.

    Args:
        task: name of the loop.
        jobs: the jobs.
    """

    task: str
    jobs: tuple[ScalingJob, ...]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise FormatError("scaling.schema", got=repr(self.schema), expected=str(SCHEMA))

    @property
    def environment(self) -> dict[str, str]:
        """Machine and versions of all jobs; values that differ are all listed."""
        return read_together(job.environment for job in self.jobs)

    def rows(self) -> Iterator[ScalingRow]:
        """Yield the rows of the table: by mode, arm and number of ranks."""
        for mode in MODES:
            for arm in (BASELINE, CONTROL, PLANNED):
                for ranks in sorted({job.ranks for job in self.jobs}):
                    if (ranks > 1 or mode == "weak") and (row := self._row(arm, mode, ranks)) is not None:
                        yield row

    def _row(self, arm: str, mode: str, ranks: int) -> ScalingRow | None:
        jobs = [job for job in self.jobs if job.ranks == ranks]
        rates = [rate for job in jobs if (rate := job.samples_per_s(arm, mode)) is not None]
        if not rates:
            return None
        waiting = [
            1 - ours / alone
            for job in jobs
            if ranks > 1
            and (ours := job.samples_per_s(arm, mode)) is not None
            and (alone := job.samples_per_s(f"{arm}{ALONE}", mode)) is not None
        ]
        control, base = (self.efficiencies(each, mode, ranks) for each in (CONTROL, BASELINE))
        noise = [control[number] / base[number] for number in control if number in base]
        peaks = [peak for job in jobs if (peak := job.peak_bytes(arm, mode)) is not None]
        return ScalingRow(
            arm,
            mode,
            ranks,
            ratio_interval(rates),
            tuple(self.efficiencies(arm, mode, ranks).values()),
            mean_interval(waiting) if waiting else None,
            resolution(ratio_interval(noise)) if len(noise) >= MIN_PAIRS_FOR_VERDICT else None,
            max(peaks, default=None),
            next((job.crowded for job in jobs if job.crowded), ""),
        )

    def efficiencies(self, arm: str, mode: str, ranks: int) -> dict[int, float]:
        """Return the efficiency of an arm by round, for rounds with a single-rank job with the same threads."""
        alone = {(job.round, job.threads): job.samples_per_s(arm, mode) for job in self.jobs if job.ranks == 1}
        found = {}
        for job in self.jobs if ranks > 1 else ():
            theirs = alone.get((job.round, job.threads))
            if job.ranks == ranks and theirs and (ours := job.samples_per_s(arm, mode)) is not None:
                found[job.round] = ours / (ranks * theirs)
        return found

    @property
    def failures(self) -> dict[str, str]:
        """Reasons of arms without times, by arm, mode and number of ranks in words."""
        return {
            f"{arm}, {_where(job.ranks, mode)}": why
            for job in self.jobs
            for mode, failed in job.failures.items()
            for arm, why in failed.items()
        }

    def __str__(self) -> str:
        return text_of(self)


_COLUMNS = ("scaling", "arm", "ranks", "samples/s", "efficiency (95%)", "waiting", "peak per rank", "rounds")


def table_of(found: Scaling) -> list[tuple[str, ...]]:
    """Return the table as cells, headings first."""
    return [_COLUMNS, *map(_cells, found.rows())]


def _cells(row: ScalingRow) -> tuple[str, ...]:
    efficiency = ", ".join(f"{100 * pair:.1f}%" for pair in row.pairs)
    if (interval := row.efficiency) is not None and row.has_verdict:
        efficiency = f"{100 * interval.mean:.1f}% ({100 * interval.low:.1f} to {100 * interval.high:.1f})"
    return (
        row.mode if row.ranks > 1 else "",
        row.arm,
        f"{row.ranks}" + (f" (share {row.crowded})" if row.crowded else ""),
        f"{row.samples_per_s.mean:,.4g}",
        efficiency,
        "" if row.waiting is None else f"{100 * row.waiting.mean:.1f}%",
        "" if row.peak_bytes is None else format_bytes(int(row.peak_bytes)),
        str(len(row.pairs) or row.samples_per_s.n),
    )


def text_of(found: Scaling) -> str:
    """Return the table with caveats."""
    rows = table_of(found)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *notes_of(found)])


def notes_of(found: Scaling) -> list[str]:
    """Return the caveats of the table."""
    rows = list(found.rows())
    said = ["efficiency: samples/s on n ranks over n times those on one rank, paired within rounds"]
    if any(row.waiting is not None for row in rows):
        said.append("waiting: fraction of a step that the same loop does not need without communication")
    plans = {_where(job.ranks, mode): describe_plan(plan) for job in found.jobs for mode, plan in job.plans.items()}
    said += [f"plan, {where}: {text}" for where, text in plans.items()]
    said += [f"{what}: {why}" for what, why in found.failures.items()]
    links = {job.ranks: job.link for job in found.jobs if job.link is not None}
    said += [
        f"link of {ranks} ranks: {link.name}, {format_seconds(link.latency_s)} per hop, "
        f"{link.bytes_per_s / 1e6:.4g} MB/s"
        for ranks, link in sorted(links.items())
    ]
    said.append(f"threads of a rank: {', '.join(map(str, sorted({job.threads for job in found.jobs})))}")
    controls = {_where(row.ranks, row.mode): row.resolution for row in rows if row.resolution is not None}
    said += [f"{where}: the A/A control resolves {100 * least:.1f}%" for where, least in controls.items()]
    if shared := {row.crowded for row in rows if row.crowded}:
        said.append(f"ranks that share {' or '.join(shared)} do not measure scaling")
    if any(len(row.pairs) < MIN_PAIRS_FOR_VERDICT for row in rows if row.ranks > 1):
        said.append(f"a verdict needs {MIN_PAIRS_FOR_VERDICT} rounds")
    return said


def _where(ranks: int, mode: str) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks, {mode}"


def describe_plan(plan: Plan) -> str:
    """Return a plan in a line: its changes, micro-batches, and the sharding of the model."""
    said = f"{plan.changes_in_words or 'no changes'}; {plan.num_micro_batches} micro-batches"
    if plan.zero_stage.value is None:
        return said
    return f"{said}; ZeRO stage {plan.zero_stage.value}, gradients reduced in {plan.reduce_dtype.value}"


def sharding_of(plan: Plan) -> dict[str, object]:
    """Return the sharding of a plan as values; predicted peak bytes are None if predicted for a single process."""
    is_of_ranks = plan.predicted is not None and (plan.num_ranks == 1 or plan.baseline is None)
    predicted = plan.predicted.peak_bytes if plan.predicted is not None and is_of_ranks else None
    return {
        "zero_stage": plan.zero_stage.value,
        "micro_batch": plan.micro_batch.value,
        "num_micro_batches": plan.num_micro_batches,
        "reduce_dtype": plan.reduce_dtype.value,
        "predicted_bytes": predicted,
    }


def benchmark_rows(found: Scaling, link: str | None = None) -> Iterator[dict[str, object]]:
    """Yield a flat row for every arm and number of ranks.

    Args:
        link: name of the link, such as "local" or "slow"; None for the measured link of the row's ranks.
    """
    links = {job.ranks: job.link.name for job in found.jobs if job.link is not None}
    kinds = {BASELINE: ("baseline", ""), CONTROL: ("self", ""), PLANNED: ("plan", "equivalent")}
    for row in found.rows():
        recipe, plan_kind = kinds[row.arm]
        interval = row.efficiency
        ends = (interval.low, interval.high) if interval is not None and row.has_verdict else (None, None)
        yield {
            "metric": "scaling_efficiency",
            "task": found.task,
            "scaling": row.mode,
            "ranks": row.ranks,
            "link": links.get(row.ranks, "") if link is None else link,
            "recipe": recipe,
            "plan_kind": plan_kind,
            "samples_per_s": row.samples_per_s.mean,
            "mean": None if interval is None else interval.mean,
            "low": ends[0],
            "high": ends[1],
            "pairs": list(row.pairs),
            "n": len(row.pairs),
            "resolution": row.resolution,
            "waiting_share": None if row.waiting is None else row.waiting.mean,
            "shares": row.crowded,
            "peak_bytes": row.peak_bytes,
            "plans": [
                sharding_of(job.plans[mode])
                for job in found.jobs
                if row.arm == PLANNED and job.ranks == row.ranks and (mode := _mode(row)) in job.plans
            ][:1],
        }
    for job in found.jobs:
        for mode, failed in job.failures.items():
            for arm, why in failed.items():
                recipe, plan_kind = kinds.get(arm, (arm, ""))
                yield {
                    "metric": "scaling_efficiency",
                    "task": found.task,
                    "scaling": mode,
                    "ranks": job.ranks,
                    "recipe": recipe,
                    "plan_kind": plan_kind,
                    "mean": None,
                    "n": 0,
                    "refused": why,
                }


def _mode(row: ScalingRow) -> str:
    return "weak" if row.ranks == 1 else row.mode

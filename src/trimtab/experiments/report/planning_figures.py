"""Figures about planning: memory against time of trials, and predicted against measured values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.profile import Trial
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import plan_tables, svg, tables
from trimtab.experiments.report.figure_spec import FigureSpec, LegendEntry, byte_unit, time_unit
from trimtab.experiments.report.svg import COLOUR, NUM_PARTS


def memory_time(comparison: Comparison) -> FigureSpec:
    """Peak memory against step time of full-step trials; the reference and chosen settings are ringed and named.

    The Pareto front of all candidates for the equivalent plan is drawn too, with infeasible points crossed out.
    """
    whole = [trial for trial in comparison.trials if trial.is_whole]
    drawn = [trial for trial in whole if trial.step_s is not None and trial.peak_bytes is not None]
    aside = tuple(_not_drawn(trial) for trial in whole if trial not in drawn)
    if not drawn:
        reason = "no trial has both a time and a peak memory" if comparison.trials else "no planning trial was run"
        return FigureSpec("", f"No figure: {reason}.", aside=aside)
    precisions = list(dict.fromkeys(trial.candidate.precision for trial in drawn))
    time, time_name = time_unit(max(trial.step_s or 0 for trial in drawn))
    size, size_name = byte_unit(max(trial.peak_bytes or 0 for trial in drawn))
    front = comparison.plans["equivalent"].front if "equivalent" in comparison.plans else ()

    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        ax.margins(0.14)
        for trial in drawn:
            colour = COLOUR[f"p{precisions.index(trial.candidate.precision) % NUM_PARTS}"]
            at = ((trial.step_s or 0) / time, (trial.peak_bytes or 0) / size)
            ax.plot(*at, "o", color=colour, markersize=6, alpha=0.85, markeredgewidth=0)
        within = [(point.step_s / time, point.peak_bytes / size) for point in front if not point.refusal]
        beyond = [(point.step_s / time, point.peak_bytes / size) for point in front if point.refusal]
        ax.plot(*zip(*within, strict=True) if within else ([], []), "-", color=COLOUR["ink"], linewidth=0.8, alpha=0.6)
        ax.plot(*zip(*beyond, strict=True) if beyond else ([], []), "x", color=COLOUR["ink"], markersize=5, alpha=0.6)
        for index, (name, trial) in enumerate(_named(comparison, drawn)):
            _ring(ax, ((trial.step_s or 0) / time, (trial.peak_bytes or 0) / size), name, above=index % 2 == 0)
        ax.set_xlabel(f"time per optimizer step, {time_name}")
        ax.set_ylabel(f"peak memory, {size_name}")

    keys = [LegendEntry(f"p{i % NUM_PARTS}", say.one_line(name, 40)) for i, name in enumerate(precisions)]
    keys += [LegendEntry("ink", "Pareto front of all combinations; crosses exceed a limit")] if front else []
    picture = svg.render(paint, name="memory-time", title="Peak memory against step time of each trial", height=250)
    caption = "One dot per trial of whole steps; lower left is better. Circled: the reference and the chosen settings."
    return FigureSpec(picture, caption, tuple(keys), aside)


def _not_drawn(trial: Trial) -> str:
    why = say.one_line(trial.error, 160) if trial.error else "step time or peak memory not measured"
    return f"{say.one_line(trial.candidate.describe())}: {why}"


def _named(comparison: Comparison, drawn: Sequence[Trial]) -> list[tuple[str, Trial]]:
    """Return a trial for every role, the last of its kind, because later search phases measure longer."""
    roles = {plan_tables.role(comparison, trial): trial for trial in drawn if not trial.control}
    return sorted((name, trial) for name, trial in roles.items() if name)


def _ring(ax: Any, at: tuple[float, float], name: str, *, above: bool) -> None:
    ax.plot(*at, "o", color="none", markeredgecolor=COLOUR["ink"], markersize=11, markeredgewidth=1.2)
    offset, side = ((0, 9), "bottom") if above else ((0, -9), "top")
    ax.annotate(name, at, xytext=offset, textcoords="offset points", ha="center", va=side, weight="bold", fontsize=9)


@dataclass(frozen=True)
class _PredictionOutcome:
    """A quantity of a plan: prediction, measurement, and the values of single runs."""

    predicted: float | None
    measured: float | None
    runs: tuple[float, ...] = ()


def predictions(comparison: Comparison) -> FigureSpec:
    """Predicted and measured step time and peak memory of all plans, from zero."""
    plan_kinds = tables.plan_kinds(comparison.plans)
    times = [_time(comparison, plan_kind) for plan_kind in plan_kinds]
    peaks = [_peak(comparison, plan_kind) for plan_kind in plan_kinds]
    if not any(row.predicted is not None and row.measured is not None for row in times + peaks):
        return FigureSpec("", "No figure: no plan has both a prediction and a measurement.")

    def paint(axes: Sequence[Any]) -> None:
        _paint_outcomes(axes[0], times, "time per step", time_unit(_largest(times)))
        _paint_outcomes(axes[1], peaks, "peak memory", byte_unit(_largest(peaks)))
        axes[0].set_yticks(
            range(len(plan_kinds)), [tables.plan_name(plan_kind).replace(", ", "\n") for plan_kind in plan_kinds]
        )
        axes[0].invert_yaxis()

    keys = (
        LegendEntry("p4", "predicted"),
        LegendEntry("p0", "measured, median"),
        LegendEntry("ink", "one run", "dotted"),
    )
    title, height = "Predicted and measured step time and peak memory of each plan", 62 + 44 * len(plan_kinds)
    picture = svg.render(paint, name="predictions", title=title, height=height, columns=2)
    return FigureSpec(picture, "A missing bar was not measured, or not predicted.", keys)


def _time(comparison: Comparison, plan_kind: str) -> _PredictionOutcome:
    predicted, arm = comparison.plans[plan_kind].predicted, plan_tables.arm_of(comparison, plan_kind)
    runs = arm.step_s if arm else ()
    return _PredictionOutcome(predicted.step_s if predicted else None, say.median_or_none(runs), runs)


def _peak(comparison: Comparison, plan_kind: str) -> _PredictionOutcome:
    predicted, arm = comparison.plans[plan_kind].predicted, plan_tables.arm_of(comparison, plan_kind)
    return _PredictionOutcome(predicted.peak_bytes if predicted else None, arm.peak_bytes if arm else None)


def _largest(rows: Sequence[_PredictionOutcome]) -> float:
    return max((value for row in rows for value in (row.predicted, row.measured, *row.runs) if value), default=0.0)


def _paint_outcomes(ax: Any, rows: Sequence[_PredictionOutcome], label: str, unit: tuple[float, str]) -> None:
    factor, name = unit
    for height, row in enumerate(rows):
        ax.barh(height - 0.19, (row.predicted or 0) / factor, height=0.34, color=COLOUR["p4"])
        ax.barh(height + 0.19, (row.measured or 0) / factor, height=0.34, color=COLOUR["p0"])
        dots = [value / factor for value in row.runs]
        ax.plot(dots, [height + 0.19] * len(dots), "o", color=COLOUR["ink"], markersize=2.4, alpha=0.6)
    ax.set_xlabel(f"{label}, {name}")
    ax.set_xlim(left=0)
    ax.grid(visible=False, axis="y")
    svg.few_ticks(ax.xaxis)

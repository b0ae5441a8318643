"""Figures of measurements: learning curves, throughput ratios and phases; `draw` finds a figure by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.core.memory_model import PARTS, StepMemory
from trimtab.experiments.comparison.comparison_result import Arm, ArmCurve, Comparison, Ratio, RatioRow
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import plan_tables, svg, tables
from trimtab.experiments.report.document import Picture
from trimtab.experiments.report.figure_spec import (
    LABEL,
    FigureSpec,
    LegendEntry,
    border,
    byte_unit,
    dash,
    series,
    time_unit,
)
from trimtab.experiments.report.svg import COLOUR, NUM_PARTS
from trimtab.plans.profile import Trial

# Figure of a step's memory: bytes by part over the step, for the plain loop and the plan's loop.


def timeline(comparison: Comparison) -> FigureSpec:
    """Bytes by part over a step, stacked; a panel for every traced loop."""
    steps = comparison.memory
    if not steps:
        return FigureSpec("", "No figure: no step could be traced.")
    factor, unit = byte_unit(max(step.peak_bytes for step in steps.values()))

    def paint(axes: Sequence[Any]) -> None:
        for ax, (name, step) in zip(axes, steps.items(), strict=True):
            _paint_step(ax, step, factor)
            ax.set_title(say.label_of_arm(comparison, name, 28), fontsize=10)
            ax.set_xlabel("one step, by its allocations")
        axes[0].set_ylabel(f"held, {unit}")

    keys = tuple(LegendEntry(f"p{index}", name) for index, name in enumerate(PARTS) if _is_seen(steps.values(), name))
    title = "Bytes held by part over one step"
    picture = svg.render(paint, name="timeline", title=title, height=220, columns=len(steps))
    caption = "Traced without running the step. Thin lines: start of backward and of the optimizer step. Dot: the peak."
    return FigureSpec(picture, caption, keys)


def _is_seen(steps: Any, part: str) -> bool:
    return any(step.most_bytes.get(part, 0) > 0 for step in steps)


def _paint_step(ax: Any, step: StepMemory, factor: float) -> None:
    at = np.array([moment.at for moment in step.timeline])
    parts = np.array([[moment.bytes_by_part.get(name, 0) for moment in step.timeline] for name in PARTS]) / factor
    ax.stackplot(at, parts, colors=[COLOUR[f"p{index}"] for index in range(len(PARTS))], linewidth=0)
    phases = [moment.phase for moment in step.timeline]
    for before, after, x in zip(phases, phases[1:], at[1:], strict=False):
        if before != after:
            ax.axvline(x, color=COLOUR["ink"], linewidth=0.5, alpha=0.5)
    ax.plot([step.peak.at], [step.peak_bytes / factor], "o", color=COLOUR["ink"], markersize=4)
    ax.set_xlim(0, 1)
    ax.set_ylim(bottom=0)
    svg.few_ticks(ax.xaxis, 3)


# Figures about planning: memory against time of trials, and predicted against measured values.


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


_MAX_POINTS = 150  # Per curve: more points are not visible and enlarge the page.


@dataclass(frozen=True)
class CurveBand:
    """An arm's curves over seeds at equal samples: median seconds; lowest, median and highest metric."""

    seconds: NDArray[np.float64]
    low: NDArray[np.float64]
    middle: NDArray[np.float64]
    high: NDArray[np.float64]


def draw(picture: Picture, comparison: Comparison) -> FigureSpec:
    """Return the drawing of a picture."""
    of_a_tier = {"forest": ratio_figure, "curves": curves}
    if picture.name in of_a_tier:
        return of_a_tier[picture.name](comparison, picture.plan_kind)
    return {
        "phases": phases,
        "memory_time": memory_time,
        "timeline": timeline,
        "predictions": predictions,
    }[picture.name](comparison)


def curve_band(arm: Arm) -> CurveBand | None:
    """Return the arm's band over samples reached by all seeds, to avoid survivorship bias beyond them."""
    found = [_columns(curve) for curve in arm.curves if curve.points]
    if not found:
        return None
    first, last = max(rows[0] for rows, _, _ in found), min(rows[-1] for rows, _, _ in found)
    grid = np.unique(np.concatenate([rows for rows, _, _ in found]))
    grid = grid[(grid >= first) & (grid <= last)]
    if len(grid) > _MAX_POINTS:
        grid = np.linspace(first, last, _MAX_POINTS)
    metric = np.stack([np.interp(grid, rows, values) for rows, _, values in found])
    seconds = np.stack([np.interp(grid, rows, times) for rows, times, _ in found])
    if len(grid) == 0 or not np.isfinite(metric).all(axis=0).any():
        return None
    return CurveBand(np.median(seconds, axis=0), metric.min(axis=0), np.median(metric, axis=0), metric.max(axis=0))


def _columns(curve: ArmCurve) -> tuple[NDArray[np.float64], ...]:
    rows, seconds, metric = np.array(sorted(curve.points), dtype=np.float64).T
    return rows, seconds, np.where(np.isfinite(metric), metric, np.nan)


def curves(comparison: Comparison, plan_kind: str) -> FigureSpec:
    """Held-out metric against training seconds of a plan and comparable arms, with the range of seeds.

    Other recipes train differently, so an equivalent plan is compared with them in throughput and memory only.
    """
    arms = [
        arm
        for arm in comparison.arms
        if arm.plan_kind == plan_kind or (not arm.plan_kind and _may_meet(plan_kind, arm))
    ]
    bands = [(arm, band) for arm in arms if (band := curve_band(arm)) is not None]
    if not bands:
        return FigureSpec("", "No figure: no held-out curve was recorded.")
    factor, unit = time_unit(max(float(band.seconds[-1]) for _, band in bands))

    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        for arm, band in bands:
            _paint_band(ax, band, factor, COLOUR[series(comparison, arm)], dash(arm))
        ax.set_xlabel(f"training time, {unit}")
        ax.set_ylabel(say.one_line(comparison.metric, 40))
        ax.set_xlim(left=0)
        _paint_targets(ax, comparison.targets)
        if say.is_perplexity(comparison):
            svg.plain_log(ax, "y")
        _label_targets(ax, comparison.targets)

    title = f"{say.one_line(comparison.metric)} against training time, one line per arm"
    keys = [LegendEntry(series(comparison, arm), say.arm_name(arm, 80), border(arm)) for arm, _ in bands]
    keys += [LegendEntry("ink", "target", "dashed")] if comparison.targets else []
    caption = (
        "Line: median over seeds at equal samples. Band: lowest to highest seed. Curves end at the first seed's end."
    )
    return FigureSpec(svg.render(paint, name=_name("curves", plan_kind), title=title, height=250), caption, tuple(keys))


def _name(picture: str, plan_kind: str) -> str:
    """Return a unique element name for a figure."""
    return f"{picture}-{''.join(c for c in plan_kind if c.isalnum()) or 'recipes'}"


def _may_meet(plan_kind: str, arm: Arm) -> bool:
    return plan_kind != "equivalent" or arm.name in ("reference", "self")


def _paint_band(ax: Any, band: CurveBand, factor: float, colour: str, style: str) -> None:
    time = band.seconds / factor
    ax.fill_between(time, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
    marker = "o" if len(time) == 1 else ""  # A line through a single evaluation would be invisible.
    ax.plot(time, band.middle, color=colour, linestyle=style, linewidth=1.6, marker=marker, markersize=4)


def _paint_targets(ax: Any, targets: Sequence[float]) -> None:
    for target in targets:
        ax.axhline(target, color=COLOUR["ink"], linestyle=(0, (4, 3)), linewidth=0.8, alpha=0.6)


def _label_targets(ax: Any, targets: Sequence[float]) -> None:
    """Label targets at the right edge, skipping labels that would overlap."""
    taken: list[float] = []
    for target in targets:
        height = float(ax.transData.transform((0, target))[1])
        if all(abs(height - other) >= 10 for other in taken):
            taken.append(height)
            at = {"xy": (1, target), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            ax.annotate(say.metric(target), xytext=(4, 0), va="center", fontsize=9, **at)


def ratio_figure(comparison: Comparison, plan_kind: str) -> FigureSpec:
    """Throughput ratios of a kind of plan with intervals; the A/A control's interval is shaded around 1."""
    rows = [
        row
        for row in comparison.ratios
        if row.metric == "throughput" and row.plan_kind == plan_kind and row.ratio.pairs
    ]
    if not rows:
        return FigureSpec("", "No figure: no throughput ratio was measured for this group.")
    control, resolved = comparison.resolution, say.is_resolved(comparison.resolution)

    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        if control and resolved:
            ax.axvspan(control.low, control.high, color=COLOUR["s0"], alpha=0.25, linewidth=0)
        ax.axvline(1, color=COLOUR["ink"], linewidth=0.8)
        for height, row in enumerate(rows):
            paint_ratio(ax, height, row.ratio)
        labels = [_forest_label(row, comparison) for row in rows]
        ax.set_yticks(range(len(rows)), labels)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.grid(visible=False, axis="y")
        ax.set_xlabel("throughput, ratio (log scale; above 1 is faster)")
        svg.plain_log(ax, "x")

    title = f"Throughput ratios with 95% intervals, {tables.plan_kind_title(plan_kind)}"
    keys = [LegendEntry("s4", "mean and 95% interval"), LegendEntry("ink", "raw pair", "dotted")]
    keys += [LegendEntry("s0", "A/A control: not significant")] if resolved else []
    caption = "Dots: raw pairs. Below 5 pairs there is no interval."
    height = 70 + 34 * len(rows)
    return FigureSpec(
        svg.render(paint, name=_name("forest", plan_kind), title=title, height=height), caption, tuple(keys)
    )


def _forest_label(row: RatioRow, comparison: Comparison) -> str:
    return f"{say.label_of_arm(comparison, row.arm, LABEL)}\nvs {say.label_of_arm(comparison, row.against, LABEL)}"


def paint_ratio(ax: Any, height: float, ratio: Ratio, role: str = "s4") -> None:
    """Draw a ratio at a height: raw pairs, and with five or more pairs the mean and interval."""
    pairs = [pair for pair in ratio.pairs if 0 < pair < np.inf]
    ax.plot(pairs, [height + 0.22] * len(pairs), "o", color=COLOUR["ink"], alpha=0.45, markersize=2.6, linewidth=0)
    if ratio.n < say.PAIRS_FOR_A_VERDICT:
        return
    if ratio.low is not None and ratio.high is not None:
        ax.plot([ratio.low, ratio.high], [height, height], color=COLOUR[role], linewidth=2, solid_capstyle="butt")
    ax.plot([ratio.mean], [height], "D", color=COLOUR[role], markersize=5)


def phases(comparison: Comparison) -> FigureSpec:
    """Seconds per batch of all arms, stacked by phase."""
    arms, names = [arm for arm in comparison.arms if arm.phases_s], tables.phase_names(comparison)
    if not arms:
        return FigureSpec("", "No figure: no phases were measured.")
    factor, unit = time_unit(max(sum(arm.phases_s.values()) for arm in arms))

    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        left = np.zeros(len(arms))
        for index, name in enumerate(names):
            width = np.array([arm.phases_s.get(name, 0.0) for arm in arms]) / factor
            ax.barh(range(len(arms)), width, left=left, height=0.62, color=COLOUR[f"p{index % NUM_PARTS}"])
            left += width
        ax.set_yticks(range(len(arms)), [say.arm_name(arm, LABEL) for arm in arms])
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.set_xlabel(f"time per batch, {unit}")

    keys = tuple(
        LegendEntry(f"p{i % NUM_PARTS}", say.one_line(name.replace("_", " "), 40)) for i, name in enumerate(names)
    )
    title, height = "Time per batch by phase, one bar per arm", 60 + 24 * len(arms)
    return FigureSpec(
        svg.render(paint, name="phases", title=title, height=height), "Bar lengths are absolute times.", keys
    )

"""Figures of measurements: learning curves, throughput ratios and phases; `draw` finds a figure by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.experiments.comparison.comparison_result import Arm, ArmCurve, Comparison, Ratio, RatioRow
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import memory_figures, planning_figures, svg, tables
from trimtab.experiments.report.document import Picture
from trimtab.experiments.report.figure_spec import LABEL, FigureSpec, LegendEntry, border, dash, series, time_unit
from trimtab.experiments.report.svg import COLOUR, NUM_PARTS

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
        "memory_time": planning_figures.memory_time,
        "timeline": memory_figures.timeline,
        "predictions": planning_figures.predictions,
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

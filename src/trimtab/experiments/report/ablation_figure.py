"""Figure of an ablation: the throughput effect of every change, alone and in the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.experiments.ablation.ablation_result import ALONE, WITHIN, Ablation
from trimtab.experiments.comparison.comparison_result import Ratio
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import svg
from trimtab.experiments.report.figure_spec import LABEL, FigureSpec, LegendEntry
from trimtab.experiments.report.figures import paint_ratio
from trimtab.experiments.report.svg import COLOUR
from trimtab.experiments.report.tables import plan_kind_title

_ROLES = {ALONE: "s2", WITHIN: "s4"}


def effects_figure(ablation: Ablation, plan_kind: str) -> FigureSpec:
    """Throughput effects of a plan's changes in both settings with intervals; the widest A/A interval is shaded."""
    rows = [
        (change, setting, effect.ratio)
        for change in ablation.changes
        for setting in _ROLES
        if change.plan_kind == plan_kind and (effect := ablation.effect(change.name, setting)) is not None
    ]
    if not rows:
        return FigureSpec("", "No figure: no effect was timed.")
    control = _widest([row.ratio for row in ablation.controls])

    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        if control:
            ax.axvspan(*control, color=COLOUR["s0"], alpha=0.25, linewidth=0)
        ax.axvline(1, color=COLOUR["ink"], linewidth=0.8)
        for height, (_, setting, ratio) in enumerate(rows):
            paint_ratio(ax, height, ratio, _ROLES[setting])
        labels = [f"{say.one_line(change.says, LABEL)}\n{setting}" for change, setting, _ in rows]
        ax.set_yticks(range(len(rows)), labels)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.grid(visible=False, axis="y")
        ax.set_xlabel("throughput with the change over without (log scale)")
        svg.plain_log(ax, "x")

    keys = [LegendEntry(role, setting) for setting, role in _ROLES.items()] + [LegendEntry("ink", "raw pair", "dotted")]
    keys += [LegendEntry("s0", "A/A control: not significant")] if control else []
    title = f"Effect of each change on throughput, {plan_kind_title(plan_kind)}"
    drawn = svg.render(paint, name=f"effects-{plan_kind}", title=title, height=70 + 30 * len(rows))
    return FigureSpec(drawn, "Dots: raw pairs. Below 5 pairs there is no interval.", tuple(keys))


def _widest(controls: Sequence[Ratio]) -> tuple[float, float] | None:
    """Return the range covering all controls, or None if any control has no usable interval."""
    if not controls or not all(map(say.is_resolved, controls)):
        return None
    bounds = [(ratio.low, ratio.high) for ratio in controls if ratio.low is not None and ratio.high is not None]
    return min(low for low, _ in bounds), max(high for _, high in bounds)

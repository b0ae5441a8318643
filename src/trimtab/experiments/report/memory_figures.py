"""Figure of a step's memory: bytes by part over the step, for the plain loop and the plan's loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trimtab.core.memory_model import PARTS, StepMemory
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import svg
from trimtab.experiments.report.figure_spec import FigureSpec, LegendEntry, byte_unit
from trimtab.experiments.report.svg import COLOUR


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

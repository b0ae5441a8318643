"""Elements of a figure besides its axes: legend, caption, units, and a fixed colour per arm."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.experiments.comparison.comparison_result import Arm, Comparison
from trimtab.experiments.report.svg import NUM_SERIES

LABEL = 28  # Characters of a name inside a drawing; tables show the full name.
_ARMS = ("reference", "self", "paper", "strong", "equivalent_plan", "tuned_plan")
_DASHES = {"self": ":", "paper": "--", "strong": "--", "tuned_plan": "--"}
_BORDERS = {"-": "solid", "--": "dashed", ":": "dotted"}


@dataclass(frozen=True)
class LegendEntry:
    """An entry of a legend: colour role, label and line style."""

    role: str
    text: str
    border: str = "solid"


@dataclass(frozen=True)
class FigureSpec:
    """A figure for the page. Without `svg`, `caption` gives the reason; `aside` lists missing values."""

    svg: str
    caption: str
    legend: tuple[LegendEntry, ...] = ()
    aside: tuple[str, ...] = ()


def series(comparison: Comparison, arm: Arm) -> str:
    """Return the colour role of an arm, the same in every figure."""
    if arm.name in _ARMS:
        return f"s{_ARMS.index(arm.name)}"
    others = [other.name for other in comparison.arms if other.name not in _ARMS]
    return f"s{(len(_ARMS) + others.index(arm.name)) % NUM_SERIES}"


def dash(arm: Arm) -> str:
    """Return matplotlib's line style of an arm, so that arms differ without colour too."""
    return _DASHES.get(arm.name, "-")


def border(arm: Arm) -> str:
    """Return the CSS border style that resembles the arm's line."""
    return _BORDERS[dash(arm)]


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return (seconds per unit, name) of the unit for an axis that ends at `longest_s` seconds."""
    steps = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"))
    return next(((factor, name) for floor, factor, name in steps if longest_s >= floor), (1e-6, "µs"))


def byte_unit(largest: float) -> tuple[float, str]:
    """Return (bytes per unit, name) of the unit for an axis that ends at `largest` bytes."""
    return (2.0**30, "GiB") if largest >= 2**30 else (2.0**20, "MiB")

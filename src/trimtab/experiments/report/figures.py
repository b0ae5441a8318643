"""The figures: what is drawn from which values. One function each; a figure without data says why instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.experiments.report import svg
from trimtab.experiments.report import wording as say
from trimtab.experiments.report.outline import Picture
from trimtab.experiments.report.svg import COLOUR, NUM_SERIES, variable
from trimtab.experiments.result import Arm, Comparison

_ARMS = {"reference": 0, "self": 1, "paper": 2, "strong": 3, "plan_S": 4, "plan_F": 5}
_DASHES = {"self": ":", "paper": "--", "strong": "--", "plan_F": "--"}
_BORDERS = {"-": "solid", "--": "dashed", ":": "dotted"}
_LABEL = 24  # characters of an arm's name inside a drawing
_MAX_POINTS = 150  # per curve: more cannot be seen and would swell the page
_WIDE = 250.0


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a colour, how its line is drawn, and what it stands for."""

    colour: str
    border: str
    text: str


@dataclass(frozen=True)
class Drawing:
    """A figure for the page; without `svg`, `caption` says why there is none. `aside`: what could not be drawn."""

    svg: str
    caption: str
    legend: tuple[Key, ...] = ()
    aside: tuple[str, ...] = ()


def draw(picture: Picture, comparison: Comparison) -> Drawing:
    """Return the drawing of a picture."""
    if picture.name == "forest":
        return forest(comparison, picture.tier)
    drawings: dict[str, Callable[[Comparison], Drawing]] = {
        "curves": curves,
        "memory_time": memory_time,
        "phases": phases,
        "predictions": predictions,
    }
    return drawings[picture.name](comparison)


def _series(comparison: Comparison, arm: Arm) -> str:
    others = [other.name for other in comparison.arms if other.name not in _ARMS]
    index = _ARMS[arm.name] if arm.name in _ARMS else len(_ARMS) + others.index(arm.name)
    return f"s{index % NUM_SERIES}"


def _time_unit(longest_s: float) -> tuple[float, str]:
    steps = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"))
    return next(((factor, name) for floor, factor, name in steps if longest_s >= floor), (1e-6, "µs"))


def _byte_unit(largest: float) -> tuple[float, str]:
    return (2.0**30, "GiB") if largest >= 2**30 else (2.0**20, "MiB")


def curves(comparison: Comparison) -> Drawing:
    """Held-out metric against training seconds, a line per arm with the range over seeds."""
    bands = [(arm, band) for arm in comparison.arms if len(band := curve_band(arm)[0]) > 0]
    if not bands:
        return Drawing("", "No figure: no held-out curve was recorded.")
    factor, unit = _time_unit(max(float(np.nanmax(curve_band(arm)[0])) for arm, _ in bands))

    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        for arm, _ in bands:
            _paint_curve(ax, curve_band(arm), COLOUR[_series(comparison, arm)], _DASHES.get(arm.name, "-"), factor)
        ax.set_xlabel(f"training time, {unit}")
        ax.set_ylabel(say.one_line(comparison.metric, 40))
        ax.set_xlim(left=0)
        if say.is_perplexity(comparison):
            ax.set_yscale("log")
            svg.plain_log(ax.yaxis, *ax.get_ylim())
        _paint_targets(ax, comparison.targets)

    title = f"{say.one_line(comparison.metric)} against training seconds, one line per arm"
    legend = tuple(
        Key(variable(_series(comparison, arm)), _BORDERS[_DASHES.get(arm.name, "-")], say.arm_name(arm, 80))
        for arm, _ in bands
    )
    goals = (Key("currentColor", "dashed", "target"),) if comparison.targets else ()
    caption = "Line: median over seeds at equal rows, at the median seconds. Band: lowest to highest seed."
    return Drawing(svg.render(paint, name="curves", title=title, height=_WIDE), caption, legend + goals)

"""Comparison as a page of HTML, or as a fragment for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trimtab.core.units import format_bytes
from trimtab.experiments import result_table
from trimtab.experiments.comparison_text import (
    caveats_of,
    changes_in_words,
    changes_of_arm,
    headline_of,
    name_of,
    remarks_of,
    table_of,
)
from trimtab.experiments.pages import Figure, figure, template
from trimtab.experiments.result_table import PEAK, PLANNED, TUNED

if TYPE_CHECKING:
    from trimtab.experiments.comparison import Comparison


class Bar(NamedTuple):
    """A bar: index of the arm's colour, name of the arm, value in words, and length from 0 to 1."""

    color: int
    label: str
    value: str
    length: float


def html_of(found: Comparison, *, is_page: bool) -> str:
    """Return the result as HTML, a whole page or a fragment.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    drawn = found.arms if found.kind != "ablation" else found.arms[:2]
    curves = {arm: result_table.loss_curve(found.table, arm, 0) for arm in drawn}
    figures = [_figure(found, curves, "Loss of the first pair, by samples trained on", "samples")]
    if found.metric is not None:
        evaluated = {arm: result_table.evaluations(found.table, arm, found.metric.name, 0) for arm in drawn}
        points = {arm: [(each.seconds, each.value) for each in one] for arm, one in evaluated.items()}
        figures.append(_figure(found, points, f"{found.metric.name} of the first pair, by seconds of training", "s"))
    plans = {arm: plan for arm, plan in found.plans.items() if found.kind != "ablation" or arm == PLANNED}
    values = {
        "is_page": is_page,
        "found": found,
        "headline": headline_of(found),
        "caveats": caveats_of(found),
        "base": name_of(found, found.arms[0]),
        "bars": _bars(found),
        "figures": [each for each in figures if each is not None],
        "changes": {name_of(found, arm): _changes(found, arm) for arm in (PLANNED, TUNED) if arm in plans},
        "effects": changes_in_words(found),
        "table": table_of(found),
        "remarks": remarks_of(found),
        "explained": {name_of(found, arm): str(plan) for arm, plan in plans.items()},
        "machine": {name: value for name, value in found.environment.items() if name != "sources"},
    }
    return str(template("comparison.html.jinja").render(values))


def _figure(
    found: Comparison, curves: Mapping[str, Sequence[tuple[float, float]]], caption: str, unit: str
) -> Figure | None:
    return figure({name_of(found, arm): curve for arm, curve in curves.items()}, caption, unit)


def _bars(found: Comparison) -> dict[str, list[Bar]]:
    """Return the bars of speed and of peak memory of the arms that did not fail, by caption."""
    colors = {arm: index for index, arm in enumerate(found.arms) if arm not in found.failures}
    speeds, words = dict[str, float](), dict[str, str]()
    for arm in colors:
        speed = None if arm == found.arms[0] else found.speed(arm)
        if speed is not None or arm == found.arms[0]:
            speeds[arm] = 1.0 if speed is None else speed.mean
            words[arm] = "1" if speed is None else f"{speed.mean:.2f}x"
    peaks = {arm: peak for arm in colors if (peak := found.table.value(PEAK, arm)) is not None}
    groups = {
        "Speed (longer is faster)": (speeds, words),
        "Peak memory (shorter is smaller)": (peaks, {arm: format_bytes(int(peak)) for arm, peak in peaks.items()}),
    }
    return {
        caption: [
            Bar(colors[arm], name_of(found, arm), text[arm], value / max(values.values()))
            for arm, value in values.items()
        ]
        for caption, (values, text) in groups.items()
        if len(values) > 1
    }


def _changes(found: Comparison, arm: str) -> list[tuple[str, ...]]:
    """Return the name, both values, numerical effect and reason of every change of an arm."""
    plan = found.plans[arm]
    choices = [getattr(plan, name) for name in found.changes.get(arm, ())]
    return [
        (*change, choice.effect.value, choice.reason)
        for change, choice in zip(changes_of_arm(found, arm), choices, strict=False)
    ]

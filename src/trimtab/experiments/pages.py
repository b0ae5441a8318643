"""Pages of HTML without outside references: templates, and the figures in them."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trimtab.core.errors import DependencyError

_WIDTH, _HEIGHT = 1000, 400  # Of a figure, as in the template.
_POINTS = 200  # Per curve.


@functools.cache
def template(name: str) -> Any:
    """Return a template of this package.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise DependencyError(
            "jinja2",
            problem=f"The package jinja2, which makes the page, cannot be imported: {error}.",
            hint="Run `pip install 'trimtab[cli]'`.",
        ) from error
    loader = jinja2.PackageLoader("trimtab.experiments", "templates")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(name)


class Figure(NamedTuple):
    """Curves of a figure as SVG points, with the ends of both axes in words."""

    caption: str
    curves: dict[str, str]
    top: str
    bottom: str
    left: str
    right: str


def figure(curves: Mapping[str, Sequence[tuple[float, float]]], caption: str, unit: str) -> Figure | None:
    """Return the curves of a figure, scaled to its size; None without a curve of two points.

    An arm with fewer points keeps its place, and with it the colours of the others.
    """
    drawn = {arm: _thinned(curve) if len(curve) > 1 else [] for arm, curve in curves.items()}
    if not any(drawn.values()):
        return None
    flat = [point for curve in drawn.values() for point in curve]
    first, last = min(x for x, _ in flat), max(x for x, _ in flat)
    low, high = min(y for _, y in flat), max(y for _, y in flat)

    def place(x: float, y: float) -> str:
        across = (x - first) / max(last - first, 1e-12) * _WIDTH
        down = 10 + (high - y) / max(high - low, 1e-12) * (_HEIGHT - 20)
        return f"{across:.1f},{down:.1f}"

    points = {arm: " ".join(place(x, y) for x, y in curve) for arm, curve in drawn.items()}
    return Figure(caption, points, f"{high:.3g}", f"{low:.3g}", f"{first:,.4g}", f"{last:,.6g} {unit}")


def thinned(values: Sequence[float], number: int) -> list[float]:
    """Return the means of up to `number` equal parts."""
    number = min(number, len(values))
    edges = [round(index * len(values) / number) for index in range(number + 1)]
    return [statistics.fmean(values[start:stop]) for start, stop in itertools.pairwise(edges)]


def _thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    xs, ys = zip(*((point[0], point[1]) for point in curve), strict=True)
    return list(zip(thinned(xs, _POINTS), thinned(ys, _POINTS), strict=True))

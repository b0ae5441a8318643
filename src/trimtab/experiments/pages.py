"""Pages of HTML without outside references: templates, figures, and the page of a run's record."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trimtab.core.errors import DependencyError
from trimtab.core.record import Event, RunRecord, RunSummary, summary_of
from trimtab.core.units import format_seconds

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


# The page of a run's record.

_ENDS = {
    "closed": "completed",
    "budget": "completed its budget",
    "grad_norm": "stopped at the limit of the gradient norm",
    "target": "stopped at its target",
    "interrupted": "interrupted, can be resumed",
    "error": "ended by an error",
}


def run_page(found: RunRecord | RunSummary) -> str:
    """Return the page. Strings from outside are escaped.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    record = summary_of(found) if isinstance(found, RunRecord) else found
    end = "the record has no end (killed or still running)"
    end = end if record.end is None else _ENDS.get(record.end.reason, record.end.reason)
    return str(
        template("run.html.jinja").render(
            title=f"{record.header.name}: {end}",
            trained=_trained(record),
            figures=list(figures_of(record)),
            events=[(event.step, event.name, _detail(event)) for event in record.events],
        )
    )


def _trained(record: RunSummary) -> str:
    """Return a summary of the training."""
    steps = record.steps
    samples, seconds = steps.trained()
    of = "an unknown number of" if steps.has_unknown_samples else f"{samples:,}"
    return f"{len(steps)} steps with {of} samples in {format_seconds(seconds)}, {steps.num_skipped} skipped"


def figures_of(record: RunSummary) -> Iterator[Figure]:
    """Yield the curves of a run; noise scale and micro-batches only if informative."""
    steps = record.steps
    columns: dict[str, Sequence[float]] = {"mean loss per term": steps.loss}
    if len(set(steps.num_micro_batches)) > 1:
        columns["micro-batches per step"] = steps.num_micro_batches
    columns["gradient noise scale, in samples"] = steps.noise_scale
    columns["learning rate of the first parameter group"] = steps.learning_rate
    # If some step has an unknown number of samples, the x axis counts steps.
    counts = itertools.repeat(1, len(steps)) if steps.has_unknown_samples else steps.rows
    samples = list(itertools.accumulate(counts))
    unit = "steps" if steps.has_unknown_samples else "samples"
    for label, values in columns.items():
        points = [(float(x), y) for x, y in zip(samples, values, strict=True) if math.isfinite(y)]
        if (found := figure({label: points}, label, unit)) is not None:
            yield found


def _detail(event: Event) -> str:
    parts = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in event.detail.items()
    )
    return ", ".join(parts)

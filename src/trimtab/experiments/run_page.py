"""A run's record as a page of HTML without outside references: curves over samples, and events."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from trimtab.core.record import Event, RunRecord, RunSummary, summary_of
from trimtab.core.units import format_seconds
from trimtab.experiments.pages import Figure, figure, template

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

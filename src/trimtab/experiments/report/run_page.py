"""HTML page of a run: loss, micro-batches, noise scale and learning rate over samples, and events."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.record import Event, RunRecord, RunSummary, StepColumns, summary_of
from trimtab.experiments.comparison.comparison_statistics import blocks, trained
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report.html import escape, labelled_cell, page
from trimtab.experiments.report.svg import COLOUR, few_ticks, plain_log, render

_ENDS = {
    "closed": "completed",
    "budget": "completed its budget",
    "grad_norm": "stopped at the limit of the gradient norm",
    "target": "stopped at its target",
    "interrupted": "interrupted, can be resumed",
    "error": "ended by an error",
}
_MOST_POINTS = 600  # Longer curves are thinned out to keep the page small.


@dataclass(frozen=True)
class StepFigure:
    """A figure of a value per step, with a line at every event."""

    name: str
    label: str
    values: Sequence[float]
    is_log: bool = False
    is_step: bool = False


def run_page(found: RunRecord | RunSummary) -> str:
    """Return the self-contained HTML page: no network, no script, external strings escaped."""
    record = summary_of(found) if isinstance(found, RunRecord) else found
    body = "\n".join((_header(record), _tracks(record), _events(record)))
    return page(f"{record.header.name}: trimtab run", body)


def tracks(steps: StepColumns) -> tuple[StepFigure, ...]:
    """Return the curves to draw; noise scale and micro-batches only if informative."""
    found = [StepFigure("loss", "mean loss per term", steps.loss)]
    if len(set(steps.num_micro_batches)) > 1:
        found.append(StepFigure("k", "micro-batches per step", steps.num_micro_batches, is_step=True))
    if any(map(math.isfinite, steps.noise_scale)):
        found.append(StepFigure("noise", "gradient noise scale, in samples", steps.noise_scale, is_log=True))
    if not steps or any(map(math.isfinite, steps.learning_rate)):  # An optimizer may set its own learning rates.
        found.append(StepFigure("rate", "learning rate of the first parameter group", steps.learning_rate))
    return tuple(found)


def _header(record: RunSummary) -> str:
    ended = (
        "the record has no end (killed or still running)"
        if record.end is None
        else _ENDS.get(record.end.reason, record.end.reason)
    )
    return (
        f'<header><p class="over">trimtab run</p><h1>{escape(record.header.name)}: {escape(ended)}</h1>'
        f'<p class="muted">{escape(_trained(record))}</p></header>'
    )


def _trained(record: RunSummary) -> str:
    """Return a summary of the training; the record of an arm in a paired run has blocks instead of steps."""
    steps, laps = record.steps, blocks(record)
    rows, seconds = trained(record)
    void = steps.num_skipped
    what = f"{len(laps)} blocks" if laps and not steps else f"{len(steps)} steps"
    of = "an unknown number of" if steps.has_unknown_samples else f"{rows:,}"
    return f"{what} with {of} samples in {say.seconds(seconds)}, {void} skipped"


def _tracks(record: RunSummary) -> str:
    if len(record.steps) < 2:
        return '<p class="muted">Too few steps for a figure.</p>'
    # If some step has an unknown number of samples, the x axis counts steps.
    counts = itertools.repeat(1, len(record.steps)) if record.steps.has_unknown_samples else record.steps.rows
    rows = array("d", itertools.accumulate(counts))
    marks = [rows[min(event.step, len(rows)) - 1] if event.step else 0 for event in record.events]
    figures = (_figure(track, rows, marks) for track in tracks(record.steps))
    return f"<section><h2>Course</h2>{''.join(figures)}</section>"


def _figure(track: StepFigure, rows: Sequence[float], marks: Sequence[float]) -> str:
    every = -(-len(rows) // _MOST_POINTS)
    finite = ((x, y) for x, y in zip(rows, track.values, strict=True) if math.isfinite(y))
    points = list(itertools.islice(finite, 0, None, every))

    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        x, y = zip(*points, strict=True)
        ax.plot(x, y, color=COLOUR["s0"], linewidth=1.4, drawstyle="steps-pre" if track.is_step else "default")
        for mark in marks:
            ax.axvline(mark, color=COLOUR["line"], linewidth=1.0)
        ax.set_xlabel("samples")
        if track.is_log and min(y) > 0:
            plain_log(ax, "y")
        few_ticks(ax.xaxis)

    if not points:
        return ""
    drawn = render(paint, name=f"track-{track.name}", title=f"{track.label} by samples", height=150)
    return f"<figure>{drawn}<figcaption>{escape(track.label)}; vertical lines mark events.</figcaption></figure>"


def _events(record: RunSummary) -> str:
    if not record.events:
        return '<section><h2>Events</h2><p class="muted">No events were recorded.</p></section>'
    names = ("after step", "event", "details")
    told = [(str(event.step), escape(event.name), _detail(event)) for event in record.events]
    rows = "".join(f"<tr>{''.join(map(labelled_cell, names, cells))}</tr>" for cells in told)
    head = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>"
    return f'<section><h2>Events</h2><div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div></section>'


def _detail(event: Event) -> str:
    parts = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in event.detail.items()
    )
    return escape(", ".join(parts))

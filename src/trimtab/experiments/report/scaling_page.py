"""HTML page of a scaling table: efficiency by ranks, the table and its caveats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.experiments.report.html import escape, labelled_cell, page
from trimtab.experiments.report.svg import COLOUR, render, variable
from trimtab.experiments.scaling.scaling_result import MODES, Scaling, ScalingRow, notes, tables

# The same colours as in the figures of comparisons. Adaptive and fixed batch sizes never share a figure.
_ROLES = {"baseline": "s0", "plan": "s4"}


def scaling_page(found: Scaling) -> str:
    """Return the self-contained HTML page: no network, no script, external strings escaped."""
    body = "\n".join((_header(found), _figure(found), _tables(found), _notes(found)))
    return page(f"{found.task}: trimtab scaling", body)


def _header(found: Scaling) -> str:
    most = max((row.ranks for row in found.rows), default=1)
    where = (found.environment or {}).get("cpu", "")
    return (
        f'<header><p class="over">trimtab scaling · {escape(found.task)}</p>'
        f"<h1>Scaling up to {most} ranks</h1>"
        '<p class="lead">Scaling efficiency: throughput(n) / (n throughput(1)), paired within rounds.</p>'
        f'<p class="muted">{escape(where)}</p></header>'
    )


def _figure(found: Scaling) -> str:
    """Return the figure of efficiency by ranks with intervals, a line per recipe and mode."""
    lines = [
        (mode, recipe, rows)
        for mode in MODES
        for recipe in _ROLES
        if (rows := [row for row in _drawn(found) if (row.mode, row.recipe) == (mode, recipe)])
    ]
    if not lines:
        return (
            '<p class="muted">No figure: no round has both one rank and several ranks on separate cores or devices.</p>'
        )

    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        for mode, recipe, rows in lines:
            _paint(ax, mode, recipe, rows)
        ax.axhline(1, color=COLOUR["line"], linewidth=1)
        ax.set_xticks(sorted({row.ranks for *_, rows in lines for row in rows}))
        ax.set_xlabel("ranks")
        ax.set_ylim(bottom=0)

    drawn = render(paint, name="efficiency", title="Scaling efficiency by ranks", height=220)
    keys = "".join(
        f'<li><span style="color:{variable(_role(recipe))}">■</span> {escape(recipe)}</li>'
        for recipe in dict.fromkeys(recipe for _, recipe, _ in lines)
    )
    said = "Solid lines: weak scaling; dashed lines: strong scaling. Bars: 95% intervals with five rounds or more."
    if shared := sorted({row.ranks for row in found.rows if row.crowded}):
        said += f" Oversubscribed numbers of ranks ({', '.join(map(str, shared))}) are omitted."
    return (
        f"<section><h2>Efficiency</h2><figure>{drawn}<ul>{keys}</ul><figcaption>{said}</figcaption></figure></section>"
    )


def _drawn(found: Scaling) -> list[ScalingRow]:
    """Return rows with a meaningful efficiency, excluding oversubscribed ranks."""
    return [row for row in found.rows if row.efficiency is not None and not row.crowded]


def _role(recipe: str) -> str:
    return _ROLES[recipe]


def _paint(ax: Any, mode: str, recipe: str, rows: Sequence[ScalingRow]) -> None:
    points = [(row.ranks, row.efficiency) for row in rows if row.efficiency is not None]
    x, y = [ranks for ranks, _ in points], [each.mean for _, each in points]
    bars = [
        (each.mean - each.low, each.high - each.mean) if row.has_verdict else (0.0, 0.0)
        for row, (_, each) in zip(rows, points, strict=True)
    ]
    style = {"color": COLOUR[_role(recipe)], "linestyle": "-" if mode == "weak" else "--", "marker": "o"}
    ax.errorbar(x, y, yerr=list(zip(*bars, strict=True)), capsize=3, linewidth=1.4, markersize=4, **style)


def _tables(found: Scaling) -> str:
    return "\n".join(_table(title, *rows) for title, rows in tables(found).items())


def _table(title: str, head: Sequence[str], *rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(labelled_cell, head, map(escape, row)))}</tr>" for row in rows)
    return (
        f'<section><h2>{title}</h2><div class="scroll"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _notes(found: Scaling) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes(found))
    return f"<section><h2>Notes</h2><ul>{items}</ul></section>"

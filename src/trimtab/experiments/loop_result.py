"""Result of a comparison of training loops: figures as queries on its table, as text and as a page."""

from __future__ import annotations

import html
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.errors import FormatError
from trimtab.core.objective import Reference
from trimtab.core.serialization import read_json, to_json, write_whole
from trimtab.core.units import format_bytes, format_seconds
from trimtab.experiments import result_table
from trimtab.experiments.result_table import PEAK, ResultTable
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, is_gain, resolution
from trimtab.plans.plan import Plan

CONTROL = "baseline again"  # Name of the baseline's second run, the A/A control.
EQUAL_LOSS = 0.5  # Percent; the paper's limit on quality (math: section 8).
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 40
_WIDTH, _HEIGHT, _MARGIN = 640, 240, 44  # Of the figure, in pixels.
_STYLE = """
.trimtab { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; color: CanvasText; background: Canvas }
.trimtab table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }
.trimtab th, .trimtab td { text-align: right; padding: .25em .9em .25em 0; border-bottom: 1px solid #8886 }
.trimtab th:first-child, .trimtab td:first-child { text-align: left }
.trimtab .headline { font-size: 1.25em; font-weight: 600 }
.trimtab svg { width: 100%; height: auto }
.trimtab svg text { font-size: 13px; fill: currentColor }
.trimtab .c0 { stroke: #7a7a7a; fill: none } .trimtab .c1 { stroke: #2f6fde; fill: none }
.trimtab .c2 { stroke: #c2571a; fill: none } .trimtab .c3 { stroke: #2a8a4a; fill: none }
.trimtab .c4 { stroke: #8a4fc2; fill: none } .trimtab .c5 { stroke: #b0902a; fill: none }
"""


@dataclass(frozen=True)
class LoopComparison:
    """Result of `compare`, `race` or `ablate`. `print` shows it, `save` writes it as a page or as JSON.

    Args:
        title: what was compared.
        arms: names of the arms, the baseline first, without the control.
        steps: optimizer steps of an arm per paired run.
        table: all measured values.
        plan: the plan of the planned arm; None for a race.
        reference: precision and clipping of the baseline.
        environment: machine and versions.
        failures: errors of arms that failed, by name.
        notes: caveats.
    """

    title: str
    arms: tuple[str, ...]
    steps: int
    table: ResultTable
    plan: Plan | None = None
    reference: Reference | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def num_pairs(self) -> int:
        """Number of paired runs."""
        return len(self.table.seeds_of(self.arms[0]))

    def speed(self, arm: str | None = None) -> Interval | None:
        """Return the speed of an arm (by default the second) relative to the baseline; None if it failed."""
        return result_table.speed(self.table, arm or self.arms[1], self.arms[0])

    def memory(self, arm: str | None = None) -> float | None:
        """Return the peak memory of an arm (by default the second) relative to the baseline; None if unknown."""
        ours, theirs = (self.table.value(PEAK, each) for each in (arm or self.arms[1], self.arms[0]))
        return None if ours is None or not theirs else ours / theirs

    def loss_difference(self, arm: str | None = None) -> Interval | None:
        """Return the difference of an arm's mean loss over the last third of training, in percent of the baseline's."""
        return result_table.loss_difference(self.table, arm or self.arms[1], self.arms[0])

    def verdict(self, arm: str | None = None) -> str:
        """Return "gain", "harm", "no gain" or "no verdict" (fewer than five pairs, or a failed arm)."""
        found, control = self.speed(arm), result_table.speed(self.table, CONTROL, self.arms[0])
        if (arm or self.arms[1]) in self.failures or found is None or found.n < MIN_PAIRS_FOR_VERDICT:
            return "no verdict"
        if is_gain(found, control):
            return "gain"
        harms = found.high < 1 and 1 - found.mean > resolution(control)
        return "harm" if harms else "no gain"

    def is_below(self, limit: float) -> bool:
        """Return True if the estimated speed of any arm but the baseline is below a limit, or if an arm failed."""
        speeds = [self.speed(arm) for arm in self.arms[1:]]
        return bool(self.failures) or any(found is None or found.mean < limit for found in speeds)

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return fragment_of(self)

    def save(self, path: str | Path) -> Path:
        """Write the result: a page for the suffix .html, the whole table for .json.

        Raises:
            FormatError: another suffix.
        """
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise FormatError(
                "path",
                got=path.name,
                expected="a name that ends in .html or .json",
                hint="A .json file can be read again with trimtab.LoopComparison.load.",
                code="result.suffix",
            )
        write_whole(path, page_of(self) if path.suffix == ".html" else to_json(self))
        return path

    @classmethod
    def load(cls, path: str | Path) -> LoopComparison:
        """Return a result from the JSON file that `save` wrote."""
        return read_json(cls, path)


def text_of(found: LoopComparison) -> str:
    """Return the result as text: a headline, a line per arm, losses, the resolution of the timing, notes."""
    lines = [headline_of(found), ""]
    table = _table(found)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.append("")
    for arm in found.arms[:2]:
        if curve := result_table.loss_curve(found.table, arm, 0):
            lines.append(f"loss  {sparkline([loss for _, loss in curve])}  {arm}")
    lines += [loss_in_words(found, arm) for arm in found.arms[1:2]]
    lines += _remarks(found)
    return "\n".join(line for index, line in enumerate(lines) if line or index < len(table) + 3)


def headline_of(found: LoopComparison) -> str:
    """Return the result in a sentence."""
    arm = found.arms[1]
    if arm in found.failures:
        return f"{arm} failed: {found.failures[arm]}"
    if found.plan is None:
        changes = ""
    else:
        changes = f" ({found.plan.changes_in_words})" if found.plan.changes else ", which changes nothing,"
    speed, memory = found.speed(), found.memory()
    parts = [] if speed is None else [f"{speed_in_words(speed)} the speed of {found.arms[0]}"]
    if memory is not None and abs(1 - memory) >= 0.01:
        parts.append(f"{abs(1 - memory):.0%} {'less' if memory < 1 else 'more'} memory")
    return f"{found.verdict()}: {arm}{changes} has " + ", ".join(parts)


def speed_in_words(speed: Interval) -> str:
    """Return a speed with its interval, or with the number of pairs if they are too few for one."""
    if speed.n < MIN_PAIRS_FOR_VERDICT:
        return f"{speed.mean:.2f}x (n={speed.n})"
    return f"{speed.mean:.2f}x (95% {speed.low:.2f} to {speed.high:.2f}, n={speed.n})"


def loss_in_words(found: LoopComparison, arm: str) -> str:
    """Return a sentence on the equality of losses, or "" without losses."""
    difference = found.loss_difference(arm)
    if difference is None:
        return ""
    what = f"loss of {arm}, last third: {difference.mean:+.2g}% of the baseline's"
    if difference.n < MIN_PAIRS_FOR_VERDICT:
        return f"{what} (n={difference.n})"
    is_equal = max(abs(difference.low), abs(difference.high)) <= EQUAL_LOSS
    interval = f"95% {difference.low:+.2g} to {difference.high:+.2g}"
    return f"{what} ({interval}): {'equal' if is_equal else 'not shown to be equal'} within {EQUAL_LOSS}%"


def _remarks(found: LoopComparison) -> list[str]:
    control = result_table.speed(found.table, CONTROL, found.arms[0])
    lines = []
    if control is not None and control.n >= 2:
        lines.append(f"timing: two runs of the baseline differ by up to {100 * resolution(control):.2g}%")
    cpu = result_table.speed(found.table, found.arms[1], found.arms[0], metric=result_table.CPU_SECONDS)
    wall = found.speed()
    if cpu is not None and wall is not None and abs(cpu.mean / wall.mean - 1) > 0.1:
        lines.append(f"by processor time: {speed_in_words(cpu)}")
    if found.reference is not None:
        lines.append(f"baseline: {found.reference.describe()}; {found.steps} steps in each of {found.num_pairs} pairs")
    if found.plan is not None and found.plan.changes:
        proved = found.plan.proof is not None and found.plan.proof.holds
        same = "proved to differ from loss_fn's own by rounding only" if proved else "not proved"
        lines.append(f"training of the plan: {same}; {planning_in_words(found.plan)}".rstrip("; "))
    lines += [f"{name} failed: {reason}" for name, reason in found.failures.items() if name != found.arms[1]]
    return lines + list(found.notes)


def _table(found: LoopComparison) -> list[list[str]]:
    summaries = {arm: summary_of(found, arm) for arm in found.arms if arm not in found.failures}
    columns = [
        name for name in next(iter(summaries.values()), {}) if any(each.get(name) for each in summaries.values())
    ]
    rows = [["", "speed", *columns]]
    for arm, summary in summaries.items():
        speed = None if arm == found.arms[0] else found.speed(arm)
        shown = "1" if arm == found.arms[0] else "" if speed is None else f"{speed.mean:.2f}x"
        rows.append([arm, shown, *(summary.get(name, "") for name in columns)])
    return rows


def sparkline(values: Sequence[float], width: int = _POINTS) -> str:
    """Return a line of block characters, each the mean of an equal part of the values."""
    parts = _thinned(values, width)
    low, high = min(parts), max(parts)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in parts)


def _thinned(values: Sequence[float], number: int) -> list[float]:
    """Return the means of up to `number` equal parts."""
    number = min(number, len(values))
    edges = [round(index * len(values) / number) for index in range(number + 1)]
    return [statistics.fmean(values[start:stop]) for start, stop in itertools.pairwise(edges)]


def page_of(found: LoopComparison) -> str:
    """Return the result as a page of HTML, without outside references."""
    title = html.escape(found.title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    scheme = '<meta name="color-scheme" content="light dark">'
    return f"<!DOCTYPE html><html lang='en'><head>{head}{scheme}</head><body>{fragment_of(found)}</body></html>\n"


def fragment_of(found: LoopComparison) -> str:
    """Return the result as HTML, for a notebook."""
    rows = _table(found)
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    remarks = [loss_in_words(found, arm) for arm in found.arms[1:]] + _remarks(found)
    items = "".join(f"<li>{html.escape(line)}</li>" for line in remarks if line)
    parts = [
        f"<style>{_STYLE}</style><div class='trimtab'><h1>{html.escape(found.title)}</h1>",
        f"<p class='headline'>{html.escape(headline_of(found))}</p>",
        f"<table><tr>{head}</tr>{body}</table>",
        _figure(found),
        f"<ul>{items}</ul>",
    ]
    if found.plan is not None:
        parts.append(f"<details><summary>plan</summary><pre>{html.escape(str(found.plan))}</pre></details>")
    machine = ", ".join(f"{name} {value}" for name, value in found.environment.items() if name != "sources")
    return "".join(parts) + f"<p><small>{html.escape(machine)}</small></p></div>"


def _figure(found: LoopComparison) -> str:
    """Return the loss curves of the first pair as SVG, or "" without losses."""
    curves = {arm: result_table.loss_curve(found.table, arm, 0) for arm in found.arms}
    curves = {arm: curve for arm, curve in curves.items() if len(curve) > 1}
    if not curves:
        return ""
    points = {
        arm: list(zip(*(_thinned(each, 200) for each in zip(*curve, strict=True)), strict=True))
        for arm, curve in curves.items()
    }
    flat = [point for each in points.values() for point in each]
    left, right = min(x for x, _ in flat), max(x for x, _ in flat)
    low, high = min(y for _, y in flat), max(y for _, y in flat)

    def place(x: float, y: float) -> str:
        across = _MARGIN + (x - left) / max(right - left, 1e-12) * (_WIDTH - _MARGIN - 8)
        down = 8 + (high - y) / max(high - low, 1e-12) * (_HEIGHT - _MARGIN - 8)
        return f"{across:.1f},{down:.1f}"

    lines, keys = [], []
    for index, (arm, each) in enumerate(points.items()):
        mark = f"class='c{index % 6}' stroke-width='2'" + (" stroke-dasharray='5 3'" if index else "")
        lines.append(f"<polyline {mark} points='{' '.join(place(x, y) for x, y in each)}'/>")
        key = f"<svg style='width:2em;height:.8em' viewBox='0 0 30 10'><path d='M0 5h30' {mark}/></svg>"
        keys.append(f"<span style='margin-right:1.2em'>{key} {html.escape(arm)}</span>")
    bottom = _HEIGHT - _MARGIN
    axes = (
        f"<text x='0' y='16'>{high:.3g}</text><text x='0' y='{bottom}'>{low:.3g}</text>"
        f"<text x='{_MARGIN}' y='{bottom + 20}'>{left:,.0f}</text>"
        f"<text x='{_WIDTH - 8}' y='{bottom + 20}' text-anchor='end'>{right:,.0f} samples</text>"
    )
    picture = (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='Loss by samples'>{''.join(lines)}{axes}</svg>"
    )
    caption = "Loss of the first pair, by samples trained on"
    return f"<figure><figcaption>{caption}</figcaption>{picture}<div>{''.join(keys)}</div></figure>"


def summary_of(found: LoopComparison, arm: str) -> dict[str, str]:
    """Return the figures of an arm in words, by name."""
    rate, peak = result_table.samples_per_s(found.table, arm), found.table.value(PEAK, arm)
    words = {
        "samples/s": "" if rate is None else f"{rate:,.4g}",
        "peak memory": "" if peak is None else format_bytes(int(peak)),
    }
    losses = [result_table.loss_curve(found.table, arm, seed) for seed in found.table.seeds_of(arm)]
    last = [curve[-1][1] for curve in losses if curve]
    words["last loss"] = f"{sum(last) / len(last):.4g}" if last else ""
    for name, values in result_table.final_values(found.table, arm).items():
        words[name] = f"{sum(values) / len(values):.4g}"
    return words


def planning_in_words(plan: Plan | None) -> str:
    """Return the time of planning in words, or ""."""
    return "" if plan is None or not plan.planning_s else f"planning took {format_seconds(plan.planning_s)}"

"""Tables of step phases from `trimtab phases` and `trimtab compare`, for `make figures`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trimtab.core.units import format_seconds
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]
_SAVED = {"phase_saved_s": "phase", "part_saved_s": "class of module"}
_RATIOS = {
    "clock_ratio": "a step under the clock, over one without",
    "step_speedup": "speed-up of a step",
    "third_speed_ratio": "rows per second",
    "third_progress_ratio": "progress",
    "third_progress_per_s_ratio": "progress per second",
}
_SHARES = {"third_saved_share": "share of the seconds that a run saves"}
METRICS = frozenset((*_SAVED, *_RATIOS, *_SHARES, "bound_share", "doubling_months"))


def phases(rows: list[Row]) -> Iterator[str]:
    """Yield the tables of a run, one per metric."""
    for metric, name in _SAVED.items():
        yield from _table(
            f"task | {name} | reference | plan | saved (95%) | n | of the gain", _of(rows, metric), _saved
        )
    yield from _table("task | loop | bound | seconds | share of its step", _of(rows, "bound_share"), _bound)
    yield from _table("task | figure | of | value (95%) | n", _of(rows, *_RATIOS, *_SHARES), _ratio)
    yield from _table("task | doubling, in cycles of | takes", _of(rows, "doubling_months"), _doubling)


def _of(rows: list[Row], *metrics: str) -> list[Row]:
    return [row for row in rows if row["metric"] in metrics]


def _table(columns: str, rows: list[Row], line: Any) -> Iterator[str]:
    if rows:
        yield f"| {columns} |"
        yield f"|{'---|' * len(columns.split(' | '))}"
        yield from (f"| {row['task']} | {line(row)} |" for row in rows)
        yield ""


def _saved(row: Row) -> str:
    name = row["phase"].replace("step", "whole step").replace("unattributed", "the clock itself")
    share = "not told" if row["share"] is None else f"{100 * row['share']:.1f}%"
    return f"{name} | {_s(row['reference_s'])} | {_s(row['plan_s'])} | {_bounded(row, _s)} | {row['n']} | {share}"


def _bound(row: Row) -> str:
    return f"{row['arm']} | {row['bound']} | {_s(row['seconds_s'])} | {100 * row['share']:.1f}%"


def _ratio(row: Row) -> str:
    of = row.get("arm", "plan")
    if "third" in row:
        of = f"{row['third']}, {row['plan_kind'] + ' plan' if row['plan_kind'] else of}"
    if row["metric"] in _SHARES:
        return f"{_SHARES[row['metric']]} | {of} | {_bounded(row, lambda value: f'{100 * value:.1f}%')} | {row['n']}"
    return f"{_RATIOS[row['metric']]} | {of} | {_bounded(row, lambda value: f'{value:.3f}x')} | {row['n']}"


def _doubling(row: Row) -> str:
    """Return the months to double, with the interval from that of the speed-up, whose upper end gives the minimum."""
    cycle = f"{row['cycle_months']:g} months"
    if row["high"] is None:
        return f"{cycle} | nothing is projected: {row.get('reason', 'no gain is clear')}"
    takes = f"{row['mean']:.1f} months"
    if row.get("n", 0) >= FEW:
        takes += f" (95% {row['low']:.1f} to {row['high']:.1f} months, n = {row['n']})"
    return f"{cycle} | {takes}, if every cycle brought as much"


def _bounded(row: Row, words: Any) -> str:
    """Return a figure with its interval. With too few pairs: the pairs, or the mean if pairs were not recorded."""
    if row["n"] < FEW:
        return ", ".join(str(words(pair)) for pair in row.get("pairs") or (row["mean"],))
    if row["low"] is None or row["high"] is None:
        return str(words(row["mean"]))
    return f"{words(row['mean'])} ({words(row['low'])} to {words(row['high'])})"


def _s(seconds: float) -> str:
    return f"-{format_seconds(-seconds)}" if seconds < 0 else format_seconds(seconds)

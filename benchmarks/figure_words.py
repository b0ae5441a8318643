"""Formatting of recorded figures: with the interval, or as single pairs if there are too few for a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]


def ratio(row: Row) -> str:
    """Return a recorded ratio as text."""
    return _raw(row) or interval(row["mean"], row["low"], row["high"])


def inverse(row: Row) -> str:
    """Return a ratio of times as a speed-up (its inverse)."""
    if pairs := _raw(row, turned=lambda pair: 1 / pair):
        return pairs
    low, high = (None, None) if row["low"] is None else (1 / row["high"], 1 / row["low"])
    return interval(1 / row["mean"], low, high)


def speed(row: Row) -> str:
    """Return the speed-up to a target, or its bound if the time is censored."""
    return row["bound"] if row["censored"] else inverse(row)


def interval(mean: float, low: float | None, high: float | None) -> str:
    """Return a ratio with its interval, if known."""
    return f"{mean:.2f}x" if low is None or high is None else f"{mean:.2f}x ({low:.2f} to {high:.2f})"


def difference(row: Row) -> str:
    """Return a difference with its sign."""
    if pairs := _raw(row, "{:+.2f}"):
        return pairs
    inside = "" if row["low"] is None else f" ({row['low']:+.2f} to {row['high']:+.2f})"
    return f"{row['mean']:+.2f}{inside}"


def bound_in_words(at_least: float | None, at_most: float | None) -> str:
    """Return a bound on a speed-up as text, or "" without a bound."""
    if at_least is not None:
        return f"at least {at_least:.2f}x the speed"
    return "" if at_most is None else f"at most {at_most:.2f}x the speed"


def _raw(row: Row, form: str = "{:.2f}x", turned: Callable[[float], float] = float) -> str:
    """Return the single pairs if there are too few for a verdict (math.md, section 8), otherwise an empty string."""
    if row["low"] is None or row["n"] >= FEW or "pairs" not in row:
        return ""
    return f"pairs {', '.join(form.format(turned(pair)) for pair in row['pairs'])}"


def medians(row: Row) -> tuple[float, float, float]:
    """Return the median seconds of a `compile_time` row: start of the compiler, whole model, by block."""
    start_s, whole_s, blocks_s = (statistics.median(row[f"{name}_s"]) for name in ("start", "whole", "blocks"))
    return start_s, whole_s, blocks_s


def spread(values: Sequence[float]) -> str:
    """Return the median and the range of seconds as text."""
    return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"

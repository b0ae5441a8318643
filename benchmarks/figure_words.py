"""How a figure of a record is written: with its interval, or its pairs where they are too few for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]


def ratio(row: Row) -> str:
    """Return a ratio as it stands in a record."""
    return _raw(row) or interval(row["mean"], row["low"], row["high"])


def inverse(row: Row) -> str:
    """Return a ratio of times as a speed."""
    if pairs := _raw(row, turned=lambda pair: 1 / pair):
        return pairs
    low, high = (None, None) if row["low"] is None else (1 / row["high"], 1 / row["low"])
    return interval(1 / row["mean"], low, high)


def speed(row: Row) -> str:
    """Return how much sooner a target was reached, or the bound of it where its time is not known."""
    return row["bound"] if row["censored"] else inverse(row)


def interval(mean: float, low: float | None, high: float | None) -> str:
    """Return a ratio with its interval, where it has one."""
    return f"{mean:.2f}x" if low is None or high is None else f"{mean:.2f}x ({low:.2f} to {high:.2f})"


def difference(row: Row) -> str:
    """Return a difference, which has a sign."""
    if pairs := _raw(row, "{:+.2f}"):
        return pairs
    inside = "" if row["low"] is None else f" ({row['low']:+.2f} to {row['high']:+.2f})"
    return f"{row['mean']:+.2f}{inside}"


def _raw(row: Row, form: str = "{:.2f}x", turned: Callable[[float], float] = float) -> str:
    """Return the pairs themselves where they are too few for an interval (math.md, section 8); else ""."""
    if row["low"] is None or row["n"] >= FEW or "pairs" not in row:
        return ""
    return f"pairs {', '.join(form.format(turned(pair)) for pair in row['pairs'])}"

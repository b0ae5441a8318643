"""Tables of scaling.py and sending.py for `make figures`: training to a validation loss, and flat rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]
# Of records whose efficiency was measured over the runs of the seeds.
_EFFICIENCY = (
    "samples per second and rank, relative to one rank with the same recipe (`no_buffers`: with `baseline`), over",
    "the whole runs, not only until the target: geometric mean of the pairs with equal seeds.",
)


def scaling(rows: list[Row]) -> Iterator[str]:
    """Yield the tables of a record, one per metric."""
    for metric in dict.fromkeys(row["metric"] for row in rows):
        found = [row for row in rows if row["metric"] == metric]
        yield from (_courses if metric == "samples_to_target" else _flat)(found)
        yield ""


def _flat(rows: list[Row]) -> Iterator[str]:
    """Yield a table with a column per key, without intervals of fewer than five pairs."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in ("metric", "pairs")]
    keys = [key for key in keys if not any(isinstance(row.get(key), list) for row in rows)]
    yield f"| {' | '.join(keys)} |"
    yield "|---" * len(keys) + "|"
    for row in rows:
        shown = row if row.get("n", FEW) >= FEW else row | {"low": None, "high": None}
        yield f"| {' | '.join(_cell(shown.get(key)) for key in keys)} |"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def _courses(rows: list[Row]) -> Iterator[str]:
    """Yield the table of training to a validation loss, with a row per recipe and number of ranks."""
    target = rows[0]["target"]
    yield f"Training to a validation loss of {target:g}: medians over seeds. Efficiency is"
    yield from _EFFICIENCY if "seconds_of_seeds" in rows[0] else ("that of `trimtab scale`.",)
    yield ""
    yield "| recipe | ranks | link | batch size | reached | samples to target | seconds to target | efficiency |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        link = f"{row['mbit']} Mbit/s" if row["mbit"] else ""
        samples, seconds = _plain(row["samples_to_target"], ".0f"), _plain(row["seconds_to_target"], ".1f")
        what = f"| {row['recipe']} | {row['ranks']} | {link} | {row['effective_batch']:.0f}"
        yield f"{what} | {row['reached']} of {row['seeds']} | {samples} | {seconds} | {_bounded(row)} |"


def _bounded(row: Row) -> str:
    if row["mean"] is None:
        return ""
    if row["n"] < FEW:
        return ", ".join(f"{pair:.3f}" for pair in row.get("pairs") or (row["mean"],))
    bounds = "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f}, n={row['n']})"
    return f"{row['mean']:.3f}{bounds}"


def _plain(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"

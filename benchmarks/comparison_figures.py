"""Tables of comparisons from `trimtab compare`, for `make figures`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figure_words import difference, interval, ratio, speed
from benchmarks.phases_figures import METRICS, phases
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]
NAMES = {
    "reference": "P0 reference",
    "self": "P0 again (A/A control)",
    "paper": "P1 paper, literal",
    "strong": "P2 strong",
    "muon": "P3 strong, with Muon",
    "strict": "P0 strict fp32",
    "equivalent_plan": "trimtab S",
    "tuned_plan": "trimtab F",
    "strong_plan": "plan made for P2",
}


def comparison(rows: list[Row]) -> Iterator[str]:
    """Yield the table of a comparison, then the tables of its phases."""
    yield "| figure | arm | against | value (95%) | n | verdict |"
    yield "|---|---|---|---|---|---|"
    gained = [row for row in rows if row["metric"] in METRICS]
    for row in rows:
        if row["metric"] in METRICS:
            continue
        if row["metric"] == "planning_s":
            yield f"| planning, seconds | {NAMES[row.get('arm', 'equivalent_plan')]} | | {_planning(row)} | 1 | |"
        elif row["metric"] == "time_to_target_ratio":
            yield _rung(row)
        else:
            value = difference(row) if row["metric"] == "final_metric_difference" else ratio(row) + _processor(row)
            yield _line(row["metric"].removesuffix("_ratio").replace("_", " "), row, value)
    if gained:
        yield ""
        yield from phases(gained)


def _planning(row: Row) -> str:
    """Return planning seconds and, if recorded, the changes of the plan."""
    if "changes" not in row:
        return f"{row['planning_s']:.1f}"
    return f"{row['planning_s']:.1f}; changes {row['changes']}"


def _rung(row: Row) -> str:
    charge = "search charged" if row["charged"] else "uncharged"
    value = speed(row)
    seconds = row.get("median_s"), row.get("median_against_s")
    everywhere = row["reached"] == row["reached_against"] == row["n"]
    if all(seconds) and everywhere:  # otherwise both medians would be over different pairs
        value += f"; medians {seconds[0]:.0f} s against {seconds[1]:.0f} s"
    reached = f", reached {row['reached']} and {row['reached_against']}" if row["censored"] else ""
    return _line(f"speed to {row['target']:g}, {charge}", row, value + reached)


def _line(figure: str, row: Row, value: str) -> str:
    arm, against = NAMES[row["arm"]], NAMES["reference" if row["against"] == "self" else row["against"]]
    return f"| {figure} | {arm} | {against} | {value} | {_pairs(row)} | {row.get('verdict', '')} |"


def _pairs(row: Row) -> str:
    """Return the number of pairs, and the number that ran to the end if it differs."""
    whole = row.get("n_whole")
    return str(row["n"]) if whole in (None, 0, row["n"]) else f"{row['n']} ({whole} whole)"


def _processor(row: Row) -> str:
    """Return the ratio of CPU times, if recorded."""
    if row.get("cpu_mean") is None:
        return ""
    bounds = (row["cpu_low"], row["cpu_high"]) if row["n"] >= FEW else (None, None)
    return f"; by processor time {interval(row['cpu_mean'], *bounds)}"

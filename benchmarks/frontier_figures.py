"""Drawings of the newest `frontier` results of each model and precision: docs/figures/frontier-<model>-<precision>.svg.

`figures.py` writes them. Equal results yield equal bytes, independent of the user's matplotlib settings.

A drawing shows time (with 95% interval) over peak memory, both relative to a step without recomputation: common
schedules, optimal schedules (connected), and the compiled model under torch's activation memory budgets.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

NAMES = {"none": "all kept", "every_block": "every block", "sqrt": "segments of √L", "selective": "selective"}
MARKERS = {"none": "o", "every_block": "s", "sqrt": "^", "selective": "D"}
INK, LINE, OTHERS, COMPILED = "#24292f", "#0969da", "#bc4c00", "#8250df"

Row = dict[str, Any]


def drawings(root: Path) -> dict[Path, str]:
    """Return the drawings as SVG text by path."""
    found, compiled = {}, newest(root, "frontier_compiled")
    for (model, precision), rows in newest(root, "frontier").items():
        name = f"frontier-{model}-{precision}"
        title = f"{model}, {precision}: a step's time against its peak memory"
        found[root / "docs" / "figures" / f"{name}.svg"] = draw(
            name, title, rows + compiled.get((model, precision), [])
        )
    return found


def newest(root: Path, name: str) -> dict[tuple[str, str], list[Row]]:
    """Return the newest rows of a benchmark for each model and precision."""
    found: dict[tuple[str, str], list[Row]] = {}
    for path in sorted((root / "benchmarks" / "results").glob(f"{name}-*.json"), key=lambda path: path.stem[-10:]):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for key in {(row["model"], row["precision"]) for row in rows}:
            found[key] = [row for row in rows if (row["model"], row["precision"]) == key]
    return dict(sorted(found.items()))


def draw(name: str, title: str, rows: list[Row]) -> str:
    """Return a drawing as SVG text."""
    whole = next(row["peak_bytes"] for row in rows if row["schedule"] == "none")
    style: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 10}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        figure = Figure(figsize=(6.4, 3.6), layout="constrained", facecolor="white")
        ax = figure.subplots()
        best = sorted(
            (row for row in rows if row["schedule"] in ("none", "optimal")), key=lambda row: row["peak_bytes"]
        )
        ax.errorbar(*_points(best, whole), color=LINE, marker=".", linewidth=1.5, label="least recomputation")
        for name, marker in MARKERS.items():
            of = [row for row in rows if row["schedule"] == name]
            ax.errorbar(*_points(of, whole), color=OTHERS, marker=marker, linestyle="none", label=NAMES[name])
        if budgets := [row for row in rows if row["schedule"] == "torch_memory_budget"]:
            look = {"marker": "x", "linestyle": ":", "linewidth": 1, "label": "compiled, by torch's budgets"}
            ax.errorbar(*_points(budgets, whole), color=COMPILED, **look)
        ax.axhline(1.0, color=INK, linewidth=0.6)
        ax.set_xlabel("peak memory, % of what keeping all takes")
        ax.set_ylabel("time over keeping all")
        ax.set_title(title, fontsize=10, loc="left", color=INK)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#d0d7de", linewidth=0.6)
        ax.legend(frameon=False, fontsize=9)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _points(rows: list[Row], whole: int) -> tuple[list[float], list[float], Any]:
    """Return x, y, and the interval's distances below and above y."""
    low = [row["over_none"] - row["low"] for row in rows]
    high = [row["high"] - row["over_none"] for row in rows]
    return [100 * row["peak_bytes"] / whole for row in rows], [row["over_none"] for row in rows], (low, high)

"""Tables of docs/measured.md for `make figures`: the effect of every setting alone, and the time of compilation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure_words import interval, medians, spread
from trimtab.settings import SETTINGS

Row = dict[str, Any]
NAME, COMPILING = "settings_on_models", "compile_time"


def blocks(root: Path) -> dict[str, dict[str, list[str]]]:
    """Return the generated lines by page and block name."""
    found = _records(root, NAME)
    settings = [*_measured(found), "", *_unmeasured(found)]
    return {"measured.md": {"settings": settings, "compiling": list(_compiling(_records(root, COMPILING)))}}


def _records(root: Path, name: str) -> list[Row]:
    paths = sorted((root / "benchmarks" / "results").glob(f"{name}-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _measured(records: Sequence[Row]) -> Iterator[str]:
    yield "| setting | model | time (95%) | A/A control | peak memory | gradients differ by | n | machine |"
    yield "|---|---|---|---|---|---|---|---|"
    rows = [(row, found["environment"]) for found in records for row in found["rows"]]
    order = list(SETTINGS)
    for row, environment in sorted(
        rows, key=lambda each: (order.index(next(iter(each[0]["values"]))), _values(each[0]))
    ):
        yield f"| {_values(row)} | {_figures(row)} | {environment['cpu']}, {environment['threads']} threads |"


def _values(row: Row) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in row["values"].items())


def _figures(row: Row) -> str:
    ratio, control = (
        interval(row["time"], row["low"], row["high"]),
        f"{row['control_low']:.2f} to {row['control_high']:.2f}",
    )
    return f"{row['model']} | {ratio} | {control} | {row['memory']:.2f}x | {row['gradient_error']:.1e} | {row['n']}"


def _unmeasured(records: Sequence[Row]) -> Iterator[str]:
    seen = {name for found in records for row in found["rows"] for name in row["values"]}
    missing = [f"`{name}`" for name in SETTINGS if name not in seen]
    if missing:
        yield f"Not measured here: {', '.join(missing)}."


def _compiling(records: Sequence[Row]) -> Iterator[str]:
    yield "| model | start of the compiler | whole model | by block | ratio | ratio with the start | n | machine |"
    yield "|---|---|---|---|---|---|---|---|"
    for found in records:
        facts = found["environment"]
        for row in found["rows"]:
            yield f"| {_compile_times(row)} | {row['n']} | {facts['cpu']}, {facts['threads']} threads |"


def _compile_times(row: Row) -> str:
    start_s, whole_s, blocks_s = medians(row)
    times = " | ".join(spread(row[f"{name}_s"]) for name in ("start", "whole", "blocks"))
    with_start = (start_s + blocks_s) / (start_s + whole_s)
    return f"{row['model']} | {times} | {blocks_s / whole_s:.2f} | {with_start:.2f}"


def compile_section(rows: list[Row]) -> Iterator[str]:
    """Yield the table of a record of compilation times."""
    columns = ("model", "start of the compiler", "whole model", "by block", "ratio", "ratio with the start", "n")
    yield f"| {' | '.join(columns)} | graphs, graph breaks |"
    yield f"|{'---|' * (len(columns) + 1)}"
    for row in rows:
        counts = "; ".join(
            f"{way}: {row[f'{way}_graphs']}, {row[f'{way}_graph_breaks']}" for way in ("whole", "blocks")
        )
        yield f"| {_compile_times(row)} | {row['n']} | {counts} |"


def section(rows: list[Row]) -> Iterator[str]:
    """Yield the table of a record on docs/RESULTS.md."""
    yield "| values | model | time (95%) | A/A control | peak memory | gradients differ by | n | compiled in |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        compiled = f"{row['compile_processor_s']:.1f} s" if "compile_processor_s" in row else ""
        yield f"| {_values(row)} | {_figures(row)} | {compiled} |"

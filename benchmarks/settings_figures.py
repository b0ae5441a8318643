"""Table of docs/measured.md: the effect of every setting alone on unmodified models, for `make figures`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure_words import interval
from trimtab.core.choice import COMPILED_BLOCKS
from trimtab.settings import SETTINGS

Row = dict[str, Any]
NAME = "settings_on_models"


def blocks(root: Path) -> dict[str, dict[str, list[str]]]:
    """Return the generated lines by page and block name."""
    records = sorted((root / "benchmarks" / "results").glob(f"{NAME}-*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in records]
    settings = [*_measured(found), "", *_unmeasured(found)]
    return {"measured.md": {"settings": settings, "compiling": list(_compiling(found))}}


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
    yield "| model | whole model | by block | ratio |"
    yield "|---|---|---|---|"
    rows = [row for found in records for row in found["rows"] if list(row["values"]) == ["compiled"]]
    took = {(row["model"], row["values"]["compiled"]): row["compile_processor_s"] for row in rows}
    for (model, value), blocks_s in took.items():
        if value == COMPILED_BLOCKS and (whole_s := took.get((model, True))) is not None:
            yield f"| {model} | {whole_s:.1f} s | {blocks_s:.1f} s | {blocks_s / whole_s:.2f} |"


def section(rows: list[Row]) -> Iterator[str]:
    """Yield the table of a record on docs/RESULTS.md."""
    yield "| values | model | time (95%) | A/A control | peak memory | gradients differ by | n | compiled in |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        compiled = f"{row['compile_processor_s']:.1f} s" if "compile_processor_s" in row else ""
        yield f"| {_values(row)} | {_figures(row)} | {compiled} |"

"""Compact record of an evaluation, `benchmarks/results/evaluation-<machine>.json`, beside the archive of its records.

It contains the machine, the status of the goals, the completed slices, comparable claims of the paper, and per run the
versions, the verdict and the main figures with intervals. Pairs of a figure with an interval, classes of modules and
roofline bounds are in the archive only. Values that are false or empty are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evaluation_figures import recorded, rows_of
from benchmarks.paper.evaluation_slices import DONE, Slice
from benchmarks.paper.finding import Run
from benchmarks.paper.judge import FAIL, PASS
from benchmarks.paper.rows import evaluation_object
from trimtab.experiments.comparison.comparison_result import NO_VERDICT
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]
DIGITS = 5  # significant digits of figures
_COMPARED = (PASS, FAIL, NO_VERDICT)
_METRICS_LEFT_OUT = ("part_saved_s", "bound_share")
_KEYS_LEFT_OUT = (
    *("metric", "arm_s", "against_s", "arm_j", "against_j", "sample_s"),
    *("cpu_low", "cpu_high", "left_censored", "censored", "resolution"),
)
_OF_THE_RUN = ("run", "kind", "task", "machine", "device")  # equal in all rows of a run
_OF_THE_CODE = ("size", "measure", "arm", "against", "of_value", "unit")  # of a goal, defined in its module
_WIDTH = 120


def compact(size: str, found: Sequence[Slice], folder: Path, runs: Mapping[str, Run]) -> dict[str, Any]:
    """Return the compact record of an evaluation.

    Args:
        size: Size of the evaluation.
        found: Slices.
        folder: Folder of results.
        runs: Runs of the slices.
    """
    known = recorded(size, found, folder, runs)
    judged = evaluation_object(tuple(runs.values()), known["environment"]["command"]) if runs else {"rows": []}
    slices = [row for row in known["rows"] if row["metric"] == "slice"]
    return {
        "schema": 1,
        "name": "evaluation",
        "environment": known["environment"],
        "headline": judged.get("headline"),
        "goals": [_brief(row, *_OF_THE_CODE) for row in known["rows"] if row["metric"] == "goal"],
        "slices": {
            "done": [_brief(row, "state") for row in slices if row["state"] == DONE],
            "to do": [row["slice"] for row in slices if row["state"] != DONE],
        },
        "claims": [_brief(row) for row in judged["rows"] if row["metric"] == "claim" and row["status"] in _COMPARED],
        "runs": [_run(folder, run, judged["rows"]) for run in runs.values()],
    }


def _run(folder: Path, run: Run, judged: Sequence[Row]) -> Row:
    """Return a run with its figures by metric: the rows that its command prints, or else those of `trimtab report`."""
    rows = rows_of(folder, run)
    if rows is None:
        rows = [row for row in judged if row.get("run") == run.name and row["metric"] != "claim"]
    about = {"name": run.name, "kind": run.kind, "task": run.task, "environment": dict(run.versions)}
    about |= {"command": run.command, "verdict": run.headline.kind, "sentence": run.headline.sentence}
    about |= {"trained": run.trained, "planned": run.planned, "known": list(run.known)}
    figures: dict[str, list[Row]] = {}
    for row in rows:
        if row["metric"] not in _METRICS_LEFT_OUT:
            figures.setdefault(row["metric"], []).append(_brief(row, *_OF_THE_RUN))
    return _brief(about) | {"figures": figures}


def _brief(row: Mapping[str, Any], *left_out: str) -> Row:
    """Return a row without false and empty values and the given keys; figures are rounded."""
    names = {name for name, value in row.items() if value is not None and value is not False and value not in ("", [])}
    names -= {*_KEYS_LEFT_OUT, *left_out}
    names -= set() if 1 < row.get("n", 0) < FEW else {"pairs"}
    return {name: _rounded(value) for name, value in row.items() if name in names}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def text_of(found: Mapping[str, Any]) -> str:
    """Return a record as JSON with a line per row, so that a changed figure is a changed line."""
    return "\n".join(_lines(found, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    whole = json.dumps(value)
    nested = isinstance(value, (dict, list)) and any(map(_has_rows, _values(value)))
    if not nested and (not isinstance(value, list) or len(whole) <= _WIDTH):
        yield whole
        return
    begin, end = "{}" if isinstance(value, dict) else "[]"
    yield begin
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(value)
    for at, (name, each) in enumerate(zip(names, _values(value), strict=True), 1):
        *lines, last = _lines(each, f"{indent} ")
        lines = [*lines, last + ("," if at < len(names) else "")]
        yield f"{indent} {name}{lines[0]}"
        yield from lines[1:]
    yield f"{indent}{end}"


def _has_rows(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value))


def _values(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value

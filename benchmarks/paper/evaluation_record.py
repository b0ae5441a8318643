"""Record of an evaluation, `benchmarks/results/evaluation-<machine>.json`, from which all pages are made.

It contains the machine, the status of the goals, the completed slices, claims of the paper that were measured, and per
run the versions, the verdict and the rows. A new result replaces the run of the same name; all other runs, also those
measured in another checkout, are kept. Values that are false or empty are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.evaluation_slices import Ran, Slice
from benchmarks.paper.goals import GOALS, PREDICTED
from benchmarks.paper.judge import NOT_COMPARABLE, NOT_MEASURED, headline, judge_claims, judge_goal
from trimtab.core.record import RunSummary
from trimtab.core.serialization import read_json
from trimtab.experiments.benchmark_rows import benchmark_object
from trimtab.experiments.comparison import Comparison
from trimtab.experiments.phase_result import PhaseResult
from trimtab.experiments.phase_result import rows_of as phase_rows
from trimtab.experiments.results import KINDS, RECORD, read_result
from trimtab.experiments.scaling import Scaling
from trimtab.experiments.scaling import benchmark_rows as scaling_rows
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW
from trimtab.plans.plan import Plan

Row = dict[str, Any]
RESULTS, PREFIX = Path("benchmarks") / "results", "evaluation-"
DIGITS = 5  # significant digits of figures
VERSIONS = ("trimtab", "sources", "torch", "cuda", "numpy", "python", "threads")
_METRICS_LEFT_OUT = ("part_saved_s", "bound_share")
_KEYS_LEFT_OUT = (
    *("metric", "arm_j", "against_j", "sample_s", "cpu_low", "cpu_high", "left_censored", "censored", "resolution"),
    *("run", "kind", "task", "machine", "device", "size", "measure", "of_value", "unit"),
)
_WIDTH = 120


def record_of(root: Path, name: str) -> Path:
    """Return the record of an evaluation."""
    return root / RESULTS / f"{name}.json"


def records(root: Path) -> dict[str, Row]:
    """Return the records of all evaluations by name."""
    paths = sorted((root / RESULTS).glob(f"{PREFIX}*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def updated(size: str, found: Sequence[Slice], folder: Path, before: Mapping[str, Any], facts: Row) -> Row:
    """Return the record of an evaluation with the results of a folder.

    Args:
        size: Size of the evaluation.
        found: Slices.
        folder: Folder of results.
        before: The record so far; {} without one.
        facts: Description of the machine, with the command.
    """
    results = {path.partition("/")[0]: folder / path for path in dict.fromkeys(each.result for each in found)}
    new = {name: _run(name, path) for name, path in results.items() if path.is_file() and _is_run(path)}
    old = {run["name"]: run for run in before.get("runs", ())}
    runs = {**{name: run for name, run in old.items() if name not in new}, **new}
    order = [name for name in results if name in runs] + [name for name in runs if name not in results]
    claims = [row for row in before.get("claims", ()) if row["run"] not in new]
    judged = {name: (run["task"], facts, rows_of(run)) for name, run in new.items()}
    claims += [
        _brief(row, keeps=("run", "task"))
        for row in judge_claims(judged)
        if row["status"] not in (NOT_COMPARABLE, NOT_MEASURED)
    ]
    done = {row["slice"]: row for row in before.get("slices", {}).get("done", ())} | _done(found, folder)
    return {
        "schema": 1,
        "name": "evaluation",
        "environment": facts,
        "headline": headline(claims) if claims else before.get("headline"),
        "goals": list(_goals(size, folder, new, before)),
        "slices": {
            "done": [done[each.name] for each in found if each.name in done],
            "to do": [each.name for each in found if each.name not in done],
        },
        "claims": claims,
        "runs": [runs[name] for name in order],
    }


def rows_of(run: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a run of a record, with metric and task."""
    of = {"task": run["task"]}
    return [{"metric": metric, **of, **row} for metric, rows in run["figures"].items() for row in rows]


def _goals(size: str, folder: Path, new: Mapping[str, Row], before: Mapping[str, Any]) -> Iterator[Row]:
    known = {row["says"]: row for row in before.get("goals", ())}
    for goal in (each for each in GOALS if each.size == size):
        head = {"says": goal.says, "run": goal.run, "sense": goal.sense, "bar": goal.bar}
        rows = rows_of(new[goal.run]) if goal.run in new else _rows_of_file(folder / goal.run)
        if goal.measure == PREDICTED:
            rows = list(_predicted(folder / goal.run, folder / goal.against))
        status, figure = judge_goal(goal, rows)
        is_new = status != NOT_MEASURED
        kept = known.get(goal.says, {"status": NOT_MEASURED, "figure": ""})
        said = {"status": status, "figure": figure} if is_new else {k: kept.get(k, "") for k in ("status", "figure")}
        yield head | {key: value for key, value in said.items() if value or key == "status"}


def _predicted(limited: Path, unlimited: Path) -> Iterator[Row]:
    """Yield the predicted ratio of step times with and without a memory limit."""
    if limited.is_file() and unlimited.is_file():
        small, large = (read_json(Plan, path).predicted for path in (limited, unlimited))
        if small is not None and large is not None and small.peak_bytes is not None:
            yield {"metric": PREDICTED, "mean": small.step_s / large.step_s, "peak_bytes": small.peak_bytes}


def _rows_of_file(path: Path) -> list[Row]:
    """Return the rows that a benchmark printed to a file; [] for anything else."""
    if path.suffix != ".json" or not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return list(found["rows"]) if isinstance(found, dict) and "rows" in found else []


def _is_run(path: Path) -> bool:
    return path.name in {kind.file for kind in KINDS} or path.suffix == RECORD


def _done(found: Sequence[Slice], folder: Path) -> dict[str, Row]:
    ended = {each.name: folder / "done" / f"{each.name}.json" for each in found}
    ran = {name: read_json(Ran, path) for name, path in ended.items() if path.is_file()}
    return {name: {"slice": name, "sources": each.sources, "seconds": each.seconds} for name, each in ran.items()}


def _run(name: str, path: Path) -> Row:
    """Return a run with its rows by metric."""
    found = read_result(path)
    if isinstance(found, Comparison):
        task, environment, kind = found.task, found.environment, found.kind
        rows, command, verdict = benchmark_object(found)["rows"], found.command, found.verdict()
    elif isinstance(found, Scaling):
        task, environment, kind = found.task, found.environment, "scaling"
        rows, command, verdict = list(scaling_rows(found)), f"trimtab scale {found.task}", "no verdict"
    elif isinstance(found, PhaseResult):
        task, environment, kind = found.task, found.environment, "phases"
        rows, command, verdict = list(phase_rows(found)), f"trimtab phases {found.task}", "no verdict"
    else:
        task, environment, kind = found.header.name, found.header.environment, "record"
        rows, command, verdict = list(_record_rows(found)), "", "no verdict"
    figures: dict[str, list[Row]] = {}
    for row in rows:
        if row["metric"] not in _METRICS_LEFT_OUT:
            figures.setdefault(row["metric"], []).append(_brief(row))
    versions = {key: environment[key] for key in VERSIONS if key in environment}
    about = {"name": name, "kind": kind, "task": task, "environment": versions, "command": command, "verdict": verdict}
    return _brief(about, keeps=("kind", "task")) | {"figures": figures}


def _record_rows(found: RunSummary) -> Iterator[Row]:
    """Yield the figures of a single run, without ratios, because it is not paired."""
    samples, seconds = found.steps.trained()
    if seconds > 0 and samples:
        yield {"metric": "samples_per_s", "arm": "run", "value": samples / seconds}
    if found.last_evaluation is not None:
        for name, value in found.last_evaluation.metrics.items():
            yield {"metric": "final_metric", "arm": "run", "of": name, "value": value}
    ending = {} if found.end is None else found.end.detail
    if isinstance(joules := ending.get("energy_j"), int | float) and samples:
        yield {"metric": "joules_per_sample", "arm": "run", "value": joules / samples}


def _brief(row: Mapping[str, Any], keeps: Sequence[str] = ()) -> Row:
    """Return a row without false and empty values; figures are rounded. Pairs are kept if too few for an interval."""
    names = {name for name, value in row.items() if value is not None and value is not False and value not in ("", [])}
    names -= set(_KEYS_LEFT_OUT) - set(keeps)
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

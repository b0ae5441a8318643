"""Pages and summary of an evaluation: goals, figures of the runs, and comparison with the paper.

They depend only on the records, so they are identical on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.comparison_figures import comparison
from benchmarks.paper.evaluation_archive import unpack_all
from benchmarks.paper.evaluation_slices import DONE, TO_DO, Ran, Slice
from benchmarks.paper.finding import Run, bound_in_words
from benchmarks.paper.goals import GOALS
from benchmarks.paper.judge import Judged, judge_goals
from benchmarks.paper.projection import with_doubling
from benchmarks.paper.report import evaluation_texts
from benchmarks.paper.results import read_evaluation
from benchmarks.phases_figures import phases
from trimtab.core.serialization import read_json
from trimtab.experiments.ablation.ablation_result import Ablation
from trimtab.experiments.ablation.ablation_rows import ablation_object
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison.comparison_rows import benchmark_object
from trimtab.experiments.comparison.gain_rows import phase_object
from trimtab.experiments.phase_result import FILE as PHASES
from trimtab.experiments.phase_result import PhaseResult
from trimtab.experiments.results import read_result
from trimtab.experiments.scaling.scaling_result import Scaling, tables
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT

Row = dict[str, Any]
Runs = Mapping[str, Run]
SUMMARY, REPORT, PAGE, MACHINE_FILE = "summary.json", "report.md", "evaluation.md", "machine.json"
_SETTINGS = {"interaction": "together", "whole": "the plan"}  # display names of settings


def folders(root: Path) -> list[Path]:
    """Return the unpacked folders of archived evaluations with a completed slice."""
    return [path for path in unpack_all(root) if any((path / "done").glob("*.json"))]


def size_of(folder: Path) -> str:
    """Return the size of the evaluation in a folder, "cpu" or "gpu"."""
    return "gpu" if "gpu" in machine_of(folder) else "cpu"


def machine_of(folder: Path) -> Row:
    """Return the recorded description of a folder's machine, empty if missing."""
    path = folder / MACHINE_FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def ran_of(each: Slice, folder: Path) -> Path:
    """Return the file of a completed slice."""
    return folder / "done" / f"{each.name}.json"


def written(size: str, found: Sequence[Slice], folder: Path, runs: Runs | None = None) -> dict[str, str]:
    """Return the generated files of a folder by name: summary of the goals, pages and tables of all runs.

    Args:
        size: Size of the evaluation.
        found: Slices.
        folder: Folder of results.
        runs: Runs of the slices; None to read the records.
    """
    runs = read_evaluation(found, folder) if runs is None else runs
    texts = {SUMMARY: json.dumps(recorded(size, found, folder, runs), indent=1) + "\n"}
    if runs:
        texts[REPORT] = "\n".join(report(folder, runs)) + "\n"
        goals = [(each.limit.says, each.goal_status, each.why) for each in _goals(size, folder, runs)]
        made = evaluation_texts(tuple(runs.values()), _command(size), goals)
        texts |= {f"evaluation.{kind}": text for kind, text in made.items()}
    return texts


def recorded(size: str, found: Sequence[Slice], folder: Path, runs: Runs) -> dict[str, Any]:
    """Return the recorded status of goals and slices. Completed slices have seconds and source fingerprint.

    Args:
        size: Size of the evaluation.
        found: Slices.
        folder: Folder of results.
        runs: Runs of the slices.
    """
    goals = _goals(size, folder, runs)
    rows = [{"metric": "goal", **asdict(each.limit), "status": each.goal_status, "figure": each.why} for each in goals]
    rows += [{"metric": "slice", "slice": each.name} | _ended(ran_of(each, folder)) for each in found]
    return {
        "schema": 1,
        "name": "evaluation",
        "environment": machine_of(folder) | {"command": _command(size)},
        "rows": rows,
    }


def _ended(path: Path) -> Row:
    if not path.is_file():
        return {"state": TO_DO}
    ran = read_json(Ran, path)
    return {"state": DONE, "sources": ran.sources, "seconds": ran.seconds}


def _goals(size: str, folder: Path, runs: Runs) -> tuple[Judged, ...]:
    return judge_goals([goal for goal in GOALS if goal.size == size], folder, runs)


def _command(size: str) -> str:
    return f"python -m benchmarks.paper.evaluation --size {size}"


def report(folder: Path, runs: Runs) -> Iterator[str]:
    """Yield the lines of an evaluation's page: goals, then all figures of every run.

    Args:
        folder: Folder of results.
        runs: Runs of the folder.
    """
    size, facts = size_of(folder), machine_of(folder)
    yield f"# {folder.name}"
    yield ""
    yield f"{', '.join(facts[key] for key in ('cpu', 'gpu') if key in facts)}. `make evaluation SIZE={size}`."
    yield f"Comparison with the paper: [{PAGE}]({PAGE})."
    yield ""
    yield "| goal | | measured |"
    yield "|---|---|---|"
    for each in _goals(size, folder, runs):
        yield f"| {each.limit.says} | {each.goal_status} | {each.why} |"
    yield ""
    for name, run in runs.items():
        yield from _run(folder / name, run)


def rows_of(folder: Path, run: Run) -> list[Row] | None:
    """Return the rows of a comparison, an ablation or a phase table; None for another kind of run.

    Measures that were found to be invalid are left out.
    """
    path = folder / run.name
    if (path / PHASES).is_file():
        page = read_json(PhaseResult, path / PHASES)
        return list(with_doubling(phase_object(page.gains, page.thirds)["rows"], page.gains))
    if not (path / "report.json").is_file():
        return None
    found = read_result(path / "report.json")
    if isinstance(found, Ablation):
        return list(ablation_object(found)["rows"])
    rows = with_doubling(benchmark_object(found)["rows"], [found.gain] if found.gain is not None else [])
    return [row for row in rows if row["metric"].removesuffix("_ratio") not in run.unfounded]


def _run(path: Path, run: Run) -> Iterator[str]:
    rows = rows_of(path.parent, run)
    if (path / "scaling.json").is_file():
        yield from _scaling(run, read_json(Scaling, path / "scaling.json"))
    elif (path / PHASES).is_file():
        yield f"## {path.name}: {run.task}"
        yield ""
        yield f"{run.headline.sentence} With {_versions(run)}."
        yield ""
        yield from phases(rows or [])
    elif (path / "report.json").is_file():
        found = read_result(path / "report.json")
        yield f"## [{path.name}]({path.name}/report.md): {found.task}"
        yield ""
        yield f"`{found.command}`; {_versions(run)}."
        yield ""
        for says in run.known:
            yield f"*{says}*"
            yield ""
        yield from (comparison if isinstance(found, Comparison) else ablation)(rows or [])
        yield ""


def _versions(run: Run) -> str:
    """Return the versions on which the figures of a run depend: torch, sources and threads."""
    return ", ".join(f"{name} {run.environment[name]}" for name in ("torch", "sources", "threads"))


def ablation(rows: list[Row]) -> Iterator[str]:
    """Yield a table with the effect of each change, added to the loop and removed from the plan."""
    yield "| change | set in | figure | with it (95%) | n | verdict |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        if row["metric"] in ("arm", "planning_s"):
            continue
        change = row.get("change", row.get("arm", "")).replace("_", " ")
        if "other" in row:
            change += f" and {row['other'].replace('_', ' ')}"
        figure = row["metric"].removesuffix("_ratio").replace("_", " ")
        if "target" in row:
            figure = f"time to {row['target']:g}{', search counted' if row['charged'] else ''}"
        setting = _SETTINGS.get(row["setting"], row["setting"])
        if "refused" in row:
            yield f"| {change} | {setting} | | not run: {row['refused']} | | |"
            continue
        yield f"| {change} | {setting} | {figure} | {_value(row)} | {row['n']} | {row['verdict']} |"


def _value(row: Row) -> str:
    if "bound" in row:
        return bound_in_words(row["at_least"], row["at_most"]) or row["bound"] or "not known"
    form = "{:+.2f}" if row["metric"] == "final_metric_difference" else "{:.3f}x"
    if row["mean"] is None:
        return "not known"
    if row["low"] is None or row["high"] is None:
        return form.format(row["mean"])
    if row["n"] < MIN_PAIRS_FOR_VERDICT:
        return f"pairs {', '.join(form.format(pair) for pair in row['pairs'])}"
    return f"{form.format(row['mean'])} ({form.format(row['low'])} to {form.format(row['high'])})"


def _scaling(run: Run, found: Scaling) -> Iterator[str]:
    yield f"## {run.name}: {found.task}"
    yield ""
    yield f"`trimtab scale {found.task}`; {_versions(run)}."
    yield ""
    for title, (head, *rows) in tables(found).items():
        yield f"{title}:"
        yield ""
        yield _line(head)
        yield f"|{'---|' * len(head)}"
        yield from map(_line, rows)
        yield ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

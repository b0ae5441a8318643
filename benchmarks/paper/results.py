"""The reader of recorded results: folders and files as runs, each with its findings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.paper.evaluation_slices import Slice
from benchmarks.paper.finding import Finding, Run
from benchmarks.paper.findings import of_ablation, of_comparison, of_phases, of_scaling
from benchmarks.paper.goals import MONITOR, NO_HARM, PREDICTED, SMALL_BYTES, Goal
from trimtab.core.energy_reading import OTHER_RANKS, MeterFacts
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.record import RunRecord, RunSummary, read_header, read_together, summary_of
from trimtab.core.serialization import from_jsonable, read_json
from trimtab.experiments.ablation.ablation_result import Ablation
from trimtab.experiments.comparison.comparison_result import NO_VERDICT, Comparison, Ratio, Verdict
from trimtab.experiments.comparison.comparison_statistics import trained
from trimtab.experiments.phase_result import PhaseResult
from trimtab.experiments.results import KINDS, RECORD, read_result, result_file
from trimtab.experiments.scaling.scaling_result import Scaling
from trimtab.experiments.settings_file import NAME, read_settings
from trimtab.plans.plan import Plan

KNOWN = "known.json"  # defects found after runs were recorded, with the affected runs or source versions
_PAIRED_RUNS = ("race-*/*.jsonl", "brief-*/*.jsonl")
_UNFOUNDED = "not to be believed, by what was found since (docs/RESULTS.md)"


def read_runs(paths: Sequence[Path]) -> tuple[Run, ...]:
    """Return the runs stored in folders and files, in order.

    Raises:
        FormatError: a file is damaged, has another schema, or is no run; the error names the file.
        ValueGivenError: a run was given twice.
    """
    files = [result_file(Path(path)) for path in paths]
    for index, file in enumerate(files):
        if file.resolve() in [other.resolve() for other in files[:index]]:
            raise ValueGivenError("runs", got=f"{paths[index]} twice", expected="each run once")
    return tuple(_run(str(path), file) for path, file in zip(paths, files, strict=True))


def _run(name: str, file: Path) -> Run:
    found = read_result(file)
    try:
        run = _RUN_OF[type(found)](name, found)
    except FormatError as error:
        problem = f"{file}: {error.problem}" if error.problem else ""
        said = {"got": error.got, "expected": error.expected, "problem": problem, "hint": error.hint}
        raise FormatError(f"{file}: {error.field}", **said, code=error.code) from None
    if file.name not in _NAMES:
        return run
    # The folder may have more complete facts than the result's file.
    where = environment_beside(file.parent) or run.environment
    return replace(run, environment=where, planned=planned_beside(file.parent))


def environment_beside(folder: Path) -> dict[str, str]:
    """Return the environment recorded by all paired runs of a folder; {} without records.

    Raises:
        FormatError: a record is damaged.
    """
    paths = [path for races in _PAIRED_RUNS for path in sorted(folder.glob(races))]
    return read_together(read_header(path).environment for path in paths)


def planned_beside(folder: Path) -> str:
    """Return the length of the run assumed in planning relative to the paired runs, as text; "" if equal.

    Raises:
        FormatError: the settings file is damaged.
    """
    if not (folder / NAME).is_file():
        return ""
    found = read_settings(folder)
    planned, raced = (found.get(name, "None") for name in ("planned_samples", "budget_samples"))
    try:
        times = 1.0 if "None" in (planned, raced) else int(planned) / int(raced)
    except (ValueError, ArithmeticError) as error:
        given = f"a damaged file ({error})"
        raise FormatError(str(folder / NAME), got=given, expected="a run's settings") from None
    return "" if times == 1 else f"planned as a run of {times:g} times the rows"


def read_evaluation(found: Sequence[Slice], folder: Path) -> dict[str, Run]:
    """Return the runs of the slices by folder or file name, with defects that were found later."""
    files = {kind.file for kind in KINDS}
    there = dict.fromkeys(each.result for each in found if (folder / each.result).is_file())
    wanted = [path for path in there if Path(path).name in files or path.endswith(RECORD)]
    runs = read_runs([folder / path for path in wanted])
    named = (replace(run, name=path.partition("/")[0]) for path, run in zip(wanted, runs, strict=True))
    defects = _defects(folder / KNOWN)
    return {run.name: _with_defects(run, defects) for run in named}


def _with_defects(run: Run, defects: Sequence[_Defect]) -> Run:
    """Return a run without the figures that were found to be invalid after it was recorded."""
    of_it = [each for each in defects if each.affects(run)]
    unfounded = frozenset(measure for each in of_it for measure in each.unfounded)
    gone = {"figure": None, "value": None, "baseline": None, "has_verdict": False, "said": _UNFOUNDED}
    findings = tuple(replace(each, **gone) if each.measure in unfounded else each for each in run.findings)
    return replace(run, findings=findings, known=tuple(each.says for each in of_it), unfounded=unfounded)


@dataclass(frozen=True)
class _Defect:
    """A defect that was found after runs were recorded.

    Args:
        says: Description.
        runs: Names of the affected runs.
        sources: Fingerprints of the affected source versions.
        unfounded: Names of the invalid measures.
    """

    says: str
    runs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    unfounded: tuple[str, ...] = ()

    def affects(self, run: Run) -> bool:
        """Return True if a run has the defect."""
        return run.name in self.runs or any(each in run.environment.get("sources", "") for each in self.sources)


@dataclass(frozen=True)
class _Defects:
    found: tuple[_Defect, ...]


def _defects(path: Path) -> tuple[_Defect, ...]:
    try:
        return read_json(_Defects, path).found if path.is_file() else ()
    except FormatError as error:
        raise FormatError(str(path), got=f"{error.field}: {error.got}", expected=error.expected) from None


def finding_of_goal(goal: Goal, folder: Path) -> Finding | None:
    """Return the finding of a goal that no run has: rows of a benchmark, or two predictions; None if missing."""
    if goal.measure == PREDICTED:
        return _predicted(folder / goal.run, folder / goal.against)
    path = folder / goal.run
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    wanted = (row for row in rows if row["metric"] == goal.measure and goal.arm in ("", row["task"]))
    row = next(wanted, None)
    return None if row is None else _of_row(row)


def _of_row(row: Mapping[str, Any]) -> Finding:
    """Return the finding of a benchmark's row.

    Interleaved steps share a process, so a plan that changes the allocator affects both loops and shows nothing.
    """
    changes = row.get("changes", "")
    if row["metric"] == NO_HARM and "allocator" in changes:
        return Finding(NO_HARM, row["task"], said=f"{changes} is of the process, and so of both", part=changes)
    figure = Ratio(row["mean"], row["low"], row["high"], row["n"], ())
    resolution = row["control_half_width"] if row["metric"] == MONITOR else 0.0
    return Finding(row["metric"], row["task"], figure=figure, part=changes, resolution=resolution)


def _predicted(limited: Path, unlimited: Path) -> Finding | None:
    """Return the predicted ratio of step times with and without a memory limit."""
    if not (limited.is_file() and unlimited.is_file()):
        return None
    small, large = (read_json(Plan, path).predicted for path in (limited, unlimited))
    if small is None or large is None or small.peak_bytes is None:
        return Finding(PREDICTED, "", said="nothing was told")
    ratio = small.step_s / large.step_s
    figure = Ratio(ratio, None, None, 1, (ratio,), counted=True)
    failed = "" if small.peak_bytes <= SMALL_BYTES else "above the memory limit"
    said = f"{small.peak_bytes:,} bytes"
    return Finding(PREDICTED, "", value=small.step_s, baseline=large.step_s, figure=figure, said=said, failed=failed)


def of_record(name: str, record: RunRecord | RunSummary) -> Run:
    """Return the run of a single record, without ratios, because it is not paired."""
    found = summary_of(record) if isinstance(record, RunRecord) else record
    header, steps = found.header, found.steps
    rows, seconds = trained(found)
    ended = "cut off" if found.end is None else found.end.reason
    what = f"{len(steps)} windows of {rows:,} rows" if steps else f"{rows:,} rows of a race"
    said = f"{header.name}, seed {header.seed}: {what}, ended: {ended}"
    findings = [Finding("throughput", "run", value=rows / seconds)] if seconds > 0 and rows else []
    if found.last_evaluation is not None:
        metric, value = next(iter(found.last_evaluation.metrics.items()), ("", math.nan))
        findings.append(Finding("final_metric", "run", value=value, said=metric))
    ending, meter = {} if found.end is None else found.end.detail, _meter_of(found)
    # The record has the samples of all ranks, but not their joules.
    if meter is None or OTHER_RANKS not in meter.uncounted:
        findings += [Finding("energy", "run", value=each) for each in _joules_per_sample(found)]
    data = header.detail.get("data", {})
    return Run(
        name,
        "record",
        header.name,
        header.environment,
        Verdict(NO_VERDICT, said),
        tuple(findings),
        labels={"run": "one run"},
        data_sha256=str(data.get("sha256", "")) if isinstance(data, dict) else "",
        meter=_said_of(meter, ending),
    )


def _joules_per_sample(found: RunSummary) -> Iterator[float]:
    """Yield joules per sample, computed from mean power over the training time.

    Mean power is used because an evaluation cuts off up to a second of metered training before it. For a resumed run,
    only
    training after the resume counts.
    """
    ending = {} if found.end is None else found.end.detail
    joules, seconds, begun = (ending.get(f"energy_{key}") for key in ("j", "s", "from_step"))
    rows, trained_s = found.steps.trained(begun if isinstance(begun, int) else 0)
    if isinstance(joules, int | float) and rows:
        is_timed = isinstance(seconds, int | float) and seconds > 0 and trained_s > 0
        yield (joules / seconds * trained_s if is_timed else joules) / rows


def _meter_of(found: RunSummary) -> MeterFacts | None:
    """Return the energy meter of a run, or None if not recorded."""
    said = found.header.detail.get("meter")
    return from_jsonable(MeterFacts, said) if isinstance(said, Mapping) else None


def _said_of(meter: MeterFacts | None, ending: Mapping[str, Any]) -> str:
    """Return the description of a run's energy meter, or the reason for missing figures; "" without metering."""
    provenance = ending.get("energy")
    if not isinstance(provenance, str):
        return ""
    if ending.get("energy_j") is None:
        return f"not measured: {ending.get('energy_reason', '')}"
    return provenance if meter is None else meter.describe()


_RUN_OF: dict[type[Any], Callable[[str, Any], Run]] = {
    Comparison: of_comparison,
    Ablation: of_ablation,
    Scaling: of_scaling,
    PhaseResult: of_phases,
    RunSummary: of_record,
}
_NAMES = {kind.file for kind in KINDS if kind.value is not PhaseResult}  # files whose folder belongs to the run

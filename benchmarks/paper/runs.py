"""Reads runs from folders and files, each as a list of findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.paper.finding import Run
from benchmarks.paper.findings import of_ablation, of_comparison, of_scaling
from benchmarks.paper.gain_findings import of_phases
from benchmarks.paper.record_findings import of_record
from benchmarks.paper.run_folder import environment_beside, planned_beside
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.record import RunSummary
from trimtab.experiments.ablation.ablation_result import Ablation
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.phase_result import PhaseResult
from trimtab.experiments.results import KINDS, read_result, result_file
from trimtab.experiments.scaling.scaling_result import Scaling

_RUN_OF: dict[type[Any], Callable[[str, Any], Run]] = {
    Comparison: of_comparison,
    Ablation: of_ablation,
    Scaling: of_scaling,
    PhaseResult: of_phases,
    RunSummary: of_record,
}
_NAMES = {kind.file for kind in KINDS if kind.value is not PhaseResult}  # files whose folder belongs to the run


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

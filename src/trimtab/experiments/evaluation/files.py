"""Reads runs from folders and files, and refuses other files by name.

A new kind of result needs an entry in `KINDS`: file name, a unique JSON key, its class, and the function that returns
its findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.core.bounded_read import read_text
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.record_summary import read_summary
from trimtab.core.serialization import from_jsonable, parse
from trimtab.experiments.ablation.ablation_result import Ablation
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.evaluation.findings import of_ablation, of_comparison, of_scaling
from trimtab.experiments.evaluation.gain_findings import of_phases
from trimtab.experiments.evaluation.record_findings import of_record
from trimtab.experiments.evaluation.result import Run
from trimtab.experiments.evaluation.run_folder import environment_beside, planned_beside
from trimtab.experiments.phase_result import FILE, PhaseResult
from trimtab.experiments.scaling.scaling_result import Scaling
from trimtab.experiments.settings_file import NAME

RECORD = ".jsonl"


@dataclass(frozen=True)
class Kind:
    """A kind of result.

    Args:
        name: name of the kind.
        file: file name in a run's folder.
        key: key of the JSON object, unique to the kind.
        value: class of the result.
        run_of: returns the run for a name and a result.
        has_report: True if the command writes a separate report.
        has_folder: True if the folder belongs to the run and contains further facts.
    """

    name: str
    file: str
    key: str
    value: type[Any]
    run_of: Callable[[str, Any], Run]
    has_report: bool = False
    has_folder: bool = True


KINDS = (
    Kind("comparison", "report.json", "target_rows", Comparison, of_comparison, has_report=True),
    Kind("ablation", "report.json", "effects", Ablation, of_ablation, has_report=True),
    Kind("scaling table", "scaling.json", "links", Scaling, of_scaling),
    Kind("phase table", FILE, "gains", PhaseResult, of_phases, has_folder=False),
)
_EXPECTED = f"a folder or file of {', '.join(kind.name for kind in KINDS)}, or a run's record ({RECORD})"


def read_runs(paths: Sequence[Path]) -> tuple[Run, ...]:
    """Return the runs stored in folders and files, in order.

    Raises:
        FormatError: a file is damaged, has another schema, or is no run; the error names the file.
        ValueGivenError: a run was given twice.
    """
    files = [_file(Path(path)) for path in paths]
    for index, file in enumerate(files):
        if file.resolve() in [other.resolve() for other in files[:index]]:
            raise ValueGivenError("runs", got=f"{paths[index]} twice", expected="each run once")
    return tuple(_read(str(path), file) for path, file in zip(paths, files, strict=True))


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = [path / name for name in dict.fromkeys(kind.file for kind in KINDS) if (path / name).is_file()]
    if len(files) > 1:
        given, hint = f"a folder of several: {', '.join(file.name for file in files)}", "Name the file."
        raise FormatError(str(path), got=given, expected="one result", hint=hint)
    if files:
        return files[0]
    if (path / NAME).is_file():  # A settings file without a result: the run was interrupted.
        raise FormatError(
            str(path),
            got="a run that was cut off before its first result",
            expected=_EXPECTED,
            hint="Start its command again with the same --out: it goes on there.",
        )
    raise FormatError(str(path), got="a folder that holds no result", expected=_EXPECTED)


def _read(name: str, file: Path) -> Run:
    if file.suffix == RECORD:
        return of_record(name, read_summary(file))
    text = read_text(file, _EXPECTED)
    try:
        data = parse(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(str(file), got=f"text that is not JSON ({error})", expected=_EXPECTED) from None
    kind = _kind_of(data)
    if kind is None:
        raise FormatError(str(file), got=_what(data), expected=_EXPECTED)
    try:
        found = kind.run_of(name, from_jsonable(kind.value, data))
    except FormatError as error:
        raise FormatError(f"{file}: {error.field}", got=error.got, expected=error.expected, hint=error.hint) from None
    return _beside(found, file.parent) if kind.has_folder and file.name == kind.file else found


def has_own_report(path: Path) -> bool:
    """Return True if the result has a separate report; damaged files count as True and are reported on reading."""
    try:
        data = parse(read_text(_file(path), _EXPECTED))
    except (FormatError, OSError, ValueError, RecursionError):
        return True
    kind = _kind_of(data)
    return kind is None or kind.has_report


def _kind_of(data: Any) -> Kind | None:
    return next((kind for kind in KINDS if isinstance(data, dict) and kind.key in data), None)


def _beside(run: Run, folder: Path) -> Run:
    """Return a run with facts from its folder, possibly more complete than the result file."""
    where = environment_beside(folder) or run.environment
    return replace(run, environment=where, planned=planned_beside(folder))


def _what(data: Any) -> str:
    """Return a description of the content of a file that is no run."""
    if isinstance(data, dict) and {"name", "rows"} <= data.keys():
        return f"the rows that benchmark {data['name']!r:.40} printed, without the run they are of"
    return "JSON of something else"

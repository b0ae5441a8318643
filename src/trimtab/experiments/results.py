"""Reader of results: comparisons, ablations, scaling tables, phase tables, and records of runs.

A new kind of result needs an entry in `KINDS`: file name, a unique JSON key and its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.core.errors import FormatError
from trimtab.core.files import read_text
from trimtab.core.record import RunSummary, read_summary
from trimtab.core.serialization import from_jsonable, parse
from trimtab.experiments.ablation.ablation_result import Ablation
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.phase_result import FILE, PhaseResult
from trimtab.experiments.scaling.scaling_result import Scaling
from trimtab.experiments.settings_file import NAME

RECORD = ".jsonl"

Result = Comparison | Ablation | Scaling | PhaseResult | RunSummary


@dataclass(frozen=True)
class Kind:
    """A kind of result.

    Args:
        name: name of the kind.
        file: file name in a result's folder.
        key: key of the JSON object, unique to the kind.
        value: class of the result.
    """

    name: str
    file: str
    key: str
    value: type[Any]


KINDS = (
    Kind("comparison", "report.json", "target_rows", Comparison),
    Kind("ablation", "report.json", "effects", Ablation),
    Kind("scaling table", "scaling.json", "links", Scaling),
    Kind("phase table", FILE, "gains", PhaseResult),
)
_EXPECTED = f"a folder or file of {', '.join(kind.name for kind in KINDS)}, or a run's record ({RECORD})"


def result_file(path: Path) -> Path:
    """Return the result's file in a folder; a file is returned unchanged.

    Raises:
        FormatError: the folder has no result or several results.
    """
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
            got="a run that was interrupted before its first result",
            expected=_EXPECTED,
            hint="Start its command again with the same --out to resume it.",
        )
    raise FormatError(str(path), got="a folder that holds no result", expected=_EXPECTED)


def read_result(path: Path) -> Result:
    """Return the result stored in a file or folder.

    Raises:
        FormatError: the file is damaged, has another schema, or is no result; the error names the file.
    """
    file = result_file(Path(path))
    if file.suffix == RECORD:
        return read_summary(file)
    text = read_text(file, _EXPECTED)
    try:
        data = parse(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(str(file), got=f"invalid JSON ({error})", expected=_EXPECTED, code="json.invalid") from None
    kind = next((kind for kind in KINDS if isinstance(data, dict) and kind.key in data), None)
    if kind is None:
        raise FormatError(str(file), got=_description(data), expected=_EXPECTED)
    try:
        found: Result = from_jsonable(kind.value, data)
    except FormatError as error:
        problem = f"{file}: {error.problem}" if error.problem else ""
        said = {"got": error.got, "expected": error.expected, "problem": problem, "hint": error.hint}
        raise FormatError(f"{file}: {error.field}", **said, code=error.code) from None
    return found


def _description(data: Any) -> str:
    """Return a description of JSON data that is no result."""
    if isinstance(data, dict) and {"name", "rows"} <= data.keys():
        return f"the rows that benchmark {data['name']!r:.40} printed, without the run they are of"
    return "JSON of something else"

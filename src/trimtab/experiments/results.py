"""Reader of results: comparisons, scaling tables, phase tables, and records of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from trimtab.core.errors import DamagedError, FormatError
from trimtab.core.files import SMALL_JSON_BYTES, read_text
from trimtab.core.record import RunSummary, read_summary
from trimtab.core.serialization import from_jsonable, parse
from trimtab.experiments.comparison import Comparison
from trimtab.experiments.phase_result import FILE as PHASES
from trimtab.experiments.phase_result import PhaseResult
from trimtab.experiments.scaling import FILE as SCALING
from trimtab.experiments.scaling import Scaling

RECORD, RESULT, SETTINGS = ".jsonl", "result.json", "settings.json"
Result = Comparison | Scaling | PhaseResult | RunSummary


class Kind(NamedTuple):
    """A kind of result: file name in a folder, a key of the JSON object that no other kind has, and class."""

    file: str
    key: str
    value: type[Any]


KINDS = (Kind(RESULT, "arms", Comparison), Kind(SCALING, "jobs", Scaling), Kind(PHASES, "changes", PhaseResult))
_EXPECTED = f"a folder or file of compare, race, ablate, scale or phases, or a run's record ({RECORD})"


def result_file(path: Path) -> Path:
    """Return the result's file in a folder; a file is returned unchanged.

    Raises:
        FormatError: the folder has no result or several results.
    """
    if not path.is_dir():
        return path
    files = [path / kind.file for kind in KINDS if (path / kind.file).is_file()]
    if len(files) > 1:
        given, hint = f"a folder of several: {', '.join(file.name for file in files)}", "Name the file."
        raise FormatError(str(path), got=given, expected="one result", hint=hint)
    if files:
        return files[0]
    is_begun = (path / SETTINGS).is_file()
    raise FormatError(
        str(path),
        got="a run that was interrupted before its first result" if is_begun else "a folder that holds no result",
        expected=_EXPECTED,
        hint="Start its command again with the same --out to continue it." if is_begun else "",
    )


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
        raise FormatError(str(file), got="JSON of something else", expected=_EXPECTED)
    try:
        found: Result = from_jsonable(kind.value, data)
    except FormatError as error:
        problem = f"{file}: {error.problem}" if error.problem else ""
        said = {"got": error.got, "expected": error.expected, "problem": problem, "hint": error.hint}
        raise FormatError(f"{file}: {error.field}", **said, code=error.code) from None
    return found


def read_settings(folder: Path) -> dict[str, str]:
    """Return the settings stored in a folder.

    Raises:
        FormatError: the file cannot be read.
        DamagedError: the file is damaged.
    """
    path = folder / SETTINGS
    text = read_text(path, "the JSON file of a command's settings", limit=SMALL_JSON_BYTES)
    try:
        found = dict(parse(text))
        if not all(isinstance(value, str) for value in found.values()):
            raise ValueError("a value is not a string")
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(
            str(path),
            problem=f"The settings file {path} is damaged: {error}.",
            hint="Name another folder with --out, or delete this one.",
            code="settings.damaged",
        ) from None

"""Facts of a run from its folder: environment of the paired runs, and length of the run assumed in planning."""

from __future__ import annotations

from pathlib import Path

from trimtab.core.errors import FormatError
from trimtab.core.record import read_header, read_together
from trimtab.experiments.settings_file import NAME, read_settings

_RACES = ("race-*/*.jsonl", "brief-*/*.jsonl")


def environment_beside(folder: Path) -> dict[str, str]:
    """Return the environment recorded by all paired runs of a folder; {} without records.

    Raises:
        FormatError: a record is damaged.
    """
    paths = [path for races in _RACES for path in sorted(folder.glob(races))]
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

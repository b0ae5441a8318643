"""What a folder says of a run beside its result: where its races ran, and how long a run its plan was made for."""

from __future__ import annotations

from pathlib import Path

from trimtab.core.errors import FormatError
from trimtab.core.record import read_header, read_together
from trimtab.experiments.settings_file import NAME, read_settings

_RACES = ("race-*/*.jsonl", "brief-*/*.jsonl")


def environment_beside(folder: Path) -> dict[str, str]:
    """Return where all races of a folder ran, by their own records; nothing where there are none.

    Raises:
        FormatError: a record is damaged.
    """
    paths = [path for races in _RACES for path in sorted(folder.glob(races))]
    return read_together(read_header(path).environment for path in paths)


def planned_beside(folder: Path) -> str:
    """Say how much longer the run is that a plan was made for than the races it ran in; "" where it is as long.

    Raises:
        FormatError: the settings are damaged.
    """
    if not (folder / NAME).is_file():
        return ""
    found = read_settings(folder)
    planned, raced = (found.get(name, "None") for name in ("planned_rows", "budget_rows"))
    try:
        times = 1.0 if "None" in (planned, raced) else int(planned) / int(raced)
    except (ValueError, ArithmeticError) as error:
        given = f"a damaged file ({error})"
        raise FormatError(str(folder / NAME), given=given, expected="a run's settings") from None
    return "" if times == 1 else f"planned as a run of {times:g} times the rows"

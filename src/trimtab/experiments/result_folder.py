"""Output folder of a command: settings, and completed parts for continuing after an interruption."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trimtab.checkpoint.run_lock import lock_run_folder
from trimtab.core.errors import FormatError
from trimtab.core.progress import note_kept
from trimtab.core.serialization import to_jsonable, write_whole
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.experiments.results import SETTINGS, read_settings
from trimtab.measure.machine import environment

T = TypeVar("T")
# Settings that several options set together, and the options of the command that set a single value.
_GROUPS = ("length", "planning")
_OPTIONS = {
    "steps": "--steps",
    "evaluate_every": "--evaluate-every",
    "cap_s": "--cap",
    "baseline_cap_s": "--baseline-cap",
    "memory": "--memory",
    "adapt": "--adapt",
    "plan": "--plan",
    "against": "--against",
    "ranks": "--ranks",
    "pairwise": "--pairwise",
    "watts": "--energy-watts",
    "modes": "--scaling",
}
_HERE = ("torch", "trimtab", "cpu", "threads", "gpu")


def folder_of(command: str, name: str, out: Path | None) -> Path:
    """Return the output folder of a command: the given folder, or a folder below `runs`.

    Raises:
        FormatError: the path is a file.
    """
    folder = out or Path("runs") / f"{command}-{name.replace(':', '-').replace('/', '-')}"
    if folder.exists() and not folder.is_dir():
        raise FormatError(
            "--out", problem=f"{folder} is a file.", hint="Name a folder, new or existing.", code="folder.is_file"
        )
    return folder


class ResultFolder:
    """Parts of a result; a file per part, written once.

    Args:
        path: the folder; None to keep nothing.
        together: the ranks of the job; only rank 0 reads and writes.
    """

    def __init__(self, path: Path | None, together: Coordinator = ALONE) -> None:
        self.path, self._together = path, together

    @contextlib.contextmanager
    def claimed(self, settings: Mapping[str, Any], *, any_threads: bool = False) -> Iterator[None]:
        """Hold the folder for a command with the given settings. Collective: all ranks must call `claimed`.

        Machine and versions belong to the settings, because times depend on both; with `any_threads` without the number
        of threads.

        Raises:
            FormatError: the folder has results of different settings (the error names them), or a damaged file.
            InUseError: another process uses the folder.
        """
        with contextlib.ExitStack() as held:

            def claim() -> None:
                if self.path is not None:
                    held.enter_context(lock_run_folder(self.path, "--out"))
                    self._claim(self.path, settings, any_threads=any_threads)

            self._together.made(type(None), claim)
            yield

    def _claim(self, path: Path, settings: Mapping[str, Any], *, any_threads: bool) -> None:
        found = environment()
        here = {key: found[key] for key in _HERE if key in found and not (any_threads and key == "threads")}
        wanted = {key: _text(value) for key, value in {**settings, **here}.items() if value is not None}
        file = path / SETTINGS
        if not file.exists():
            write_whole(file, json.dumps(wanted, indent=1))
            return
        before = read_settings(path)
        if differing := sorted(key for key in {*before, *wanted} if before.get(key) != wanted.get(key)):
            named = [name for key in differing for name in _option_names(key, before.get(key), wanted.get(key))]
            raise FormatError(
                str(path),
                problem=f"{path} contains results with different settings: {', '.join(named)}.",
                hint="Name another folder with --out, or use the same settings to continue.",
                code="folder.settings_differ",
            )

    def has(self, name: str) -> bool:
        """Return True if a part is complete."""
        return self.path is not None and (self.path / f"{name}.json").exists()

    def part(self, name: str, kind: type[T], make: Callable[[], T]) -> T:
        """Return a part from the file, or make and write the part. Collective: all ranks must call `part`.

        Raises:
            FormatError: the file is damaged.
        """
        if self.path is None:
            return make()
        file = self.path / f"{name}.json"
        try:
            found = self._together.read(kind, file)
        except FormatError as error:
            hint = "Delete the file, and this part is measured again."
            raise FormatError(str(file), problem=f"{file}: {error.reason}", hint=hint, code=error.code) from error
        if found is None:
            found = make()
            self._together.write(file, found)
            note_kept(f"{self.path} keeps all completed parts; the same command continues.")
        return found


def _option_names(key: str, before: str | None, now: str | None) -> list[str]:
    """Return the options that set a differing setting; the setting's own name if no option is known."""
    parts = [key]
    with contextlib.suppress(ValueError):
        ours, theirs = (json.loads(each or "{}") for each in (before, now))
        if key in _GROUPS and isinstance(ours, dict) and isinstance(theirs, dict):
            parts = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return [_OPTIONS.get(name, name) for name in parts]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(to_jsonable(value), sort_keys=True)

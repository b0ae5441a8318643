"""A rank and the launcher that started it: the rank ends with its launcher, and reports how it ended.

Imports neither torch nor anything that does: this runs first in a rank, while its launcher may already be gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import RankError, TrimtabError

# Codes of errors that report another rank's end.
ENDED, SILENT = "ranks.ended", "ranks.silent"

LAUNCHER, REPORTS = "TRIMTAB_LAUNCHER_PID", "TRIMTAB_RANK_REPORTS"  # variables that `launch` sets for its ranks
_ELASTIC = "TORCHELASTIC_RUN_ID"  # and one of torchrun's
_LOOK_S = 0.5
_SAVING_S = 60.0  # for a rank that handles SIGTERM, as one that saves a checkpoint does
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
_DONE = "done"


@dataclass(frozen=True)
class Report:
    """How a rank ended.

    Args:
        text: the error in one line; "done" if the command finished.
        at_s: on the clock of the machine.
        is_echo: another rank's end is behind it.
    """

    rank: int
    text: str
    at_s: float
    is_echo: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the command finished."""
        return self.text == _DONE


class Launched:
    """This process, if a launcher started it as a rank.

    Args:
        environment: of the process; the launcher's own variables are removed from it, as programs that the rank starts
            are not ranks.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        pid, folder = variables.pop(LAUNCHER, ""), variables.pop(REPORTS, "")
        self._rank = int(variables.get("RANK", "0")) if folder else 0
        self._reports = Path(folder) if folder else None
        self._parent = int(pid) if pid else os.getppid()
        self._follows = bool(pid) or _ELASTIC in variables

    def follow(self) -> None:
        """Have this process end when its launcher does, whatever it waits for: by SIGTERM, as the launcher would."""
        if not self._follows:
            return
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))
        if os.getppid() != self._parent:
            os._exit(128 + signal.SIGTERM)
        threading.Thread(target=self._watch, name="trimtab launcher watch", daemon=True).start()

    def _watch(self) -> None:
        """End the process where the system sends no signal, or nothing comes of it."""
        while os.getppid() == self._parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SAVING_S)
        os._exit(128 + signal.SIGTERM)

    def done(self) -> None:
        """Report that the command finished."""
        self._write(Report(self._rank, _DONE, time.time()))

    def failed(self, error: BaseException) -> None:
        """Report the error that ends this rank, before anything that may take time."""
        text = str(error).partition("\n")[0]
        text = text if isinstance(error, TrimtabError) else f"{type(error).__name__}: {text}"
        is_echo = isinstance(error, RankError) and (error.is_echo or error.code in (ENDED, SILENT))
        self._write(Report(self._rank, text, time.time(), is_echo))

    def _write(self, report: Report) -> None:
        if self._reports is None:
            return
        with contextlib.suppress(OSError):
            partial = self._reports / f".rank-{self._rank}"
            partial.write_text(json.dumps(vars(report)), encoding="utf-8")
            partial.replace(self._reports / f"rank-{self._rank}.json")


def reports_in(folder: Path) -> Mapping[int, Report]:
    """Return how ranks ended, by rank; those that wrote nothing are left out."""
    found = [Report(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank-*.json")]
    return {each.rank: each for each in sorted(found, key=lambda each: each.rank)}

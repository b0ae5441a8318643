"""Rank side of a launch: ends the rank together with the launcher, and reports the cause of the rank's end.

Must not import torch, even indirectly: this code runs first in a rank, while the launcher may already be gone.
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

# Codes of errors about another rank's end.
ENDED, SILENT = "ranks.ended", "ranks.silent"


def ranks_failed(errors: Mapping[int, str]) -> RankError:
    """Return the error of a rank stopped by the failure of different ranks.

    Args:
        errors: class names and messages of the errors, "ValueError: no data", by rank.
    """
    first = min(errors)
    error = RankError(
        f"rank {first}",
        got="; ".join(errors.values()),
        problem=" ".join(f"Rank {rank} failed ({text})." for rank, text in errors.items()),
        hint="Fix this error; the other ranks stopped because of it.",
        code=ENDED,
    )
    error.ranks, error.cause = tuple(errors), errors[first].partition(":")[0]
    return error.echoed()


def rank_lost(rank: int, reason: str) -> RankError:
    """Return the error for an awaited rank without heartbeats.

    Args:
        reason: clause such as "no heartbeat for 60 s".
    """
    error = RankError(
        f"rank {rank}",
        got=reason,
        problem=f"Rank {rank} was lost ({reason}).",
        hint=f"Check the log of rank {rank} and its machine: the process was stopped or killed, or the machine failed.",
        code=SILENT,
    )
    error.ranks = (rank,)
    return error


LAUNCHER, REPORTS = "TRIMTAB_LAUNCHER_PID", "TRIMTAB_RANK_REPORTS"  # environment variables set by `launch`
_ELASTIC = "TORCHELASTIC_RUN_ID"  # environment variable set by torchrun
_LOOK_S = 0.5
_SAVING_S = 60.0  # for a rank that handles SIGTERM, for instance by saving a checkpoint
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
_DONE = "done"


@dataclass(frozen=True)
class ExitReport:
    """Report of a rank's end.

    Args:
        text: error on a single line; "done" if the command finished.
        is_echo: the error was caused by another rank's end.
        behind: rank of the causing error; None if unknown.
    """

    rank: int
    text: str
    at_s: float
    is_echo: bool = False
    behind: int | None = None

    @property
    def is_done(self) -> bool:
        """True if the command finished."""
        return self.text == _DONE


class LaunchedRank:
    """This process as a possible rank of a launcher.

    Args:
        environment: environment of the process; the launcher's variables are removed from it, because programs started
            by the rank are not ranks.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        pid, folder = variables.pop(LAUNCHER, ""), variables.pop(REPORTS, "")
        self._rank = int(variables.get("RANK", "0")) if folder else 0
        self._reports = Path(folder) if folder else None
        self._parent = int(pid) if pid else os.getppid()
        self._follows = bool(pid) or _ELASTIC in variables

    def follow(self) -> None:
        """End this process by SIGTERM when the launcher ends, even if blocked."""
        if not self._follows:
            return
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))
        if os.getppid() != self._parent:
            os._exit(128 + signal.SIGTERM)
        threading.Thread(target=self._watch, name="trimtab launcher watch", daemon=True).start()

    def _watch(self) -> None:
        """End the process if the system sends no signal, or the signal has no effect."""
        while os.getppid() == self._parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SAVING_S)
        os._exit(128 + signal.SIGTERM)

    def done(self) -> None:
        """Report that the command finished."""
        self._write(ExitReport(self._rank, _DONE, time.time()))

    def failed(self, error: BaseException) -> None:
        """Report the error that ends this rank, before any slow cleanup."""
        text = str(error).partition("\n")[0]
        text = text if isinstance(error, TrimtabError) else f"{type(error).__name__}: {text}"
        is_echo = isinstance(error, RankError) and (error.is_echo or error.code in (ENDED, SILENT))
        behind = error.ranks[0] if isinstance(error, RankError) and error.ranks else None
        self._write(ExitReport(self._rank, text, time.time(), is_echo, behind))

    def _write(self, report: ExitReport) -> None:
        if self._reports is None:
            return
        with contextlib.suppress(OSError):
            partial = self._reports / f".rank-{self._rank}"
            partial.write_text(json.dumps(vars(report)), encoding="utf-8")
            partial.replace(self._reports / f"rank-{self._rank}.json")


def reports_in(folder: Path) -> Mapping[int, ExitReport]:
    """Return the reports of ranks, by rank; ranks without a report are left out."""
    found = [ExitReport(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank-*.json")]
    return {each.rank: each for each in sorted(found, key=lambda each: each.rank)}

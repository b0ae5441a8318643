"""Launch of ranks on this machine with torchrun's launcher, and the rank's side: its exit report and its end.

Must not import torch at the top: this code runs first in a rank, while the launcher may already be gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.core.errors import RankError, TrimtabError

# Command of a rank. Without `-P`, `-m` would first import from the current folder any file with the name of a package;
# a user's task is found there by its own name.
_PROGRAM = ("-P", "-m", "trimtab.cli")

_LEFT = "Remove the call of os._exit or exec from the task."
EARLY = "ranks.ended_early"
# Exit statuses caused by another rank's end: SIGTERM by the launcher, SIGABRT in a gloo thread that lost its peer.
_FOLLOWS = (-signal.SIGTERM, -signal.SIGABRT)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(arguments: Sequence[str], num_ranks: int) -> None:
    """Run `trimtab ARGUMENTS` on several ranks and wait; a single thread per rank unless OMP_NUM_THREADS is set.

    The ranks end when this process ends.

    Raises:
        RankError: a rank ended by an error, by a signal, or before completing the command; the remaining ranks were
            then ended too.
        KeyboardInterrupt, SystemExit: this process received SIGINT or a different signal, and ended the ranks.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="trimtab-ranks-") as logs, _told_of(Path(logs) / "reports") as reports:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"trimtab-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            with _own_handlers():
                elastic_launch(config, sys.executable)(*_PROGRAM, *arguments)
        except ChildFailedError as failed:
            raise _error_of(failed, reports) from None
        except SignalException as sent:
            raise (KeyboardInterrupt() if sent.sigval == signal.SIGINT else SystemExit(128 + sent.sigval)) from None
        finished = reports_in(reports)
    if early := [rank for rank in range(num_ranks) if rank not in finished]:
        names = f"Rank {early[0]}" if len(early) == 1 else f"Ranks {', '.join(map(str, early))}"
        problem = f"{names} ended with status 0 before the command finished."
        error = RankError(f"rank {early[0]}", got="status 0", problem=problem, hint=_LEFT, code=EARLY)
        error.ranks = tuple(early)
        raise error


@contextlib.contextmanager
def _told_of(reports: Path) -> Iterator[Path]:
    """Set the environment for ranks started inside the block: this process's id and a folder for reports."""
    reports.mkdir()
    os.environ |= {LAUNCHER: str(os.getpid()), REPORTS: str(reports)}
    try:
        yield reports
    finally:
        for name in (LAUNCHER, REPORTS):
            del os.environ[name]


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Restore signal handlers after the block; torch's launcher replaces them permanently."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: a handler not set from Python
                signal.signal(number, handler)


def _error_of(failed: Any, reports: Path) -> RankError:
    """Return the error of the rank that caused the failure; the launcher may first see a rank that lost a peer."""
    rank, text = _behind(failed, reports)
    status = failed.failures[rank].exitcode if rank in failed.failures else 0
    if status == 0:
        problem, hint = f"Rank {rank} ended with status 0 before the command finished.", _LEFT
    elif text:
        problem, hint = f"Rank {rank} ended first. Another rank reported: {text}", ""
    elif status < 0:
        problem = f"Rank {rank} was ended by {signal.Signals(-status).name}."
        hint = "Read its output above and the log of its machine; the system sends SIGKILL if memory runs out."
    else:
        problem, hint = f"Rank {rank} ended with status {status}.", "Read its output above."
    error = RankError(f"rank {rank}", got=text or f"status {status}", problem=problem, hint=hint, code=ENDED)
    error.ranks = (rank,)
    return error


def _behind(failed: Any, reports: Path) -> tuple[int, str]:
    """Return the rank that caused the failure, and a report of the failure by a different rank if needed."""
    said, by_status = reports_in(reports), {rank: each.exitcode for rank, each in failed.failures.items()}
    if killed := [rank for rank, status in by_status.items() if status < 0 and status not in _FOLLOWS]:
        return killed[0], ""
    if own := [each for each in said.values() if not (each.is_done or each.is_echo)]:
        return min(own, key=lambda each: each.at_s).rank, ""
    for each in said.values():
        if each.is_echo and each.behind is not None:
            return each.behind, each.text
    silent = [rank for rank, status in by_status.items() if rank not in said and status != -signal.SIGTERM]
    return (silent or [failed.get_first_failure()[0]])[0], ""


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
    """Return the error for an awaited rank without heartbeats; `reason` is a clause such as "no heartbeat for 60 s"."""
    problem = f"Rank {rank} was lost ({reason})."
    hint = f"Check the log of rank {rank} and its machine: the process was stopped or killed, or the machine failed."
    error = RankError(f"rank {rank}", got=reason, problem=problem, hint=hint, code=SILENT)
    error.ranks = (rank,)
    return error


LAUNCHER, REPORTS = "TRIMTAB_LAUNCHER_PID", "TRIMTAB_RANK_REPORTS"  # environment variables set by `launch`
_ELASTIC = "TORCHELASTIC_RUN_ID"  # environment variable set by torchrun
_LOOK_S = 0.5
_SAVING_S = 60.0  # for a rank that handles SIGTERM, for instance by saving a checkpoint
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
        if os.getppid() != self._parent:
            os._exit(128 + signal.SIGTERM)
        threading.Thread(target=self._watch, name="trimtab launcher watch", daemon=True).start()

    def _watch(self) -> None:
        """End the process when the launcher has ended, first by SIGTERM."""
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

"""Launch of ranks on this machine with torchrun's launcher; no ssh, no hostfile."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.errors import RankError
from trimtab.distributed.launched_rank import ENDED, LAUNCHER, REPORTS, reports_in

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
        _require_done(reports, num_ranks)


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


def _require_done(reports: Path, num_ranks: int) -> None:
    """Raise `RankError` for ranks that ended with status 0 before completing the command."""
    finished = reports_in(reports)
    if early := [rank for rank in range(num_ranks) if rank not in finished]:
        names = f"Rank {early[0]}" if len(early) == 1 else f"Ranks {', '.join(map(str, early))}"
        problem = f"{names} ended with status 0 before the command finished."
        error = RankError(f"rank {early[0]}", got="status 0", problem=problem, hint=_LEFT, code=EARLY)
        error.ranks = tuple(early)
        raise error


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

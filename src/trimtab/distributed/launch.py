"""Ranks on this machine, started by torchrun's own launcher: no ssh, no hostfile."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from trimtab.core.errors import RankError
from trimtab.distributed.process_group import ENDED

# What a rank runs: the command itself, with what it was called with. `-P`, as `-m` alone would import first from the
# current folder whatever has the name of a package; a task of the user's is found there by its own name.
_PROGRAM = ("-P", "-m", "trimtab.cli")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(arguments: Sequence[str], num_ranks: int) -> None:
    """Run `trimtab ARGUMENTS` as so many ranks, and wait for all: one thread each, unless OMP_NUM_THREADS says else.

    Raises:
        RankError: a rank ended by an error or a signal; the others were then ended too.
        KeyboardInterrupt, SystemExit: this process was sent SIGINT, or another signal, and ended them.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="trimtab-ranks-") as logs:
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
            raise _error_of(failed) from None
        except SignalException as sent:
            raise (KeyboardInterrupt() if sent.sigval == signal.SIGINT else SystemExit(128 + sent.sigval)) from None


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Leave the handlers of signals as they are: torch's launcher puts its own in their place, for good."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: one that is not Python's
                signal.signal(number, handler)


def _error_of(failed: Any) -> RankError:
    """Return what a rank ended with: the first that did, by what the launcher saw."""
    rank, first = failed.get_first_failure()
    if first.exitcode < 0:
        how = f"was ended by {signal.Signals(-first.exitcode).name}"
        way_out = "Where it was killed, the machine may have run out of memory: look at its log."
    else:
        how, way_out = f"ended with status {first.exitcode}", "What it said stands above."
    return RankError(
        "rank", given=f"rank {rank}, which {how}", expected="all ranks to end well", way_out=way_out, code=ENDED
    )

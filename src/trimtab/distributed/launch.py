"""Ranks on this machine, started by torchrun's own launcher: no ssh, no hostfile."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from trimtab.core.errors import RankError

# What a rank runs: the command itself, with what it was called with. `-P`, as `-m` alone would import first from the
# current folder whatever has the name of a package; a task of the user's is found there by its own name.
_PROGRAM = ("-P", "-m", "trimtab.cli")


def launch(arguments: Sequence[str], num_ranks: int) -> None:
    """Run `trimtab ARGUMENTS` as so many ranks, and wait for all: one thread each, unless OMP_NUM_THREADS says else.

    Raises:
        RankError: a rank ended by an error or a signal; the others were then ended too.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
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
            elastic_launch(config, sys.executable)(*_PROGRAM, *arguments)
        except ChildFailedError as failed:
            raise _error_of(failed) from None


def _error_of(failed: Any) -> RankError:
    """Return what a rank ended with: the first that did, by what the launcher saw."""
    rank, first = failed.get_first_failure()
    if first.exitcode < 0:
        how = f"was ended by {signal.Signals(-first.exitcode).name}"
        way_out = "Where it was killed, the machine may have run out of memory: look at its log."
    else:
        how, way_out = f"ended with status {first.exitcode}", "What it said stands above."
    return RankError("rank", given=f"rank {rank}, which {how}", expected="all ranks to end well", way_out=way_out)

"""A function in a process of its own: what ends that process, as a kernel that has a fault, ends no more than it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

DONE, RAISED, LATE = "done", "raised", "late"
_PATIENCE_S, _LOOK_S = 10.0, 0.002


def can_fork() -> bool:
    """Return whether a process can be split off: not one of several ranks, whose collectives its twin would join."""
    return (
        hasattr(os, "fork") and not (dist.is_available() and dist.is_initialized()) and not torch.cuda.is_initialized()
    )


def end_of(function: Callable[[], object], patience_s: float = _PATIENCE_S) -> str:
    """Return how a function came to its end on the CPU, in a process of its own: DONE, RAISED or LATE, or by a signal.

    LATE too where there is no other process to be had. It is a fork of this one: nothing has to be sent to it, and what
    it changes in memory is its own. It computes in one thread, as others are not forked.
    """
    child, end = 0, time.monotonic() + patience_s
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which it has no use for
            child = os.fork()
        if child == 0:
            _run(function)
        while time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                if os.WIFSIGNALED(status):
                    return signal.Signals(os.WTERMSIG(status)).name
                return RAISED if status else DONE
            time.sleep(_LOOK_S)
        return LATE
    except OSError:  # no room for a process, or somebody else waits for all of them
        return LATE
    finally:
        if child > 0:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _run(function: Callable[[], object]) -> None:
    """Run it, and be gone: nothing that the parent has open is flushed, closed or cleaned up."""
    code = 1
    try:
        import resource  # which systems without a fork have not

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        kept = sys.stdout, sys.stderr  # let go they would write what they hold
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        for stream in (1, 2):
            os.dup2(sys.stdout.fileno(), stream)
        torch.set_num_threads(1)
        function()
        code = 0
        del kept
    finally:
        os._exit(code)

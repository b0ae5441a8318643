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

_PATIENCE_S, _LOOK_S = 20.0, 0.002


def can_fork() -> bool:
    """Return whether a process can be split off: not one of several ranks, whose collectives its twin would join."""
    return (
        hasattr(os, "fork") and not (dist.is_available() and dist.is_initialized()) and not torch.cuda.is_initialized()
    )


def killed_by(function: Callable[[], object], patience_s: float = _PATIENCE_S) -> str | None:
    """Return the name of the signal that ended a process in which a function ran on the CPU; None where none did.

    None too where it raised, or took longer than it is waited for. The process is a fork of this one: nothing has to
    be sent to it, and what it changes is its own. It computes in one thread, as others are not forked.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which it has no use for
        child = os.fork()
    if child == 0:
        _run(function)
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None
        time.sleep(_LOOK_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(function: Callable[[], object]) -> None:
    """Run it, and be gone: nothing of the parent's is written, closed or cleaned up."""
    import resource  # which systems without a fork have not

    with contextlib.suppress(BaseException):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        for stream in (1, 2):
            os.dup2(sys.stdout.fileno(), stream)
        torch.set_num_threads(1)
        function()
    os._exit(0)

"""Runs a function in a forked child, so that a crash such as a segmentation fault in a kernel does not end planning."""

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
    """Return True if the process can be forked. A rank of several cannot: the child would take part in collectives."""
    return (
        hasattr(os, "fork") and not (dist.is_available() and dist.is_initialized()) and not torch.cuda.is_initialized()
    )


def end_of(function: Callable[[], object], patience_s: float = _PATIENCE_S) -> str:
    """Run a function on the CPU in a forked child and return its outcome: DONE, RAISED, LATE or the name of a signal.

    The child starts with a copy of the memory, so nothing is transferred and changes are discarded. The function runs
    in a single thread, because fork does not copy other threads. LATE is also returned if the process cannot be
    forked.
    """
    child, end = 0, time.monotonic() + patience_s
    try:
        with warnings.catch_warnings():
            # Fork warns of other threads, which the child does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
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
    except OSError:  # No memory for a process, or other code has waited for the child.
        return LATE
    finally:
        if child > 0:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _run(function: Callable[[], object]) -> None:
    """Run the function and exit without flushing, closing or cleaning up the parent's resources."""
    code = 1
    try:
        import resource  # Missing on systems without fork.

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        kept = sys.stdout, sys.stderr  # If freed, the streams would flush the parent's buffers.
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        for stream in (1, 2):
            os.dup2(sys.stdout.fileno(), stream)
        torch.set_num_threads(1)
        function()
        code = 0
        del kept
    finally:
        os._exit(code)

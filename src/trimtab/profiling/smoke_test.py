"""Smoke test of candidates on a few samples, before a step on the whole batch.

A dtype or memory format without an optimized kernel can take a hundred times as long (fp16 convolutions on a CPU: 52
s per step instead of 0.4 s), and a running step cannot be stopped. A faulty kernel ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from trimtab.core.choice import Note
from trimtab.core.units import format_seconds
from trimtab.measure.timing import time_call
from trimtab.plans.profile import Candidate
from trimtab.profiling.training_loop import TrainingLoop

DONE, RAISED, LATE = "done", "raised", "late"
_PATIENCE_S = 10.0
_WORTH_S = 0.1  # Seconds per step; a hundred times less can be tolerated.
_SHARE, _FEWEST = 32, 2  # A fraction of 1/32 of the samples, and at least 2 for batch statistics.
_TRIES = 3
_HOPELESS = 10.0  # Above 1, because fixed costs (mainly casts of weights) dominate with few samples.


def can_fork() -> bool:
    """Return True if the process can be forked. A rank of several cannot: the child would take part in collectives."""
    is_rank = dist.is_available() and dist.is_initialized()
    return hasattr(os, "fork") and not is_rank and not torch.cuda.is_initialized()


def end_of(function: Callable[[], object], patience_s: float = _PATIENCE_S) -> str:
    """Run a function on the CPU in a forked child and return its outcome: DONE, RAISED, LATE or the name of a signal.

    The child starts with a copy of the memory, and changes are discarded. The function runs in a single thread, because
    fork does not copy other threads. LATE is also returned if the process cannot be forked.
    """
    child = multiprocessing.get_context("fork").Process(target=_run_and_exit, args=(function,))
    try:
        with warnings.catch_warnings():
            # Fork warns of other threads, which the child does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
    except (OSError, AssertionError):  # No memory for a process, or this process is a daemon.
        return LATE
    child.join(patience_s)
    if child.exitcode is None:
        child.kill()
        child.join()
        return LATE
    if child.exitcode < 0:
        return signal.Signals(-child.exitcode).name
    return RAISED if child.exitcode else DONE


def _run_and_exit(function: Callable[[], object]) -> None:
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


class CrashTest:
    """Finds kernels that end the process: runs forward and backward of a few samples in a forked child.

    Results are cached by kernels. After a timeout, or if the incumbent's own test fails, no candidate is tested.
    """

    def __init__(self, subject: TrainingLoop, incumbent: Candidate) -> None:
        self._few, self._rows, self._incumbent = subject, subject.rows, incumbent
        self._is_on, self._has_begun = subject.device.type == "cpu" and can_fork(), False
        with contextlib.suppress(Exception):  # A batch that cannot be split is used whole.
            self._few = subject.first(min(self._rows, max(_FEWEST, self._rows // _SHARE)))
        self._ends: dict[Candidate, str] = {}

    def refusal(self, candidate: Candidate) -> Note | None:
        """Return a refusal with the signal that ended a candidate's test process; None if none did."""
        if self._is_on and not self._has_begun:
            self._has_begun, self._is_on = True, self._end_of(self._incumbent) == DONE
        kernels = candidate.having(micro_batch=1, allocator="keep", fused_optimizer=False, recompute=None, offload=None)
        if self._is_on and kernels not in self._ends:
            self._ends[kernels] = self._end_of(candidate)
            self._is_on = self._ends[kernels] != LATE
        if (end := self._ends.get(kernels, DONE)) in (DONE, RAISED, LATE):
            return None
        return Note(
            "trial.crashed", f"a test on {self._few.rows} of {self._rows} samples crashed its process with {end}"
        )

    def _end_of(self, candidate: Candidate) -> str:
        few, chunk = self._few, candidate.loss_chunk
        fewer = chunk and max(1, chunk * few.rows // self._rows)  # The same number of chunks as for the whole batch.

        def backward() -> None:  # No optimizer step, which would write to copy-on-write memory of all parameters.
            with few.start(candidate.having(micro_batch=few.rows, loss_chunk=fewer)) as run:
                for micro in run.window(few.batch):
                    with run.autocast():
                        result = few.loss_fn(run.model, micro)
                    run.backward(result)
                run.discard()

        return end_of(backward)


class SpeedTest:
    """Finds hopelessly slow candidates by a step of a few samples, which changes the state like any step."""

    def __init__(self, subject: TrainingLoop, incumbent: Candidate, step_s: float) -> None:
        self._rows = subject.rows
        few = max(_FEWEST, self._rows // _SHARE)
        self._few: TrainingLoop | None = None
        if subject.device.type == "cpu" and step_s >= _WORTH_S and few < self._rows:
            with contextlib.suppress(Exception):  # If the batch cannot be split, the whole step decides.
                self._few = subject.first(few)
                self._base_s = self._seconds(self._few, incumbent)

    def refusal(self, candidate: Candidate) -> Note | None:
        """Return the reason for not trying a candidate's whole step; None if fast enough or not tested."""
        if self._few is None or self._base_s is None:
            return None
        for _ in range(_TRIES):  # The first step may include one-time costs, and any may be disturbed.
            seconds = self._seconds(self._few, candidate)
            if seconds is None or seconds <= _HOPELESS * self._base_s:
                return None
        taken, best = format_seconds(seconds), format_seconds(self._base_s)
        few = f"{self._few.rows} of {self._rows} samples"
        text = f"too slow in a test on {few}: {taken} per step; the best candidate so far takes {best}"
        return Note("trial.too_slow", text)

    @staticmethod
    def _seconds(few: TrainingLoop, candidate: Candidate) -> float | None:
        try:
            with few.start(candidate.having(micro_batch=few.rows)) as run:
                return time_call(lambda: few.step(run), few.device)
        except Exception:  # The model may require a fixed batch size; the whole step decides.
            return None

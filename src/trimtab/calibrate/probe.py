"""A few rows of the batch, stepped through before all of it is risked.

A dtype or layout without a kernel of its own can take a hundred times as long (fp16 convolutions on a CPU: 52 s a step
in place of 0.4 s), and a step that has begun cannot be stopped. One with a fault ends the process it runs in.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from trimtab.calibrate.child import DONE, LATE, RAISED, can_fork, end_of
from trimtab.calibrate.subject import Subject
from trimtab.core.profile import Candidate
from trimtab.core.units import format_seconds
from trimtab.measure.timing import time_call

_WORTH_S = 0.1  # of a step: one of a hundred times a shorter one can be borne
_SHARE, _FEWEST = 32, 2  # one row in so many, and at least so many: batch statistics need two
_HOPELESS = 10.0  # few rows have fixed costs, casts of the weights above all, that all of them do not


class Guard:
    """Tells who ends the process: a few rows go forward and backward in another one, as the incumbent's do, or no more.

    What was told of some kernels is told of them again, and after one that was late nothing is told of others.

    Args:
        incumbent: where its own do not come to their end there, nothing is told of others either.
    """

    def __init__(self, subject: Subject, incumbent: Candidate) -> None:
        rows, few = subject.rows, subject
        self._is_on, self._has_begun = subject.device.type == "cpu" and can_fork(), False
        with contextlib.suppress(Exception):  # a batch that cannot be split goes whole
            few = few.first(min(rows, max(_FEWEST, rows // _SHARE)))
        self._few, self._rows, self._incumbent = few, rows, incumbent
        self._ends: dict[Candidate, str] = {}

    def refusal(self, candidate: Candidate) -> str | None:
        """Return what ended a process that a candidate was in, or None; also where that cannot be told."""
        if self._is_on and not self._has_begun:
            self._has_begun, self._is_on = True, self._end_of(self._incumbent) == DONE
        kernels = replace(candidate, micro_batch=1, allocator="keep", fused_optimizer=False, recompute=None)
        if self._is_on and kernels not in self._ends:
            self._ends[kernels] = self._end_of(candidate)
            self._is_on = self._ends[kernels] != LATE
        end = self._ends.get(kernels, DONE)
        if end in (DONE, RAISED, LATE):
            return None
        return f"{end} ended a process that stepped through {self._few.rows} of {self._rows} rows"

    def _end_of(self, candidate: Candidate) -> str:
        few, chunk = self._few, candidate.loss_chunk
        fewer = chunk and max(1, chunk * few.rows // self._rows)  # of as many chunks as the whole batch is in

        def backward() -> None:  # without a step, which would write to copies of all there is
            with few.start(replace(candidate, micro_batch=few.rows, loss_chunk=fewer)) as run:
                for micro in run.window(few.batch):
                    with run.autocast():
                        result = few.loss_fn(run.model, micro)
                    run.backward(result)
                run.discard()

        try:
            return end_of(backward)
        except Exception:  # no process to be had: nothing can be told
            return LATE


class Probe:
    """Tells hopeless candidates by a step of a few rows, beside the incumbent's; changes the subject as a step does."""

    def __init__(self, subject: Subject, incumbent: Candidate, step_s: float) -> None:
        self._rows = subject.rows
        few = max(_FEWEST, self._rows // _SHARE)
        self._few: Subject | None = None
        if subject.device.type == "cpu" and step_s >= _WORTH_S and few < self._rows:
            with contextlib.suppress(Exception):  # a batch that cannot be split: the whole step will tell
                self._few = subject.first(few)
                self._base_s = self._seconds(self._few, incumbent)

    def refusal(self, candidate: Candidate) -> str | None:
        """Return why a candidate's whole step is not worth a try, or None; also where a few rows cannot tell."""
        if self._few is None or self._base_s is None:
            return None
        for _ in range(2):  # the first may hold what happens once
            seconds = self._seconds(self._few, candidate)
            if seconds is None or seconds <= _HOPELESS * self._base_s:
                return None
        share = f"{self._few.rows} of {self._rows} rows"
        return f"stopped after {share}: {format_seconds(seconds)} per step against {format_seconds(self._base_s)}"

    @staticmethod
    def _seconds(few: Subject, candidate: Candidate) -> float | None:
        try:
            with few.start(replace(candidate, micro_batch=few.rows)) as run:
                return time_call(lambda: run.train_step(run.window(few.batch), few.loss_fn), few.device)
        except Exception:  # a model of one batch size, say: the whole step will tell
            return None


class Door:
    """What a candidate passes before its whole step is tried: a few rows in another process, then a few of them here.

    Args:
        incumbent: whom it is held against. step_s: seconds of its whole step; None where nobody is thought hopeless.
        guard: of the whole search; None: one of its own.
    """

    def __init__(
        self, subject: Subject, incumbent: Candidate, step_s: float | None, guard: Guard | None = None
    ) -> None:
        self._guard = guard or Guard(subject, incumbent)
        self._probe = None if step_s is None else Probe(subject, incumbent, step_s)

    def refusal(self, candidate: Candidate) -> str | None:
        """Return why a candidate is not tried, or None."""
        return self._guard.refusal(candidate) or (self._probe and self._probe.refusal(candidate))

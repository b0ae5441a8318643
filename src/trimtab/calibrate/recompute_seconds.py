"""Seconds that recomputing takes: of steps by a schedule beyond those of steps that keep all, run in turns.

Not those of a block's forward as it runs in a step: what a call of torch's checkpointing does besides (hooks, the
random numbers' state, weights that autocast casts anew) is in no forward, and is there once a micro-batch however few
its rows are. So it is measured at two sizes of a micro-batch, and lies on a line in its rows.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from trimtab.calibrate.subject import Subject
from trimtab.calibrate.trials import step_until_applied, timer
from trimtab.core.profile import Candidate
from trimtab.core.recompute import Schedule
from trimtab.decide.checkpoint_schedule import keep_all
from trimtab.runtime.activation_checkpoint import use_schedule

T = TypeVar("T")
_MEASURING_S = 1.0  # of a schedule's steps, where more than the fewest fit
_MOST = 10
_SMALLER = 4  # the smaller micro-batch is this share of the other


@dataclass(frozen=True)
class Line:
    """Seconds of a micro-batch by its rows."""

    fixed_s: float
    row_s: float

    def at(self, rows: int) -> float:
        """Return the seconds of a micro-batch of so many rows."""
        return self.fixed_s + self.row_s * rows


def line_through(points: Sequence[tuple[int, float]]) -> Line:
    """Return the line through one or two points (rows, seconds), more rows first; it never falls, and is not below 0.

    Of one point it goes through zero.
    """
    (more, high), (fewer, low) = points[0], points[-1]
    high, low = max(0.0, high), max(0.0, low)
    row_s = high / more if more == fewer else (high - low) / (more - fewer)
    if row_s <= 0:  # more rows take no longer: a call is all that costs, or it drowns in noise
        return Line((high + low) / 2, 0.0)
    fixed_s = high - row_s * more
    return Line(fixed_s, row_s) if fixed_s >= 0 else Line(0.0, high / more)


def measure_seconds(
    subject: Subject, candidate: Candidate, schedules: Sequence[Schedule], *, splits: bool
) -> tuple[float, list[Line]]:
    """Return seconds of a candidate's step that keeps all, and by each schedule those of a micro-batch beyond it.

    Args:
        schedules: of the subject's blocks. splits: whether its batch may be split into more micro-batches.
    """
    rows = min(candidate.micro_batch, subject.rows)
    sizes = (rows, -(-rows // _SMALLER)) if splits and rows > 1 else (rows,)
    found = [_longer(subject, replace(candidate, micro_batch=size), schedules) for size in sizes]
    lines = [
        line_through(
            [(size, longer[index] * size / subject.rows) for size, (_, longer) in zip(sizes, found, strict=True)]
        )
        for index in range(len(schedules))
    ]
    return found[0][0], lines


def _longer(subject: Subject, candidate: Candidate, schedules: Sequence[Schedule]) -> tuple[float, list[float]]:
    """Return seconds of a step that keeps all, and how much longer one takes by each schedule."""
    names = subject.blocks.names
    with subject.start(candidate) as run:

        def step() -> None:
            run.train_step(run.window(subject.batch), subject.loss_fn)

        step_until_applied(run, subject)
        timed = functools.partial(timer(candidate), step, subject.device)
        turns = max(2, min(_MOST, int(_MEASURING_S / timed())))
        kept = keep_all(len(names))
        taken = [
            [with_schedule(run.model, names, each, timed) for each in (kept, *schedules)] for _ in range(1 + turns)
        ]
    own, *others = zip(*taken[1:], strict=True)  # in the first turn the heap grows
    differences = ([ours - theirs for ours, theirs in zip(each, own, strict=True)] for each in others)
    return statistics.median(own), [statistics.median(each) for each in differences]


def with_schedule(model: nn.Module, names: tuple[str, ...], schedule: Schedule, call: Callable[[], T]) -> T:
    """Return what a call returns that is made while a model's blocks run by a schedule."""
    undo = use_schedule(model, names, schedule)
    try:
        return call()
    finally:
        undo()

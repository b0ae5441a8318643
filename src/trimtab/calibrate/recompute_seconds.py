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
from trimtab.calibrate.trial_steps import step_until_applied
from trimtab.calibrate.trials import timer
from trimtab.core.profile import Candidate
from trimtab.core.recompute import Schedule
from trimtab.decide.checkpoint_schedule import keep_all
from trimtab.runtime.activation_checkpoint import use_schedule

T = TypeVar("T")
_MEASURING_S = 1.0  # of a schedule's steps, where more than the fewest fit
_MOST = 10
_OTHERS = 14  # steps in which loss scales are found, blocks tried and their forwards timed
_SMALLER = 4  # the smaller micro-batch is this share of the other
# Of the blocks' forward: what computing it again takes at the least, whole and in part, for noise may show nothing.
_LEAST, _LEAST_IN_PART = 0.5, 0.1


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
    subject: Subject, candidate: Candidate, schedules: Sequence[Schedule], *, splits: bool, forward_s: float
) -> tuple[float, list[Line]]:
    """Return seconds of a candidate's step that keeps all, and by each schedule those of a micro-batch beyond it.

    Args:
        schedules: of the subject's blocks, all computed again, then all in part. splits: whether its batch may be split
            into more micro-batches. forward_s: of the blocks' forward, in a micro-batch.
    """
    rows = min(candidate.micro_batch, subject.rows)
    sizes = (rows, -(-rows // _SMALLER)) if splits and rows > 1 else (rows,)
    found = [_longer(subject, replace(candidate, micro_batch=size), schedules) for size in sizes]
    lines = []
    for index, share in zip(range(len(schedules)), (_LEAST, _LEAST_IN_PART), strict=False):
        each_s = [longer[index] * size / subject.rows for size, (_, longer) in zip(sizes, found, strict=True)]
        least_s = [share * forward_s * size / rows for size in sizes]
        lines.append(line_through([*zip(sizes, map(max, each_s, least_s), strict=True)]))
    return found[0][0], lines


def num_steps(step_s: float) -> int:
    """Return about how many steps measuring the blocks of a candidate takes, of so many seconds."""
    turns = 2 * 3 * (1 + _turns(step_s))  # two sizes; all kept, computed again, and in part
    return turns + _OTHERS


def _turns(step_s: float) -> int:
    return max(2, min(_MOST, int(_MEASURING_S / step_s))) if step_s > 0 else _MOST


def _longer(subject: Subject, candidate: Candidate, schedules: Sequence[Schedule]) -> tuple[float, list[float]]:
    """Return seconds of a step that keeps all, and how much longer one takes by each schedule."""
    names = subject.blocks.names
    with subject.start(candidate) as run:

        def step() -> None:
            run.train_step(run.window(subject.batch), subject.loss_fn)

        step_until_applied(run, subject)
        timed = functools.partial(timer(candidate), step, subject.device)
        ways = [keep_all(len(names)), *schedules]
        taken = [
            [with_schedule(run.model, names, each, timed) for each in (ways if turn % 2 else reversed(ways))]
            for turn in range(1 + _turns(timed()))
        ]
    ordered = (each if turn % 2 else each[::-1] for turn, each in enumerate(taken))
    _, *counted = ordered  # in the first turn the heap grows
    own, *others = zip(*counted, strict=True)
    differences = ([ours - theirs for ours, theirs in zip(each, own, strict=True)] for each in others)
    return statistics.median(own), [statistics.median(each) for each in differences]


def with_schedule(model: nn.Module, names: tuple[str, ...], schedule: Schedule, call: Callable[[], T]) -> T:
    """Return what a call returns that is made while a model's blocks run by a schedule."""
    undo = use_schedule(model, names, schedule)
    try:
        return call()
    finally:
        undo()

"""Measured time of recomputation: extra seconds of steps with a schedule over steps without, in alternation.

A block's forward time alone would be too low: each checkpointed call has overhead (hooks, saving and restoring random
state, casting weights again under autocast) per micro-batch, independent of its size. The extra time is therefore
measured at two micro-batch sizes and interpolated linearly.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.calibrate.trial_steps import step_until_applied
from trimtab.calibrate.trials import timer
from trimtab.core.profile import Candidate
from trimtab.core.recompute_schedule import Schedule
from trimtab.decide.recompute_cost import keep_all
from trimtab.runtime.activation_checkpoint import use_schedule

T = TypeVar("T")
_MEASURING_S = 1.0  # Seconds per schedule, if more than the fewest steps fit.
_MOST = 10
_OTHERS = 14  # Steps for finding loss scales, trying blocks and timing their forwards.
_SMALLER = 4  # Ratio of the larger to the smaller micro-batch.
# Lower bounds, as fractions of the blocks' forward time, for recomputation of whole blocks and in part, because the
# measured difference may be lost in noise.
_LEAST, _LEAST_IN_PART = 0.5, 0.1


@dataclass(frozen=True)
class SecondsPerSample:
    """Seconds of a micro-batch as a linear function of its samples."""

    fixed_s: float
    sample_s: float

    def at(self, rows: int) -> float:
        """Return the seconds of a micro-batch of `rows` samples."""
        return self.fixed_s + self.sample_s * rows


def line_through(points: Sequence[tuple[int, float]]) -> SecondsPerSample:
    """Return the non-negative, non-decreasing line through one or two points (samples, seconds), larger size first.

    A single point gives a line through zero.
    """
    (more, high), (fewer, low) = points[0], points[-1]
    high, low = max(0.0, high), max(0.0, low)
    sample_s = high / more if more == fewer else (high - low) / (more - fewer)
    if sample_s <= 0:  # More samples take no longer: only the overhead per call counts, or the rest is lost in noise.
        return SecondsPerSample((high + low) / 2, 0.0)
    fixed_s = high - sample_s * more
    return SecondsPerSample(fixed_s, sample_s) if fixed_s >= 0 else SecondsPerSample(0.0, high / more)


def measure_seconds(
    subject: TrainingLoop, candidate: Candidate, schedules: Sequence[Schedule], *, splits: bool, forward_s: float
) -> tuple[float, list[SecondsPerSample]]:
    """Return the seconds of a step without recomputation, and each schedule's extra seconds per micro-batch.

    Args:
        schedules: recomputation of all blocks, then of all blocks in part.
        splits: True if the batch may be split into more micro-batches.
        forward_s: forward seconds of the blocks per micro-batch.
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
    """Return the approximate number of steps for measuring the blocks of a candidate with `step_s` seconds per step."""
    turns = 2 * 3 * (1 + _turns(step_s))  # Two sizes; everything kept, recomputed, and recomputed in part.
    return turns + _OTHERS


def _turns(step_s: float) -> int:
    return max(2, min(_MOST, int(_MEASURING_S / step_s))) if step_s > 0 else _MOST


def _longer(subject: TrainingLoop, candidate: Candidate, schedules: Sequence[Schedule]) -> tuple[float, list[float]]:
    """Return the seconds of a step that keeps all activations, and the extra seconds of each schedule."""
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
    _, *counted = ordered  # The heap grows in the first round.
    own, *others = zip(*counted, strict=True)
    differences = ([ours - theirs for ours, theirs in zip(each, own, strict=True)] for each in others)
    return statistics.median(own), [statistics.median(each) for each in differences]


def with_schedule(model: nn.Module, names: tuple[str, ...], schedule: Schedule, call: Callable[[], T]) -> T:
    """Return the result of a call while the model's blocks use a recomputation schedule."""
    undo = use_schedule(model, names, schedule)
    try:
        return call()
    finally:
        undo()

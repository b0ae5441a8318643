"""Length of timed-only arms, and time limit of a quick comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.tasks.task import Task

# Minimum steps and reference seconds of a short arm, so that fast steps also fill more than one block.
_FEW_STEPS, _FEW_S = 60, 6.0
# The same on a GPU, where device time is expensive; seconds are counted by the arm's own step.
_DEAR_STEPS, _DEAR_S = 24, 5.0
_QUICK_STEPS, _QUICK_S = 4, 3.5
# Minimum seconds of the control in a full run: the control sets the resolution, and needs rounds for that.
_CONTROL_S = 60.0
# A quick comparison ends at about this time, with fewer pairs if planning took long.
_QUICK_END_S = 110.0


class RunLengths(NamedTuple):
    """Samples of a timed-only arm and of the control, which is longer in a full run."""

    few: int
    control: int


def short_arm_lengths(task: Task, step_s: float, *, quick: bool, brief: bool, dear: bool = False) -> RunLengths:
    """Return the samples of short arms, at most the task's budget.

    Args:
        task: the task to train.
        step_s: seconds per step of the reference, or of the arm itself if `dear`.
        quick: True for a quick comparison.
        brief: True if all arms of the paired run are short.
        dear: True if device time is expensive (a GPU).
    """
    usual = (_DEAR_STEPS, _DEAR_S) if dear else (_FEW_STEPS, _FEW_S)
    steps, seconds = (_QUICK_STEPS, _QUICK_S) if quick else usual
    few, control = (
        min(task.budget_samples, max(steps, math.ceil(s / step_s)) * task.batch_size)
        for s in (seconds, seconds if brief else max(seconds, _CONTROL_S))
    )
    return RunLengths(few, control)


def seeds_in_time(num: int, *, quick: bool, begun: float, together: Coordinator = ALONE) -> Iterator[int]:
    """Yield the seeds of `num` paired runs; a quick comparison stops when no further run fits, after at least one.

    Args:
        num: number of paired runs.
        quick: True for a quick comparison.
        begun: start of the comparison, from `time.perf_counter`.
        together: the ranks of the job.
    """
    race_s = 0.0
    for seed in range(num):
        race_begun = time.perf_counter()
        if quick and seed and together.each(race_begun - begun + race_s)[0] > _QUICK_END_S:
            return
        yield seed
        race_s = time.perf_counter() - race_begun

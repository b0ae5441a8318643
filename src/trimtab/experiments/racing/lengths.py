"""How long arms run where they are only timed, and for how long a first look goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from trimtab.distributed.alone import ALONE, Together
from trimtab.tasks.task import Task

# What a short arm runs: steps, and seconds of the reference, so that fast steps fill more than one block too.
_FEW_STEPS, _FEW_S = 60, 6.0
# On a GPU, whose seconds are dear: of each arm by its own step.
_DEAR_STEPS, _DEAR_S = 24, 5.0
_QUICK_STEPS, _QUICK_S = 4, 3.5
# And in a race whose other arms run to the end: the control is what that race can resolve, and laps are what it lacks.
_CONTROL_S = 60.0
# A first look ends about here: with fewer pairs where planning left no more time.
_QUICK_END_S = 110.0


class Lengths(NamedTuple):
    """Rows of an arm that is only timed, and of a control: as many, but in a race whose others run to their end."""

    few: int
    control: int


def lengths(task: Task, step_s: float, *, quick: bool, brief: bool, dear: bool = False) -> Lengths:
    """Return the rows of short arms, at most the task's.

    Args:
        step_s: of the reference, or of the arm where seconds are `dear`, as on a GPU. quick: a first look. brief:
            whether all arms of the race are short.
    """
    usual = (_DEAR_STEPS, _DEAR_S) if dear else (_FEW_STEPS, _FEW_S)
    steps, seconds = (_QUICK_STEPS, _QUICK_S) if quick else usual
    few, control = (
        min(task.budget_rows, max(steps, math.ceil(s / step_s)) * task.batch_rows)
        for s in (seconds, seconds if brief else max(seconds, _CONTROL_S))
    )
    return Lengths(few, control)


def seeds_in_time(num: int, *, quick: bool, begun: float, together: Together = ALONE) -> Iterator[int]:
    """Yield the seeds of so many races; of a first look as long as one more fits in its time, and one at the least.

    Args:
        begun: when it began, by `time.perf_counter`.
    """
    race_s = 0.0
    for seed in range(num):
        race_begun = time.perf_counter()
        if quick and seed and together.each(race_begun - begun + race_s)[0] > _QUICK_END_S:
            return
        yield seed
        race_s = time.perf_counter() - race_begun

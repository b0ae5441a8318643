"""Watts of trials: each arm's own steps for a second or more, in turns, beside the blocks that say how long one takes.

Joules of a step are watts times its seconds. A counter says nothing of a block of 0.15 s, and seconds differ by more
than watts do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trimtab.calibrate.failures import describe
from trimtab.calibrate.subject import Subject
from trimtab.core.energy import WINDOW_S
from trimtab.core.profile import ALONE, Candidate, is_final
from trimtab.decide.search import Stage
from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT
from trimtab.measure.energy import EnergyClock, GivenWatts, Meter
from trimtab.measure.loop_state import LoopState
from trimtab.measure.timing import synchronize
from trimtab.runtime.cuda_graphs import steps_to_launch
from trimtab.runtime.engine import Run


class Metered(Protocol):
    """An arm, as far as its watts are concerned."""

    candidate: Candidate
    first_s: float
    error: str | None
    block_s: list[float]
    watts: list[float]


@dataclass(frozen=True)
class Power:
    """Reads watts in trials.

    Args:
        meter: what is read. is_asked: whether energy is weighed or limited; else a window each of a final is all.
    """

    meter: Meter
    is_asked: bool

    def num_windows(self, stage: Stage, *, hurried: bool = False) -> int:
        """Return how many windows each of a stage's arms gets: in a final that weighs energy a verdict's."""
        decides = is_final(stage.name)
        if stage.name == ALONE or not (self.is_asked or (decides and not hurried)):
            return 0
        return MIN_PAIRS_FOR_VERDICT if self.is_asked and decides else 1

    def read(self, subject: Subject, arms: Sequence[Metered], start: LoopState, num_windows: int) -> None:
        """Add each arm's watts, in turns; none of an arm in which the meter was lost once.

        One whose step raises has that error, as in its blocks, and is run no further.
        """
        for lap in range(num_windows):
            for arm in [arm for arm in arms if arm.error is None][:: 1 if lap % 2 == 0 else -1]:
                start.restore()
                try:
                    watts = self._watts(subject, arm)
                except Exception as error:  # memory that grew short, above all
                    arm.error, arm.block_s = describe(error), []
                else:
                    arm.watts.append(math.nan if watts is None else watts)
        for arm in arms:
            if arm.error is not None or any(map(math.isnan, arm.watts)):
                arm.watts.clear()

    def _watts(self, subject: Subject, arm: Metered) -> float | None:
        if isinstance(self.meter, GivenWatts):
            return self.meter.watts
        with subject.start(arm.candidate) as run:
            for _ in range(steps_to_launch(arm.candidate.compiled) or 1):
                _step(run, subject)
            synchronize(subject.device)
            clock = EnergyClock(self.meter)
            clock.start()
            steps = max(1, math.ceil(WINDOW_S / max(arm.first_s, 1e-6)))
            while clock.seconds < WINDOW_S:
                for _ in range(steps):
                    _step(run, subject)
                    clock.tick()
                synchronize(subject.device)
                steps = max(1, steps // 8)
            return clock.read().watts


def _step(run: Run, subject: Subject) -> None:
    run.train_step(run.window(subject.batch), subject.loss_fn)

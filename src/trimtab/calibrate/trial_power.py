"""Power of candidates in trials, measured in separate windows of a second or more.

A candidate's joules per step are watts times seconds per step. A counter cannot resolve a block of 0.15 s, and
candidates differ more in seconds than in watts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trimtab.calibrate.exception_text import failure_of
from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core.energy_reading import WINDOW_S
from trimtab.core.plan_note import Note
from trimtab.core.profile import ALONE, Candidate, is_final
from trimtab.decide.search import SearchPhase
from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT
from trimtab.measure.energy_meter import EnergyClock, GivenWatts, Meter
from trimtab.measure.loop_state import LoopState
from trimtab.measure.timing import synchronize
from trimtab.runtime.cuda_graphs import steps_to_launch
from trimtab.runtime.run import Run


class MeteredArm(Protocol):
    """Fields of a trial arm that the power measurement uses."""

    candidate: Candidate
    first_s: float
    error: Note | None
    block_s: list[float]
    watts: list[float]


@dataclass(frozen=True)
class TrialPower:
    """Power measurement of trials.

    Args:
        meter: meter to read.
        is_asked: True if energy is weighted or limited; otherwise candidates of a final get a single window each.
    """

    meter: Meter
    is_asked: bool

    def num_windows(self, stage: SearchPhase, *, over_time_budget: bool = False) -> int:
        """Return the number of windows per arm; a final that weights energy gets enough for a verdict."""
        decides = is_final(stage.name)
        if stage.name == ALONE or not (self.is_asked or (decides and not over_time_budget)):
            return 0
        return MIN_PAIRS_FOR_VERDICT if self.is_asked and decides else 1

    def read(self, subject: TrainingLoop, arms: Sequence[MeteredArm], start: LoopState, num_windows: int) -> None:
        """Add the watts of each arm, in alternating order; an arm with a missing reading gets none.

        An arm whose step raises records the error and is not run again.
        """
        for lap in range(num_windows):
            for arm in [arm for arm in arms if arm.error is None][:: 1 if lap % 2 == 0 else -1]:
                start.restore()
                try:
                    watts = self._watts(subject, arm)
                except Exception as error:  # Most likely out of memory.
                    arm.error, arm.block_s = failure_of(error), []
                else:
                    arm.watts.append(math.nan if watts is None else watts)
        for arm in arms:
            if arm.error is not None or any(map(math.isnan, arm.watts)):
                arm.watts.clear()

    def _watts(self, subject: TrainingLoop, arm: MeteredArm) -> float | None:
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


def _step(run: Run, subject: TrainingLoop) -> None:
    run.train_step(run.window(subject.batch), subject.loss_fn)

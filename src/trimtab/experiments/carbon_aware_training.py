"""`trimtab train --when-clean`: train in forecast low-carbon hours, in one piece or with pauses.

A decision holds until the end of its first time window. The remaining work is then scheduled again with a new forecast
and measured step times. A killed process does the same on restart.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from trimtab.carbon.job import RemainingWork
from trimtab.carbon.pause_schedule import CarbonSchedule, when_to_train
from trimtab.carbon.services import IntensitySource, forecast_or_reason
from trimtab.checkpoint.signals import Signals
from trimtab.core.serialization import to_jsonable
from trimtab.experiments.train import Note
from trimtab.experiments.train_summary import TrainingPart

# Upper bound on the reaction time to a signal, to a changed clock, or after a suspend.
SLICE_S = 1.0


@dataclass(frozen=True)
class Clock:
    """Wall clock, replaceable in tests.

    Args:
        now: returns seconds since 1970.
        sleep: sleeps for a number of seconds.
    """

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


@contextlib.contextmanager
def catch_signals() -> Iterator[Signals]:
    """Catch termination signals inside the block, where no run may handle them; act on a signal at its end.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; the exit code is 128 plus its number.
    """
    signals = Signals()
    signals.install()
    try:
        yield signals
    finally:
        signals.restore()
    if signals.came is not None:
        signals.leave()


def wait_until(moment_s: float, clock: Clock) -> float:
    """Wait until a time and return the seconds waited; unreferenced memory, including a GPU's, is freed first.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; the exit code is 128 plus its number.
    """
    begun_s = clock.now()
    if begun_s >= moment_s:
        return 0.0
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with catch_signals() as signals:
        while (left_s := moment_s - clock.now()) > 0 and signals.came is None:
            clock.sleep(min(left_s, SLICE_S))
    return clock.now() - begun_s


class TrainPart(Protocol):
    """Callback like `train_part`: trains to a pause or to the end; `is_first` is True before any training here."""

    def __call__(self, *, notes: Sequence[Note], is_over: Callable[[], bool], is_first: bool) -> TrainingPart: ...


@dataclass(frozen=True)
class CarbonRequest:
    """Forecast source, and deadline in seconds since 1970."""

    source: IntensitySource
    deadline_s: float


@dataclass(frozen=True)
class ScheduledTraining:
    """Result of scheduled training: the parts, the decision before every part, and the seconds waited."""

    parts: tuple[TrainingPart, ...]
    decisions: tuple[CarbonSchedule, ...]
    waited_s: float

    def figures(self) -> dict[str, Any]:
        """Return the first decision, the seconds waited and the number of pauses."""
        return {
            "when": self.decisions[0].describe(),
            "waited_s": round(self.waited_s, 3),
            "pauses": len(self.parts) - 1,
        }


def schedule_of_rest(wish: CarbonRequest, work: RemainingWork, done: int, now_s: float) -> CarbonSchedule:
    """Return the schedule of the remaining work after `done` steps; without a forecast, start now."""
    forecast, reason = forecast_or_reason(wish.source, now_s)
    return when_to_train(forecast, work.job(done), now_s, wish.deadline_s, unknown=reason)


def train_when_clean(
    wish: CarbonRequest, work: RemainingWork, done: int, train: TrainPart, say: Callable[[str], None], clock: Clock
) -> ScheduledTraining:
    """Wait, train and pause alternately until all steps are done.

    Args:
        wish: forecast source and deadline.
        work: the work of the run.
        done: steps done before this call.
        train: trains a part.
        say: receives every decision, before the wait.
        clock: the wall clock.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; training before a pause is saved.
    """
    parts, decisions, waited_s = [], [], 0.0
    while True:
        found = schedule_of_rest(wish, work, done, clock.now())
        say(found.describe())
        waited_s += (here_s := wait_until(found.stretches[0].begin_s, clock))
        train_next = partial(train, notes=[_note(wish, work, done, found, here_s)], is_first=not parts)
        part = _stretch(train_next, found, clock)
        parts.append(part)
        decisions.append(found)
        if not part.is_paused:
            return ScheduledTraining(tuple(parts), tuple(decisions), waited_s)
        work = replace(work, step_s=part.seconds / (part.done - done), seconds_by="as measured before the pause")
        done = part.done


def _stretch(train: Callable[..., TrainingPart], found: CarbonSchedule, clock: Clock) -> TrainingPart:
    """Train the first time window of a decision; the last window ends only with the last step."""
    if len(found.stretches) == 1:
        return train(is_over=lambda: False)
    with catch_signals() as signals:  # A signal during start-up or saving would otherwise have no handler.
        return train(is_over=lambda: signals.came is not None or clock.now() >= found.stretches[0].end_s)


def _note(wish: CarbonRequest, work: RemainingWork, done: int, found: CarbonSchedule, waited_s: float) -> Note:
    by = {"forecast": wish.source.name, "deadline_s": wish.deadline_s, "waited_s": waited_s}
    return "when_to_train", {**by, **work.describe(done), **to_jsonable(found)}

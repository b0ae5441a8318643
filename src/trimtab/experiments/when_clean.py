"""`trimtab train --when-clean`: trains when a forecast says that energy is clean, in one piece or with pauses.

A decision stands until its first stretch is over. What is left is then decided anew, by a new forecast and the seconds
that steps have taken; a process that was killed, and is started again, does just that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from trimtab.core.codec import to_jsonable
from trimtab.decide.carbon_schedule import CarbonSchedule, when_to_train
from trimtab.decide.carbon_work import Work
from trimtab.experiments.train import Note
from trimtab.experiments.train_figures import Part
from trimtab.experiments.waiting import Clock, heeded, wait_until
from trimtab.integrations.intensity import IntensitySource, forecast_or_reason


class TrainPart(Protocol):
    """Trains up to a pause, or to the end, as `train_part` does; `is_first`: nothing was trained here before."""

    def __call__(self, *, notes: Sequence[Note], is_over: Callable[[], bool], is_first: bool) -> Part: ...


@dataclass(frozen=True)
class Wish:
    """Where forecasts are from, and when the run is to be done, in seconds since 1970."""

    source: IntensitySource
    deadline_s: float


@dataclass(frozen=True)
class Waited:
    """What became of a wish: the parts that were trained, what was decided before each, and the seconds waited."""

    parts: tuple[Part, ...]
    decisions: tuple[CarbonSchedule, ...]
    waited_s: float

    def figures(self) -> dict[str, Any]:
        """Return what is said of it: the first decision, and what it came to."""
        return {
            "when": self.decisions[0].describe(),
            "waited_s": round(self.waited_s, 3),
            "pauses": len(self.parts) - 1,
        }


def decided(wish: Wish, work: Work, done: int, now_s: float) -> CarbonSchedule:
    """Return when to train what is left after so many steps; where there is no forecast, now."""
    forecast, reason = forecast_or_reason(wish.source, now_s)
    how = {} if forecast is not None else {"unknown": reason}
    return when_to_train(forecast, work.job(done), now_s, wish.deadline_s, **how)


def train_when_clean(
    wish: Wish, work: Work, done: int, train: TrainPart, say: Callable[[str], None], clock: Clock
) -> Waited:
    """Wait, train and pause by turns until all steps are done.

    Args:
        done: steps before this. say: is told every decision, before its wait.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; what was trained before a pause is saved.
    """
    parts, decisions, waited_s = [], [], 0.0
    while True:
        found = decided(wish, work, done, clock.now())
        say(found.describe())
        waited_s += (here_s := wait_until(found.stretches[0].begin_s, clock))
        train_next = partial(train, notes=[_note(wish, work, done, found, here_s)], is_first=not parts)
        part = _stretch(train_next, found, clock)
        parts.append(part)
        decisions.append(found)
        if not part.is_paused:
            return Waited(tuple(parts), tuple(decisions), waited_s)
        work = replace(work, step_s=part.seconds / (part.done - done), seconds_by="as they took before the pause")
        done = part.done


def _stretch(train: Callable[..., Part], found: CarbonSchedule, clock: Clock) -> Part:
    """Train the first stretch of a decision; the last one has no end but that of its steps."""
    if len(found.stretches) == 1:
        return train(is_over=lambda: False)
    with heeded() as signals:  # one that comes while the run is made ready, or saved for its pause, is nobody else's
        return train(is_over=lambda: signals.came is not None or clock.now() >= found.stretches[0].end_s)


def _note(wish: Wish, work: Work, done: int, found: CarbonSchedule, waited_s: float) -> Note:
    by = {"forecast": wish.source.name, "deadline_s": wish.deadline_s, "waited_s": waited_s}
    return "when_to_train", {**by, **work.describe(done), **to_jsonable(found)}

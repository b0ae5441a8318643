"""Optimal training periods under a stepwise carbon intensity, if every pause has a cost.

Intensity is constant between two steps of the forecast. Pauses therefore begin and end at steps, and either the last
period ends when the work is done, or the first begins so that the last ends at a step. Within this set the search is
exact. It is dynamic programming over the steps: among all partial schedules with the same work done by the same step
and the same state (training or paused), only the cheapest can be part of the optimum. A forward pass leaves the last
end free, and a backward pass leaves the first begin free.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.decide.carbon_job import TrainingJob, TrainingPeriod
from trimtab.decide.carbon_time_axis import IntensitySteps, microseconds, moments_to_pause

# Minimum relative cost of a pause: among schedules of equal cost, the one with fewer pauses wins.
TIE = 1e-9
Moments = Callable[[int], float]


class PastPeriods(NamedTuple):
    """Linked list of training periods so far, the last first; begin and end are points."""

    begin: int
    end: int
    before: PastPeriods | None


class PartialSchedule(NamedTuple):
    """Partial schedule: its cost, the begin of the current period, and the periods before."""

    cost: float
    begin: int
    past: PastPeriods | None


@dataclass(frozen=True)
class TimeAxisPass:
    """The time axis in one direction; costs are in W g s / kWh.

    Args:
        points: moments at which a pause may begin or end.
        total: integral of the intensity up to a point.
        starts: cost of starting the job at a point.
        ends: cost of ending the job at a point.
        pauses: cost of beginning a pause at a point, in addition to idling.
        resumes: cost of ending a pause at a point, in addition to idling.
        train_w: power while training.
        idle_w: power while paused.
    """

    points: Sequence[int]
    total: Moments
    starts: Moments
    ends: Moments
    pauses: Moments
    resumes: Moments
    train_w: float
    idle_w: float


def best_stretches(hours: IntensitySteps, job: TrainingJob) -> tuple[TrainingPeriod, ...] | None:
    """Return the training periods of least emissions; None if the job does not fit or may not be paused.

    Args:
        hours: intensity from now to the deadline, or to the end of the forecast.
        job: training job.
    """
    if job.pause is None:
        return None
    work, gap = microseconds(job.seconds), max(1, microseconds(job.pause.seconds))
    least = max(1, microseconds(job.pause.least_stretch_s))
    forwards = _walked(_forwards(hours, job), work, least, gap)
    backwards = _walked(_backwards(_forwards(hours, job)), work, least, gap)
    # Both searches include the job in one piece, so both fail only if it does not fit.
    if forwards is None or backwards is None:
        return None
    spans = _spans(forwards[1])
    if backwards[0] < forwards[0]:
        spans = [(-end, -begin) for begin, end in reversed(_spans(backwards[1]))]
    return tuple(TrainingPeriod(hours.moment(begin), hours.moment(end)) for begin, end in spans)


def _forwards(hours: IntensitySteps, job: TrainingJob) -> TimeAxisPass:
    pause = job.pause
    assert pause is not None
    least_cost = TIE * job.watts * hours.total(hours.points[-1])
    lost = microseconds(pause.seconds)
    more_w = pause.watts - pause.idle_watts

    def resumes(point: int) -> float:
        return least_cost + more_w * (hours.total(point) - hours.total(max(0, point - lost)))

    def starts(point: int) -> float:
        return job.waiting_watts * hours.total(point)

    points = moments_to_pause(hours.points)
    return TimeAxisPass(points, hours.total, starts, _nothing, _nothing, resumes, job.watts, pause.idle_watts)


def _backwards(walk: TimeAxisPass) -> TimeAxisPass:
    """Return the time axis reversed: begins become ends and ends become begins."""

    def turned(cost: Moments, sign: int = 1) -> Moments:
        return lambda point: sign * cost(-point)

    return TimeAxisPass(
        points=[-point for point in reversed(walk.points)],
        total=turned(walk.total, -1),
        starts=turned(walk.ends),
        ends=turned(walk.starts),
        pauses=turned(walk.resumes),
        resumes=turned(walk.pauses),
        train_w=walk.train_w,
        idle_w=walk.idle_w,
    )


def _nothing(_: int) -> float:
    return 0.0


def _walked(walk: TimeAxisPass, work: int, least: int, gap: int) -> tuple[float, PastPeriods] | None:
    """Return the least cost and the periods of the cheapest schedule; None if the work does not fit.

    Training states are stored under work done minus the current point, and paused states under work done; neither key
    changes with time. Costs are stored minus the cost of training or idling up to the point, so a state is stored once.

    Args:
        walk: time axis.
        work: microseconds of training.
        least: least microseconds of a period.
        gap: least microseconds of a pause.
    """
    best: tuple[float, PastPeriods] | None = None
    training: dict[int, PartialSchedule] = {}
    paused: dict[int, PartialSchedule] = {}
    # by the index from which they are long enough
    long_enough: defaultdict[int, list[tuple[int, PartialSchedule]]] = defaultdict(list)
    rested: defaultdict[int, list[tuple[int, PartialSchedule]]] = defaultdict(list)
    for index, point in enumerate(walk.points):
        total = walk.total(point)
        _keep(training, long_enough.pop(index, []))
        _keep(paused, rested.pop(index, []))
        back = walk.idle_w * total + walk.resumes(point)
        begun = [(0, walk.starts(point), None), *((done, way.cost + back, way.past) for done, way in paused.items())]
        for done, cost, past in begun:
            end = point + work - done
            if end > walk.points[-1]:
                continue
            cost -= walk.train_w * total
            whole = cost + walk.train_w * walk.total(end) + walk.ends(end)
            if best is None or whole < best[0]:
                best = whole, PastPeriods(point, end, past)
            from_index = bisect.bisect_left(walk.points, point + least)
            long_enough[from_index].append((done - point, PartialSchedule(cost, point, past)))
        stop = walk.train_w * total - walk.idle_w * total + walk.pauses(point)
        from_index = bisect.bisect_left(walk.points, point + gap)
        for key, way in training.items():
            if work - key - point >= least:
                stopped = PartialSchedule(way.cost + stop, 0, PastPeriods(way.begin, point, way.past))
                rested[from_index].append((key + point, stopped))
    return best


def _keep(ways: dict[int, PartialSchedule], found: list[tuple[int, PartialSchedule]]) -> None:
    """Store every partial schedule that is cheaper than the stored one."""
    for key, way in found:
        if key not in ways or way.cost < ways[key].cost:
            ways[key] = way


def _spans(past: PastPeriods | None) -> list[tuple[int, int]]:
    spans = []
    while past is not None:
        spans.append((past.begin, past.end))
        past = past.before
    return spans[::-1]

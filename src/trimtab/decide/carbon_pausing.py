"""Training in stretches, over an intensity that steps: which of the hours to use, where every pause costs something.

Between two steps of the forecast every second is like the next one, so pauses begin and end at steps, and the last
stretch ends where the work is done; or the first one begins so that the last ends at a step. Among all of these the
search is exact. It is a walk over the steps: of all ways to have done the same work by the same step, and to be in the
same state (training, or paused), only the cheapest can be part of the cheapest whole, as what follows depends on
nothing else. One walk forwards has the last end free, and one backwards the first beginning.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.decide.carbon_hours import Hours, microseconds, moments_to_pause
from trimtab.decide.carbon_job import Stretch, TrainingJob

# Of ways that cost the same, that with fewer pauses: a pause costs so much of everything at the least.
TIE = 1e-9
Moments = Callable[[int], float]


class Past(NamedTuple):
    """Stretches so far, the last one first: as points, and the ones before."""

    begin: int
    end: int
    before: Past | None


class Way(NamedTuple):
    """One way to have got so far: what it cost, where the present stretch began, and the stretches before."""

    cost: float
    begin: int
    past: Past | None


@dataclass(frozen=True)
class Walk:
    """The hours in one direction; costs are in W g s / kWh.

    Args:
        points: where a pause may begin or end. total: the integral of the intensity up to a point.
        starts, ends: what starting and ending at a point costs. pauses, resumes: the same of a pause, above idling.
        train_w, idle_w: while training and while paused.
    """

    points: Sequence[int]
    total: Moments
    starts: Moments
    ends: Moments
    pauses: Moments
    resumes: Moments
    train_w: float
    idle_w: float


def best_stretches(hours: Hours, job: TrainingJob) -> tuple[Stretch, ...] | None:
    """Return the stretches of the least carbon; None where the job does not fit, or may not be paused.

    Args:
        hours: from now to the deadline, or as far as is known.
    """
    if job.pause is None:
        return None
    work, gap = microseconds(job.seconds), max(1, microseconds(job.pause.seconds))
    least = max(1, microseconds(job.pause.least_stretch_s))
    forwards = _walked(_forwards(hours, job), work, least, gap)
    backwards = _walked(_backwards(_forwards(hours, job)), work, least, gap)
    if forwards is None or backwards is None:  # both know the job in one piece
        return None
    spans = _spans(forwards[1])
    if backwards[0] < forwards[0]:
        spans = [(-end, -begin) for begin, end in reversed(_spans(backwards[1]))]
    return tuple(Stretch(hours.moment(begin), hours.moment(end)) for begin, end in spans)


def _forwards(hours: Hours, job: TrainingJob) -> Walk:
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
    return Walk(points, hours.total, starts, _nothing, _nothing, resumes, job.watts, pause.idle_watts)


def _backwards(walk: Walk) -> Walk:
    """Return the same hours from their end to now: what begins there is what ends here."""

    def turned(cost: Moments, sign: int = 1) -> Moments:
        return lambda point: sign * cost(-point)

    return Walk(
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


def _walked(walk: Walk, work: int, least: int, gap: int) -> tuple[float, Past] | None:
    """Return the cheapest way to do the work, and its cost; None where it does not fit.

    What trains is kept by its work less the moment, and what is paused by its work alone: neither changes with time. So
    is the cost, less what training or idling up to the moment would cost, and each way is put down once.

    Args:
        work, least, gap: microseconds of all stretches, of one at the least and of a pause at the least.
    """
    best: tuple[float, Past] | None = None
    training: dict[int, Way] = {}
    paused: dict[int, Way] = {}
    long_enough: defaultdict[int, list[tuple[int, Way]]] = defaultdict(list)  # by the index from which on they are
    rested: defaultdict[int, list[tuple[int, Way]]] = defaultdict(list)
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
                best = whole, Past(point, end, past)
            from_index = bisect.bisect_left(walk.points, point + least)
            long_enough[from_index].append((done - point, Way(cost, point, past)))
        stop = walk.train_w * total - walk.idle_w * total + walk.pauses(point)
        from_index = bisect.bisect_left(walk.points, point + gap)
        for key, way in training.items():
            if work - key - point >= least:
                stopped = Way(way.cost + stop, 0, Past(way.begin, point, way.past))
                rested[from_index].append((key + point, stopped))
    return best


def _keep(ways: dict[int, Way], found: list[tuple[int, Way]]) -> None:
    """Put down each way that is cheaper than the one there."""
    for key, way in found:
        if key not in ways or way.cost < ways[key].cost:
            ways[key] = way


def _spans(past: Past | None) -> list[tuple[int, int]]:
    spans = []
    while past is not None:
        spans.append((past.begin, past.end))
        past = past.before
    return spans[::-1]

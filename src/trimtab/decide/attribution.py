"""Whose seconds shrank: what a plan saves, split over the phases of a step, and what bounds those that are left.

Means of paired laps, because means add up: what the phases save, with what is unattributed, is what a step saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab.core.phases import PHASES, ArmPhases, Gain, Lap, Roof
from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT, Interval, mean_interval, ratio_interval, share_interval

WHOLE, UNATTRIBUTED = "step", "unattributed"
# Times as long as without it that a step under the clock may take, for its phases to be those of a step: one that waits
# for its host waits for the clock as well.
DISTORTED = 1.25
# Phases that a roof is known of, and which phases' seconds are under it.
_UNDER = {"forward": ("forward",), "backward": ("backward", "recompute"), "optimizer": ("optimizer",)}
# What a step function of the task's own has in its rest, and a loop of ours apart.
_HIDDEN = ("forward", "recompute", "backward")
COMPUTE, MEMORY, UNBOUND = "compute-bound", "memory-bound", "not known"
_OTHERS = {"communication": "communication-bound", "data": "waiting for data", "rest": "the loop itself"}
BOUNDS = (COMPUTE, MEMORY, *_OTHERS.values(), UNBOUND)


@dataclass(frozen=True)
class Saved:
    """What one phase saves.

    Args:
        reference_s, plan_s: mean seconds of a step. saved: the one less the other, paired by lap, with its 95% t
            interval. share: of what the whole step saves; None where it is not clear that it saves anything.
    """

    phase: str
    reference_s: float
    plan_s: float
    saved: Interval
    share: float | None


@dataclass(frozen=True)
class Attribution:
    """Where a plan's gain comes from.

    Args:
        phases: those that either arm has, in order, clocked; where of one arm the forward and the backward are in the
            rest, those of the other are too. unattributed: the difference of what the clock itself
            costs the two. whole: steps without the clock; phases and unattributed add up to it.
        reference_clock, plan_clock: what a step takes with the clock over one without, paired by lap.
        parts: by class of module, of the forward and the backward; they add up to those two. None where of one arm
            alone they are told apart. is_distorted: as the function says.
    """

    phases: tuple[Saved, ...]
    unattributed: Saved
    whole: Saved
    reference_clock: Interval
    plan_clock: Interval
    parts: tuple[Saved, ...]
    is_distorted: bool


def attribute(gain: Gain) -> Attribution:
    """Return what each phase saves; phases and what is unattributed add up to the whole."""
    theirs, ours = gain.reference.laps, gain.plan.laps
    whole_s = math.fsum(t.plain_s - o.plain_s for t, o in zip(theirs, ours, strict=True)) / len(ours)
    interval = mean_interval([t.plain_s - o.plain_s for t, o in zip(theirs, ours, strict=True)])
    # Of a loss nothing has a share: the paper's shares are of what is gained.
    is_gain, distorted = _is_gain(interval), is_distorted(gain)

    def saved(name: str, of: Callable[[Lap], float]) -> Saved:
        pairs = [(of(t), of(o)) for t, o in zip(theirs, ours, strict=True)]
        found = mean_interval([t - o for t, o in pairs])
        reference_s, plan_s = (math.fsum(each) / len(each) for each in zip(*pairs, strict=True))
        return Saved(name, reference_s, plan_s, found, found.mean / whole_s if is_gain and not distorted else None)

    def of_phase(name: str, within: tuple[str, ...]) -> Saved:
        return saved(name, lambda lap: math.fsum(lap.seconds.get(each, 0.0) for each in within))

    def of_part(name: str) -> Saved:
        return saved(name, lambda lap: lap.parts.get(name, 0.0))

    parts = dict.fromkeys(name for lap in (*theirs, *ours) for name in lap.parts) if _are_told_apart(gain) else ()
    return Attribution(
        tuple(of_phase(phase, within) for phase, within in _told(gain).items()),
        saved(UNATTRIBUTED, lambda lap: lap.plain_s - lap.clocked_s),
        saved(WHOLE, lambda lap: lap.plain_s),
        _clock_cost(gain.reference),
        _clock_cost(gain.plan),
        tuple(map(of_part, parts)),
        distorted,
    )


def _is_gain(saved: Interval) -> bool:
    return saved.n >= MIN_PAIRS_FOR_VERDICT and saved.low > 0


def _told(gain: Gain) -> dict[str, tuple[str, ...]]:
    """Return the phases that either arm has, each with those that are in it: what is in one's rest is in both's."""
    seen = [phase for phase in PHASES if phase in (*gain.reference.has, *gain.plan.has)]
    if ("forward" in gain.reference.has) == ("forward" in gain.plan.has):
        return {phase: (phase,) for phase in seen}
    return {phase: (phase,) for phase in seen if phase not in (*_HIDDEN, "rest")} | {"rest": (*_HIDDEN, "rest")}


def _are_told_apart(gain: Gain) -> bool:
    """Return whether both arms tell as much apart: one that is compiled no classes, one of a hidden forward nothing."""
    arms = (gain.reference, gain.plan)
    theirs, ours = (("forward" in a.has, any(" " in name for lap in a.laps for name in lap.parts)) for a in arms)
    return theirs == ours


def is_distorted(gain: Gain) -> bool:
    """Return whether a step under the clock is so much longer that its phases are not those of one without."""
    return any(_clock_cost(arm).mean > DISTORTED for arm in (gain.reference, gain.plan))


def _clock_cost(arm: ArmPhases) -> Interval:
    return ratio_interval([lap.clocked_s / lap.plain_s for lap in arm.laps])


@dataclass(frozen=True)
class Share:
    """What a phase or a bound has of the seconds that a whole step saves.

    Args:
        each: lap by lap, over what is saved on average, so that their mean is the share.
    """

    of: str
    share: Interval
    each: tuple[float, ...]


def shares(gain: Gain) -> tuple[Share, ...]:
    """Return the share of each phase, and of each bound (`BOUNDS`) where of no phase it is unknown.

    None where it is not clear that anything is saved, or the clock makes another step of it.
    """
    theirs, ours = gain.reference.laps, gain.plan.laps
    wholes = [t.plain_s - o.plain_s for t, o in zip(theirs, ours, strict=True)]
    if not _is_gain(mean_interval(wholes)) or is_distorted(gain):
        return ()
    bounds = [
        tuple(bound_seconds(replace(arm, laps=(lap,))) for arm, lap in ((gain.reference, t), (gain.plan, o)))
        for t, o in zip(theirs, ours, strict=True)
    ]
    saved = {
        phase: [
            math.fsum(t.seconds.get(each, 0.0) - o.seconds.get(each, 0.0) for each in within)
            for t, o in zip(theirs, ours, strict=True)
        ]
        for phase, within in _told(gain).items()
    }
    are_known = not any(UNBOUND in each for pair in bounds for each in pair)
    for bound in BOUNDS if are_known else ():
        if any(bound in each for pair in bounds for each in pair):
            saved[bound] = [t.get(bound, 0.0) - o.get(bound, 0.0) for t, o in bounds]
    mean_s = math.fsum(wholes) / len(wholes)
    return tuple(
        Share(name, share_interval(seconds, wholes), tuple(each / mean_s for each in seconds))
        for name, seconds in saved.items()
    )


def bound_seconds(arm: ArmPhases) -> dict[str, float]:
    """Return the mean seconds of a clocked step by what bounds them (`BOUNDS`); together they are that step.

    A phase's seconds are split as its roof is, between operators that compute at length and those that move: what they
    take beyond their roof is shared alike. Seconds of a phase without a roof are not known, nor are those of a rest
    that has the forward in it.
    """
    found = dict.fromkeys(BOUNDS, 0.0)
    for phase in arm.has:
        seconds, roof = arm.mean_s(phase), _roof_over(phase, arm)
        if phase in _OTHERS and not (phase == "rest" and "forward" not in arm.has):
            found[_OTHERS[phase]] += seconds
        elif roof is None or roof.seconds <= 0:
            found[UNBOUND] += seconds
        else:
            found[COMPUTE] += seconds * roof.compute_s / roof.seconds
            found[MEMORY] += seconds * roof.memory_s / roof.seconds
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _roof_over(phase: str, arm: ArmPhases) -> Roof | None:
    return next((roof for key, roof in arm.roofs.items() if phase in _UNDER.get(key, ())), None)


def of_the_roof(arm: ArmPhases) -> Mapping[str, float]:
    """Return by phase how much of its seconds its operators need at the least; above 1 where caches hold tensors."""
    taken_s = {key: math.fsum(map(arm.mean_s, _UNDER.get(key, ()))) for key in arm.roofs}
    return {key: arm.roofs[key].seconds / seconds for key, seconds in taken_s.items() if seconds > 0}


def speedup(gain: Gain) -> Interval:
    """Return the reference's seconds over the plan's, without the clock, paired by lap."""
    return ratio_interval([t.plain_s / o.plain_s for t, o in zip(gain.reference.laps, gain.plan.laps, strict=True)])

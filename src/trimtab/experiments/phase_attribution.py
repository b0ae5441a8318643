"""Attribution of a plan's gain to the phases of a step, and to compute, memory and communication bounds.

Means of paired rounds, because means are additive: the phases' savings and the unattributed rest sum to the saving
of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab.core.step_phases import PHASES, ArmPhases, RooflineBound, TimedGain, TimedRound
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, mean_interval, ratio_interval, share_interval

WHOLE, UNATTRIBUTED = "step", "unattributed"
# Timing phases may lengthen a step by this factor at most, or the phases do not represent a plain step: a step that
# waits for its host also waits for the timers.
DISTORTED = 1.25
# Phases that have a roofline, and the phases whose seconds it covers.
_UNDER = {"forward": ("forward",), "backward": ("backward", "recompute"), "optimizer": ("optimizer",)}
# Phases that a task's own step function hides in its rest, and our loop times separately.
_HIDDEN = ("forward", "recompute", "backward")
COMPUTE, MEMORY, UNBOUND = "compute-bound", "memory-bound", "not known"
_OTHERS = {"communication": "communication-bound", "data": "waiting for data", "rest": "the loop itself"}
BOUNDS = (COMPUTE, MEMORY, *_OTHERS.values(), UNBOUND)


@dataclass(frozen=True)
class SavedTime:
    """Time saved in one phase.

    Args:
        phase: name of the phase.
        reference_s: mean seconds per step of the reference.
        plan_s: mean seconds per step of the plan.
        saved: reference minus plan in seconds, paired by round, with a 95 % t interval.
        share: fraction of the whole step's saving; None if the saving is not significant.
    """

    phase: str
    reference_s: float
    plan_s: float
    saved: Interval
    share: float | None


@dataclass(frozen=True)
class Attribution:
    """Split of a plan's gain by phase and module class.

    Args:
        phases: timed phases of either arm, in order. A forward and backward hidden in the rest of one arm are merged
            into the rest of both.
        unattributed: difference between the two arms' timing overhead.
        whole: steps without timers; phases and `unattributed` sum to it.
        reference_clock: reference step with timers divided by a step without, paired by round.
        plan_clock: plan step with timers divided by a step without, paired by round.
        parts: savings by module class in forward and backward; empty if only one arm distinguishes classes.
        is_distorted: result of `is_distorted`.
    """

    phases: tuple[SavedTime, ...]
    unattributed: SavedTime
    whole: SavedTime
    reference_clock: Interval
    plan_clock: Interval
    parts: tuple[SavedTime, ...]
    is_distorted: bool


def attribute(gain: TimedGain) -> Attribution:
    """Return the saving of each phase; phases and the unattributed rest sum to the whole."""
    theirs, ours = gain.reference.laps, gain.plan.laps
    whole_s = math.fsum(t.plain_s - o.plain_s for t, o in zip(theirs, ours, strict=True)) / len(ours)
    interval = mean_interval([t.plain_s - o.plain_s for t, o in zip(theirs, ours, strict=True)])
    # A slowdown has no shares: the paper's shares are fractions of a gain.
    is_gain, distorted = _is_gain(interval), is_distorted(gain)

    def saved(name: str, of: Callable[[TimedRound], float]) -> SavedTime:
        pairs = [(of(t), of(o)) for t, o in zip(theirs, ours, strict=True)]
        found = mean_interval([t - o for t, o in pairs])
        reference_s, plan_s = (math.fsum(each) / len(each) for each in zip(*pairs, strict=True))
        return SavedTime(name, reference_s, plan_s, found, found.mean / whole_s if is_gain and not distorted else None)

    def of_phase(name: str, within: tuple[str, ...]) -> SavedTime:
        return saved(name, lambda lap: math.fsum(lap.seconds.get(each, 0.0) for each in within))

    def of_part(name: str) -> SavedTime:
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


def _told(gain: TimedGain) -> dict[str, tuple[str, ...]]:
    """Return reported phases and their constituents; phases hidden in one arm's rest are merged in both arms."""
    seen = [phase for phase in PHASES if phase in (*gain.reference.has, *gain.plan.has)]
    if ("forward" in gain.reference.has) == ("forward" in gain.plan.has):
        return {phase: (phase,) for phase in seen}
    return {phase: (phase,) for phase in seen if phase not in (*_HIDDEN, "rest")} | {"rest": (*_HIDDEN, "rest")}


def _are_told_apart(gain: TimedGain) -> bool:
    """Return True if both arms time the same parts of a step.

    A compiled model has no times by module class, and a step whose forward is not timed has no parts.
    """
    arms = (gain.reference, gain.plan)
    theirs, ours = (("forward" in a.has, any(" " in name for lap in a.laps for name in lap.parts)) for a in arms)
    return theirs == ours


def is_distorted(gain: TimedGain) -> bool:
    """Return True if timers lengthen a step so much that its phases do not represent a plain step."""
    return any(_clock_cost(arm).mean > DISTORTED for arm in (gain.reference, gain.plan))


def _clock_cost(arm: ArmPhases) -> Interval:
    return ratio_interval([lap.clocked_s / lap.plain_s for lap in arm.laps])


@dataclass(frozen=True)
class SavedFraction:
    """Fraction of a step's saved seconds that belongs to a phase or bound.

    Args:
        of: name of the phase or bound.
        share: mean fraction with an interval.
        each: saving per round divided by the mean saving of a whole step; their mean is the share.
    """

    of: str
    share: Interval
    each: tuple[float, ...]


def shares(gain: TimedGain) -> tuple[SavedFraction, ...]:
    """Return the shares of phases, and of bounds (`BOUNDS`) unless a phase has an unknown bound.

    Empty if the saving is not significant or timers distort the step.
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
        SavedFraction(name, share_interval(seconds, wholes), tuple(each / mean_s for each in seconds))
        for name, seconds in saved.items()
    )


def bound_seconds(arm: ArmPhases) -> dict[str, float]:
    """Return the mean seconds of a timed step by bound (`BOUNDS`); the values sum to the step.

    A phase's seconds are split in proportion to the compute and memory seconds of its roofline. Phases without a
    roofline are unknown, as is a rest that contains the forward.
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


def _roof_over(phase: str, arm: ArmPhases) -> RooflineBound | None:
    return next((roof for key, roof in arm.roofs.items() if phase in _UNDER.get(key, ())), None)


def of_the_roof(arm: ArmPhases) -> Mapping[str, float]:
    """Return roofline seconds divided by measured seconds per phase; above 1 if caches hold tensors."""
    taken_s = {key: math.fsum(map(arm.mean_s, _UNDER.get(key, ()))) for key in arm.roofs}
    return {key: arm.roofs[key].seconds / seconds for key, seconds in taken_s.items() if seconds > 0}


def speedup(gain: TimedGain) -> Interval:
    """Return the ratio of reference to plan seconds per step without timers, paired by round."""
    return ratio_interval([t.plain_s / o.plain_s for t, o in zip(gain.reference.laps, gain.plan.laps, strict=True)])

"""Interpretation of trials: relative speed, violated limits, resolution of the A/A control."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from trimtab.core.choice import Note
from trimtab.core.objective import Budget, Cost, Objective
from trimtab.core.units import format_bytes, format_joules, format_seconds
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, rank_interval, ratio_interval, resolution
from trimtab.plans.profile import Profile, Trial

# Blocks after which a phase may drop candidates that lost all of them; acceptance needs the blocks of a full verdict.
MIN_BLOCKS = 3
# A memory saving alone justifies a change if it is at least the fraction WORTH_SAVING of the peak, the mean of the
# speed ratio is at least FREE_SPEED, and the interval excludes a loss of speed above the fraction LOSS_PER_SAVING of
# the saving: a few blocks on a noisy machine cannot exclude a loss of 1%, and a large saving is worth that doubt.
FREE_SPEED = 0.99
WORTH_SAVING = 0.05
LOSS_PER_SAVING = 0.25
CLEARLY_SLOWER = 0.95
# Without a memory limit, a plan's peak is at most this multiple of the loop's own.
CLEARLY_MORE = 1.1


def speed_ratio(ours: Trial, theirs: Trial) -> Interval:
    """Return the speed of `ours` relative to `theirs`, paired by block."""
    return rank_interval([b / a for a, b in zip(ours.block_s, theirs.block_s, strict=False)])


def typical_ratio(ours: Trial, theirs: Trial) -> float:
    """Return the speed of `ours` relative to `theirs` by the median over blocks, robust to a disturbed block."""
    return math.exp(statistics.median(math.log(b / a) for a, b in zip(ours.block_s, theirs.block_s, strict=False)))


def ratio_by_longest(ours: Trial, theirs: Trial, trials: Sequence[Trial]) -> float:
    """Return `typical_ratio` of two trials of a phase, computed by way of the trial with most blocks.

    Either trial may have been dropped early. Trials that ran longer than a dropped trial are compared with it on the
    common blocks, and with each other on all blocks.
    """
    longest = max([theirs, *trials], key=lambda trial: len(trial.block_s))
    return typical_ratio(ours, longest) * typical_ratio(longest, theirs)


def score_ratio(ours: Trial, theirs: Trial, objective: Objective, unit: Trial) -> Interval:
    """Return C(theirs) / C(ours), paired by block, with costs relative to `unit`; the speed ratio if only time counts.

    If energy counts, the number of pairs is the number of power readings, paired with their parts of the blocks: five
    readings carry no more information when split into fifteen pairs.
    """
    if objective.time == 1.0:
        return speed_ratio(ours, theirs)
    base = Cost(unit.step_s or 0.0, unit.peak_bytes, unit.energy_j)
    num = min(len(ours.block_s), len(theirs.block_s))
    pairs = min(num, len(ours.watts), len(theirs.watts)) if objective.energy > 0 else num

    def score(trial: Trial, pair: int) -> float:
        step_s = statistics.fmean(trial.block_s[pair:num:pairs])
        energy_j = trial.watts[pair] * step_s if objective.energy > 0 else None
        return objective.score(Cost(step_s, trial.peak_bytes, energy_j), base)

    return rank_interval([score(theirs, pair) / score(ours, pair) for pair in range(pairs)])


def control_interval(profile: Profile, stage: str, objective: Objective | None = None) -> Interval | None:
    """Return the A/A control's ratio, a phase's incumbent compared with itself; None if missing or failed.

    A ratio of speeds; of scores C if the objective weighs more than time, because rivals are then compared by C. None
    if energy is weighed and the meter failed, because power readings have separate noise.
    """
    trials = profile.stage(stage)
    control = next((trial for trial in trials if trial.control), None)
    if control is None or min(len(control.block_s), len(trials[0].block_s)) < 2:
        return None
    if objective is not None and objective.time != 1.0:
        if objective.energy > 0 and not (control.watts and trials[0].watts):
            return None
        # The control is the same loop, so its memory is not counted again.
        known = replace(control, peak_bytes=trials[0].peak_bytes)
        return score_ratio(known, trials[0], objective, trials[0])
    return speed_ratio(control, trials[0])


def resolution_in_words(control: Interval | None) -> str:
    """Return the resolution of an A/A control in words."""
    if not math.isfinite(resolution(control)):
        return "without an A/A control no gain is significant"
    return f"the A/A control resolves gains above {100 * resolution(control):.2g}%"


def speed_in_words(speed: Interval) -> str:
    """Return a speed ratio in words."""
    if not math.isfinite(speed.high):
        return f"{speed.mean:.3g}x the speed (n={speed.n})"
    return f"{speed.mean:.3g}x the speed (95% {speed.low:.3g} to {speed.high:.3g}, n={speed.n})"


def is_behind(ours: Sequence[float], theirs: Sequence[float], *, is_lighter: bool) -> bool:
    """Return True if all blocks, in seconds, are slower than the rival's, or the mean is significantly slower.

    Three blocks of an equal candidate are all slower in 1 of 8 phases. A candidate with less memory must be slower than
    `CLEARLY_SLOWER`, because a small loss of speed may be acceptable.
    """
    speed = ratio_interval([b / a for a, b in zip(ours, theirs, strict=True)])
    if speed.high >= 1 and not all(a > b for a, b in zip(ours, theirs, strict=True)):
        return False
    return not is_lighter or speed.mean < CLEARLY_SLOWER


def reason_unfit(profile: Profile, trial: Trial, budget: Budget) -> Note | None:
    """Return the reason why a trial of whole steps cannot be chosen, or None.

    If the meter failed in this trial, energy uses the power of the same settings in a different trial.
    """
    if (failure := trial.failure) is not None:
        return failure
    if len(trial.block_s) < MIN_BLOCKS:
        taken = f"{len(trial.block_s)} blocks of steps with {format_seconds(trial.step_s)} per step"
        return Note("trial.stopped_early", f"much slower: the trial was stopped after {taken}")
    power_w = trial.power_w or profile.power_w(trial.candidate)
    energy_j = None if trial.step_s is None or power_w is None else power_w * trial.step_s
    over = over_budget(trial.step_s, trial.peak_bytes, budget, energy_j)
    return over or over_own_peak(profile, trial.peak_bytes, budget) or unknown_energy(energy_j, budget)


def over_own_peak(profile: Profile, peak_bytes: int | None, budget: Budget) -> Note | None:
    """Return the reason for refusing a peak well above the loop's own without a memory limit, or None."""
    own = profile.own_peak_bytes
    if budget.memory is not None or own is None or peak_bytes is None or peak_bytes <= CLEARLY_MORE * own:
        return None
    ratio = f"{peak_bytes / own:.2f}x that of the unchanged loop, {format_bytes(own)}"
    text = f"peak memory {format_bytes(peak_bytes)} is {ratio}; set Budget(memory=...) to allow more memory"
    return Note("memory.over_own_peak", text)


def unknown_energy(energy_j: float | None, budget: Budget, objective: Objective | None = None) -> Note | None:
    """Return the reason for refusing a cost with unknown energy, or None if energy is known or does not count."""
    counts = budget.energy is not None or (objective is not None and objective.energy > 0)
    return Note("energy.unknown", "the energy per step is unknown") if counts and energy_j is None else None


def over_budget(
    step_s: float | None, peak_bytes: int | None, budget: Budget, energy_j: float | None = None
) -> Note | None:
    """Return the violated hard limit, or None; unknown costs violate nothing."""
    limit = budget.memory_bytes
    if limit is not None and peak_bytes is not None and peak_bytes > limit:
        text = f"peak memory {format_bytes(peak_bytes)} is over the budget of {format_bytes(limit)}"
        return Note("budget.memory", text)
    if budget.time is not None and step_s is not None and step_s > budget.time:
        text = f"{format_seconds(step_s)} per step is over the budget of {format_seconds(budget.time)}"
        return Note("budget.time", text)
    if budget.energy is not None and energy_j is not None and energy_j > budget.energy:
        text = f"{format_joules(energy_j)} per step is over the budget of {format_joules(budget.energy)}"
        return Note("budget.energy", text)
    return None


def is_free(ours: Trial, theirs: Trial) -> bool:
    """Return True if a trial saves memory without a measured loss of speed; a larger saving may be less certain."""
    if ours.peak_bytes is None or theirs.peak_bytes is None:
        return False
    return saves_for_free(speed_ratio(ours, theirs), saved_memory_fraction(ours, theirs))


def saves_for_free(speed: Interval, saved: float) -> bool:
    """Return True if a fraction of the peak memory is saved without a measured loss of speed."""
    is_as_fast = speed.mean >= FREE_SPEED and speed.low >= min(FREE_SPEED, 1 - LOSS_PER_SAVING * saved)
    return is_as_fast and speed.n >= MIN_PAIRS_FOR_VERDICT and saved >= WORTH_SAVING


def saved_memory_fraction(ours: Trial, theirs: Trial) -> float:
    """Return the saved fraction of the other trial's peak memory."""
    return 1 - (ours.peak_bytes or 0) / (theirs.peak_bytes or 1)


# Successive elimination: selection of a search phase's candidates for the next round.


Arm = TypeVar("Arm", bound=Any)  # a trial or a running candidate: candidate, block_s, peak_bytes and control


def still_open(running: Sequence[Arm], incumbent: Arm, *, orders: bool) -> list[Arm]:
    """Return the candidates to run in the next round; the incumbent, the first of the phase, may have failed."""
    raced = [arm for arm in running if orders and arm.block_s and not arm.control]
    rival = min(raced, key=lambda arm: statistics.median(arm.block_s), default=incumbent)
    return [arm for arm in running if arm.control or not has_lost(arm, rival)]


def has_lost(arm: Arm, rival: Arm) -> bool:
    """Return True if a candidate is behind a rival.

    Never True for a fused step alone, because its gain is too small to show in a whole step.
    """
    if arm is rival or not rival.block_s or arm.candidate.alike(rival.candidate, "fused_optimizer"):
        return False
    is_lighter = (arm.peak_bytes or 2**63) <= (1 - WORTH_SAVING) * (rival.peak_bytes or 0)
    return is_behind(arm.block_s, rival.block_s, is_lighter=is_lighter)

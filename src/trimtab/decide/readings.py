"""What trials say: speed of one against another, which limit one breaks, what the machine resolves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from trimtab.core.objective import Budget, Cost, Objective
from trimtab.core.profile import Profile, Trial
from trimtab.core.units import format_bytes, format_joules, format_seconds
from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT, Interval, ratio_interval, resolution

# After this many blocks a stage may drop who lost each of them; what is accepted takes as many as any verdict.
MIN_BLOCKS = 3
# Memory alone is worth a change only if it costs at most this much speed (interval's lower end) and saves at least this
# share of the peak.
FREE_SPEED = 0.99
WORTH_SAVING = 0.05
CLEARLY_SLOWER = 0.95
# Without a limit on memory a plan's peak is at most this multiple of the loop's own.
CLEARLY_MORE = 1.1


def speed_ratio(ours: Trial, theirs: Trial) -> Interval:
    """Return how many times faster `ours` is, paired by block."""
    return ratio_interval([b / a for a, b in zip(ours.block_s, theirs.block_s, strict=False)])


def typical_ratio(ours: Trial, theirs: Trial) -> float:
    """Return how many times faster `ours` is, by the median of its blocks: of three or more one may be disturbed."""
    return math.exp(statistics.median(math.log(b / a) for a, b in zip(ours.block_s, theirs.block_s, strict=False)))


def ratio_by_longest(ours: Trial, theirs: Trial, trials: Sequence[Trial]) -> float:
    """Return `typical_ratio` of two of a stage's trials, by way of who ran longest: either may have been dropped.

    Two that went on after a third was dropped are held against it by the blocks that it ran, and against each other by
    all of theirs.
    """
    longest = max([theirs, *trials], key=lambda trial: len(trial.block_s))
    return typical_ratio(ours, longest) * typical_ratio(longest, theirs)


def score_ratio(ours: Trial, theirs: Trial, objective: Objective, unit: Trial) -> Interval:
    """Return C(theirs) / C(ours), paired by block, in units of a trial's cost; speed alone where only that counts.

    Where energy counts there are as many pairs as windows of watts, each with its share of the blocks: watts that were
    read five times say no more in fifteen pairs.
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

    return ratio_interval([score(theirs, pair) / score(ours, pair) for pair in range(pairs)])


def control_interval(profile: Profile, stage: str, objective: Objective | None = None) -> Interval | None:
    """Return an A/A control's ratio: a stage's incumbent against itself. None without one, or where it failed.

    Of speeds; of C where that weighs more than time: it is then what a rival is better by. Watts have noise of their
    own: none where the meter was lost.
    """
    trials = profile.stage(stage)
    control = next((trial for trial in trials if trial.control), None)
    if control is None or min(len(control.block_s), len(trials[0].block_s)) < 2:
        return None
    if objective is not None and objective.time != 1.0:
        if objective.energy > 0 and not (control.watts and trials[0].watts):
            return None
        known = replace(control, peak_bytes=trials[0].peak_bytes)  # of one loop: the control's is not counted again
        return score_ratio(known, trials[0], objective, trials[0])
    return speed_ratio(control, trials[0])


def resolves(control: Interval | None) -> str:
    """Return in words what an A/A control resolves."""
    if not math.isfinite(resolution(control)):
        return "without an A/A control nothing can be resolved"
    return f"the A/A control resolves {100 * resolution(control):.2g}%"


def figures(speed: Interval) -> str:
    """Return a speed in words."""
    if not math.isfinite(speed.high):
        return f"{speed.mean:.3g}x the speed (n={speed.n})"
    return f"{speed.mean:.3g}x the speed (95% {speed.low:.3g} to {speed.high:.3g}, n={speed.n})"


def is_behind(ours: Sequence[float], theirs: Sequence[float], *, is_lighter: bool) -> bool:
    """Return whether blocks are all slower than another's, as an equal one's three are in 1 of 8 stages, or clearly so.

    One that needs less memory may still be as fast as makes no difference: it is behind where it is clearly slower.
    """
    speed = ratio_interval([b / a for a, b in zip(ours, theirs, strict=True)])
    if speed.high >= 1 and not all(a > b for a, b in zip(ours, theirs, strict=True)):
        return False
    return not is_lighter or speed.mean < CLEARLY_SLOWER


def unfit(profile: Profile, trial: Trial, budget: Budget) -> str | None:
    """Return why a trial of whole steps cannot be chosen, or None.

    Where its meter was lost, its joules are by the watts of the same settings in another trial.
    """
    if trial.error is not None:
        return trial.error
    if len(trial.block_s) < MIN_BLOCKS:
        return f"stopped after {len(trial.block_s)} blocks: {format_seconds(trial.step_s)} per step is far slower"
    power_w = trial.power_w or profile.power_w(trial.candidate)
    energy_j = None if trial.step_s is None or power_w is None else power_w * trial.step_s
    over = over_budget(trial.step_s, trial.peak_bytes, budget, energy_j)
    return over or over_own_peak(profile, trial.peak_bytes, budget) or unknown_energy(energy_j, budget)


def over_own_peak(profile: Profile, peak_bytes: int | None, budget: Budget) -> str | None:
    """Return why a peak is refused where no limit allows it: it is clearly above the loop's own; else None."""
    own = profile.own_peak_bytes
    if budget.memory is not None or own is None or peak_bytes is None or peak_bytes <= CLEARLY_MORE * own:
        return None
    ratio = f"{peak_bytes / own:.2f}x the loop's own {format_bytes(own)}"
    return f"peak memory {format_bytes(peak_bytes)} is {ratio}, which no limit allows: Budget(memory=...) does"


def unknown_energy(energy_j: float | None, budget: Budget, objective: Objective | None = None) -> str | None:
    """Return why joules that are not known speak against a cost, or None where they are known or do not count."""
    counts = budget.energy is not None or (objective is not None and objective.energy > 0)
    return "its energy is not known" if counts and energy_j is None else None


def over_budget(
    step_s: float | None, peak_bytes: int | None, budget: Budget, energy_j: float | None = None
) -> str | None:
    """Return which hard limit a cost breaks, or None; what is not known breaks none."""
    limit = budget.memory_bytes
    if limit is not None and peak_bytes is not None and peak_bytes > limit:
        return f"peak memory {format_bytes(peak_bytes)} is over the budget of {format_bytes(limit)}"
    if budget.time is not None and step_s is not None and step_s > budget.time:
        return f"{format_seconds(step_s)} per step is over the budget of {format_seconds(budget.time)}"
    if budget.energy is not None and energy_j is not None and energy_j > budget.energy:
        return f"{format_joules(energy_j)} per step is over the budget of {format_joules(budget.energy)}"
    return None


def is_free(ours: Trial, theirs: Trial) -> bool:
    """Return whether a trial saves memory against another at no cost in speed."""
    if ours.peak_bytes is None or theirs.peak_bytes is None:
        return False
    speed = speed_ratio(ours, theirs)
    is_as_fast = speed.n >= MIN_PAIRS_FOR_VERDICT and speed.low >= FREE_SPEED
    return is_as_fast and saved(ours, theirs) >= WORTH_SAVING


def saved(ours: Trial, theirs: Trial) -> float:
    """Return the share of another trial's peak that one saves."""
    return 1 - (ours.peak_bytes or 0) / (theirs.peak_bytes or 1)

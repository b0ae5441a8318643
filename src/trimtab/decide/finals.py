"""Who wins the final: the reference, until somebody is clearly better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.objective import Budget, Objective
from trimtab.core.profile import Candidate, Profile, Trial
from trimtab.decide.readings import control_interval, is_free, score_ratio, speed_ratio, unfit, unknown_energy
from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT, Interval, is_gain

_UNREAD = "its meter was lost, and nobody's joules can be held against the loop's"


@dataclass(frozen=True)
class Outcome:
    """What a final decided.

    Args:
        winner: its trial. reference: that of the user's loop. control: how far that is from itself.
        must_leave: why the reference cannot stay, or None. unread: why nobody's joules, which are weighed, can be held
            against the reference's, which stays then; or "".
    """

    winner: Trial
    reference: Trial
    control: Interval | None
    must_leave: str | None = None
    unread: str = ""

    @property
    def speed(self) -> Interval | None:
        """How many times the reference's speed the winner has; None where that did not run, or won."""
        if self.winner is self.reference or not (self.reference.block_s and self.winner.block_s):
            return None
        return speed_ratio(self.winner, self.reference)


def standing(profile: Profile) -> tuple[str, ...]:
    """Return the finals that decide: those without a candidate that its proof refused, if there are any."""
    names = profile.finals
    unrefuted = [n for n in names if not any(profile.refutation_of(t.candidate) for t in profile.stage(n))]
    return tuple(unrefuted or names)


def decide(profile: Profile, stage: str, objective: Objective, budget: Budget) -> Outcome | None:
    """Return a final's outcome; None where nobody in it fits.

    Rivals come in the order in which they were predicted. The first that is clearly better than the reference leads,
    until another is clearly better than it; one that changes less takes its place unless it is clearly worse; and so
    does one as fast that needs less memory. Where the reference cannot stay, whoever fits may lead. It stays where its
    joules are weighed and were not read: by none nobody is better.
    """
    reference, *rivals = [trial for trial in profile.stage(stage) if not trial.control]
    control = control_interval(profile, stage, objective)
    must_leave = _refusal(profile, reference, budget)
    unread = unknown_energy(reference.energy_j, Budget(), objective)
    fitting = [trial for trial in rivals if _refusal(profile, trial, budget, objective) is None]
    if must_leave is not None and not fitting:
        return None
    if must_leave is None and unread is not None:
        return Outcome(reference, reference, control, unread=_UNREAD)
    unit = reference if reference.block_s and unread is None else fitting[0]

    def is_better(ours: Trial, theirs: Trial) -> bool:
        found = score_ratio(ours, theirs, objective, unit)
        if control is None and must_leave is not None:  # nothing is claimed against the reference: who is faster?
            return found.n >= MIN_PAIRS_FOR_VERDICT and found.low > 1
        return is_gain(found, control)

    def is_accepted(trial: Trial) -> bool:
        if must_leave is not None:
            return True
        if trial.candidate.differences(reference.candidate) == ("fused_optimizer",):
            # Its gain is clear on the optimizer's step alone, a small share of a whole one, where it may drown. That is
            # one in seconds: where joules are weighed, what they are is asked too.
            weighs = objective.energy > 0
            found = score_ratio(trial, reference, objective, unit) if weighs else speed_ratio(trial, reference)
            is_read = control is not None or not weighs
            return is_read and found.n >= MIN_PAIRS_FOR_VERDICT and found.high >= 1
        return is_better(trial, reference)

    accepted = [trial for trial in fitting if is_accepted(trial)]
    winner = accepted[0] if accepted else reference
    for trial in accepted[1:]:
        winner = trial if is_better(trial, winner) else winner
    for trial in accepted:
        fewer = _changes(trial, reference.candidate) < _changes(winner, reference.candidate)
        winner = trial if fewer and not is_better(winner, trial) else winner
    kept = [] if must_leave is not None or accepted else [reference]
    if objective.energy == 0:  # as fast, and lighter, might take more of it
        winner = _lightest([*fitting, *kept], winner)
    return Outcome(winner, reference, control, must_leave)


def _refusal(profile: Profile, trial: Trial, budget: Budget, objective: Objective | None = None) -> str | None:
    """Return why a trial cannot stay or win: also where its settings failed before.

    Of rivals, whose joules have to be known where an objective weighs them, that is given.
    """
    known = unfit(profile, trial, budget)
    if known is None and objective is not None:
        known = unknown_energy(trial.energy_j, Budget(), objective)
    return profile.error_of(trial.candidate) or known


def _changes(trial: Trial, reference: Candidate) -> frozenset[str]:
    return frozenset(trial.candidate.differences(reference))


def _lightest(fitting: Sequence[Trial], winner: Trial) -> Trial:
    """Return who saves most memory at the winner's speed, or the winner."""
    free = [trial for trial in fitting if trial is not winner and is_free(trial, winner)]
    return min(free, key=lambda trial: trial.peak_bytes or 0, default=winner)

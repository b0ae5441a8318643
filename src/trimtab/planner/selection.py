"""Decision of a final: the reference wins unless a rival is significantly better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.choice import Note
from trimtab.core.objective import Budget, Objective
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, is_gain
from trimtab.planner.trial_statistics import (
    control_interval,
    is_free,
    reason_unfit,
    score_ratio,
    speed_ratio,
    unknown_energy,
)
from trimtab.plans.profile import Candidate, Profile, Trial

_UNREAD = Note(
    "energy.not_read", "the energy of the unchanged loop was not measured, so no energy can be compared with it"
)


@dataclass(frozen=True)
class FinalOutcome:
    """Result of a final.

    Args:
        control: A/A control, the reference compared with itself.
        must_leave: reason why the reference cannot stay, or None.
        unread: reason why weighed energy cannot be compared, in which case the reference stays; otherwise None.
    """

    winner: Trial
    reference: Trial
    control: Interval | None
    must_leave: Note | None = None
    unread: Note | None = None

    @property
    def speed(self) -> Interval | None:
        """Speed of the winner relative to the reference; None if the reference won or did not run."""
        if self.winner is self.reference or not (self.reference.block_s and self.winner.block_s):
            return None
        return speed_ratio(self.winner, self.reference)


def deciding_finals(profile: Profile) -> tuple[str, ...]:
    """Return the deciding finals: those without a refuted candidate, or all if every final has one."""
    names = profile.finals
    unrefuted = [n for n in names if not any(profile.refutation_of(t.candidate) for t in profile.stage(n))]
    return tuple(unrefuted or names)


def decide(profile: Profile, stage: str, objective: Objective, budget: Budget) -> FinalOutcome | None:
    """Return the result of a final; None if no candidate fits the budget.

    Rivals are in predicted order. The first that is significantly better than the reference leads, until a rival is
    significantly better than the leader. A candidate with fewer changes replaces the leader unless significantly worse,
    and so does a candidate of equal speed with less memory. If the reference cannot stay, any fitting candidate may
    lead. The reference stays if energy is weighed and the reference's energy is unknown.
    """
    reference, *rivals = [trial for trial in profile.stage(stage) if not trial.control]
    control = control_interval(profile, stage, objective)
    must_leave = _refusal(profile, reference, budget)
    unread = unknown_energy(reference.energy_j, Budget(), objective)
    fitting = [trial for trial in rivals if _refusal(profile, trial, budget, objective) is None]
    if must_leave is not None and not fitting:
        return None
    if must_leave is None and unread is not None:
        return FinalOutcome(reference, reference, control, unread=_UNREAD)
    unit = reference if reference.block_s and unread is None else fitting[0]

    def is_better(ours: Trial, theirs: Trial) -> bool:
        found = score_ratio(ours, theirs, objective, unit)
        # With no baseline to beat, only the faster of two rivals matters.
        if control is None and must_leave is not None:
            return found.n >= MIN_PAIRS_FOR_VERDICT and found.low > 1
        return is_gain(found, control)

    def is_accepted(trial: Trial) -> bool:
        if must_leave is not None:
            return True
        if trial.candidate.differences(reference.candidate) == ("fused_optimizer",):
            # Its gain was proved on the optimizer step alone, a small fraction of a whole step, in which it may drown.
            # The proof covers seconds; if energy is weighed, the score has to agree.
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
    if objective.energy == 0:  # A candidate as fast, with less memory, might need more energy.
        winner = _lightest([*fitting, *kept], winner)
    return FinalOutcome(winner, reference, control, must_leave)


def _refusal(profile: Profile, trial: Trial, budget: Budget, objective: Objective | None = None) -> Note | None:
    """Return the reason why a trial cannot stay, or win by an objective; earlier failures of its settings included."""
    known = reason_unfit(profile, trial, budget)
    if known is None and objective is not None:
        known = unknown_energy(trial.energy_j, Budget(), objective)
    return profile.error_of(trial.candidate) or known


def _changes(trial: Trial, reference: Candidate) -> frozenset[str]:
    return frozenset(trial.candidate.differences(reference))


def _lightest(fitting: Sequence[Trial], winner: Trial) -> Trial:
    """Return the trial that saves most memory at the winner's speed, or the winner."""
    free = [trial for trial in fitting if trial is not winner and is_free(trial, winner)]
    return min(free, key=lambda trial: trial.peak_bytes or 0, default=winner)

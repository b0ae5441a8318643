"""Selection of a plan from a profile: a joint decision over all settings, with reasons and rejected alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from trimtab.core.choice import Choice, MeasuredCost, Note
from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.units import format_bytes, format_joules, format_seconds
from trimtab.planner import explain, search_space, selection
from trimtab.planner.cost_model import CostModel
from trimtab.planner.recommendations import advice_of
from trimtab.planner.search_space import PricedCandidate
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, resolution
from trimtab.planner.trial_statistics import speed_ratio
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, Profile, is_final
from trimtab.settings import SEARCHED, SETTINGS, unchanged
from trimtab.settings.step_in_backward import NOTES, SAVES

_RISES = 1.02  # relative to the loop's own peak; repeated counts of a peak agree to about 1 %


class _Decision(NamedTuple):
    """Chosen candidate and the result of the deciding final; None if no final decided."""

    winner: Candidate
    outcome: selection.FinalOutcome | None


def choose(profile: Profile, objective: Objective, budget: Budget) -> Plan:
    """Return the equivalent plan that a profile supports, possibly "change nothing".

    For the profile's own objective and budget, the final decides; likewise for tighter limits that the final's winner
    meets. For a different objective or budget, the final's winner stays if the cost model finds nothing better.
    Otherwise the plan was never compared with the loop, and states so.

    Raises:
        InfeasibleError: no candidate meets the budget; reports the limit and the nearest candidate.
        ValueGivenError: energy is weighed but was not measured.
    """
    _refuse_unknown(profile, objective)
    limits = profile.limits(budget)
    return _plan(profile, search_space.priced_candidates(profile, limits), objective, limits)


def chosen_candidate(profile: Profile, objective: Objective, budget: Budget) -> Candidate | None:
    """Return the settings that `choose` selects; None if no candidate meets the budget."""
    try:
        _refuse_unknown(profile, objective)
        limits = profile.limits(budget)
        return _decide(profile, search_space.priced_candidates(profile, limits), objective, limits).winner
    except (InfeasibleError, ValueGivenError):
        return None


def _refuse_unknown(profile: Profile, objective: Objective) -> None:
    if objective.energy > 0 and not any(trial.watts for trial in profile.trials):
        why = profile.meter.reason or "the meter failed"
        problem = f"Energy has the weight {objective.energy:g}, but the profile has no energy measurements ({why})."
        hint = "Set Objective(energy=0), or pass watts with trimtab.Metering(watts=...) and plan again."
        raise ValueGivenError("energy", problem=problem, hint=hint, code="energy.not_measured")


def choose_each(profile: Profile, objective: Objective, budget: Budget) -> tuple[Plan, ...]:
    """Return the plan for every micro-batch size that may meet the budget, the largest first; errors as of `choose`."""
    _refuse_unknown(profile, objective)
    budget = profile.limits(budget)
    found = search_space.priced_candidates(profile, budget)
    sizes = sorted({point.candidate.micro_batch for point in found if point.refusal is None}, reverse=True)
    if not sizes:
        raise _infeasible(profile, found, budget)
    return tuple(_plan(profile, found, objective, budget, rows) for rows in sizes)


def _plan(
    profile: Profile, found: Sequence[PricedCandidate], objective: Objective, budget: Budget, rows: int | None = None
) -> Plan:
    """Return the plan of the best point, or of the best with a micro-batch of `rows`."""
    decision = _decide(profile, found, objective, budget, rows)
    winner, reference = decision.winner, profile.reference_candidate
    told = explain.Explanations(profile, found, winner, decision.outcome, budget)
    blocks = profile.recomputable_of(winner)
    speed = None if decision.outcome is None else decision.outcome.speed
    noise = resolution(None if decision.outcome is None else decision.outcome.control)
    weighs = objective.energy > 0
    counts = weighs or budget.energy is not None

    def choice(name: str) -> Choice:
        value = getattr(winner, name)
        why, changed = told.reason(name), value != getattr(reference, name)
        return Choice(value, why.text, SETTINGS[name].effect, changed, told.rejected(name), why.code)

    choices: dict[str, Any] = {name: choice(name) for name in SEARCHED}
    choices["clip_norm"] = replace(unchanged("clip_norm"), value=profile.reference.clip_norm)
    return Plan(
        batch_size=profile.loop.batch_size,
        **choices,
        recompute_blocks=() if blocks is None or not winner.changes_blocks else blocks.blocks,
        check=profile.check,
        proof=profile.proof_of(winner),
        reference=profile.reference,
        baseline=_measured(profile, reference) if profile.trials else _predicted(profile, reference),
        target_device="" if profile.trials else profile.device.name,
        peak_margin=None if profile.trials else CostModel(profile).margin,
        seconds_margin=None if profile.trials else CostModel(profile).seconds_margin,
        predicted=_predicted(profile, winner),
        measured=_measured(profile, winner),
        verified=None if speed is None else (speed.low, speed.high),
        timing_noise=noise if math.isfinite(noise) else None,
        stands_between=None if weighs else search_space.stands_between(found, winner, reference),
        front=tuple(point.shown for point in search_space.front(found, with_energy=counts)),
        meter=profile.meter,
        planning_s=profile.profiling_s,
        advice=advice_of(profile, _measured(profile, reference), _measured(profile, winner), winner),
        notes=(
            *profile.notes,
            *_notes_of_memory(profile, winner, budget),
            *_notes_of_gradients(profile, winner),
            *_notes_of_length(profile, winner),
        ),
    )


def _notes_of_length(profile: Profile, winner: Candidate) -> Iterator[Note]:
    """Yield a note on a run that is too short to pay back the time of planning."""
    ours, loop = _measured(profile, winner), _measured(profile, profile.reference_candidate)
    if profile.total_steps is None or ours is None or loop is None or winner == profile.reference_candidate:
        return
    if 0 < profile.total_steps * (loop.step_s - ours.step_s) < profile.profiling_s:
        text = f"the run of {profile.total_steps:,} steps saves less time than planning took"
        yield Note("planning.short_run", text)


def _notes_of_memory(profile: Profile, winner: Candidate, budget: Budget) -> Iterator[Note]:
    """Yield notes on the default memory limit, and on a peak above the loop's own."""
    own, reference = profile.own_peak_bytes, profile.reference
    if own is None:
        return
    limit = profile.limits(Budget()).memory_bytes
    if reference.accumulate > 1 and profile.budget.memory is None and budget.memory_bytes == limit:
        yield Note(
            "memory.own_peak",
            f"memory is limited to the peak of the unchanged loop, {format_bytes(own)}, because the loop accumulates "
            f"{reference.accumulate} batches per step; set Budget(memory=...) to allow more",
        )
    planned = _measured(profile, winner)
    peak = None if planned is None else planned.peak_bytes
    if peak is not None and peak > _RISES * own:
        rise = f"by {100 * (peak / own - 1):.2g}%, from {format_bytes(own)} to {format_bytes(peak)}"
        yield Note("memory.peak_rises", f"the peak memory of a step increases {rise}")


def _notes_of_gradients(profile: Profile, winner: Candidate) -> Iterator[Note]:
    """Yield a note on the memory of the gradients that a step within the backward pass frees."""
    if not winner.step_in_backward:
        return
    model = CostModel(profile)
    early, late = (model.predict(each).peak_bytes for each in (winner, winner.having(step_in_backward=False)))
    if early is not None and late is not None:
        more = format_bytes(max(0, late - early))
        yield Note(SAVES, f"without step_in_backward, the peak memory is predicted to rise by {more}")
    yield Note(
        NOTES[1],
        "after run.train_step, gradients (p.grad) are None; for a loop that reads gradients, or calls run.step itself, "
        "plan with Reference(keeps_gradients=True)",
    )


def choose_there(profile: Profile) -> Plan:
    """Return the plan for a target device, with the profile's own limits and weights."""
    chosen = choose(profile, profile.objective, profile.budget)
    # judged from the modules alone, because nothing was run
    unproved = chosen.check is not None and chosen.check.splittable
    return replace(chosen, check=None) if unproved else chosen


def _decide(
    profile: Profile, found: Sequence[PricedCandidate], objective: Objective, budget: Budget, rows: int | None = None
) -> _Decision:
    rounds = profile.finals
    outcome, judged = _outcome(profile, rounds, objective, budget)
    was_asked = (objective, budget) == (profile.objective, profile.limits(profile.budget))
    if outcome is not None and (was_asked or _still_wins(profile, rounds, outcome, objective, budget)):
        return _Decision(outcome.winner.candidate, outcome)
    winner = None if outcome is None else outcome.winner.candidate
    lost = judged - {winner, profile.reference_candidate} - _untold(profile, rounds, objective)
    fitting = [point for point in found if point.refusal is None and point.candidate not in lost]
    fitting = [point for point in fitting if rows is None or point.candidate.micro_batch == rows]
    if not fitting or (rounds and was_asked):
        raise _infeasible(profile, found, budget)
    unit = next((p for p in found if p.candidate == profile.reference_candidate), fitting[0])
    scores = {point.candidate: search_space.score(point, objective, unit) for point in fitting}
    simplest = search_space.simplest_candidate(fitting, scores, profile.reference_candidate)
    stays = unit.candidate == profile.reference_candidate and unit in fitting
    best = (
        unit.candidate
        if stays and not search_space.is_worth_a_change(simplest, unit, objective)
        else simplest.candidate
    )
    if winner in scores and scores[winner] <= scores[best] / search_space.WORTH_A_RUN:
        return _Decision(winner, outcome)
    return _Decision(best, None)


def _untold(profile: Profile, rounds: Sequence[str], objective: Objective) -> set[Candidate]:
    """Return candidates with too few energy readings for a verdict in any final, except slower candidates."""
    if objective.energy == 0:
        return set()
    found: set[Candidate] = set()
    for name in rounds:
        own, *rivals = profile.stage(name)
        told = len(own.watts) >= MIN_PAIRS_FOR_VERDICT
        untold = [rival for rival in rivals if not told or len(rival.watts) < MIN_PAIRS_FOR_VERDICT]
        found |= {rival.candidate for rival in untold if rival.block_s and speed_ratio(rival, own).high >= 1}
    return found


def _still_wins(
    profile: Profile, rounds: Sequence[str], outcome: selection.FinalOutcome, objective: Objective, budget: Budget
) -> bool:
    """Return True if the limits are tighter than the profile's own, and the final's winner is the same under both."""
    if objective != profile.objective or not budget.is_within(profile.limits(profile.budget)):
        return False
    before, _ = _outcome(profile, rounds, profile.objective, profile.limits(profile.budget))
    return before is not None and before.winner.candidate == outcome.winner.candidate


def _outcome(
    profile: Profile, rounds: Sequence[str], objective: Objective, budget: Budget
) -> tuple[selection.FinalOutcome | None, set[Candidate]]:
    """Return the first final with a fitting candidate, and its candidates; else None, and those of all finals.

    A later final ran only because no candidate of the earlier finals fitted, which may differ under new limits.
    """
    for name in selection.deciding_finals(profile):
        outcome = selection.decide(profile, name, objective, budget)
        if outcome is not None:
            return outcome, {trial.candidate for trial in profile.stage(name)}
    return None, {trial.candidate for name in rounds for trial in profile.stage(name)}


def _infeasible(profile: Profile, found: Sequence[PricedCandidate], budget: Budget) -> InfeasibleError:
    near, rounds = search_space.nearest_refused(found, budget), profile.finals
    if near is None and budget.energy is not None and any(trial.block_s for trial in profile.trials):
        why = profile.meter.reason if profile.meter.is_absent else "the meter failed in every trial"
        limit = format_joules(budget.energy)
        problem = f"The budget limits energy to {limit} per step, but no energy was measured ({why})."
        hint = "Leave out Budget(energy=...), or pass watts with trimtab.Metering(watts=...)."
        return InfeasibleError("budget", problem=problem, hint=hint, code="energy.not_measured")
    if near is None:
        reasons = "; ".join(sorted({t.error for t in profile.trials if t.error}))[:300]
        problem = f"No trial of the loop ran: {reasons}." if reasons else "No trial of the loop ran."
        hint = "Correct the error, and check that the unchanged loop trains."
        return InfeasibleError("plan", problem=problem, hint=hint, code="plan.no_trial_ran")
    cost, nearest = near.cost, f"{near.candidate.describe()}: {near.refusal}"
    problem = f"No settings meet the budget. The nearest are {nearest}."
    if rounds and any(point.refusal is None for point in found):
        missed = f"settings that were predicted to fit exceeded it in {len(rounds)} measurements"
        problem = f"No settings meet the budget: {missed}, the last with {nearest}."
    how = "need" if cost.counted else "are predicted to need"
    more = f" (compared with a limit plus {100 * cost.margin:.2g}%)" if cost.margin and budget.time is not None else ""
    joules = "" if cost.energy_j is None or budget.energy is None else f" and {format_joules(cost.energy_j)}"
    return InfeasibleError(
        "budget",
        got=nearest,
        problem=problem,
        hint=f"Raise the budget: the nearest settings {how} {format_bytes(cost.peak_bytes)} and are predicted to take "
        f"{format_seconds(cost.step_s)}{joules} per step{more}.",
    )


def _measured(profile: Profile, candidate: Candidate) -> MeasuredCost | None:
    """Return a candidate's cost as measured in its last final trial; without a final trial, in its first trial."""
    whole = [trial for trial in profile.trials if trial.is_whole and not trial.control]
    trials = [trial for trial in whole if trial.candidate == candidate and trial.step_s]
    if not trials:
        return None
    chosen = trials[-1] if is_final(trials[-1].stage) else trials[0]
    peaks = [trial.peak_bytes for trial in trials if trial.peak_bytes is not None]
    return MeasuredCost(chosen.step_s or 0.0, peaks[-1] if peaks else None, energy_j=chosen.energy_j)


def _predicted(profile: Profile, candidate: Candidate) -> MeasuredCost | None:
    """Return the predicted cost of a candidate before the finals, with traced bytes if available."""
    before = tuple(trial for trial in profile.trials if trial.stage not in profile.finals)
    model = CostModel(replace(profile, trials=before))
    cost, told = model.predict(candidate), model.traced_bytes(candidate) if before else None
    if cost.step_s is None:
        return None
    return MeasuredCost(cost.step_s, told or cost.peak_bytes, model.between(cost.step_s), cost.energy_j)

"""From a profile to a plan: every choice with its reason, its losers, and what it is predicted to cost."""

from __future__ import annotations

import math
from dataclasses import replace

from trimtab.core.errors import InfeasibleError
from trimtab.core.objective import PRECISIONS, Budget, Objective
from trimtab.core.plan import Choice, Mark, Measured, Plan, Rejected, Scalar
from trimtab.core.profile import Candidate, Profile, Trial
from trimtab.core.units import format_bytes, format_seconds
from trimtab.decide import search
from trimtab.decide.learning_rate import RateChoice
from trimtab.decide.search import Outcome
from trimtab.decide.statistics import is_gain, resolution

_MARKS = Plan.marks()
# Of a step's time, the share that waiting for data takes before a word is said of it.
WORTH_ADVICE = 0.05


def choose(profile: Profile, objective: Objective, budget: Budget) -> Plan:
    """Return the tier-S plan a profile supports: what is chosen, or "change nothing".

    Raises:
        InfeasibleError: no candidate meets the budget; says which limit, and the nearest candidate.
    """
    outcomes = {
        name: search.decide_stage(profile, name, objective, budget) for name in search.STAGES if profile.stage(name)
    }
    reference = search.reference_candidate(profile)
    winner = _final(profile, outcomes, objective, budget)
    _require_feasible(profile, winner, budget)

    def choice(name: str) -> Choice:
        return _choice(name, winner, reference, profile, outcomes)

    return Plan(
        batch_rows=profile.loop.batch_rows,
        micro_batch=choice("micro_batch"),
        precision=choice("precision"),
        memory_layout=choice("memory_layout"),
        allocator=choice("allocator"),
        fused_optimizer=choice("fused_optimizer"),
        clip_norm=Choice(profile.reference.clip_norm, "as the loop has it", Mark.DYNAMICS),
        check=profile.check,
        reference=profile.reference,
        baseline=_cost(profile, reference),
        predicted=_cost(profile, winner),
        verified=_verified(winner, outcomes),
        planning_s=profile.profiling_s,
        advice=_advice(profile),
    )


def adapt_learning_rate(plan: Plan, rates: RateChoice, search_s: float) -> Plan:
    """Return the plan in tier F: peak learning rate from a range test, warm-up and cosine by progress.

    Where the test keeps the user's rate, the user's schedule stays too: nothing speaks for another one.
    """
    total = plan.planning_s + search_s
    scale = Choice(rates.scale, rates.reason, Mark.DYNAMICS, rates.scale != 1.0, rates.losers)
    if not scale.changed:
        kept = replace(plan.schedule, reason="as the loop has it: the rate is, and no schedule was tried on its own")
        return replace(plan, learning_rate_scale=scale, schedule=kept, search_s=search_s, planning_s=total)
    schedule = Choice(
        "warmup_cosine",
        "5% linear warm-up lets the higher rate start safely, cosine to a tenth of it ends low (paper eq. 10)",
        Mark.DYNAMICS,
        changed=True,
        losers=(Rejected("user", "not tried: a range test ends where a rate turns unsafe, and shows no rate to hold"),),
    )
    return replace(plan, learning_rate_scale=scale, schedule=schedule, search_s=search_s, planning_s=total)


def _final(profile: Profile, outcomes: dict[str, Outcome], objective: Objective, budget: Budget) -> Candidate:
    """Return the search's winner; the reference when the verification does not confirm it."""
    reference = search.reference_candidate(profile)
    candidate = search.winner_before(profile, "verify", objective, budget)
    verified = {trial.candidate: trial for trial in profile.stage("verify")}
    if candidate == reference or candidate not in verified:  # under another budget than the profile was recorded for
        return candidate
    if search.unfit(profile, verified[reference], "verify", budget) and verified[candidate].error is None:
        return candidate
    if search.unfit(profile, verified[candidate], "verify", budget):
        return reference
    if candidate not in outcomes["verify"].ratios:
        return reference
    if candidate.differences(reference) == ("fused_optimizer",):
        # Its gain is clear on the optimizer's step alone, a small share of a whole one, where it may drown in noise.
        return reference if outcomes["verify"].ratios[candidate].high < 1 else candidate
    # Each change already had its own clear gain: the verification has to agree with it, not to prove it once more.
    found = outcomes["verify"].ratios[candidate]
    floor = search.FREE_SPEED if _saves_memory(profile, candidate, reference) else 1.0
    agrees = found.mean > floor and found.high >= _promised(outcomes)
    return candidate if agrees or outcomes["verify"].winner == candidate else reference


def _verified(winner: Candidate, outcomes: dict[str, Outcome]) -> tuple[float, float] | None:
    found = outcomes["verify"].ratios.get(winner) if "verify" in outcomes else None
    return None if found is None else (found.low, found.high)


def _promised(outcomes: dict[str, Outcome]) -> float:
    """Return the speed-up that the stages' winners had at the least, measured on whole steps."""
    stages = [outcomes[name] for name in ("allocator", "precision", "micro_batch") if name in outcomes]
    ratios = [stage.ratios[stage.winner] for stage in stages if stage.winner in stage.ratios]
    return math.prod(ratio.low for ratio in ratios)


def _saves_memory(profile: Profile, candidate: Candidate, reference: Candidate) -> bool:
    ours, theirs = _cost(profile, candidate), _cost(profile, reference)
    if ours is None or theirs is None or ours.peak_bytes is None or theirs.peak_bytes is None:
        return False
    return ours.peak_bytes <= (1 - search.WORTH_SAVING) * theirs.peak_bytes


def _cost(profile: Profile, candidate: Candidate) -> Measured | None:
    """Return a candidate's cost as last measured on whole steps."""
    whole = [trial for trial in profile.trials if trial.is_whole and not trial.control]
    trials = [trial for trial in whole if trial.candidate == candidate and trial.step_s]
    if not trials:
        return None
    peaks = [trial.peak_bytes for trial in trials if trial.peak_bytes is not None]
    return Measured(trials[-1].step_s or 0.0, peaks[-1] if peaks else None)


def _require_feasible(profile: Profile, winner: Candidate, budget: Budget) -> None:
    failed = {trial.candidate for trial in profile.trials if trial.error is not None}
    whole = [trial for trial in profile.trials if trial.is_whole and not trial.control]
    ran = [trial for trial in whole if trial.block_s and trial.candidate not in failed]
    if not ran:
        reasons = "; ".join(sorted({t.error for t in profile.trials if t.error}))[:300]
        raise InfeasibleError(
            "plan", given=f"a loop that did not run ({reasons})", expected="at least one trial that runs"
        )
    nearest = min(ran, key=lambda trial: _excess(trial, budget))
    chosen = [trial for trial in ran if trial.candidate == winner]
    if not chosen:
        why = next((t.error for t in profile.trials if t.candidate == winner and t.error), "it was never tried")
        raise InfeasibleError(
            "plan",
            given=f"{winner.describe()}, which failed in a trial ({why})",
            expected="settings that run whenever they are tried",
            way_out=f"{nearest.candidate.describe()} ran to the end.",
        )
    refusal = search.over_budget(profile, chosen[-1], "verify", budget)
    if refusal is not None:
        raise InfeasibleError(
            "budget",
            given=f"{winner.describe()}: {refusal}",
            expected="a plan within the budget",
            way_out=f"The nearest that runs: {nearest.candidate.describe()} needs {format_bytes(nearest.peak_bytes)} "
            f"and {format_seconds(nearest.step_s)} per step.",
        )


def _excess(trial: Trial, budget: Budget) -> tuple[float, float]:
    """Return how far a trial is over the limit it breaks most, then its seconds."""
    step_s = trial.step_s or 0.0
    memory = (trial.peak_bytes or 0) / budget.memory_bytes if budget.memory_bytes else 0.0
    return max(memory, step_s / budget.time if budget.time else 0.0, 1.0), step_s


def _choice(
    name: str, winner: Candidate, reference: Candidate, profile: Profile, outcomes: dict[str, Outcome]
) -> Choice:
    value: Scalar = getattr(winner, name)
    before: Scalar = getattr(reference, name)
    outcome = outcomes.get(_STAGE_OF[name])
    changed = value != before
    if outcome is None:
        reason = _untried(name, profile)
    elif changed:
        reason = outcome.reasons.get(outcome.winner, "needed to meet the budget")
    else:
        reason = _kept_reason(name, profile, outcome, value)
    losers = _losers(name, value, outcome)
    if name == "precision":
        losers += tuple(r for r in _screened(profile) if r.value != value)
    return Choice(value, reason, _MARKS[name], changed, losers)


def _screened(profile: Profile) -> tuple[Rejected, ...]:
    refusals = ((p, search.precision_refusal(profile.device, p)) for p in PRECISIONS)
    return tuple(Rejected(precision, reason) for precision, reason in refusals if reason is not None)


_STAGE_OF = {
    "precision": "precision",
    "memory_layout": "precision",
    "allocator": "allocator",
    "fused_optimizer": "optimizer",
    "micro_batch": "micro_batch",
}


def _kept_reason(name: str, profile: Profile, outcome: Outcome, value: Scalar) -> str:
    if outcome.winner != outcome.incumbent and getattr(outcome.winner, name) != value:
        return "as the loop has it: the gain of the trials was not confirmed by the verification"
    if all(getattr(candidate, name) == value for candidate in outcome.reasons):
        return _untried(name, profile)
    if _lost_every_block(profile, _STAGE_OF[name], outcome.incumbent, name, value):
        return "as the loop has it: whatever else was tried lost every block against it"
    control = search.control_interval(profile, _STAGE_OF[name])
    resolved = resolution(control)
    if not math.isfinite(resolved):
        return f"as the loop has it: {search.resolves(control)}"
    tried = [ratio for candidate, ratio in outcome.ratios.items() if getattr(candidate, name) != value]
    above = [ratio for ratio in tried if ratio.mean - 1 > resolved]
    if not above:
        return f"as the loop has it: nothing tried gains more than the {100 * resolved:.2g}% that can be resolved"
    if not any(is_gain(ratio, control) for ratio in above):
        return "as the loop has it: nothing tried is clear of the noise"
    return "as the loop has it: no gain tried is large enough to be worth a change"


def _lost_every_block(profile: Profile, stage: str, incumbent: Candidate, name: str, value: Scalar) -> bool:
    """Return whether there were rivals with another value, and the incumbent was faster in each block of theirs."""
    ran = [trial for trial in profile.trials if trial.stage == stage and not trial.control and trial.block_s]
    rivals = [trial for trial in ran if getattr(trial.candidate, name) != value]
    its = next((trial.block_s for trial in ran if trial.candidate == incumbent), ())
    pairs = [pair for rival in rivals for pair in zip(rival.block_s, its, strict=False)]
    return bool(pairs) and all(ours > theirs for ours, theirs in pairs)


def _losers(name: str, value: Scalar, outcome: Outcome | None) -> tuple[Rejected, ...]:
    """Return the values that lost: for each, the reason of the candidate nearest to the winner."""
    if outcome is None:
        return ()
    ranked = sorted(outcome.reasons.items(), key=lambda item: len(item[0].differences(outcome.winner)))
    losers: dict[Scalar, str] = {}
    for candidate, reason in ranked:
        other = getattr(candidate, name)
        if other != value:
            losers.setdefault(other, reason)
    before = getattr(outcome.incumbent, name)
    if before != value:
        losers.setdefault(before, "the reference; slower or over the budget in the trials")
    return tuple(Rejected(other, reason) for other, reason in losers.items())


def _untried(name: str, profile: Profile) -> str:
    if name == "micro_batch":
        if not profile.check.splittable:
            return "the user's batch: " + profile.check.reason
        return "the user's batch: it cannot be smaller"
    if name == "memory_layout" and profile.loop.layout_hazard:
        return "channels_last is not safe: " + profile.loop.layout_hazard
    if name == "memory_layout":
        return "already channels_last" if profile.loop.layout == "channels_last" else "the model has no convolutions"
    if name == "fused_optimizer":
        return "already fused" if profile.loop.is_fused else f"{profile.loop.optimizer} has no fused step to switch on"
    if name == "allocator" and profile.loop.can_retain:
        return f"as the loop has it: {search.retaining_refusal(profile) or 'retaining memory was not tried'}"
    if name == "allocator":
        return "only host memory under glibc can be retained"
    return "as the loop has it"


def _advice(profile: Profile) -> tuple[str, ...]:
    """Return what would help but is the user's to change."""
    data, whole = profile.phases_s.get("data", 0.0), sum(profile.phases_s.values())
    if whole > 0 and data / whole > WORTH_ADVICE:
        share = f"{100 * data / whole:.0f}%"
        return (f"the step waits {share} of its time for data: more loader workers, or pinned memory on a GPU",)
    return ()

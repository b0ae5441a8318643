"""Tuned plans: changes to training dynamics, from a learning rate range test or from paired short trainings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab.core.lr_factors import WARMUP_FRACTION
from trimtab.core.objective import Budget
from trimtab.core.plan import (
    KEEP_BATCH,
    KEEP_DROPOUT,
    KEEP_LEARNING_RATE,
    KEEP_OPTIMIZER,
    KEEP_WARMUP,
    Choice,
    Effect,
    Plan,
    Rejected,
    Scalar,
)
from trimtab.decide.learning_rate import RateChoice
from trimtab.decide.paired_training_verdict import PairedTrainingVerdict
from trimtab.decide.trial_statistics import over_budget

_LATER, _LATER_CODE = "takes longer to the same loss", "paired_run.later"
_UNCLIPPED = "not tried: a range test is too short for rare outliers"
# The warm-up takes at most this fraction of a short run, so that enough steps remain at the full rate.
_LONGEST_RISE = 0.3


def tried_settings(plan: Plan) -> tuple[str, ...]:
    """Return the training settings that were tried, kept or not, by their names in `adapt`."""
    shapes = {plan.schedule.value, *(loser.value for loser in plan.schedule.rejected)}
    found = {
        "learning_rate": plan.learning_rate_scale != KEEP_LEARNING_RATE,
        "schedule": "warmup_linear" in shapes,
        "optimizer": plan.optimizer != KEEP_OPTIMIZER,
        "dropout": bool(plan.dropout.rejected),  # the reason may also state why no comparison was run
        "batch": plan.batch_policy != KEEP_BATCH,
    }
    return tuple(name for name, was in found.items() if was)


def adapt_learning_rate(
    plan: Plan, rates: RateChoice, search_s: float, *, may_clip: bool = False, run_steps: int | None = None
) -> Plan:
    """Return the tuned plan with the peak learning rate from a range test, warm-up and cosine decay.

    If the test keeps the user's rate, the user's schedule also stays, as nothing supports a change.

    Args:
        plan: plan to change.
        rates: result of the range test.
        search_s: seconds of the search, charged to the plan.
        may_clip: gradients may be clipped at the typical norm for the rate if the loop does not clip. Allowed for
            optimizers with a step length independent of the gradient's scale.
        run_steps: steps of the run, if known: the warm-up is no shorter than the rise of the test, or 5% of the run.
    """
    plan = _searched(plan, search_s)
    scale = Choice(rates.scale, rates.reason, Effect.TRAINING, rates.scale != 1.0, rates.rejected, rates.code)
    if not scale.changed:
        text = "unchanged: the learning rate is unchanged, and a schedule was not tried alone"
        kept = replace(plan.schedule, reason=text, code="schedule.rate_unchanged")
        return replace(plan, learning_rate_scale=scale, schedule=kept)
    schedule = Choice(
        "warmup_cosine",
        "linear warm-up to the higher learning rate, then cosine decay to a tenth of it (paper eq. 10)",
        Effect.TRAINING,
        changed=True,
        rejected=(
            Rejected("user", "not tried: a range test finds a peak rate, not a constant rate", "setting.not_tried"),
        ),
        code="schedule.for_higher_rate",
    )
    rise = _rise(rates.rising_steps, run_steps)
    plan = replace(plan, learning_rate_scale=scale, schedule=schedule, warmup_fraction=rise)
    if not may_clip or not rates.norm or plan.clip_norm.value is not None:
        return plan
    reason = "the median gradient norm at this learning rate in the range test; larger gradients are clipped"
    unclipped = (Rejected(None, _UNCLIPPED, "setting.not_tried"),)
    norm = float(f"{rates.norm:.2g}")
    clip = Choice(norm, reason, Effect.TRAINING, changed=True, rejected=unclipped, code="clip.median_norm")
    return replace(plan, clip_norm=clip)


def _rise(rising_steps: int | None, run_steps: int | None) -> Choice:
    """Return the warm-up fraction: no shorter than the rise of the range test, which reached its rate safely.

    Transients at the start last a number of steps, not a fraction, so short runs need a larger fraction.
    """
    share, bound = float(f"{(rising_steps or 0) / (run_steps or 1):.2g}"), ""
    if run_steps is None or share <= WARMUP_FRACTION:
        return KEEP_WARMUP
    if share > _LONGEST_RISE:
        share, bound = _LONGEST_RISE, f", limited to {100 * _LONGEST_RISE:.0f}% of the run"
    reason = f"as long as the rise to the lowest loss in the range test: {rising_steps} of {run_steps} steps{bound}"
    shorter = "not tried: the range test did not raise the learning rate faster"
    rejected = (Rejected(WARMUP_FRACTION, shorter, "setting.not_tried"),)
    return Choice(share, reason, Effect.TRAINING, changed=True, rejected=rejected, code="warmup.of_range_test")


def adapt_optimizer(stands: Plan, rival: Plan, verdict: PairedTrainingVerdict, search_s: float) -> Plan:
    """Return the rival with Muon as a tuned plan if it won; otherwise the incumbent with the reason."""
    if not verdict.is_gain:
        kept = _kept(KEEP_OPTIMIZER, "muon", verdict)
        return replace(_searched(stands, search_s), optimizer=kept)
    reason = f"Muon for the matrices of the blocks, AdamW for the rest; {verdict.reason}"
    rejected = (Rejected("user", _LATER, _LATER_CODE),)
    won = replace(rival.optimizer, reason=reason, rejected=rejected, code=verdict.code)
    return replace(_won(stands, rival, verdict, search_s), optimizer=won)


def adapt_dropout(stands: Plan, rival: Plan, verdict: PairedTrainingVerdict, search_s: float) -> Plan:
    """Return the rival without dropout as a tuned plan if it won; otherwise the incumbent with the reason."""
    if not verdict.is_gain:
        kept = _kept(KEEP_DROPOUT, rival.dropout.value, verdict)
        return replace(_searched(stands, search_s), dropout=kept)
    rejected = (Rejected(None, _LATER, _LATER_CODE),)
    won = replace(rival.dropout, reason=verdict.reason, rejected=rejected, code=verdict.code)
    return replace(_won(stands, rival, verdict, search_s), dropout=won)


def adapt_schedule(stands: Plan, rival: Plan, verdict: PairedTrainingVerdict, search_s: float) -> Plan:
    """Return the plan with the rival's schedule if it won; otherwise the incumbent with the rejected schedule.

    A schedule does not change a step's cost.
    """
    mine, theirs = stands.schedule, rival.schedule
    if not verdict.is_gain:
        kept = replace(mine, rejected=(*mine.rejected, Rejected(theirs.value, verdict.reason, verdict.code)))
        return replace(_searched(stands, search_s), schedule=kept)
    rejected = (*mine.rejected, Rejected(mine.value, _LATER, _LATER_CODE))
    won = replace(theirs, reason=verdict.reason, rejected=rejected, code=verdict.code)
    return replace(_searched(stands, search_s), schedule=won)


def _kept(unchanged: Choice, value: Scalar, verdict: PairedTrainingVerdict) -> Choice:
    """Return the unchanged setting with the verdict on its rejected alternative."""
    rejected = (Rejected(value, verdict.reason, verdict.code),)
    return replace(unchanged, reason=verdict.reason, rejected=rejected, code=verdict.code)


def within_limits(budget: Budget, rival: Plan, verdict: PairedTrainingVerdict) -> PairedTrainingVerdict:
    """Return the verdict, with no gain if the rival's measured step exceeds a hard limit.

    Energy assumes the plan's power.
    """
    cost = rival.measured or rival.predicted
    if cost is None or not verdict.is_gain:
        return verdict
    energy_j = None if cost.energy_j is None else cost.energy_j * verdict.step_ratio
    over = over_budget(cost.step_s * verdict.step_ratio, None, budget, energy_j)
    if over is None:
        return verdict
    return replace(verdict, is_gain=False, reason=f"{over.text}; {verdict.reason}", code=over.code)


def _searched(plan: Plan, search_s: float) -> Plan:
    """Return the plan with additional search time."""
    return replace(plan, search_s=plan.search_s + search_s, planning_s=plan.planning_s + search_s)


def _won(stands: Plan, rival: Plan, verdict: PairedTrainingVerdict, search_s: float) -> Plan:
    """Return the rival with the search time of both plans, and step times corrected by the comparison.

    Args:
        stands: incumbent.
        rival: winner.
        verdict: result of the comparison.
        search_s: seconds of the comparison, in addition to earlier searches.
    """
    told = {name: getattr(rival, name) for name in ("predicted", "measured")}
    slower: dict[str, Any] = {
        name: cost and replace(cost, step_s=cost.step_s * verdict.step_ratio, between_s=None, energy_j=None)
        for name, cost in told.items()
    }
    slower["verified"] = rival.verified and tuple(bound / verdict.step_ratio for bound in rival.verified)
    spent = _searched(stands, search_s)
    return replace(rival, search_s=spent.search_s, planning_s=spent.planning_s, **slower)

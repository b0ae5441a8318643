"""Tuned plans with low-bit optimizer state: the same loss in less memory, from paired short trainings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimtab.core.choice import MeasuredCost
from trimtab.core.objective import Cost, Objective
from trimtab.planner.statistics import Interval, ratio_interval
from trimtab.planner.trial_statistics import saves_for_free
from trimtab.planner.tuned_plan import PairedTrainingVerdict, ShortPair, falls_clearly
from trimtab.plans.plan import Plan

# Least ratio of samples to the same loss: in a single pair, and as the lower bound over all pairs.
LEAST_IN_PAIR, LEAST_SAMPLES = 0.9, 0.95


def peak_reduction(plan: Plan, traced: Mapping[str, int], kind: str, saved_bytes: int) -> tuple[int, float] | None:
    """Return the bytes and the fraction by which low-bit state lowers the peak of a step; None if unknown.

    State is held throughout a step, so the peak falls by the saved bytes, up to temporary tensors of the optimizer
    step, which a trace includes.

    Args:
        traced: traced peaks by storage of the state, in bytes; {} if the step cannot be traced.
        saved_bytes: bytes by which the state is smaller.
    """
    cost = plan.measured or plan.predicted
    whole = traced.get("user") or (None if cost is None else cost.peak_bytes)
    if not whole:
        return None
    fewer = traced["user"] - traced[kind] if {"user", kind} <= traced.keys() else saved_bytes
    return fewer, fewer / whole


def with_lower_peak(plan: Plan, fewer_bytes: int) -> Plan:
    """Return the plan with all peaks lowered by a number of bytes."""

    def lowered(cost: MeasuredCost | None) -> MeasuredCost | None:
        if cost is None or cost.peak_bytes is None:
            return cost
        return replace(cost, peak_bytes=max(0, cost.peak_bytes - fewer_bytes))

    return replace(plan, predicted=lowered(plan.predicted), measured=lowered(plan.measured))


def ends_comparison(pair: ShortPair) -> bool:
    """Return True if a pair ends the comparison: there is no target loss, or the rival needs clearly more samples."""
    return not falls_clearly(pair.stands.losses) or pair.samples_at_equal_loss < LEAST_IN_PAIR


def judge_smaller(
    pairs: Sequence[ShortPair], stands: Plan, objective: Objective, kind: str, saved: float
) -> PairedTrainingVerdict:
    """Return the verdict on low-bit state from the pairs so far, up to the first that ends the comparison or all.

    Low-bit state is accepted if it needs at most 1 / `LEAST_SAMPLES` of the samples to the same loss with 95%
    confidence, and if it lowers the score of a step (energy counts as time). Without a weight of memory, a step must
    be as fast.

    Args:
        stands: the plan with the user's state, for the weights of time and memory in its score.
        kind: storage of the state, such as "8bit".
        saved: saved fraction of the peak memory.
    """
    where = f"paired runs of {len(pairs[-1].stands.losses)} steps from the current weights"
    if not falls_clearly(pairs[-1].stands.losses):
        text = f"{where}: the loss of the unchanged loop did not decrease significantly, so there is no target loss"
        return PairedTrainingVerdict(False, text, code="paired_run.no_target")
    samples = ratio_interval([max(pair.samples_at_equal_loss, 1e-3) for pair in pairs]).inverse
    if ends_comparison(pairs[-1]):
        text = f"{where}: in pair {len(pairs)} {kind} state needed more than {1 / LEAST_IN_PAIR:.2f}x the samples to "
        return PairedTrainingVerdict(False, f"{text}the same loss", code="paired_run.worse_loss")
    steps = [pair.rival.step_s / pair.stands.step_s for pair in pairs]
    text = (
        f"{where}, {len(pairs)} pairs: {kind} state needed {_in_words(samples)} the samples to the same loss, a step "
    )
    text += f"took {_in_words(ratio_interval(steps))} the time, and the peak memory is {100 * saved:.0f}% lower"
    if not samples.high <= 1 / LEAST_SAMPLES:
        return PairedTrainingVerdict(False, f"{text}; the loss may be worse", code="paired_run.loss_uncertain")
    if objective.memory:
        score = ratio_interval([_score_ratio(stands, objective, step, saved) for step in steps])
        is_worth, why = score.high < 1, "the score is not significantly better"
    else:
        is_worth = saves_for_free(ratio_interval(steps).inverse, saved)
        why = "a step is slower, and memory has no weight in the objective"
    if not is_worth:
        return PairedTrainingVerdict(False, f"{text}; {why}", code="paired_run.not_worth")
    ratio = statistics.median(steps)
    return PairedTrainingVerdict(True, f"{text}; later steps were not tried", ratio, "paired_run.less_memory")


def _score_ratio(stands: Plan, objective: Objective, step: float, saved: float) -> float:
    """Return the ratio of the scores with low-bit state and without, relative to the loop before planning."""
    cost, base, time, memory = stands.measured or stands.predicted, stands.baseline, 1.0, 1.0
    if cost is not None and base is not None and cost.peak_bytes and base.peak_bytes:
        time, memory = cost.step_s / base.step_s, cost.peak_bytes / base.peak_bytes
    weights = Objective(objective.time + objective.energy, objective.memory)
    one = Cost(1.0, 1.0)
    return weights.score(Cost(time * step, memory * (1 - saved)), one) / weights.score(Cost(time, memory), one)


def _in_words(interval: Interval) -> str:
    return f"{interval.mean:.2f}x ({interval.low:.2f} to {interval.high:.2f})"

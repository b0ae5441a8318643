"""Planning on several ranks: rank 0 plans for its part of a batch, and all ranks time the link and do dry runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.hardware import LinkCalibration
from trimtab.core.parallelism import StepShape
from trimtab.core.serialization import from_json, to_json
from trimtab.distributed.bandwidth_test import calibrate
from trimtab.distributed.dry_run import DryRuns
from trimtab.distributed.process_group import from_first
from trimtab.distributed.zero_stage_inputs import StageMeasurements, of_replicas
from trimtab.planner.multi_rank_plan import (
    MOST_REHEARSALS,
    CompletedDryRuns,
    DryRunResult,
    by_default,
    for_replicas,
    saying_unrehearsed,
    with_fastest_communication,
)
from trimtab.plans.plan import Plan

# Sent by rank 0 if the way to shard the model is chosen after the link is timed.
_TO_CHOOSE = ""


@dataclass(frozen=True)
class BroadcastPlan:
    """Plan sent by rank 0 to all ranks, as JSON.

    Args:
        shape: times and sizes of the plan's micro-batch; None if nothing was timed.
        kept: reason for not considering sharding; "" if sharding was not requested.
    """

    plan: Plan
    shape: StepShape | None = None
    kept: str = ""


@dataclass(frozen=True)
class _NextPlan:
    """Next plan for a dry run, or the final plan."""

    plan: Plan
    is_last: bool


def plan_together(
    make: Callable[[], BroadcastPlan | StageMeasurements],
    device: torch.device,
    rehearsal: Callable[[], DryRuns] | None = None,
) -> Plan:
    """Return the plan of a job, the same on every rank; a collective.

    Args:
        make: called on rank 0 only; returns a single-process plan for replicas of the model, or the inputs for choosing
            a way to shard the model.
        rehearsal: returns the dry run, called on all ranks before the first run; None: choose by predictions only.

    Raises:
        InfeasibleError: on rank 0, no plan meets the limits.
        RankError: rank 0 could not make a plan (on the remaining ranks), or a rank ended during a dry run.
    """
    ranks, shares = dist.get_world_size(), list[StageMeasurements]()

    def made() -> str:
        found = make()
        if isinstance(found, StageMeasurements):
            shares.append(found)
            return _TO_CHOOSE
        return to_json(replace(found, plan=for_replicas(found.plan, ranks, found.kept)))

    text = from_first(made)
    if text == _TO_CHOOSE:
        calibration = _timed(device)
        if isinstance(calibration, LinkCalibration) and rehearsal is not None:
            return _rehearsed(shares, ranks, calibration, rehearsal())

        def chosen() -> str:
            if isinstance(calibration, LinkCalibration):
                return to_json(shares[0].plan(ranks, calibration))
            plan = for_replicas(of_replicas(shares[0].profile, calibration), ranks, calibration)
            return to_json(_as_by_default(plan, calibration))

        return from_json(Plan, from_first(chosen))
    found = from_json(BroadcastPlan, text)
    if found.shape is None or found.plan.zero_stage.value != 0:
        return found.plan
    calibration = _timed(device)
    if not isinstance(calibration, LinkCalibration):
        return _as_by_default(found.plan, calibration)
    plan = with_fastest_communication(found.plan, calibration, found.shape)
    usual = by_default(plan)
    if usual is None or rehearsal is None:
        return plan
    refusal = (dry_run := rehearsal()).refusal()
    ran = None if refusal else dry_run.of(plan, counts_memory=False)
    if ran is None or ran.refusal:
        return saying_unrehearsed(usual, refusal or (ran.refusal if ran else ""))
    return replace(ran.plan, planning_s=plan.planning_s + ran.took_s)


def _rehearsed(
    shares: Sequence[StageMeasurements], ranks: int, calibration: LinkCalibration, rehearsal: DryRuns
) -> Plan:
    """Return the best plan by dry runs; rank 0 chooses the next plan for all ranks to run."""
    refusal, ran = rehearsal.refusal(), tuple[DryRunResult, ...]()

    def asked() -> str:
        found = _next_plan(shares[0], ranks, calibration, ran, refusal)
        spent = replace(found.plan, planning_s=found.plan.planning_s + sum(each.took_s for each in ran))
        return to_json(replace(found, plan=spent) if found.is_last else found)

    while not (next_one := from_json(_NextPlan, from_first(asked))).is_last:
        found, usual = rehearsal.of(next_one.plan, counts_memory=True), by_default(next_one.plan)
        if found.refusal and usual is not None:
            again = rehearsal.of(saying_unrehearsed(usual, found.refusal), counts_memory=True)
            # The prediction belongs to the refused plan, so it says nothing about this plan's speed.
            found = replace(again, slower=None, took_s=found.took_s + again.took_s)
        ran += (found,)
    return next_one.plan


def _next_plan(
    share: StageMeasurements, ranks: int, calibration: LinkCalibration, ran: tuple[DryRunResult, ...], refusal: str
) -> _NextPlan:
    """Return the next plan for a dry run, or the final plan."""
    if not refusal and len(ran) >= MOST_REHEARSALS:
        try:
            return _NextPlan(share.plan(ranks, calibration, CompletedDryRuns(ran, only=True)), is_last=True)
        except InfeasibleError:
            refusal = f"none of the first {len(ran)} plans stayed within the limits in a dry run, and no more are tried"
    found = CompletedDryRuns(ran, as_usual=bool(refusal))
    plan = share.plan(ranks, calibration, found)
    if not refusal:
        return _NextPlan(plan, is_last=found.of(plan) is not None)
    stage = replace(plan.zero_stage, reason=f"{plan.zero_stage.reason}; not tested in a dry run: {refusal}")
    return _NextPlan(saying_unrehearsed(plan, refusal).having(zero_stage=stage), is_last=True)


def _timed(device: torch.device) -> LinkCalibration | str:
    """Return the measured link, or the reason why it is unknown; the same on every rank."""
    try:
        return calibrate(device)
    except ValueGivenError as error:
        return f"the bandwidth between the ranks could not be measured ({str(error).rstrip('.')})"


def _as_by_default(plan: Plan, why: str) -> Plan:
    return plan.having(reduce_dtype=replace(plan.reduce_dtype, reason=f"torch's default, because {why}"))

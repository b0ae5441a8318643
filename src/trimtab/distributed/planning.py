"""One plan for all ranks: rank 0 makes it for its share of a batch, all time the link, and run what is predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trimtab.core.codec import from_json, to_json
from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.link import Calibration
from trimtab.core.parallelism import StepShape
from trimtab.core.plan import Plan
from trimtab.core.rehearsal import Ran
from trimtab.decide.ranks import replicated, sending
from trimtab.decide.rehearsing import MOST_REHEARSALS, Rehearsed, by_default, saying_unrehearsed
from trimtab.distributed.link_speed import calibrate
from trimtab.distributed.process_group import from_first
from trimtab.distributed.rehearsal import Rehearsal
from trimtab.distributed.stage_choice import Share, of_replicas

# What rank 0 says where the way to share the model is chosen once the link is timed.
_TO_CHOOSE = ""


@dataclass(frozen=True)
class Made:
    """What rank 0 hands to the others, a JSON value.

    Args:
        shape: of the plan's step; None where nothing was timed. kept: why no other way to share the model was weighed;
            "" where none was asked for.
    """

    plan: Plan
    shape: StepShape | None = None
    kept: str = ""


@dataclass(frozen=True)
class _Asked:
    """What rank 0 says of the next plan of a job, a JSON value. `is_last`: it is the job's; else all rehearse it."""

    plan: Plan
    is_last: bool


def plan_together(
    make: Callable[[], Made | Share], device: torch.device, rehearsal: Callable[[], Rehearsal] | None = None
) -> Plan:
    """Return the plan of a job, the same on every rank; each calls it.

    Args:
        make: called on rank 0 alone; returns a plan of one process for ranks that each hold the model, or what the way
            to share it is chosen by. device: whose gradients are sent. rehearsal: returns what runs plans on all ranks,
            called on each once something is to be run; None: predictions are all that is chosen by.

    Raises:
        InfeasibleError: on rank 0, where no plan meets the limits. RankError: on the other ranks, where rank 0 could
            not make one; on any, where another rank ended in a rehearsal.
    """
    ranks, shares = dist.get_world_size(), list[Share]()

    def made() -> str:
        found = make()
        if isinstance(found, Share):
            shares.append(found)
            return _TO_CHOOSE
        return to_json(replace(found, plan=replicated(found.plan, ranks, found.kept)))

    text = from_first(made)
    if text == _TO_CHOOSE:
        calibration = _timed(device)
        if isinstance(calibration, Calibration) and rehearsal is not None:
            return _rehearsed(shares, ranks, calibration, rehearsal())
        return from_json(Plan, from_first(lambda: to_json(_chosen(shares[0], ranks, calibration))))
    found = from_json(Made, text)
    if found.shape is None or found.plan.zero_stage.value != 0:
        return found.plan
    calibration = _timed(device)
    if not isinstance(calibration, Calibration):
        return _as_by_default(found.plan, calibration)
    plan = sending(found.plan, calibration, found.shape)
    usual = by_default(plan)
    return plan if usual is None or rehearsal is None else _worth_it(plan, usual, rehearsal())


def _worth_it(plan: Plan, usual: Plan, rehearsal: Rehearsal) -> Plan:
    """Return the plan where what it changes in how gradients are sent is measurably worth it, else the usual one."""
    refusal = rehearsal.refusal()
    ran = None if refusal else rehearsal.of(plan, counts_memory=False)
    if ran is None or ran.refusal:
        return saying_unrehearsed(usual, refusal or (ran.refusal if ran else ""))
    return replace(ran.plan, planning_s=plan.planning_s + ran.took_s)


def _rehearsed(shares: Sequence[Share], ranks: int, calibration: Calibration, rehearsal: Rehearsal) -> Plan:
    """Return the plan that is best by what was run of it; rank 0 chooses, and all run what it chooses next.

    Args:
        shares: one, on rank 0.
    """
    refusal, ran = rehearsal.refusal(), tuple[Ran, ...]()

    def asked() -> str:
        found = _next_plan(shares[0], ranks, calibration, ran, refusal)
        spent = replace(found.plan, planning_s=found.plan.planning_s + sum(each.took_s for each in ran))
        return to_json(replace(found, plan=spent) if found.is_last else found)

    while not (next_one := from_json(_Asked, from_first(asked))).is_last:
        ran += (_ran(next_one.plan, rehearsal),)
    return next_one.plan


def _next_plan(share: Share, ranks: int, calibration: Calibration, ran: tuple[Ran, ...], refusal: str) -> _Asked:
    """Return the plan to be rehearsed next, or to be trained by.

    Args:
        refusal: why none can be rehearsed, or "".

    Raises:
        InfeasibleError: no plan meets the limits.
    """
    if not refusal and len(ran) >= MOST_REHEARSALS:
        try:
            return _Asked(share.plan(ranks, calibration, Rehearsed(ran, only=True)), is_last=True)
        except InfeasibleError:
            refusal = f"none of {len(ran)} plans that were could be run within the limits, and no more are tried"
    found = Rehearsed(ran, as_usual=bool(refusal))
    plan = share.plan(ranks, calibration, found)
    if not refusal:
        return _Asked(plan, is_last=found.of(plan) is not None)
    stage = replace(plan.zero_stage, reason=f"{plan.zero_stage.reason}; not rehearsed: {refusal}")
    return _Asked(replace(saying_unrehearsed(plan, refusal), zero_stage=stage), is_last=True)


def _ran(plan: Plan, rehearsal: Rehearsal) -> Ran:
    """Return the rehearsal of a plan; where it is refused, that of it sent as by default, which another one is."""
    ran, usual = rehearsal.of(plan, counts_memory=True), by_default(plan)
    if not ran.refusal or usual is None:
        return ran
    again = rehearsal.of(saying_unrehearsed(usual, ran.refusal), counts_memory=True)
    # What was told is of the plan that sends otherwise: its seconds say nothing of how much slower this one is.
    return replace(again, slower=None, took_s=ran.took_s + again.took_s)


def _timed(device: torch.device) -> Calibration | str:
    """Return what the link does, or why that is not known; on every rank, by the same figures."""
    try:
        return calibrate(device)
    except ValueGivenError as error:
        return f"the link could not be timed ({error})"


def _chosen(share: Share, ranks: int, calibration: Calibration | str) -> Plan:
    if isinstance(calibration, Calibration):
        return share.plan(ranks, calibration)
    return _as_by_default(replicated(of_replicas(share.profile, calibration), ranks, calibration), calibration)


def _as_by_default(plan: Plan, why: str) -> Plan:
    return replace(plan, reduce_dtype=replace(plan.reduce_dtype, reason=f"as by default: {why}"))

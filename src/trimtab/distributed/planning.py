"""One plan for all ranks: rank 0 makes it for its share of a batch, all time the link, and by that it is shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trimtab.core.codec import from_json, to_json
from trimtab.core.errors import ValueGivenError
from trimtab.core.link import Calibration
from trimtab.core.parallelism import StepShape
from trimtab.core.plan import Plan
from trimtab.decide.ranks import replicated, sending
from trimtab.distributed.link_speed import calibrate
from trimtab.distributed.process_group import from_first
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


def plan_together(make: Callable[[], Made | Share], device: torch.device) -> Plan:
    """Return the plan of a job, the same on every rank; each calls it.

    Args:
        make: called on rank 0 alone; returns a plan of one process for ranks that each hold the model, or what the way
            to share it is chosen by. device: whose gradients are sent.

    Raises:
        InfeasibleError: on rank 0, where no plan meets the limits. RankError: on the other ranks, where rank 0 could
            not make one.
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
        return from_json(Plan, from_first(lambda: to_json(_chosen(shares[0], ranks, calibration))))
    found = from_json(Made, text)
    if found.shape is None or found.plan.zero_stage.value != 0:
        return found.plan
    calibration = _timed(device)
    if isinstance(calibration, Calibration):
        return sending(found.plan, calibration, found.shape)
    return _as_by_default(found.plan, calibration)


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

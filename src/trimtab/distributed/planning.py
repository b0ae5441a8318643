"""One plan for all ranks: rank 0 makes it for its share of a batch, then all time the link between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trimtab.core.codec import from_json, to_json
from trimtab.core.errors import ValueGivenError
from trimtab.core.parallelism import StepShape
from trimtab.core.plan import Plan
from trimtab.decide.ranks import replicated, sending
from trimtab.distributed.link_speed import calibrate
from trimtab.distributed.process_group import from_first


@dataclass(frozen=True)
class Made:
    """What rank 0 hands to the others, a JSON value. `shape`: of the plan's step; None where nothing was timed."""

    plan: Plan
    shape: StepShape | None = None


def plan_together(make: Callable[[], Made], device: torch.device) -> Plan:
    """Return the plan of a job, the same on every rank; each calls it.

    Args:
        make: called on rank 0 alone. device: whose gradients are sent.

    Raises:
        RankError: on the other ranks, where rank 0 could not make one.
    """
    ranks = dist.get_world_size()

    def made() -> str:
        found = make()
        return to_json(Made(replicated(found.plan, ranks), found.shape))

    found = from_json(Made, from_first(made))
    if found.shape is None or found.plan.zero_stage.value != 0:
        return found.plan
    try:
        calibration = calibrate(device)
    except ValueGivenError as error:  # on every rank, by the same figures
        reason = f"as by default: the link could not be timed ({error})"
        return replace(found.plan, reduce_dtype=replace(found.plan.reduce_dtype, reason=reason))
    return sending(found.plan, calibration, found.shape)

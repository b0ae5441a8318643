"""`trimtab plan TASK --ranks N`: plan for several ranks from a single process, by tracing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import LinkCalibration, ring_link
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.profile import Profile
from trimtab.distributed.zero_stage_inputs import traces_of_ranks, with_traces
from trimtab.experiments.task_plans import loop_of, profile_here, profile_there
from trimtab.experiments.task_ranks import task_of_rank
from trimtab.experiments.zero_stage_values import stage_figures
from trimtab.measure.fake_tensors import FakeCudaMode
from trimtab.measure.machine import device_name
from trimtab.planner.zero_stage import Stages, choose_stage, ways_of
from trimtab.profiling.communication_profile import step_shape
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task


def plan_ranks(
    task: Task,
    ranks: int,
    link: str,
    *,
    device: str | None,
    engine: str = "torch",
    budget: Budget,
    objective: Objective,
    progress: Callable[[str], None],
) -> tuple[Plan, Stages, Profile]:
    """Return a plan for every rank, the costs of all ways to shard the model, and the profile.

    Args:
        task: the task.
        ranks: number of ranks.
        link: interconnect by its name in the table, or nodes ("8 x nvlink + ib").
        device: target device that is not present; None to measure a rank's shard on this machine.
        engine: sharding backend.
        budget, objective: limits and weights of the plan.
        progress: receives progress messages.

    Raises:
        ValueGivenError: energy is weighed or limited, there are more ranks than samples per batch, or the link or
            device is
            unknown.
        InfeasibleError: no ZeRO stage meets the limits.
        ModelError: the steps cannot be traced.
    """
    if objective.energy > 0 or budget.energy is not None:
        raise ValueGivenError(
            "energy",
            problem=f"Energy cannot be predicted for {ranks} ranks, so it can have neither a weight nor a limit.",
            hint="Remove --energy-weight, or plan for one rank.",
            code="energy.several_ranks",
        )
    share = task_of_rank(task, ranks)
    ring_link(link, device or device_name(device_here()), ranks)  # Validates the link before anything is measured.
    if device is None:
        found = profile_here(share, budget, objective, progress)
        found = with_traces(found, loop_of(share, found.device.kind), progress)
    else:
        found = profile_there(share, device, budget=budget, objective=objective, progress=progress)
    calibration = LinkCalibration(ring_link(link, found.device.name, ranks))
    loop = loop_of(share, "cpu" if device is not None else found.device.kind)
    with contextlib.nullcontext() if device is None else FakeCudaMode():
        traces = traces_of_ranks(found, loop, ranks, progress, ways_of(engine))
    with torch.device("meta"):
        model = task.make_model()
    plan, costs = choose_stage(found, traces, ranks, calibration, functools.partial(step_shape, model, found), engine)
    where = f"{ranks} ranks of {found.device.name}, over {calibration.link.name}"
    return replace(plan, target_device=where, stages=stage_figures(costs)), costs, found

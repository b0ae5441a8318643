"""`trimtab plan TASK --ranks N`: a plan of several ranks from one process, none of the others being there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch

from trimtab.api import profile
from trimtab.calibrate.step_shape import step_shape
from trimtab.core.errors import ModelError
from trimtab.core.link import Calibration, absent_link
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.profile import Candidate, Profile
from trimtab.core.rank_trace import RankTrace
from trimtab.decide.stages import Stages, choose_stage
from trimtab.distributed.rank_memory import trace_ways
from trimtab.experiments.planning import PLANNING_SEED, example_batch, profile_there
from trimtab.experiments.ranks import task_of_rank
from trimtab.measure.as_cuda import AsCuda
from trimtab.recipes.loop import move
from trimtab.tasks.task import Task

_BUT = ("micro_batch", "allocator")


def plan_ranks(
    task: Task,
    ranks: int,
    link: str,
    *,
    device: str | None,
    budget: Budget,
    objective: Objective,
    progress: Callable[[str], None],
) -> tuple[Plan, Stages, Profile]:
    """Return a plan for each of so many ranks, what every way to share the model takes, and the profile behind them.

    Args:
        link: what joins them, by its name in the table. device: one that is not here; None: this machine's, on which
            one rank's share is measured.

    Raises:
        ValueGivenError: more ranks than rows of a batch, or a link or device that is not known. InfeasibleError: no
            stage meets the limits. ModelError: the steps of ranks cannot be traced.
    """
    share = task_of_rank(task, ranks)
    found = (
        _profile_here(share, budget, objective, progress)
        if device is None
        else profile_there(share, device, budget=budget, objective=objective, progress=progress)
    )
    calibration = Calibration(absent_link(link, found.device.name))
    traces = _traces(share, found, ranks, is_there=device is not None, progress=progress)
    with torch.device("meta"):
        model = task.make_model()
    plan, costs = choose_stage(found, traces, ranks, calibration, functools.partial(step_shape, model, found))
    return plan, costs, found


def _profile_here(task: Task, budget: Budget, objective: Objective, progress: Callable[[str], None]) -> Profile:
    torch.manual_seed(PLANNING_SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batches = task.make_model().to(device).train(), task.load_data().batches(PLANNING_SEED, task.batch_rows)
    loop = (model, task.make_optimizer(model), task.loss_fn, move(next(batches), device))
    given = {"budget": budget, "objective": objective, "reference": task.reference}
    return profile(*loop, data=batches, progress=progress, **given)


def _traces(
    task: Task, found: Profile, ranks: int, *, is_there: bool, progress: Callable[[str], None]
) -> tuple[RankTrace, ...]:
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().train()
    loop = (model, task.make_optimizer(model), task.loss_fn, example_batch(task))
    candidates: list[Candidate] = []
    for traced in found.traces:
        if not any(traced.candidate.alike(each, *_BUT) for each in candidates):
            candidates.append(traced.candidate)
    traces: list[RankTrace] = []
    for index, candidate in enumerate(candidates):
        progress(f"tracing {ranks} ranks: {candidate.describe()}", (index + 0.5) / len(candidates))
        with ExitStack() as stack:
            if is_there or found.device.kind == "cuda":
                stack.enter_context(AsCuda())
            traces += trace_ways(*loop, candidate, ranks, counts_scratch=found.device.kind == "cpu")
    if not traces:
        raise ModelError("model", given="a step whose ranks cannot be traced", expected="one of 3 rows or more")
    return tuple(traces)

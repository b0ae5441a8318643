"""`trimtab plan TASK --ranks N`: a plan of several ranks from one process, none of the others being there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from trimtab.api import profile
from trimtab.calibrate.step_shape import step_shape
from trimtab.calibrate.tracing import trace_here
from trimtab.core.errors import ModelError
from trimtab.core.link import Calibration, ring_link
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.profile import Candidate, Profile, Traced
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
        link: what joins them, by its name in the table, or nodes ("8 x nvlink + ib").
        device: one that is not here; None: this machine's, on which one rank's share is measured.

    Raises:
        ValueGivenError: more ranks than rows of a batch, or a link or device that is not known. InfeasibleError: no
            stage meets the limits. ModelError: the steps of ranks cannot be traced.
    """
    share = task_of_rank(task, ranks)
    ring_link(link, device or "", ranks)  # or it is refused, before anything is measured
    if device is None:
        found = _alone(share, _profile_here(share, budget, objective, progress), progress)
    else:
        found = profile_there(share, device, budget=budget, objective=objective, progress=progress)
    calibration = Calibration(ring_link(link, found.device.name, ranks))
    traces = _traces(share, found, ranks, is_there=device is not None, progress=progress)
    with torch.device("meta"):
        model = task.make_model()
    plan, costs = choose_stage(found, traces, ranks, calibration, functools.partial(step_shape, model, found))
    where = f"{ranks} ranks of {found.device.name}, over {calibration.link.name}"
    return replace(plan, elsewhere=where), costs, found


def _profile_here(task: Task, budget: Budget, objective: Objective, progress: Callable[[str], None]) -> Profile:
    torch.manual_seed(PLANNING_SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batches = task.make_model().to(device).train(), task.load_data().batches(PLANNING_SEED, task.batch_rows)
    loop = (model, task.make_optimizer(model), task.loss_fn, move(next(batches), device))
    given = {"budget": budget, "objective": objective, "reference": task.reference}
    return profile(*loop, data=batches, progress=progress, **given)


def _alone(task: Task, found: Profile, progress: Callable[[str], None]) -> Profile:
    """Return the profile with traces of all that ran and can be traced, to hold a rank's against."""
    loop, traces = _loop(task, found.device.kind), list[Traced]()
    for candidate in _unlike(trial.candidate for trial in found.trials if trial.block_s):
        progress(f"tracing: {candidate.describe()}")
        traced = trace_here(*loop, candidate)
        traces += [] if traced is None else [traced]
    return replace(found, traces=tuple(traces))


def _traces(
    task: Task, found: Profile, ranks: int, *, is_there: bool, progress: Callable[[str], None]
) -> tuple[RankTrace, ...]:
    loop, traces = _loop(task, "cpu" if is_there else found.device.kind), list[RankTrace]()
    as_there = AsCuda if is_there else contextlib.nullcontext
    for candidate in _unlike(traced.candidate for traced in found.traces):
        progress(f"tracing {ranks} ranks: {candidate.describe()}")
        with as_there():
            traces += trace_ways(*loop, candidate, ranks, counts_scratch=found.device.kind == "cpu")
    if not traces:
        raise ModelError("model", given="a step that cannot be traced", expected="one whose ranks can be")
    return tuple(traces)


def _loop(task: Task, kind: str) -> tuple[Any, ...]:
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().to(kind).train()
    return model, task.make_optimizer(model), task.loss_fn, move(example_batch(task), torch.device(kind))


def _unlike(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return those that differ in what a trace shows."""
    found: list[Candidate] = []
    for each in candidates:
        plain = replace(each, recompute=None)
        if not each.compiled and not any(plain.alike(other, *_BUT) for other in found):
            found.append(plain)
    return found

"""Profiles and plans of tasks: measured here on a fresh model, or traced for a device that is not present."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from trimtab import api
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.progress import Progress
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import DataStream
from trimtab.experiments.task_loops import TaskLoops
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.profiling.candidate_traces import MIN_SAMPLES
from trimtab.tasks.task import Task
from trimtab.training.batch import to_device


def plan_task(task: Task, *, adapt: Collection[str] = (), **options: Any) -> Plan:
    """Return a plan for a task's loop, on all ranks of the job. Collective: all ranks must call `plan_task`.

    Args:
        adapt: training settings that the plan may change.
        options: further arguments of `trimtab.plan`.

    Raises:
        InfeasibleError: no plan meets the budget.
        RankError: on all other ranks, if rank 0 could not make a plan.
    """
    loop = loop_setup.build(TaskLoops(task).setup, loop_setup.PLANNING_SEED, task.name)
    given: dict[str, Any] = {"total_steps": task.planned_steps, "adapt": tuple(adapt) or None}
    return loop_setup.plan_of(loop, task.reference, **given, **options)


def profile_task(task: Task, *, total_steps: int | None = None, **options: Any) -> Profile:
    """Return a task's profile on this machine; options as in `trimtab.profile`."""
    loop = loop_setup.build(TaskLoops(task).setup, loop_setup.PLANNING_SEED, task.name)
    stream = DataStream(loop.loader, loop_setup.PLANNING_SEED)
    example = to_device(next(stream), loop.device)
    stream.close()
    given: dict[str, Any] = {"reference": task.reference, "data": loop.loader, "total_steps": total_steps}
    return api.profile(loop.model, loop.optimizer, loop.loss_fn, example, **given, **options)


def loop_of(task: Task, kind: str) -> tuple[Any, ...]:
    """Return a task's model, optimizer, loss and a traceable batch on a kind of device."""
    torch.manual_seed(loop_setup.PLANNING_SEED)
    model = task.make_model().to(kind).train()
    return model, task.make_optimizer(model), task.loss_fn, to_device(example_batch(task), torch.device(kind))


def profile_there(task: Task, device: str, *, budget: Budget, objective: Objective, progress: Progress) -> Profile:
    """Return a task's profile for a target device that is not present, from a trace."""
    given: dict[str, Any] = {"rows": task.batch_size, "budget": budget, "objective": objective}
    given |= {"reference": task.reference, "progress": progress}
    return api.profile_there(*loop_of(task, "cpu"), device, **given)


def example_batch(task: Task) -> Any:
    """Return a batch for tracing, larger than the task's batch if that has too few samples to split.

    Uses `task.example`, which needs no data, if available.
    """
    rows = max(task.batch_size, 2 * (MIN_SAMPLES - 1))
    if task.example is not None:
        return task.example(rows)
    return next(task.load_data().batches(loop_setup.PLANNING_SEED, rows))


def require_fits(task: Task, plan: Plan, num_ranks: int = 1) -> None:
    """Raise an error if an existing plan does not match the task.

    Args:
        task: the task as seen from a rank.
        plan: the existing plan.
        num_ranks: number of ranks.

    Raises:
        ValueGivenError: the plan has another batch size or number of ranks.
    """
    if plan.num_ranks != num_ranks:
        raise ValueGivenError(
            "plan",
            problem=f"The plan is for {plan.num_ranks} rank(s), but the command runs on {num_ranks}.",
            hint=f"Add --ranks {plan.num_ranks}, or use a plan for {num_ranks} rank(s).",
            code="plan.ranks_differ",
        )
    if plan.batch_size != task.batch_size:
        name = task.name if num_ranks == 1 else f"{task.name} on each of {num_ranks} ranks"
        raise ValueGivenError(
            "plan",
            problem=f"The plan is for {plan.batch_size} samples per step, but {name} has {task.batch_size}.",
            hint=f"Make a plan with `trimtab plan` for {task.name}.",
            code="plan.batch_differs",
        )


def task_of_rank(task: Task, num_ranks: int) -> Task:
    """Return the task of a rank: a shard of every batch and of all samples.

    Raises:
        ValueGivenError: a batch has fewer samples than there are ranks.
    """
    if num_ranks > task.batch_size:
        raise ValueGivenError(
            "--ranks",
            problem=f"{num_ranks} ranks cannot share a batch of {task.batch_size} samples; each rank needs one or "
            "more.",
            hint=f"Use at most {task.batch_size} ranks, or a larger batch.",
            code="ranks.too_many",
        )
    rows = {name: getattr(task, name) for name in ("batch_size", "budget_samples", "planned_samples")}
    return replace(task, **{name: None if each is None else -(-each // num_ranks) for name, each in rows.items()})

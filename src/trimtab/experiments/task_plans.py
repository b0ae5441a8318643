"""Plans of tasks, and tasks on several ranks: equal on all of them, with an error that ends all."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from trimtab import api
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.progress import Progress
from trimtab.distributed.coordinator import ALONE, Coordinator, RankCoordinator
from trimtab.distributed.process_group import job_position
from trimtab.distributed.rank_consistency import digest, optimizer_facts, require_same_over_job
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import DataStream
from trimtab.experiments.task_loops import TaskLoops
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.profiling.candidate_traces import MIN_SAMPLES
from trimtab.tasks.task import Task, TaskData
from trimtab.training.batch import to_device


@contextlib.contextmanager
def job_ranks() -> Iterator[Coordinator]:
    """Yield the ranks of the job, or a single process; an error on any rank is raised on all ranks.

    Raises:
        RankError: another rank ended.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield ALONE
        return
    ranks = RankCoordinator()
    try:
        yield ranks
    except BaseException as error:
        _raise(ranks.ended(error), error)
    ranks.close()


def _raise(reason: BaseException, error: BaseException) -> NoReturn:
    if reason is error:
        raise error
    raise reason from error


def ranks_of_job(asked: int) -> int:
    """Return the number of ranks of a command: the launcher's world size, or the requested number.

    Raises:
        ValueGivenError: the requested number differs from the launcher's world size.
    """
    here = job_position().num_ranks
    if here > 1 and asked not in (1, here):
        raise ValueGivenError(
            "--ranks",
            problem=f"--ranks is {asked}, but the launcher started {here} processes.",
            hint=f"Remove --ranks, or start {asked} processes.",
            code="ranks.launcher_differs",
        )
    return max(asked, here)


def require_same_task(task: Task, data: TaskData) -> None:
    """Require equal data and an equal optimizer on all ranks. Collective: all ranks must call it.

    Raises:
        ValueGivenError: on every rank, with the differences and the ranks.
    """
    if job_position().num_ranks == 1:
        return
    own = {"samples": data.num_samples, "source": data.source.sha256, "values": digest(data.columns)}
    held_out = [each for batch in data.held_out for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
    own |= {"held-out batches": len(data.held_out), "held-out values": digest(held_out)}
    hint = "Return the same data from load_data and the same optimizer from make_optimizer on every rank."
    require_same_over_job("task", own | _optimizer_facts(task), hint)


def _optimizer_facts(task: Task) -> dict[str, Any]:
    try:
        with torch.device("meta"):
            return optimizer_facts(task.make_optimizer(task.make_model()))
    except Exception:  # An optimizer that cannot be built on the meta device is compared when its run starts.
        return {}


def refuse_on_ranks(task: Task, num_ranks: int, *, adapts: bool = False, recipes: bool = False) -> None:
    """Raise an error if a comparison on several ranks includes unsupported options.

    Args:
        adapts, recipes: True if a tuned plan or recipes were requested.

    Raises:
        ValueGivenError: a batch has fewer samples than ranks, the task has a custom step, or a tuned plan or recipes
            were requested.
    """
    task_of_rank(task, num_ranks)
    if task.step is not None:
        raise ValueGivenError(
            "task.step",
            problem=f"Task {task.name} has a step function, which does not reduce gradients over {num_ranks} ranks.",
            hint="Remove --ranks; or remove task.step, and the baseline is the plain loop in DistributedDataParallel.",
            code="step.several_ranks",
        )
    asked = " and ".join(name for name, is_asked in (("--adapt", adapts), ("--against", recipes)) if is_asked)
    if asked:
        raise ValueGivenError(
            "--ranks",
            problem=f"On {num_ranks} ranks only the baseline and an equivalent plan are compared, so {asked} cannot be "
            "used.",
            hint=f"Remove {asked}, or --ranks.",
            code="option.conflict",
        )


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

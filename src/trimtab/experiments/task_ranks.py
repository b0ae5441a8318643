"""Tasks on several ranks: the shard of a rank, planning for a job, and unsupported comparisons."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.distributed.coordinator import Coordinator
from trimtab.distributed.dry_run import DryRuns
from trimtab.distributed.plan_on_ranks import BroadcastPlan, plan_together
from trimtab.distributed.process_group import job_position
from trimtab.distributed.rank_consistency import digest, optimizer_facts, require_same_over_job
from trimtab.distributed.zero_stage_inputs import ADAPTS, RankLoop, StageMeasurements, of_replicas, share_of
from trimtab.experiments.task_plans import PLANNING_SEED, Plans, loop_of, make_plans, profile_here
from trimtab.planner.rank_profile import of_any_rank
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.profiling.communication_profile import step_shape
from trimtab.profiling.training_settings_search import RACED
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task, TaskData


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


def task_of_rank(task: Task, num_ranks: int) -> Task:
    """Return a task as seen from a rank: its shard of every batch and of all samples.

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


def plan_on_ranks(
    task: Task,
    budget: Budget,
    adapt: Collection[str],
    progress: Callable[[str], None],
    *,
    objective: Objective | None = None,
    dry_runs: bool = True,
    seen: Callable[[Profile], None] = lambda _: None,
) -> Plan:
    """Return the plan of the job, or of this process on a single rank.

    Args:
        task: the task.
        budget, objective: limits and weights of a rank.
        adapt: as in `make_plans`.
        progress: receives progress messages.
        dry_runs: as in `trimtab.plan`.
        seen: called on rank 0 with its profile.

    Raises:
        InfeasibleError: no plan meets the budget.
        RankError: on all other ranks, if rank 0 could not make a plan.
    """
    device = device_here()
    weights, ranks = objective or Objective(), job_position().num_ranks

    def plans_of(each: Task) -> Plans:
        how = {"adapt": adapt, "strong": False, "budget": budget, "objective": weights, "progress": progress}
        return make_plans(each, each.load_data(), device, **how)

    if ranks == 1:
        return _preferred(plans_of(task))
    if raced := sorted(RACED & set(adapt)):
        raise ValueGivenError(
            "--adapt",
            problem=f"--adapt {raced[0]} is not supported on {ranks} ranks: its test trainings need a single process.",
            hint=f"Remove {raced[0]} from --adapt, or plan in one process.",
            code="adapt.several_ranks",
        )

    def made() -> BroadcastPlan | StageMeasurements:
        share, asks = task_of_rank(task, ranks), budget.memory_bytes is not None or weights.memory > 0
        if adapt or not asks:
            plans = plans_of(share)
            seen(plans.profiles["equivalent"])
            return _made(share, _preferred(plans), plans.profiles["equivalent"], ADAPTS if asks else "")
        found = profile_here(share, budget, weights, progress, share.planned_steps)
        seen(found)
        weighed = share_of(found, loop_of(share, device.type), progress)
        if isinstance(weighed, StageMeasurements):
            return weighed
        return _made(share, of_replicas(of_any_rank(found), weighed), found, weighed)

    def rehearsal() -> DryRuns:
        return rehearsal_of(task_of_rank(task, ranks), device, progress)

    return plan_together(made, device, rehearsal if dry_runs else None)


def rehearsal_of(share: Task, device: torch.device, progress: Callable[[str], None]) -> DryRuns:
    """Return the dry run of plans on a rank's shard of a task, with fresh models. All ranks must call it."""
    batch = next(share.load_data().batches(PLANNING_SEED, share.batch_size))

    def copied() -> RankLoop:
        torch.manual_seed(PLANNING_SEED)
        model = share.make_model().to(device.type).train()
        return model, share.make_optimizer(model), share.loss_fn, batch

    return DryRuns(copied, clip_norm=share.reference.clip_norm, progress=progress)


def _made(task: Task, plan: Plan, profile: Profile, kept: str) -> BroadcastPlan:
    with torch.device("meta"):
        model = task.make_model()
    return BroadcastPlan(plan, step_shape(model, profile, plan), kept)


def job_plans(
    task: Task, budget: Budget, objective: Objective, progress: Callable[[str], None], together: Coordinator
) -> Plans:
    """Return the plan of a comparison's job with rank 0's profile, on all ranks."""
    own: list[Profile] = []  # Rank 0's profile.
    plan = plan_on_ranks(task, budget, (), progress, objective=objective, seen=own.append)
    return together.made(Plans, lambda: Plans({"equivalent": plan}, {"equivalent": own[0]}))


def refuse_on_ranks(task: Task, num_ranks: int, *, adapts: bool | None = None, peers: bool | None = None) -> None:
    """Raise an error if a comparison on several ranks includes unsupported options.

    Args:
        task: the task.
        num_ranks: number of ranks.
        adapts, peers: True if a tuned plan or baseline recipes were requested, None if not given.

    Raises:
        ValueGivenError: a batch has fewer samples than ranks, the task has a custom step, or a tuned plan or baseline
            recipes were requested.
    """
    task_of_rank(task, num_ranks)
    if task.step is not None:
        raise ValueGivenError(
            "task.step",
            problem=f"Task {task.name} has a step function, which does not reduce gradients over {num_ranks} ranks.",
            hint="Remove --ranks; or remove task.step, and the baseline is the plain loop in DistributedDataParallel.",
            code="step.several_ranks",
        )
    asked = " and ".join(name for name, is_asked in (("--adapt", adapts), ("--peers", peers)) if is_asked)
    if asked:
        raise ValueGivenError(
            "--ranks",
            problem=f"On {num_ranks} ranks only the baseline and an equivalent plan are compared, so {asked} cannot be "
            "used.",
            hint=f"Remove {asked}, or --ranks.",
            code="option.conflict",
        )


def _preferred(plans: Plans) -> Plan:
    return plans.plans.get("tuned", plans.plans["equivalent"])

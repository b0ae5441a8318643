"""A task on several ranks: planned as one of them sees it, and shared between them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from trimtab.calibrate.step_shape import step_shape
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.profile import Profile
from trimtab.distributed.planning import Made, plan_together
from trimtab.distributed.process_group import place
from trimtab.distributed.stage_choice import ADAPTS, Share, of_replicas, share_of
from trimtab.experiments.planning import Plans, loop_of, make_plans, profile_here
from trimtab.tasks.task import Task


def task_of_rank(task: Task, num_ranks: int) -> Task:
    """Return a task as one of so many ranks sees it: its share of every batch, and of all rows.

    Raises:
        ValueGivenError: a batch has fewer rows than there are ranks.
    """
    if num_ranks > task.batch_rows:
        expected = f"{task.batch_rows} at the most, a row of each batch for every rank"
        raise ValueGivenError("--ranks", given=str(num_ranks), expected=expected)
    share = {name: -(-getattr(task, name) // num_ranks) for name in ("batch_rows", "budget_rows")}
    return replace(task, **share)


def plan_on_ranks(task: Task, budget: Budget, adapt: Collection[str], progress: Callable[[str], None]) -> Plan:
    """Return the plan of this job, or of this process where it is alone.

    Args:
        budget: of one rank. adapt: as of `make_plans`.

    Raises:
        InfeasibleError: no plan meets the budget. RankError: on the other ranks, where rank 0 could not make one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def plans_of(each: Task) -> Plans:
        how = {"adapt": adapt, "strong": False, "budget": budget, "progress": progress}
        return make_plans(each, each.load_data(), device, **how)

    ranks = place().num_ranks
    if ranks == 1:
        return _preferred(plans_of(task))

    def made() -> Made | Share:
        share = task_of_rank(task, ranks)
        if budget.memory_bytes is None or adapt:
            plans = plans_of(share)
            return _made(share, _preferred(plans), plans.profiles["S"], ADAPTS if budget.memory_bytes else "")
        found = profile_here(share, budget, Objective(), progress, -(-share.budget_rows // share.batch_rows))
        weighed = share_of(found, loop_of(share, device.type), progress)
        return weighed if isinstance(weighed, Share) else _made(share, of_replicas(found, weighed), found, weighed)

    return plan_together(made, device)


def _made(task: Task, plan: Plan, profile: Profile, kept: str) -> Made:
    with torch.device("meta"):
        model = task.make_model()
    return Made(plan, step_shape(model, profile, plan), kept)


def _preferred(plans: Plans) -> Plan:
    return plans.plans.get("F", plans.plans["S"])

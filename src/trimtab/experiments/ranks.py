"""A task on several ranks: planned as one of them sees it, shared between them, and what a comparison cannot be of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from trimtab.calibrate.step_shape import step_shape
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.distributed.planning import Made, plan_together
from trimtab.distributed.process_group import place
from trimtab.experiments.planning import Plans
from trimtab.experiments.together import Together
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


def plan_on_ranks(task: Task, make: Callable[[Task], Plans]) -> Plan:
    """Return the plan of this job, or of this process where it is alone.

    Args:
        make: returns the plans of a task.
    """
    ranks = place().num_ranks
    if ranks == 1:
        return _preferred(make(task))

    def made() -> Made:
        plans = make(task_of_rank(task, ranks))
        plan = _preferred(plans)
        with torch.device("meta"):
            model = task.make_model()
        return Made(plan, step_shape(model, plans.profiles["S"], plan))

    return plan_together(made, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def plans_on_ranks(task: Task, make: Callable[[Task], Plans], together: Together) -> Plans:
    """Return the plans of a comparison, on all ranks; of several that of tier S is the job's.

    Args:
        make: returns the plans of a task.
    """
    if together.num_ranks == 1:
        return make(task)
    own: list[Plans] = []  # rank 0's

    def noted(share: Task) -> Plans:
        own.append(make(share))
        return own[0]

    plan = plan_on_ranks(task, noted)
    return together.made(Plans, lambda: replace(own[0], plans={"S": plan}))


def refuse_on_ranks(task: Task, num_ranks: int, *, adapts: bool | None, peers: bool | None) -> None:
    """Raise where a comparison on so many ranks was asked for what it cannot race.

    Args:
        adapts, peers: as given, None where they were not.

    Raises:
        ValueGivenError: a batch has fewer rows than there are ranks, the task has a step of its own, or tier F or peers
            were asked for.
    """
    task_of_rank(task, num_ranks)
    if task.step is not None:
        raise ValueGivenError(
            "task.step",
            given=f"a step function, which would train on each of {num_ranks} ranks by itself",
            expected="a task whose loss_fn and make_optimizer are its loop",
            way_out="Leave out --ranks, or task.step: the loop is then the plain one, in DistributedDataParallel.",
        )
    asked = " and ".join(name for name, is_asked in (("--adapt", adapts), ("--peers", peers)) if is_asked)
    if asked:
        raise ValueGivenError(
            "--ranks",
            given=f"{num_ranks} with {asked}",
            expected="the reference and a plan that keeps the maths, alone",
            way_out=f"Leave out {asked}, or --ranks.",
        )


def _preferred(plans: Plans) -> Plan:
    return plans.plans.get("F", plans.plans["S"])

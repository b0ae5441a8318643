"""A task on several ranks: planned as one of them sees it, and shared between them."""

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


def _preferred(plans: Plans) -> Plan:
    return plans.plans.get("F", plans.plans["S"])

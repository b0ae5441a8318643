"""Plans for a task: tier S, tier F, and one made for the strong peer; each on a fresh model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import torch

from trimtab.api import FREED, find_learning_rate, profile
from trimtab.core.batch_rule import BatchRule
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.plan import Plan
from trimtab.core.profile import Profile
from trimtab.decide.planner import choose
from trimtab.recipes.loop import move
from trimtab.recipes.strong import StrongLoop
from trimtab.tasks.task import Task, TaskData

# Planning data is drawn with a seed that no race uses.
PLANNING_SEED = 2**31 - 1


@dataclass(frozen=True)
class Plans:
    """Tier ("S", "F", "strong") -> plan, and the profiles behind them. A JSON value."""

    plans: Mapping[str, Plan]
    profiles: Mapping[str, Profile] = field(default_factory=dict)


def make_plans(
    task: Task,
    data: TaskData,
    device: torch.device,
    *,
    adapt: str | None,
    strong: bool,
    budget: Budget | None = None,
    objective: Objective | None = None,
    progress: Callable[[str], None],
) -> Plans:
    """Profile and decide, as a user of the task would; returns the plans with their profiles.

    Args:
        adapt: what tier F may change, "learning_rate" or "batch"; None: there is no tier F.
    """
    budget, objective = budget or Budget(), objective or Objective()
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().to(device).train()
    optimizer = task.make_optimizer(model)
    batches = data.batches(PLANNING_SEED, task.batch_rows)
    batch = move(next(batches), device)
    found = profile(
        model,
        optimizer,
        task.loss_fn,
        batch,
        budget=budget,
        objective=objective,
        reference=task.reference,
        data=data.batches(PLANNING_SEED, task.batch_rows),
        progress=progress,
    )
    plans = {"S": choose(found, objective, budget)}
    profiles = {"S": found}
    if adapt == "batch":
        plans["F"] = plans["S"].freed(BatchRule(), FREED)
    elif adapt is not None:
        plans["F"] = find_learning_rate(model, optimizer, task.loss_fn, batch, plans["S"], batches, progress)
    if strong and task.strong is not None:
        reference = Reference(task.strong.precision, task.strong.clip_norm)
        with closing(StrongLoop(task, device)) as peer:  # its precision is the process's, not for what comes after
            profiles["strong"] = profile(
                peer.model, peer.optimizer, task.loss_fn, batch, reference=reference, progress=progress
            )
        plans["strong"] = choose(profiles["strong"], Objective(), Budget())
    return Plans(plans, profiles)

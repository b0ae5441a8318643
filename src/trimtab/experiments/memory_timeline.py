"""Memory of a step by part and over time, from a trace, so that it is equal on every machine."""

from __future__ import annotations

import contextlib
from functools import partial

import torch

from trimtab.api import start
from trimtab.core.memory_model import StepMemory
from trimtab.core.plan import Plan
from trimtab.experiments.baselines.loop import autocast, move
from trimtab.measure.memory_trace import Prepare, as_it_is, trace_step
from trimtab.settings.recompute import use_plan
from trimtab.tasks.task import Task, TaskData
from trimtab.training.batch import BY_CONTAINERS


def step_memory(task: Task, data: TaskData, device: torch.device, plan: Plan | None) -> StepMemory | None:
    """Return the memory of a step of the task's plain loop, or of a plan's loop; None if it cannot be traced.

    A custom step function is not traced; the declared loss and optimizer are traced instead.
    """
    try:
        return _traced(task, data, device, plan)
    except Exception:  # A step that cannot be started or traced is left out of the report.
        return None


def _traced(task: Task, data: TaskData, device: torch.device, plan: Plan | None) -> StepMemory:
    torch.manual_seed(0)
    model = task.make_model().to(device).train()
    optimizer = task.make_optimizer(model)
    batch = move(next(data.batches(0, task.batch_size)), device)
    with contextlib.ExitStack() as stack:
        count, rows, forward = 1, task.batch_size, lambda: autocast(task.reference.precision, device)
        prepare: Prepare = as_it_is
        if plan is not None:
            run = stack.enter_context(start(model, optimizer, plan, total_samples=task.budget_samples))
            count, rows, forward = plan.num_micro_batches, plan.micro_batch_of(rows), run.autocast
            # The traced copy of the model lacks recomputation, so it is applied again.
            if plan.recompute.value is not None:
                prepare = partial(use_plan, plan=plan)
        micro = next(BY_CONTAINERS.slices(batch, task.batch_size, rows))[0]
        return trace_step(
            model,
            optimizer,
            task.loss_fn,
            micro,
            autocast=forward,
            num_micro_batches=min(count, 2),
            counts_scratch=device.type == "cpu",
            prepare=prepare,
        )

"""Accelerate: a plan, and a run, on what an Accelerator prepared.

Its wrappers of a model and an optimizer are looked through: a run is of what is inside, which stays the same objects.
Its loaders are any loaders.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trimtab.api import plan as make_plan
from trimtab.api import start as start_run
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.integrations.hosted import refuse_ranks
from trimtab.runtime.engine import Run


def plan(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loss_fn: Any, example_batch: Any, **how: Any
) -> Plan:
    """Return `trimtab.plan` of what an Accelerator prepared; the model is on its device then.

    Args:
        model, optimizer: as prepared, or before. how: more arguments of `trimtab.plan`.

    Raises:
        ValueGivenError: the Accelerator decides what a plan does.
    """
    _refuse(accelerator)
    inner = accelerator.unwrap_model(model).to(accelerator.device)
    return make_plan(inner, _inner(optimizer), loss_fn, example_batch, **how)


def start(accelerator: Accelerator, model: nn.Module, optimizer: Any, plan: Plan, **running: Any) -> Run:
    """Return `trimtab.start` of what an Accelerator prepared: `run.windows(loader)` is then the loop.

    `accelerator.accumulate`, `accelerator.backward` and the optimizer's `step` are not called in it.

    Args:
        model, optimizer: as prepared, or before. running: more arguments of `trimtab.start`.

    Raises:
        ValueGivenError: the Accelerator decides what a plan does.
    """
    _refuse(accelerator)
    return start_run(accelerator.unwrap_model(model).to(accelerator.device), _inner(optimizer), plan, **running)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _refuse(accelerator: Accelerator) -> None:
    refuse_ranks(accelerator.num_processes, "Accelerator")
    if accelerator.mixed_precision != "no":
        way_out = "Leave it out: the precision is the plan's. To fix it, Plan.fixed(rows, precision='bf16')."
        given = f"{accelerator.mixed_precision!r}"
        raise ValueGivenError("Accelerator(mixed_precision=...)", given=given, expected="'no'", way_out=way_out)
    if accelerator.gradient_accumulation_steps > 1:
        way_out = (
            "Leave it out: a window is a loader's batch, which the plan splits. Have the loader yield all its rows."
        )
        given = f"{accelerator.gradient_accumulation_steps}"
        raise ValueGivenError("gradient_accumulation_steps", given=given, expected="1", way_out=way_out)

"""Accelerate: a plan, and a run, on what an Accelerator prepared.

Its wrappers of a model and an optimizer are looked through: a run is of what is inside, which stays the same objects.
Its loaders are any loaders. On several ranks its process group and its sharding of data are used as well; a model that
it did not prepare is shared as the plan says, and one that it did stays in its own DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from trimtab.api import plan as make_plan
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.integrations.hosted import STAGES, require_shared, started
from trimtab.runtime.engine import Run


def plan(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loss_fn: Any, example_batch: Any, **how: Any
) -> Plan:
    """Return `trimtab.plan` of what an Accelerator prepared; the model is on its device then.

    Args:
        model, optimizer: as prepared, or before; on several ranks before. example_batch: one of the loader's, of this
            rank: each is split by itself, also where a window is of several.
        how: more arguments of `trimtab.plan`.

    Raises:
        ValueGivenError: the Accelerator decides what a plan does.
    """
    _refuse(accelerator)
    inner = accelerator.unwrap_model(model)
    if accelerator.num_processes > 1 and inner is not model:
        way_out = "Leave it out of prepare: the plan says how ranks share it. To keep what wraps it, Plan.fixed(rows)."
        raise ValueGivenError("model", given="one that is prepared", expected="the model itself", way_out=way_out)
    return make_plan(inner.to(accelerator.device), _inner(optimizer), loss_fn, example_batch, **how)


def start(accelerator: Accelerator, model: nn.Module, optimizer: Any, plan: Plan, **running: Any) -> Run:
    """Return `trimtab.start` of what an Accelerator prepared: `run.windows(loader)` is then the loop.

    `accelerator.accumulate`, `accelerator.backward` and the optimizer's `step` are not called in it. A window is of
    `gradient_accumulation_steps` of the loader's batches, and the last one of a pass of those that are left.

    Args:
        model, optimizer: as prepared, so that `accelerator.save_state` has them, or before. On several ranks a prepared
            model stays in the Accelerator's DDP, by a plan without a `zero_stage`; any other is shared as the plan's
            says.
        running: more arguments of `trimtab.start`.

    Raises:
        ValueGivenError: the Accelerator decides what a plan does.
    """
    _refuse(accelerator)
    inner = accelerator.unwrap_model(model)
    is_wrapped = accelerator.num_processes > 1 and inner is not model
    require_shared(plan, accelerator.num_processes, (None,) if is_wrapped else STAGES)
    _refuse_windows(accelerator, plan)
    run = started(model if is_wrapped else inner.to(accelerator.device), _inner(optimizer), plan, **running)
    if (num_batches := accelerator.gradient_accumulation_steps) > 1:
        run.of_batches(num_batches)
    return run


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    # Any other that has one inside, as Lookahead, is what steps.
    inner: torch.optim.Optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return inner


def refuse_sharded(accelerator: Accelerator) -> None:
    """Raise where an Accelerator shards a model, or has it on devices of another kind."""
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        way_out = "Leave it out: a plan has ZeRO stages of its own (docs/ranks.md)."
        raise ValueGivenError("Accelerator", given=kind, expected="none, or data parallel", way_out=way_out)


def refuse_compiling(accelerator: Accelerator) -> None:
    """Raise where an Accelerator compiles what it prepares, as an environment may say too."""
    compiler = str(accelerator.state.dynamo_plugin.backend.value).lower()
    if compiler != "no":
        way_out = "Leave it out: the plan compiles where that pays within the run."
        raise ValueGivenError("Accelerator(dynamo_backend=...)", given=compiler, expected="none", way_out=way_out)


def _refuse(accelerator: Accelerator) -> None:
    refuse_sharded(accelerator)
    if accelerator.mixed_precision != "no":
        way_out = "Leave it out: the precision is the plan's. To fix it, Plan.fixed(rows, precision='bf16')."
        given = f"{accelerator.mixed_precision!r}"
        raise ValueGivenError("Accelerator(mixed_precision=...)", given=given, expected="'no'", way_out=way_out)
    refuse_compiling(accelerator)


def _refuse_windows(accelerator: Accelerator, plan: Plan) -> None:
    """Raise where two say of how many batches a window is, or where it would not end with the loader."""
    if (num_batches := accelerator.gradient_accumulation_steps) == 1:
        return
    if isinstance(plan, Plan) and plan.batch_rule is not None:
        given, way_out = f"{num_batches}, and a batch that the plan freed", "Leave the one out, or the other."
        raise ValueGivenError("gradient_accumulation_steps", given=given, expected="1", way_out=way_out)
    if not accelerator.gradient_state.sync_with_dataloader:
        given, way_out = "False", "Leave it out: the last window of a pass is of the batches that are left."
        raise ValueGivenError("sync_with_dataloader", given=given, expected="True", way_out=way_out)

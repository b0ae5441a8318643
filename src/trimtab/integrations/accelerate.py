"""Hugging Face Accelerate: plan and start a run with objects prepared by an `Accelerator`.

Accelerate's wrappers of model and optimizer are removed; the run uses the same inner objects. Prepared loaders are used
like any loader. With several ranks, the process group and the sharding of data are Accelerate's too. A model that was
not prepared is sharded or replicated by the plan; a prepared model stays in Accelerate's DDP.
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
from trimtab.integrations.trainer_rules import STAGES, require_shared, started
from trimtab.runtime.run import Run


def plan(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loss_fn: Any, example_batch: Any, **how: Any
) -> Plan:
    """Return `trimtab.plan` for objects of an Accelerator; moves the model to the Accelerator's device.

    Args:
        accelerator: the Accelerator.
        model: the model, prepared or not; not prepared with several ranks.
        optimizer: the optimizer, prepared or not.
        loss_fn: the loss function.
        example_batch: a batch of this rank's loader; batches are split separately even if a window has several.
        how: further arguments of `trimtab.plan`.

    Raises:
        ValueGivenError: the Accelerator sets something that a plan decides.
    """
    _refuse(accelerator)
    inner = accelerator.unwrap_model(model)
    if accelerator.num_processes > 1 and inner is not model:
        hint = "Leave it out of prepare: the plan says how ranks share it. To keep what wraps it, Plan.fixed(rows)."
        raise ValueGivenError("model", got="one that is prepared", expected="the model itself", hint=hint)
    return make_plan(inner.to(accelerator.device), _inner(optimizer), loss_fn, example_batch, **how)


def start(accelerator: Accelerator, model: nn.Module, optimizer: Any, plan: Plan, **running: Any) -> Run:
    """Return `trimtab.start` for objects of an Accelerator; loop over `run.windows(loader)`.

    The loop does not call `accelerator.accumulate`, `accelerator.backward` or the optimizer's `step`. A window has
    `gradient_accumulation_steps` loader batches; the last window of an epoch may have fewer.

    Args:
        accelerator: the Accelerator.
        model: the model, prepared (so that `accelerator.save_state` includes it) or not. With several ranks, a prepared
            model stays in Accelerate's DDP and requires a plan without `zero_stage`; any other is distributed by the
            plan.
        optimizer: the optimizer, prepared or not.
        plan: the plan.
        running: further arguments of `trimtab.start`.

    Raises:
        ValueGivenError: the Accelerator sets something that a plan decides.
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
    # Optimizers that wrap another, such as Lookahead, are stepped themselves.
    inner: torch.optim.Optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return inner


def refuse_sharded(accelerator: Accelerator) -> None:
    """Raise `ValueGivenError` if an Accelerator shards the model or uses an unsupported kind of device."""
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        hint = "Leave it out: a plan has ZeRO stages of its own (docs/ranks.md)."
        raise ValueGivenError("Accelerator", got=kind, expected="none, or data parallel", hint=hint)


def refuse_compiling(accelerator: Accelerator) -> None:
    """Raise `ValueGivenError` if an Accelerator compiles models, which an environment variable may request too."""
    compiler = str(accelerator.state.dynamo_plugin.backend.value).lower()
    if compiler != "no":
        hint = "Leave it out: the plan compiles where that pays within the run."
        raise ValueGivenError("Accelerator(dynamo_backend=...)", got=compiler, expected="none", hint=hint)


def _refuse(accelerator: Accelerator) -> None:
    refuse_sharded(accelerator)
    if accelerator.mixed_precision != "no":
        hint = "Leave it out: the precision is the plan's. To fix it, Plan.fixed(rows, precision='bf16')."
        given = f"{accelerator.mixed_precision!r}"
        raise ValueGivenError("Accelerator(mixed_precision=...)", got=given, expected="'no'", hint=hint)
    refuse_compiling(accelerator)


def _refuse_windows(accelerator: Accelerator, plan: Plan) -> None:
    """Raise `ValueGivenError` if both Accelerator and plan set the number of batches, or windows span epochs."""
    if (num_batches := accelerator.gradient_accumulation_steps) == 1:
        return
    if isinstance(plan, Plan) and plan.batch_rule is not None:
        given, hint = f"{num_batches}, and a batch that the plan freed", "Leave the one out, or the other."
        raise ValueGivenError("gradient_accumulation_steps", got=given, expected="1", hint=hint)
    if not accelerator.gradient_state.sync_with_dataloader:
        given, hint = "False", "Leave it out: the last window of a pass is of the batches that are left."
        raise ValueGivenError("sync_with_dataloader", got=given, expected="True", hint=hint)

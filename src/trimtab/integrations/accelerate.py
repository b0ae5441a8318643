"""Hugging Face Accelerate: plan and start a run with objects prepared by an `Accelerator`.

Accelerate's wrappers of model and optimizer are removed; the run uses the same inner objects. Prepared loaders are used
like any loader. With several ranks, the process group and the sharding of data are Accelerate's too. A model that was
not prepared is sharded or replicated by the plan; a prepared model stays in Accelerate's DDP. `mixed_precision` is the
baseline of the plan: while a run is open, the run opens the autocast of the model's training forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import get_mixed_precision_context_manager
from accelerate.utils.operations import ConvertOutputsToFp32, convert_to_fp32
from torch import nn

from trimtab.api import plan as make_plan
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.integrations.planning_messages import announced
from trimtab.integrations.trainer_rules import (
    STAGES,
    follow_plan_precision,
    following,
    require_shared,
    start_until_closed,
)
from trimtab.plans.plan import Plan
from trimtab.training.run import Run


def plan(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loss_fn: Any, loader_or_batch: Any, **how: Any
) -> Plan:
    """Return `trimtab.plan` for objects of an Accelerator, and log the result in one line.

    The baseline is the loop in the Accelerator's `mixed_precision`, with its `gradient_accumulation_steps`. The model
    is moved to the Accelerator's device.

    Args:
        accelerator: the Accelerator.
        model: the model, prepared or not; not prepared with several ranks.
        optimizer: the optimizer, prepared or not.
        loss_fn: the loss function.
        loader_or_batch: this rank's loader, or a batch of it; batches are split separately even if a window has
            several.
        how: further arguments of `trimtab.plan`, such as `total_steps`.

    Raises:
        ValueGivenError: the Accelerator sets something that a plan decides.
    """
    _refuse(accelerator)
    inner, stepped = accelerator.unwrap_model(model), _inner(optimizer)
    if accelerator.num_processes > 1 and inner is not model:
        raise ValueGivenError(
            "model",
            problem="The Accelerator has wrapped the model, so the plan cannot decide how to distribute it over ranks.",
            hint="Do not pass the model to accelerator.prepare. To keep Accelerate's wrapper, use Plan.fixed(rows).",
            code="model.prepared",
        )
    known = {"reference": Reference(precision_of(accelerator)), "accumulate": accelerator.gradient_accumulation_steps}

    def make(progress: Callable[[str], None]) -> Plan:
        asked = known | {"progress": progress} | how
        return make_plan(inner.to(accelerator.device), stepped, loss_fn, loader_or_batch, **asked)

    undo = leave_precision_to_plan(accelerator, inner)
    try:
        return announced(make, stepped, speaks=accelerator.is_main_process)[0]
    finally:
        undo()


def start(accelerator: Accelerator, model: nn.Module, optimizer: Any, plan: Plan, **running: Any) -> Run:
    """Return `trimtab.start` for objects of an Accelerator; loop over `run.windows(loader)`.

    The loop does not call `accelerator.accumulate`, `accelerator.backward` or the optimizer's `step`. A window has
    `gradient_accumulation_steps` loader batches; the last window of an epoch may have fewer. `run.plan` is the plan.

    Args:
        accelerator: the Accelerator.
        model: the model, prepared (so that `accelerator.save_state` includes it) or not. With several ranks, a prepared
            model stays in Accelerate's DDP and requires a plan without `zero_stage`; any other is distributed by the
            plan.
        optimizer: the optimizer, prepared or not.
        plan: the plan; one made by hand without a precision keeps the Accelerator's `mixed_precision`.
        running: further arguments of `trimtab.start`.

    Raises:
        ValueGivenError: the Accelerator sets something that a plan decides.
    """
    _refuse(accelerator)
    inner = accelerator.unwrap_model(model)
    is_wrapped = accelerator.num_processes > 1 and inner is not model
    require_shared(plan, accelerator.num_processes, (None,) if is_wrapped else STAGES)
    _refuse_windows(accelerator, plan)
    plan, undo = following(plan, precision_of(accelerator)), leave_precision_to_plan(accelerator, inner)
    placed = model if is_wrapped else inner.to(accelerator.device)
    run = start_until_closed(undo, placed, _inner(optimizer), plan, **running)
    if (num_batches := accelerator.gradient_accumulation_steps) > 1:
        run.of_batches(num_batches)
    return run


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    # Optimizers that wrap another, such as Lookahead, are stepped themselves.
    inner: torch.optim.Optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return inner


def precision_of(accelerator: Accelerator) -> str:
    """Return the precision of an Accelerator's own loops: "fp32", "bf16" or "fp16".

    Raises:
        ValueGivenError: the Accelerator uses another precision.
    """
    name = str(accelerator.mixed_precision)
    if name not in ("no", "bf16", "fp16"):
        raise ValueGivenError(
            "Accelerator(mixed_precision=...)",
            problem=f"The Accelerator sets mixed_precision={name!r}, which trimtab does not support.",
            hint="Use mixed_precision='bf16' or 'fp16', or remove it.",
            code="trainer.precision_unsupported",
        )
    # On a CPU, Accelerate accepts fp16 and trains in fp32.
    return name if accelerator.native_amp else "fp32"


def leave_precision_to_plan(accelerator: Accelerator, model: nn.Module) -> Callable[[], None]:
    """Remove the Accelerator's autocast from a model's training forward; return a function that restores it.

    Outputs are converted to fp32 as by the Accelerator, and evaluation keeps its autocast.
    """
    if precision_of(accelerator) == "fp32":
        return lambda: None

    def autocast() -> Any:
        return get_mixed_precision_context_manager(True, accelerator.autocast_handler)

    return follow_plan_precision(model, autocast, convert_to_fp32, _without_autocast)


def _without_autocast(forward: Any) -> Any:
    """Return a forward function without the decorators of each `accelerator.prepare_model`."""
    while isinstance(wrapper := getattr(forward, "__wrapped__", None), ConvertOutputsToFp32):
        forward = wrapper.model_forward.__wrapped__  # The function that autocast decorates.
    return forward


def refuse_sharded(accelerator: Accelerator) -> None:
    """Raise `ValueGivenError` if an Accelerator shards the model or uses an unsupported kind of device."""
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueGivenError(
            "Accelerator",
            problem=f"The Accelerator has the distributed type {kind}; supported are one process and data parallelism.",
            hint="Remove this configuration; a plan chooses a ZeRO stage itself (docs/ranks.md).",
            code="trainer.decided_by_plan",
        )


def refuse_compiling(accelerator: Accelerator) -> None:
    """Raise `ValueGivenError` if an Accelerator compiles models, which an environment variable may request too."""
    compiler = str(accelerator.state.dynamo_plugin.backend.value).lower()
    if compiler != "no":
        raise ValueGivenError(
            "Accelerator(dynamo_backend=...)",
            problem=f"The Accelerator compiles the model with the backend {compiler}, but the plan decides on "
            "compilation.",
            hint="Remove dynamo_backend, and unset ACCELERATE_DYNAMO_BACKEND.",
            code="trainer.decided_by_plan",
        )


def _refuse(accelerator: Accelerator) -> None:
    refuse_sharded(accelerator)
    precision_of(accelerator)
    refuse_compiling(accelerator)


def _refuse_windows(accelerator: Accelerator, plan: Plan) -> None:
    """Raise `ValueGivenError` if both Accelerator and plan set the number of batches, or windows span epochs."""
    if (num_batches := accelerator.gradient_accumulation_steps) == 1:
        return
    if isinstance(plan, Plan) and plan.batch_rule is not None:
        raise ValueGivenError(
            "gradient_accumulation_steps",
            problem=f"gradient_accumulation_steps is {num_batches}, but the plan's adaptive batch size also sets the "
            "number of batches per step.",
            hint="Use gradient_accumulation_steps=1, or a plan without adapt='batch'.",
            code="trainer.decided_by_plan",
        )
    if not accelerator.gradient_state.sync_with_dataloader:
        raise ValueGivenError(
            "sync_with_dataloader",
            problem="sync_with_dataloader=False lets an optimizer step span two epochs, which a run does not support.",
            hint="Remove it; the last step of an epoch then has the remaining batches.",
            code="trainer.step_spans_epochs",
        )

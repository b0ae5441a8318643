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
from trimtab.integrations.trainer_rules import STAGES, require_shared, start_in_process_group
from trimtab.plans.plan import Plan
from trimtab.training.run import Run


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
        raise ValueGivenError(
            "model",
            problem="The Accelerator has wrapped the model, so the plan cannot decide how to distribute it over ranks.",
            hint="Do not pass the model to accelerator.prepare. To keep Accelerate's wrapper, use Plan.fixed(rows).",
            code="model.prepared",
        )
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
    run = start_in_process_group(
        model if is_wrapped else inner.to(accelerator.device), _inner(optimizer), plan, **running
    )
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
    if accelerator.mixed_precision != "no":
        raise ValueGivenError(
            "Accelerator(mixed_precision=...)",
            problem=f"The Accelerator sets mixed_precision={accelerator.mixed_precision!r}, but the plan decides the "
            "precision.",
            hint="Remove mixed_precision. To fix a precision, use Plan.fixed(rows, precision='bf16').",
            code="trainer.decided_by_plan",
        )
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
